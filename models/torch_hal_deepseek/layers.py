"""The parts that all blocks are made of: weights in the layout their kernel wants, norms, the gated MLP, the head."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_hal import OpSet
from torch_hal.formats import BLOCK, SCALE_LAYOUTS

from .config import Config
from .parallel import Group, Parallel, Ranks, Span, share
from .weights import SCALE, STORED, Part, Targets, adapt, codes, dequantized, fp8_kind, plain, wants_ue8m0

ALONE = Parallel()
QUANT_EPS = 1e-10  # the least amax of a group of activations


@dataclass(frozen=True)
class Build:
    """What layers are built from. ``names``: the tensors that the checkpoint holds, where its form is a choice."""

    config: Config
    ops: OpSet
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel = ALONE
    names: Container[str] = ()
    dequantize: bool = False
    fuse_shared_expert: bool = False

    @functools.cached_property
    def ranks(self) -> Ranks:
        return Ranks.of(self.parallel, self.config.n_routed_experts)

    def empty(self, *shape: int, dtype: torch.dtype | None = None, padded: bool = False) -> Tensor:
        """padded: no tensor fills all of it, and the rest must be zeros."""
        new = torch.zeros if padded else torch.empty
        return new(shape, dtype=dtype or self.dtype, device=self.device)

    def wide(self, *shape: int) -> Tensor:
        """For weights that stay in float32, whatever the model's dtype (float64 in a float64 model)."""
        return self.empty(*shape, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32)

    def like(self, width: int) -> Tensor:
        """A token's activations without storage: what ops are specialised for."""
        return torch.empty((1, width), dtype=self.dtype, device="meta")

    def stored_fp8(self, name: str) -> bool:
        """Whether the checkpoint's tensor of that name is FP8."""
        quantization = self.config.quantization
        if quantization is None:
            return False
        return quantization.covers(name.removesuffix(".weight")) or name + SCALE in self.names

    def stays_fp8(self, *names: str) -> bool:
        """Whether the one weight of these tensors is FP8: only if all of them are, and none is to be dequantised."""
        return not self.dequantize and all(map(self.stored_fp8, names))

    def targets(self, name: str, into: Tensor, *spans: Span) -> Targets:
        """For a weight in the model's dtype, whatever it is stored as."""
        return (dequantized if self.stored_fp8(name) else plain)(name, into, *spans)

    def sum_over(self, group: Group) -> Callable[[Tensor], Tensor]:
        """The sum of what the ranks of ``group`` computed."""
        return functools.partial(self.ops.all_reduce, group=group.name) if group.size > 1 else lambda x: x


