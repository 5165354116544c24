"""Functional and in-place twins: a kernel for one serves the other, at the price of a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .kernel import Kernel, Trait, load
from .op import Op


def with_twins(kernels: Iterable[Kernel], ops: dict[str, Op[..., Any]]) -> list[Kernel]:
    """``kernels`` and, after each one whose op has a twin that its plugin does not serve, the derived kernel."""
    kernels = list(kernels)
    twin = {op.name: op.twin_of for op in ops.values() if op.twin_of}
    twin |= {functional: in_place for in_place, functional in twin.items()}
    served = {(k.plugin, k.name, k.op) for k in kernels}
    result = []
    for kernel in kernels:
        result.append(kernel)
        other = twin.get(kernel.op)
        if other and (kernel.plugin, kernel.name, other) not in served and Trait.TRACEABLE not in kernel.traits:
            result.append(replace(kernel, op=other, fake=None, derived_from=kernel.op))
    return result


def load_run(kernel: Kernel, ops: dict[str, Op[..., Any]]) -> Callable[..., Any]:
    """The kernel's callable, with the op's signature; for a derived kernel, the copying form.

    Its fake is imported too, so that a kernel which could not be compiled is refused like any other broken one.
    """
    run = load(kernel.run)
    if kernel.fake is not None:
        load(kernel.fake)
    if kernel.derived_from is None:
        return run
    op = ops[kernel.op]
    return _write_back(run, op) if op.mutates else _copy_first(run, ops[kernel.derived_from])


# Cached, so that every bind gets the same function, and with it the same torch op.
@functools.cache
def _copy_first(run: Callable[..., Any], in_place: Op[..., Any]) -> Callable[..., Any]:
    """The functional form of an in-place kernel: run it on copies and return them."""
    places = [list(in_place.signature.parameters).index(name) for name in in_place.mutates]

    @functools.wraps(run)
    def functional(*args: Any, **kwargs: Any) -> Any:
        arguments = list(in_place.bind(*args, **kwargs).values())
        for i in places:
            arguments[i] = arguments[i].clone()
        run(*arguments)
        copies = tuple(arguments[i] for i in places)
        return copies if len(copies) > 1 else copies[0]

    return functional


@functools.cache
def _write_back(run: Callable[..., Any], in_place: Op[..., Any]) -> Callable[..., Any]:
    """The in-place form of a functional kernel: copy its results over the arguments that they replace."""
    places = [list(in_place.signature.parameters).index(name) for name in in_place.mutates]

    @functools.wraps(run)
    def overwriting(*args: Any, **kwargs: Any) -> None:
        args = tuple(in_place.bind(*args, **kwargs).values())
        results = run(*args)
        for i, result in zip(places, results if isinstance(results, tuple) else (results,), strict=True):
            args[i].copy_(result)

    return overwriting
