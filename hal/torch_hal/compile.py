"""Opaque kernels under torch.compile: each is its own torch op, ``torch_hal::<op>__<kernel>``.

Eager calls never go through it. Compilers meet the kernel's callable, which `substitute_in_graph` maps to the op,
so a graph names the kernel it was compiled with and two op sets can live in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .device import DeviceInfo
from .loading import Loaded
from .op import Op

NAMESPACE = "torch_hal"

_library: torch.library.Library | None = None
_lock = threading.Lock()
_names: dict[Callable[..., Any], str] = {}  # callable -> its op's name
_keys: set[tuple[str, str]] = set()  # (name, dispatch key) that have an implementation


def register_torch_op(loaded: Loaded, op: Op[..., Any], device: DeviceInfo) -> str:
    """Give a kernel its torch op on the device's dispatch key, once; returns the op's qualified name."""
    with _lock:
        run = loaded.run
        name = _names.get(run)
        if name is None:
            name = _define(loaded, op)
            _names[run] = name
            _substitute(run, name)
        if (name, device.dispatch_key) not in _keys:
            _lib().impl(name, run, device.dispatch_key)  # type: ignore[no-untyped-call]
            _keys.add((name, device.dispatch_key))
        return f"{NAMESPACE}::{name}"


def torch_op_name(run: Callable[..., Any]) -> str | None:
    """The qualified name of the torch op that compiled graphs call for this kernel's callable."""
    name = _names.get(run)
    return None if name is None else f"{NAMESPACE}::{name}"


def _lib() -> torch.library.Library:
    global _library
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    return _library


def _define(loaded: Loaded, op: Op[..., Any]) -> str:
    kernel = loaded.kernel
    name = f"{op.name}__{kernel.name}"
    taken = set(_names.values())
    if name in taken:  # the same name from another plugin, or from a newer build of this one
        name = f"{op.name}__{kernel.plugin}_{kernel.name}"
    base, n = name, 2
    while name in taken:
        name, n = f"{base}_{n}", n + 1
    _lib().define(name + op.schema)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake or op.reference, lib=_lib())
    return name


def _substitute(run: Callable[..., Any], name: str) -> None:
    # Generated rather than a closure, so that a traceback through a compiled graph shows the kernel's name.
    scope = {"_op": getattr(getattr(torch.ops, NAMESPACE), name).default}
    exec(f"def {name}(*args):\n    return _op(*args)\n", scope)
    torch.compiler.substitute_in_graph(run, skip_signature_check=True)(scope[name])