class Linear:
    """``x · weightᵀ`` of projections that read the same x: one weight, their outputs side by side.

    columns: of the inputs, what this rank holds; projections: names in the checkpoint, and what of their outputs.
    `prepare` hands the loaded weight to the chosen kernel, which may lay it out anew.
    """

    unit = 1  # where a projection's outputs may begin

    def __init__(self, build: Build, columns: Span, *projections: tuple[str, Span]) -> None:
        self.build, self.ops, self.columns = build, build.ops, columns
        self.names = [f"{name}.weight" for name, _ in projections]
        self.rows = [rows for _, rows in projections]
        rooms = [-(-rows.room // self.unit) * self.unit for rows in self.rows[:-1]]
        self.starts = [0, *itertools.accumulate(rooms)]
        self.outputs = self.starts[-1] + self.rows[-1].room
        self.allocate()

    def allocate(self) -> None:
        self.weight = self.build.empty(self.outputs, self.columns.room, padded=self.padded(self.columns.room))

    def padded(self, inputs: int) -> bool:
        return self.outputs != sum(rows.size for rows in self.rows) or inputs != self.columns.size

    def targets(self) -> Targets:
        for name, rows, start in zip(self.names, self.rows, self.starts, strict=True):
            into = self.weight[start : start + rows.size, : self.columns.size]
            yield from self.build.targets(name, into, rows, self.columns)

    def prepare(self) -> None:
        (self.weight,), self.layout = self.ops.linear.prepare(self.weight)
        self.run = self.ops.linear.specialize(self.build.like(self.columns.room), self.weight, self.layout)

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight, self.layout)  # type: ignore[no-any-return]

    def split(self, y: Tensor) -> list[Tensor]:
        """Each projection's part of the outputs."""
        return [y[..., start : start + rows.size] for rows, start in zip(self.rows, self.starts, strict=True)]


class Fp8Linear(Linear):
    """The same for FP8 weights with a scale for every 128×128 block, on activations that are quantised here.

    Projections begin with a block of their own, rows of zeros before them if need be, so that their scales fit.
    """

    unit = BLOCK

    def allocate(self) -> None:
        self.inputs = -(-self.columns.room // BLOCK) * BLOCK
        self.weight = self.build.empty(self.outputs, self.inputs, dtype=STORED, padded=self.padded(self.inputs))
        self.scale = self.build.empty(-(-self.outputs // BLOCK), self.inputs // BLOCK, dtype=torch.float32)

    def targets(self) -> Targets:
        for name, rows, start in zip(self.names, self.rows, self.starts, strict=True):
            into = self.weight[start : start + rows.size, : self.columns.size]
            first, end = start // BLOCK, -(-(start + rows.size) // BLOCK)
            yield from codes(name, into, self.scale[first:end], rows, self.columns)

    def prepare(self) -> None:
        op, kind = self.ops.fp8_block_linear, fp8_kind(self.ops)
        self.x_layout = op.formats.get("x_scale_layout", "row_f32")
        weight = adapt(self.ops, self.weight, self.scale, wants_ue8m0(op))
        (self.weight, self.scale), self.layout = op.prepare(weight, self.scale)
        quantization = self.build.config.quantization
        assert quantization is not None
        self.how = (BLOCK, kind, self.x_layout, QUANT_EPS, quantization.ue8m0)
        like = self.build.like(self.inputs)
        self.quantize = self.ops.per_token_group_quant_fp8.specialize(like, *self.how)
        x_scale = SCALE_LAYOUTS[self.x_layout].pack(torch.empty(1, self.inputs // BLOCK, device="meta"))
        arguments = (self.weight, self.scale, self.build.dtype, self.x_layout, self.layout)
        self.run = op.specialize(like.to(weight.dtype), x_scale, *arguments)

    def __call__(self, x: Tensor) -> Tensor:
        if self.inputs != self.columns.room:
            x = F.pad(x, (0, self.inputs - self.columns.room))
        x, x_scale = self.quantize(x, *self.how)
        return self.run(x, x_scale, self.weight, self.scale, self.build.dtype, self.x_layout, self.layout)  # type: ignore[no-any-return]


def linear(build: Build, columns: Span, *projections: tuple[str, Span]) -> Linear:
    """FP8 if the checkpoint has all these projections so; if it has but some, those are dequantised."""
    kind = Fp8Linear if build.stays_fp8(*(f"{name}.weight" for name, _ in projections)) else Linear
    return kind(build, columns, *projections)


class Norm:
    """RMSNorm with a learned weight."""

    def __init__(self, build: Build, name: str, width: int, eps: float) -> None:
        self.name, self.weight, self.eps = f"{name}.weight", build.empty(width), eps
        self.run = build.ops.rms_norm.specialize(build.like(width), self.weight, eps)

    def targets(self) -> Targets:
        yield self.name, Part.entire(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight, self.eps)  # type: ignore[no-any-return]


class ResidualNorm:
    """One step of the residual stream: take in a block's output, and norm the sum for the next block."""

    def __init__(self, build: Build, name: str, width: int, eps: float) -> None:
        self.norm = Norm(build, name, width, eps)
        like = build.like(width)
        self.add_norm = build.ops.fused_add_rms_norm_.specialize(like, like, self.norm.weight, eps)

    def targets(self) -> Targets:
        return self.norm.targets()

    def __call__(self, block_TD: Tensor | None, residual_TD: Tensor) -> Tensor:
        """block_TD: the block's output, overwritten; None before the first block. residual_TD: updated in place."""
        if block_TD is None:
            return self.norm(residual_TD)
        self.add_norm(block_TD, residual_TD, self.norm.weight, self.norm.eps)
        return block_TD


class MLP:
    """SwiGLU: ``down(silu(gate(x)) · up(x))``, gate and up in one weight, gate first. Sum it over ranks."""

    def __init__(self, build: Build, prefix: str, intermediate: int) -> None:
        hidden = Span.all(build.config.hidden_size)
        gate, up, down = (f"{prefix}.{part}_proj" for part in ("gate", "up", "down"))
        # In FP8 ranks hold whole blocks, and a last one that is partial gets rows of zeros, which stay zeros.
        unit = BLOCK if build.stays_fp8(f"{gate}.weight", f"{up}.weight") else 1
        inner = share(gate, intermediate, build.ranks.tp, unit)
        self.gate_up = linear(build, hidden, (gate, inner), (up, inner))
        self.down = linear(build, inner, (down, hidden))
        self.silu_and_mul = build.ops.silu_and_mul.specialize(build.like(2 * inner.room))

    def targets(self) -> Targets:
        yield from self.gate_up.targets()
        yield from self.down.targets()

    def prepare(self) -> None:
        self.gate_up.prepare()
        self.down.prepare()

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(self.silu_and_mul(self.gate_up(x_TD)))


class Head:
    """Logits of every word. Each rank computes those of its words, equally many, the last ones perhaps of none."""

    def __init__(self, build: Build, name: str, tied: Tensor | None = None) -> None:
        """tied: the embedding, where the head is no tensor of its own."""
        c, self.group = build.config, build.ranks.tp
        room = -(-c.vocab_size // self.group.size)
        begin = min(self.group.rank * room, c.vocab_size)
        words = Span(c.vocab_size, begin, min(room, c.vocab_size - begin), room)
        self.vocab_size, self.ops = c.vocab_size, build.ops
        self.linear = Linear(build, Span.all(c.hidden_size), (name, words))
        self.tied = tied is not None and self.group.size == 1
        if tied is not None and self.tied:
            self.linear.weight = tied

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def targets(self) -> Targets:
        if not self.tied:
            yield from self.linear.targets()

    def prepare(self) -> None:
        self.linear.prepare()

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """Float32 [T, W], the same on all ranks."""
        logits_TW = self.linear(hidden_TD)
        if self.group.size > 1:
            shares = self.ops.all_gather(logits_TW, self.group.name).view(self.group.size, *logits_TW.shape)
            logits_TW = shares.movedim(0, 1).flatten(1)[:, : self.vocab_size]
        return logits_TW.to(torch.float32)
