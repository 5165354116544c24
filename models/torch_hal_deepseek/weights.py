"""From a checkpoint's tensors to where they go: which part of each, into which part of a weight, in which form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hal import OpSet, Unsupported
from torch_hal.formats import BLOCK, FP8_KINDS, SCALE_LAYOUTS
from torch_hal.opset import BoundOp

from .errors import ParallelError
from .parallel import Span

STORED = torch.float8_e4m3fn  # the kind of FP8 that checkpoints hold, whatever the device's own is
SCALE = "_scale_inv"  # a weight's name and this is its scales', which multiply, despite the name


@dataclass(frozen=True)
class Part:
    """What to read of a stored tensor of shape ``whole``: the run from ``begin`` on that is as large as ``into``.

    scale: for codes that are dequantised on the way, the scales of every block that the part touches. They are the
    target of a part of their own, which is read first.
    """

    into: Tensor
    whole: tuple[int, ...]
    begin: tuple[int, ...]
    scale: Tensor | None = None

    @classmethod
    def entire(cls, tensor: Tensor) -> Part:
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())


# A checkpoint tensor's name and where a part of it goes; None: nowhere, it is other ranks'. Names may come again.
Targets = Iterator[tuple[str, Part | None]]


def plain(name: str, into: Tensor, *spans: Span) -> Targets:
    """A tensor that is stored as a float; ``spans``: what is held of each of its dimensions."""
    yield name, Part(into, tuple(span.whole for span in spans), tuple(span.begin for span in spans))


def dequantized(name: str, into: Tensor, *spans: Span) -> Targets:
    """A tensor that is stored as FP8, and wanted in ``into``'s dtype."""
    blocks = [*spans[:-2], *map(_blocks, spans[-2:])]
    scale = torch.empty([span.size for span in blocks])
    yield from plain(name + SCALE, scale, *blocks)
    for _, part in plain(name, into, *spans):
        assert part is not None
        yield name, Part(into, part.whole, part.begin, scale)


def codes(name: str, into: Tensor, scale: Tensor, *spans: Span) -> Targets:
    """A tensor that is stored as FP8 and stays so, with its scales. Raises ParallelError if a span cuts a block."""
    for span in spans[-2:]:
        end = span.begin + span.size
        if span.begin % BLOCK or (end % BLOCK and end != span.whole):
            raise ParallelError(
                f"{name}: a rank's part, {span.begin} to {end} of {span.whole}, cuts FP8 blocks of {BLOCK}: "
                "spread the model over another number of ranks, or ask for dequantize"
            )
    yield from plain(name + SCALE, scale, *spans[:-2], *map(_blocks, spans[-2:]))
    yield from plain(name, into, *spans)


def _blocks(span: Span) -> Span:
    """Every block that is held at least in part."""
    first, end = span.begin // BLOCK, -(-(span.begin + span.size) // BLOCK)
    return Span(-(-span.whole // BLOCK), first, end - first, end - first)


def fp8_kind(ops: OpSet) -> str:
    """The kind of FP8 that the device multiplies. Raises Unsupported if there is none."""
    if ops.device.fp8 is None:
        raise Unsupported(f"{ops.device} has no 8-bit floats, which the checkpoint's weights are: ask for dequantize")
    return ops.device.fp8


def wants_ue8m0(bound: BoundOp) -> bool:
    """Whether the chosen kernel reads no scales but powers of two."""
    layout = SCALE_LAYOUTS[bound.formats.get("x_scale_layout", "row_f32")]
    return layout.power_of_two or bound.formats.get("ue8m0") == "True"


def adapt(ops: OpSet, weight: Tensor, scale: Tensor, ue8m0: bool) -> Tensor:
    """Loaded codes [..., N, K] and scales as device and kernel want them: changed in place, matrix by matrix.

    Returns the codes, of the device's kind. ue8m0: requantise with scales that are powers of two.
    """
    kind = FP8_KINDS[fp8_kind(ops)]
    if ue8m0 or kind.dtype != weight.dtype:
        matrices = (x.view(-1, *x.shape[-2:]) for x in (weight, scale))
        for codes_NK, scale_NK in zip(*matrices, strict=True):
            new = codes_NK, scale_NK
            if ue8m0:
                new = ops.block_requant_ue8m0_fp8(*new)
            new_codes, new_scale = ops.convert_kind_fp8(*new, kind.name)
            codes_NK.view(torch.uint8).copy_(new_codes.view(torch.uint8))
            scale_NK.copy_(new_scale)
    return weight.view(kind.dtype)
