"""References built again from their source, as it stands or edited: what mutants and variants are made of.

A rebuilt function has code of its own, so that provenance takes it for somebody else's kernel, and everything that it
reaches within torch_hal.ops is rebuilt with it.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_hal.op import Op, declared

PACKAGE = "torch_hal.ops"
DECLARING = "torch_hal.op"
Edit = Callable[[str], str]  # source -> source


def rebuild(op: str, edits: Mapping[str, Edit] | None = None) -> Callable[..., Any]:
    """The reference of ``op`` from source; ``edits``: module name within `torch_hal.ops` -> what to do to its source.

    `torch_hal.formats` and `torch_hal.numerics` may be edited too, by these names: "formats", "numerics".
    """
    modules = _Modules(dict(edits or {}))
    rebuilt = modules.get(declared()[op].reference.__module__)
    function: Callable[..., Any] = getattr(rebuilt, op).reference
    return function


def replaced(old: str, new: str, count: int = 1) -> Edit:
    """The edit that puts ``new`` where ``old`` stands, which must be ``count`` times."""

    def edit(source: str) -> str:
        if source.count(old) != count:
            raise ValueError(
                f"{old!r} stands {source.count(old)} times in the source, expected {count}: edit the mutant"
            )
        return source.replace(old, new)

    return edit


EDITABLE = ("torch_hal.formats", "torch_hal.numerics", "torch_hal.kv_formats")


class _Modules:
    """Rebuilt modules of one mutant, each executed once, importing one another."""

    def __init__(self, edits: dict[str, Edit]) -> None:
        self._edits = {self._full(name): edit for name, edit in edits.items()}
        self._built: dict[str, types.ModuleType] = {}

    @staticmethod
    def _full(name: str) -> str:
        return f"torch_hal.{name}" if f"torch_hal.{name}" in EDITABLE else f"{PACKAGE}.{name}"

    def get(self, name: str) -> types.ModuleType:
        if name in self._built:
            return self._built[name]
        original = importlib.import_module(name)
        module = types.ModuleType(name)
        module.__package__, module.__file__ = original.__package__, original.__file__
        self._built[name] = module
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        source = source_of(name)
        if name in self._edits:
            source = self._edits[name](source)
        # dataclasses looks a class's module up by name: it finds the original, which is like enough.
        exec(compile(source, f"<rebuilt {name}>", "exec"), module.__dict__)
        return module

    def _import(self, name: str, scope: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
        package = (scope or {}).get("__package__") or ""
        full = importlib.util.resolve_name("." * level + name, package) if level else name
        if full == DECLARING:
            return _DECLARING
        if full.startswith(f"{PACKAGE}.") or full in EDITABLE:
            return self.get(full)
        if full == PACKAGE:
            found = types.ModuleType(full)
            for part in wanted:
                setattr(found, part, self.get(f"{PACKAGE}.{part}"))
            return found
        return builtins.__import__(name, scope, locals_, wanted, level)


@functools.cache
def source_of(name: str) -> str:
    """The source of a module by its full name."""
    return Path(str(importlib.import_module(name).__file__)).read_text(encoding="utf-8")


def _declare(**traits: Any) -> Callable[[Callable[..., Any]], Op[..., Any]]:
    """`torch_hal.op.op`, but for an op that nobody else learns of."""

    def decorate(function: Callable[..., Any]) -> Op[..., Any]:
        where = traits.pop("where", None) or {}
        return Op(function.__name__, "rebuilt", function, traits.pop("shapes"), traits.pop("dtypes"), where, **traits)

    return decorate


_DECLARING = types.ModuleType(DECLARING)
_DECLARING.__dict__.update(vars(sys.modules[DECLARING]))
_DECLARING.__dict__["op"] = _declare
