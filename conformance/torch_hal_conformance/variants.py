"""Two backends that are right and differ from native torch: the suite must find nothing wrong with either.

``wide`` computes in float64 and rounds once at the end, also where native torch rounds in between. ``reordered`` sums
backwards and in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import torch_hal as hal
from torch_hal.op import Op, declared

from .oracle import is_wide, leaves
from .rebuild import rebuild
from .signature import like_op

aten = torch.ops.aten
PIECES = 3


class Reordered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums, means and matrix products run over their terms backwards, in pieces that are added up at the end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REORDERED and is_wide(args[0]) and not torch.compiler.is_compiling():
            return _REORDERED[func](*args, **kwargs)
        return func(*args, **kwargs)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.flip(-1), b.flip(-2)
    pieces = zip(a.tensor_split(PIECES, -1), b.tensor_split(PIECES, -2), strict=True)
    first, *rest = (torch.matmul(left, right) for left, right in pieces)
    return sum(rest, first)


def _sum(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x.to(dtype) if dtype is not None else x
    dims = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    if not dims:
        return x.clone()
    first, *rest = (piece.sum(dims, keepdim) for piece in x.flip(dims).tensor_split(PIECES, dims[0]))
    return sum(rest, first)


def _mean(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    total = _sum(x, dims, keepdim, dtype=dtype)
    return total / (x.numel() // max(total.numel(), 1)) if x.numel() else total / 0


_REORDERED: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.matmul.default: _matmul,  # compilers do not take these two apart
    aten.linear.default: lambda x, weight: _matmul(x, weight.mT),
    aten.sum.dim_IntList: _sum,
    aten.sum.default: lambda x, *, dtype=None: _sum(x, dtype=dtype),
    aten.mean.dim: _mean,
}


def _reordered(op: Op[..., Any]) -> Callable[..., Any]:
    reference = rebuild(op.name)

    def run(*args: Any) -> Any:
        with Reordered():  # type: ignore[no-untyped-call]
            return reference(*args)

    return run


def _wide(op: Op[..., Any]) -> Callable[..., Any]:
    if op.rounds == 0:  # copies, whose NaN would lose their bits on the way
        return rebuild(op.name)
    reference, names = rebuild(op.name), list(op.signature.parameters)
    fake = op.fake or reference

    def run(*args: Any) -> Any:
        narrow = fake(*tree_map_only(Tensor, lambda x: x.to("meta"), args))
        wide = tree_map_only(Tensor, lambda x: x.double() if is_wide(x) else x, args)
        wide = tuple(torch.float64 if isinstance(x, torch.dtype) else x for x in wide)
        results = reference(*wide)
        for name, before, after in zip(names, args, wide, strict=True):
            if name in op.mutates and after is not before:
                before.copy_(after)
        rounded = [_converted(y, like.dtype) for y, like in zip(leaves(results), leaves(narrow), strict=True)]
        return None if results is None else tuple(rounded) if isinstance(results, tuple) else rounded[0]

    return run


def _converted(y: Tensor, dtype: torch.dtype) -> Tensor:
    """``y`` in ``dtype`` with its strides and what its storage holds beside it: a layout's padding."""
    if y.dtype == dtype:
        return y
    storage = y.as_strided((y.untyped_storage().nbytes() // y.element_size(),), (1,), 0)
    return storage.to(dtype).as_strided(y.shape, y.stride(), y.storage_offset())


class Variant:
    """A backend of every op without ranks, made by ``build`` from its reference."""

    def __init__(self, build: Callable[[Op[..., Any]], Callable[..., Any]], name: str) -> None:
        self._build, self._name = build, name

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterator[hal.Kernel]:
        for name, op in list(declared().items()):
            if op.family not in ("collectives", "expert_parallel"):
                reads = frozenset({"*"}) if op.plan else None
                traits = frozenset({hal.Trait.DETERMINISTIC, hal.Trait.GRAPH_SAFE})
                run = like_op(op, self._build(op))
                yield hal.Kernel(name, self._name, run=run, reads=reads, traits=traits)


VARIANTS = {"wide": functools.partial(Variant, _wide), "reordered": functools.partial(Variant, _reordered)}
