"""Kernels: what a plugin offers for an op, and under which conditions."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .device import DeviceInfo, arch_matches
from .errors import PluginError
from .fields import check_fields, collect
from .op import PLAIN

ANY_LAYOUT = "*"  # in `Kernel.reads`: the kernel ignores the layout argument's tensors (a plan it does not need)

Target = str | Callable[..., Any]  # "module:attribute", imported when first needed, or the object itself


class Band(enum.IntEnum):
    """A kernel's declared rank where nothing was measured and nobody asked: higher goes first."""

    REFERENCE = 0  # native torch
    PORTABLE = 10  # written once for many devices
    LIBRARY = 20  # a vendor's or a kernel library's
    TUNED = 30  # made for this very arch and these shapes


class Trait(enum.StrEnum):
    """What a kernel declares about itself, and the conformance suite checks."""

    GRAPH_SAFE = "graph_safe"  # capturable in a device graph, replay sees new values
    PIECEWISE_SAFE = "piecewise_safe"  # capturable in a graph that covers a part of the model
    DETERMINISTIC = "deterministic"  # bitwise equal over runs
    BATCH_INVARIANT = "batch_invariant"  # a row's result does not depend on the other rows
    TRACEABLE = "traceable"  # a composition of torch ops that compilers may look into and fuse


@dataclass(frozen=True)
class Library:
    """A kernel library: importable name, wanted version, and a probe that says whether it works on a device.

    ``probe`` is ``(DeviceInfo) -> None | reason``. It may import the library and use the device; it runs once a
    process and device, when something is bound or explicitly probed, never on import or listing.
    """

    name: str
    version: str = ""  # e.g. ">=0.4", compared numerically
    distribution: str | None = None  # where it differs from the importable name
    probe: Target | None = None

    def __post_init__(self) -> None:
        check_fields(self, f"library {self.name!r}", named=("name",))
        _clauses(self.version)
        object.__setattr__(self, "probe", _by_identity(self.probe))  # libraries are keys of dicts

    def missing(self) -> str | None:
        """Why the library is not installed in the wanted version; None if it is. Imports nothing."""
        try:  # the top package alone: to look inside it would import it
            found = importlib.util.find_spec(self.name.partition(".")[0]) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return f"library {self.name} is not installed"
        if not self.version:
            return None
        try:
            have = importlib.metadata.version(self.distribution or self.name)
        except (importlib.metadata.PackageNotFoundError, KeyError):
            have = None
        if have is None:  # as metadata without a version has it
            return f"library {self.name}: its version is unknown, wants {self.version}"
        return None if _version_ok(have, self.version) else f"library {self.name} is {have}, wants {self.version}"


