"""Opaque kernels under torch.compile: each is its own torch op, ``torch_hal::<op>__<kernel>``.

Eager calls never go through it. Compilers meet the kernel's callable, which `substitute_in_graph` maps to the op,
so a graph names the kernel it was compiled with and two op sets can live in one process.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .device import DeviceInfo
from .kernel import load
from .loading import Loaded
from .lock import LOCK
from .op import Op, declared

NAMESPACE = "torch_hal"

_library: torch.library.Library | None = None
_names: dict[Callable[..., Any], str] = {}  # callable -> its op's name
_own: dict[tuple[str, str, Callable[..., Any]], Callable[..., Any]] = {}  # (op, kernel, its callable) -> function
_keys: set[tuple[str, str]] = set()  # (name, dispatch key) that have an implementation


def with_torch_op(loaded: Loaded, op: Op[..., Any], device: DeviceInfo) -> Loaded:
    """The kernel with its torch op, registered once on the device's dispatch key, for compilers to meet."""
    key = (op.name, f"{loaded.kernel.plugin}.{loaded.kernel.name}", loaded.run)
    fake = _fake(loaded, op)  # not under the lock: the module that it is in may bind
    with LOCK:
        run = _own.get(key)
        if run is None:
            run = _own_function(loaded.run)
            name = _define(loaded, op, fake)
            _substitute(run, name)
            _names[run], _own[key] = name, run
        name = _names[run]
        if (name, device.dispatch_key) not in _keys:
            _lib().impl(name, run, device.dispatch_key)  # type: ignore[no-untyped-call]
            _keys.add((name, device.dispatch_key))
    return loaded if run is loaded.run else replace(loaded, run=run)


def _own_function(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that one torch op may stand for: ``run`` itself, unless it serves another op or is no function."""
    if not isinstance(run, types.FunctionType):

        @functools.wraps(run, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return call
    if run in _names or any(run is op.reference for op in declared().values()):
        copy = types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
        return functools.update_wrapper(copy, run)
    return run


def torch_op_name(run: Callable[..., Any]) -> str | None:
    """The qualified name of the torch op that compiled graphs call for this kernel's callable."""
    name = _names.get(run)
    return None if name is None else f"{NAMESPACE}::{name}"


def _lib() -> torch.library.Library:
    global _library
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    return _library


def _define(loaded: Loaded, op: Op[..., Any], fake: Callable[..., Any]) -> str:
    kernel = loaded.kernel
    name = f"{op.name}__{kernel.name}"
    taken = set(_names.values())
    if name in taken:  # the same name from another plugin, or from a newer build of this one
        name = f"{op.name}__{kernel.plugin}_{kernel.name}"
    base, n = name, 2
    while name in taken:
        name, n = f"{base}_{n}", n + 1
    _lib().define(name + op.schema)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_lib())
    _lib().impl(name, _without_gradient(loaded, op, name), "Autograd")  # type: ignore[no-untyped-call]
    return name


def _without_gradient(loaded: Loaded, op: Op[..., Any], name: str) -> Callable[..., Any]:
    """What autograd meets: torch's own fallback would drop the gradient, with a warning at most."""
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
            raise NotImplementedError(
                f"{op.name}: kernel '{loaded.kernel.id}' has no gradient under torch.compile, and an argument requires "
                "one; call it under torch.no_grad(), detach the argument, or choose a kernel that compilers trace"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return forward


def _fake(loaded: Loaded, op: Op[..., Any]) -> Callable[..., Any]:
    return load(loaded.kernel.fake) if loaded.kernel.fake is not None else op.fake or op.reference


def _substitute(run: Callable[..., Any], name: str) -> None:
    # Generated rather than a closure, so that a traceback through a compiled graph shows the kernel's name.
    scope = {"_op": getattr(getattr(torch.ops, NAMESPACE), name).default}
    exec(f"def {name}(*args, **kwargs):\n    return _op(*args, **kwargs)\n", scope)
    torch.compiler.substitute_in_graph(run, skip_signature_check=True)(scope[name])
