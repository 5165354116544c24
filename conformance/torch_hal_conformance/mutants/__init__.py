"""Wrong backends: each must be found out, in the case that it names, by the check that it names.

Most are one edit of a reference's source (`edit`); what no edit makes is written out (`kernel`). Offered as one plugin,
so that they are found as any other backend is.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch_hal as hal
from torch_hal.op import declared

from ..rebuild import rebuild, replaced
from ..signature import like_op

PLUGIN = "mutants"


@dataclass(frozen=True)
class Mutant:
    """One wrong kernel. ``case``: the id of the case that must kill it; ``check``: by which check."""

    op: str
    name: str
    case: str
    check: str
    why: str  # what is wrong with it, in a few words
    build: Callable[[], Callable[..., Any]] = field(repr=False, compare=False)
    options: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # further fields of its Kernel

    @property
    def kernel(self) -> str:
        return f"{PLUGIN}.{self.name}"


def edit(
    op: str,
    name: str,
    why: str,
    old: str,
    new: str,
    case: str,
    check: str = "bound",
    module: str | None = None,
    count: int = 1,
    **options: Any,
) -> Mutant:
    """A mutant that is the reference with ``old`` replaced by ``new`` in its module's source, or in ``module``'s.

    case: without the op: "core/M17-D512/bfloat16/contiguous/tiny/0".
    """

    def build() -> Callable[..., Any]:
        home = module or declared()[op].reference.__module__.rpartition(".")[2]
        return rebuild(op, {home: replaced(old, new, count)})

    return Mutant(op, name, f"{op}/{case}", check, why, build, options)


def kernel(
    op: str, name: str, why: str, case: str, check: str = "bound", **options: Any
) -> Callable[[Callable[..., Any]], Mutant]:
    """Decorate a function that takes the rebuilt reference first and then the op's arguments by position."""

    def decorate(function: Callable[..., Any]) -> Mutant:
        def build() -> Callable[..., Any]:
            return like_op(declared()[op], functools.partial(function, rebuild(op)))

        return Mutant(op, name, f"{op}/{case}", check, why, build, options)

    return decorate


@functools.cache
def mutants() -> tuple[Mutant, ...]:
    """All of them: the `Mutant`s that the modules of this package hold."""
    found: list[Mutant] = []
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            found += [m for m in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(m, Mutant)]
    twice = {(m.op, m.name) for i, m in enumerate(found) if (m.op, m.name) in {(o.op, o.name) for o in found[:i]}}
    if twice:
        raise ValueError(f"mutants called alike: {sorted(twice)}")
    return tuple(found)


TRAITS = frozenset({hal.Trait.TRACEABLE, hal.Trait.GRAPH_SAFE, hal.Trait.DETERMINISTIC})


@hal.hookimpl
def torch_hal_kernels() -> tuple[hal.Kernel, ...]:
    return _kernels()


@functools.cache  # every other plugin that comes or goes has all of them asked again
def _kernels() -> tuple[hal.Kernel, ...]:
    return tuple(map(_kernel, mutants()))


def _kernel(mutant: Mutant) -> hal.Kernel:
    reads = frozenset({"*"}) if declared()[mutant.op].plan else None
    options = {"traits": TRAITS, "reads": reads, **mutant.options}
    return hal.Kernel(mutant.op, mutant.name, run=mutant.build(), **options)