@dataclass(frozen=True)
class Requires:
    """What a kernel needs of a device. Empty fields ask for nothing.

    ``arch``: patterns of `device.arch_matches`, one of which must match: ``("sm_90", "sm_100f")``.
    """

    vendor: str | None = None
    arch: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    library: Library | str | None = None  # "acme_kernels>=1.4" is short for a Library without a probe

    def __post_init__(self) -> None:
        collect(self, "arch", tuple)
        collect(self, "features", frozenset)
        check_fields(self, "requirements")
        if isinstance(self.library, str):
            match = re.fullmatch(r"([A-Za-z_][\w.]*)\s*((?:[<>=!]=?|==).*)?", self.library)
            if match is None:
                raise ValueError(f"library requirement {self.library!r}: expected 'name' or 'name>=1.2'")
            object.__setattr__(self, "library", Library(match[1], match[2] or ""))

    def refuse(self, device: DeviceInfo) -> str | None:
        """Why ``device`` will not do, from what is known of it without touching it; the library is not looked at."""
        if self.vendor is not None and self.vendor != device.vendor:
            return f"made for {self.vendor}, the device is {device.vendor}"
        if self.arch and not any(arch_matches(device.arch, pattern) for pattern in self.arch):
            return f"built for {', '.join(self.arch)}, the device is {device.arch or 'unprobed'}"
        if lacking := self.features - device.features:
            return f"needs device features {', '.join(sorted(lacking))}"
        return None


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel for one op. ``name`` is the provider's: ``"sgl_kernel"``, ``"triton"``; unique per plugin and op.

    run, static, dynamic: the op's own signature. ``static`` and ``dynamic`` return None or a reason to refuse:
    static sees dtypes, fixed dims, formats and layouts (tensors may be on ``meta``); dynamic sees the call.
    prepare, plan: the signature of the op's own ``prepare`` or ``plan``; what they return is in ``layout``.
    keeps_plain: where that is the plain layout, that any other kernel may read it as if nothing had been prepared.
    reads: layouts that ``run`` accepts beside ``layout``; unless given, plain for a kernel without a layout of its own.
    fake: shapes and dtypes of ``run``'s results, where its own layout keeps the op's fake from telling them.
    """

    op: str
    name: str
    run: Target
    requires: Requires = Requires()
    static: Target | None = None
    dynamic: Target | None = None
    prepare: Target | None = None
    plan: Target | None = None
    layout: str = PLAIN
    keeps_plain: bool = False
    reads: frozenset[str] | None = None
    fake: Target | None = None
    formats: tuple[tuple[str, str], ...] = ()  # argument -> value it wants, e.g. ("x_scale_layout", "mn_f32_tma")
    traits: frozenset[Trait] = frozenset()
    band: Band = Band.LIBRARY
    version: int = 1  # of the op's contract that it was written against
    plugin: str = ""  # filled in by discovery
    position: int = 0  # filled in by discovery: yield order within the plugin
    derived_from: str | None = None  # the twin that this functional form copies for

    def __post_init__(self) -> None:
        what = f"kernel {self.name!r} of {self.op!r}"
        try:
            object.__setattr__(self, "band", Band(self.band))
            collect(self, "traits", lambda traits: frozenset(Trait(trait) for trait in traits))
        except ValueError as error:
            raise PluginError(f"{what}: {error}") from error
        collect(self, "formats", tuple)
        if self.reads is not None:
            collect(self, "reads", frozenset)
        check_fields(self, what, named=("op", "name", "run", "layout"))
        if self.layout == ANY_LAYOUT:
            raise PluginError(f"{what}: layout '{ANY_LAYOUT}' is for `reads`; name the kernel's own")
        plain = self.layout == PLAIN and (self.prepare is not None or self.plan is not None)
        if plain and not self.keeps_plain:
            raise PluginError(
                f"{what}: what prepare or plan returns needs a `layout` of its own, or keeps_plain=True "
                "if every other kernel may read it as the plain one"
            )
        if self.keeps_plain and not plain:
            raise PluginError(f"{what}: keeps_plain is for a prepare or plan in layout '{PLAIN}'")

    @property
    def id(self) -> str:
        """``plugin.name``, or the name alone where they are one."""
        return self.name if self.plugin in ("", self.name) else f"{self.plugin}.{self.name}"

    @property
    def layouts(self) -> frozenset[str]:
        """Every layout that ``run`` reads; `ANY_LAYOUT` among them means all."""
        return frozenset({self.layout}) | (self.reads or frozenset())

    def accepts_layout(self, layout: str) -> bool:
        return layout in self.layouts or ANY_LAYOUT in self.layouts


def load(target: Target) -> Callable[..., Any]:
    """The object that ``"module:attribute"`` names, imported now."""
    value: Any = target
    if isinstance(target, str):
        module, colon, attribute = target.partition(":")
        if not colon:
            raise ImportError(f"{target!r}: expected 'module:attribute'")
        value = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    function: Callable[..., Any] = _by_identity(value)
    return function


_functions: dict[int, tuple[object, Callable[..., Any]]] = {}  # id of a callable object -> it, and its function


def _by_identity(target: Any) -> Any:
    """``target``, or, if it compares by value and so may have no hash, one function that stands for it."""
    equals: object = type(target).__eq__
    by_value = equals is not object.__eq__
    if not by_value or not callable(target) or isinstance(target, (type, types.MethodType, types.BuiltinMethodType)):
        return target

    @functools.wraps(target.__call__, updated=())  # inspecting the object itself would compare it
    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return _functions.setdefault(id(target), (target, call))[1]


def _version_ok(have: str, wanted: str) -> bool:
    """Compare release numbers with each comma-separated clause of ``wanted``; ``==1.4`` holds for 1.4.2."""
    tests: dict[str, Callable[[list[int], list[int], int], bool]] = {
        ">=": lambda a, b, n: a >= b,
        "<=": lambda a, b, n: a <= b,
        "==": lambda a, b, n: a[:n] == b[:n],
        "!=": lambda a, b, n: a[:n] != b[:n],
        ">": lambda a, b, n: a > b,
        "<": lambda a, b, n: a < b,
    }
    for sign, version in _clauses(wanted):
        a, b = _release(have), _release(version)
        named, length = len(b), max(len(a), len(b))
        a, b = (x + [0] * (length - len(x)) for x in (a, b))  # 1.4 is 1.4.0
        if not tests[sign](a, b, named):
            return False
    return True


def _clauses(wanted: str) -> list[tuple[str, str]]:
    """``">=1.2,<2"`` -> [(">=", "1.2"), ("<", "2")]."""
    matches = [re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*(\d[\d.]*)\s*", part) for part in wanted.split(",") if wanted]
    if None in matches:
        raise ValueError(f"version requirement {wanted!r}: expected e.g. '>=1.2,<2'")
    return [(match[1], match[2]) for match in matches if match]


def _release(version: str) -> list[int]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []


def by_name(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels grouped by op."""
    grouped: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        grouped.setdefault(kernel.op, []).append(kernel)
    return grouped
