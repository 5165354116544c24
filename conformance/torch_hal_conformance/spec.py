"""What the suite knows of an op beyond its declaration: how to make calls of it, and how to compare results."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .verdict import Verdict, bounded

PROFILES = ("core", "deepseek", "full")  # each holds the ones before it
FLOATS = ("float32", "bfloat16", "float16")
LAYOUTS = ("rows", "columns", "wide", "offset")  # see `memory`; beside "contiguous"

Dim = int | str | bool | None


@dataclass(frozen=True)
class Shape:
    """Keyword arguments for `Spec.arguments`, the smallest profile that has them, and, if they are special, how."""

    profile: str
    dims: tuple[tuple[str, Dim], ...]
    regime: str = "unit"
    dtypes: tuple[str, ...] | None = None  # where not those of the spec

    @property
    def name(self) -> str:
        return "-".join(_spell(key, value) for key, value in self.dims)


def _spell(key: str, value: Dim) -> str:
    if value is None:
        return f"without_{key}"
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    return value if isinstance(value, str) else f"{key}{value}"


def core(regime: str = "unit", dtypes: tuple[str, ...] | None = None, **dims: Dim) -> Shape:
    return Shape("core", tuple(dims.items()), regime, dtypes)


def deepseek(regime: str = "unit", dtypes: tuple[str, ...] | None = None, **dims: Dim) -> Shape:
    return Shape("deepseek", tuple(dims.items()), regime, dtypes)


def full(regime: str = "unit", dtypes: tuple[str, ...] | None = None, **dims: Dim) -> Shape:
    return Shape("full", tuple(dims.items()), regime, dtypes)


@dataclass(frozen=True)
class Spec:
    """One op's calls. The first shape is the base, at which layouts, regimes and behaviours are looked at.

    arguments: (Draw, **dims) -> the call's arguments by name, on the host.
    regimes: beside "unit", names that `Draw.values` or ``arguments`` itself gives a meaning; "bNN_…" is behaviour NN.
    fixed: arguments whose strides say something (scales in a layout), which no case lays out differently.
    rows: arguments whose first dim is the tokens, for batch invariance: results' first dim is too.
    names_rows: arguments that hold numbers of such rows: where rows are repeated, so are these.
    structural: regimes in which a result of zeros may be right.
    unwritten: (arguments, outputs) -> of each output a mask over its leading dims of what may hold anything, or None.
    plan: arguments -> those of the op's ``plan``.
    """

    op: str
    arguments: Callable[..., dict[str, Any]]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = FLOATS
    regimes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    fixed: frozenset[str] = frozenset()
    rows: tuple[str, ...] = ()
    names_rows: tuple[str, ...] = ()
    structural: frozenset[str] = frozenset()
    verdict: Verdict = bounded
    unwritten: Callable[[dict[str, Any], list[Any]], list[Tensor | None]] | None = None
    plan: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ranks: tuple[int, ...] = ()  # a collective: how many processes it is judged with

    def written(self, arguments: dict[str, Any], outputs: list[Any]) -> list[Any]:
        """``outputs`` with zeros wherever they may hold anything: two calls may be compared by them."""
        if self.unwritten is None:
            return outputs
        masks = self.unwritten(arguments, outputs)
        return [y if mask is None else _blank(y, mask) for y, mask in zip(outputs, masks, strict=True)]


def _blank(y: Tensor, mask: Tensor) -> Tensor:
    words = y.view(torch.uint8) if y.element_size() == 1 else y
    mask = mask.to(y.device).reshape(*mask.shape, *[1] * (y.dim() - mask.dim()))
    return words.masked_fill(mask, 0)


@functools.cache
def specs() -> Mapping[str, Spec]:
    """Every op's spec, by op: the ``SPECS`` of each module in ``specs``."""
    from . import specs as package

    found: dict[str, Spec] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        for spec in importlib.import_module(f"{package.__name__}.{module}").SPECS:
            if spec.op in found:
                raise ValueError(f"op '{spec.op}' has two specs")
            found[spec.op] = spec
    return found
