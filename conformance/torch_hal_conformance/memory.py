"""How a case's arguments lie in memory, and whether anything was written that may not be.

Every tensor lies in storage of its own between guard zones, and wherever no element of it lies the storage holds
poison: NaN, or for integers a number that is no valid index. What is read by mistake shows in the result; what is
written by mistake shows in the storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GUARD = 256  # elements before and after; a multiple of any alignment that kernels ask for
BAD_INDEX = 1 << 30


@dataclass(frozen=True)
class Placed:
    """One argument's storage, the argument in it, and what the storage held before the call."""

    storage: Tensor
    view: Tensor
    before: Tensor

    def changed(self, written: bool) -> bool:
        """Whether the storage changed; outside of the argument itself, where that is ``written``."""
        after = self.storage.clone()
        if written:
            inside = after.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            source = self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            inside.copy_(source)
        return not torch.equal(_bits(after), _bits(self.before))


def place(
    arguments: dict[str, Any], layout: str, fixed: Iterable[str], device: torch.device
) -> tuple[dict[str, Any], dict[str, Placed]]:
    """The arguments on ``device``, laid out as ``layout`` says: contiguous, rows (every outer stride doubled),
    columns (all strides doubled), wide (columns of wider rows), offset (starting one element off), far (the first
    dim's last element 2³¹ elements from its first).
    """
    values, placed = dict(arguments), {}
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            continue
        arrangement = "as is" if name in fixed else layout
        if arrangement == "far":
            values[name] = _far(x, device)
            continue
        storage, view = _arrange(x, arrangement, device)
        values[name], placed[name] = view, Placed(storage, view, storage.clone())
    return values, placed


def _arrange(x: Tensor, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    start, shape, strides = GUARD, list(x.shape), list(x.stride())
    if layout != "as is":
        box = list(x.shape)
        if layout in ("rows", "columns"):
            inner = 0 if layout == "columns" else 1
            box = [2 * n for n in box[: len(box) - inner]] + box[len(box) - inner :]
        elif layout == "wide" and box:
            box[-1] += 64
            start += 64
        elif layout == "offset":
            start += 1
        steps = [2 if b == 2 * n and b != n else 1 for b, n in zip(box, shape, strict=True)]
        strides = [stride * step for stride, step in zip(_dense(box), steps, strict=True)]
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if x.numel() else 0
    storage = torch.empty(start + span + GUARD, dtype=x.dtype, device=device)
    poison(storage)
    view = storage.as_strided(shape, strides, start)
    view.copy_(x)
    return storage, view


def _dense(box: list[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(box):
        strides.append(step)
        step *= max(n, 1)
    return strides[::-1]


def _far(x: Tensor, device: torch.device) -> Tensor:
    if x.dim() < 2 or x.shape[0] < 2 or x.numel() == 0:
        return x.clone().to(device)
    step = -(-(2**31) // (x.shape[0] - 1))
    inner = x[0].contiguous()
    storage = torch.empty((x.shape[0] - 1) * step + inner.numel(), dtype=x.dtype, device=device)
    return storage.as_strided(x.shape, (step, *inner.stride()), 0).copy_(x)


def on_host(y: Tensor) -> Tensor:
    """``y`` on the host, with its strides, and with what its storage holds beside it: a layout's padding."""
    if y.device.type == "cpu":
        return y
    storage = y.untyped_storage().cpu()  # type: ignore[no-untyped-call]
    return y.new_empty(0, device="cpu").set_(storage, y.storage_offset(), y.shape, y.stride())


def poison(x: Tensor) -> None:
    """Fill with what no op may read: NaN, 0xFF in bytes, an index out of every range."""
    if x.dtype == torch.bool:
        x.fill_(True)
    elif x.element_size() == 1:
        x.view(torch.uint8).fill_(0x80 if "fnuz" in str(x.dtype) else 0xFF)
    elif x.is_floating_point():
        x.fill_(torch.nan)
    else:
        x.fill_(BAD_INDEX)


def taken(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, of 8-bit floats too, which not every device can index."""
    return (x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x)[index].view(x.dtype)


def with_copies(rows: Tensor, number: int, many: int) -> Tensor:
    """Numbers of ``number`` rows, followed by those of their copies where the rows are repeated to ``many``.

    What names no row becomes -1: of many rows it could name one.
    """
    copies = torch.arange(0, many, number, dtype=rows.dtype, device=rows.device)
    real = (rows >= 0) & (rows < number)
    return torch.where(real, rows + copies[:, None], -1).flatten()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaN and signed zeros included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_flat_bytes(a), _flat_bytes(b))


def _flat_bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
