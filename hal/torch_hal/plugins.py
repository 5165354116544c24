"""Discovery: entry points loaded one by one, each in isolation, into one immutable `Registry`.

A plugin is whatever a ``torch_hal.backends`` entry point names, usually a module with hook implementations. Each
gets a pluggy manager of its own, so that dropping the manager drops everything that a failed plugin left.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pluggy

from . import hookspecs, probing
from .device import DeviceInfo
from .errors import FATAL, PluginError, PluginWarning, describe
from .kernel import Kernel
from .lock import LOCK, no_return
from .op import _OPS

GROUP = "torch_hal.backends"
SETTING = "TORCH_HAL_PLUGINS"  # names to load, comma-separated, or "none"; with a leading "-", names to leave out
NATIVE = "native"
IN_PROCESS = "registered in this process"


@dataclass(frozen=True)
class Plugin:
    """One plugin: where it comes from, whether it works, and what it offers."""

    name: str
    origin: str
    state: str  # "loaded", "broken" or "off"
    error: str = ""  # the exception, one line
    detail: str = ""  # its traceback
    kernels: tuple[Kernel, ...] = ()
    notes: tuple[str, ...] = ()
    hooks: Any = field(default=None, repr=False, compare=False)  # pluggy's hook relay, for this plugin alone
    target: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Registry:
    """Every plugin of one discovery, ordered by name. Never changes: a new discovery makes a new one."""

    plugins: tuple[Plugin, ...]

    @property
    def loaded(self) -> tuple[Plugin, ...]:
        return tuple(p for p in self.plugins if p.state == "loaded")

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel on offer, by plugin name and then in the order it was yielded."""
        return tuple(kernel for plugin in self.loaded for kernel in plugin.kernels)


_current: Registry | None = None
_registered: dict[str, Any] = {}


def discover() -> Registry:
    """The plugins of this process, discovered at the first call."""
    with LOCK:
        if _current is None:
            return refresh()
        with _discovering():
            return _current


def refresh(strict: bool = True) -> Registry:
    """Discover anew: installed plugins appear, uninstalled ones go, broken ones are tried again.

    Op sets that are already bound keep what they have; the next bind sees the new registry. Unless ``strict``, names
    in ``TORCH_HAL_PLUGINS`` that no plugin has are let pass, for whoever is to find out what is wrong.
    """
    global _current
    with LOCK, _discovering():
        probing.forget()
        known = {p.name: p for p in _current.loaded} if _current else {}
        groups = _entry_points()
        if strict:
            _check_setting(groups)
        found = [_load_entry_point(name, group, known) for name, group in sorted(groups.items())]
        found += [_load_registered(name, plugin, found) for name, plugin in _registered.items()]
        _current = Registry(tuple(sorted(found, key=lambda p: p.name)))
        for plugin in _current.plugins:
            if plugin.state == "broken":
                message = (
                    f"plugin '{plugin.name}' ({plugin.origin}) is left out: {plugin.error}. See `torch-hal doctor`."
                )
                warnings.warn(message, PluginWarning, stacklevel=3)
        return _current


def _discovering() -> contextlib.AbstractContextManager[None]:
    return no_return(
        "discovery", "plugins are being loaded: do not bind, explain, list devices, register or refresh until they are"
    )


def register(plugin: object, name: str) -> None:
    """Add a plugin from this process: a module or object with hook implementations. Raises PluginError if broken."""
    with LOCK:
        if any(p.name == name for p in discover().plugins):
            raise PluginError(f"plugin name '{name}' is taken; unregister it or choose another")
        with _discovering():
            loaded = _load(name, IN_PROCESS, plugin)
        if loaded.state == "broken":
            raise PluginError(f"plugin '{name}': {loaded.error}")
        _registered[name] = plugin
        refresh()


def unregister(name: str) -> None:
    """Take back a plugin that `register` added; the next bind is without it."""
    with LOCK:
        if name not in _registered:
            raise PluginError(f"no plugin '{name}' was registered in this process")
        del _registered[name]
        refresh()


def _entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Entry points by name; one seen twice for one distribution (a link, stale metadata) counts once."""
    groups: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        seen = groups.setdefault(entry.name, [])
        if _distribution(entry) not in [_distribution(other) for other in seen]:
            seen.append(entry)
    return groups


def _check_setting(groups: Iterable[str]) -> None:
    if unknown := [item for item in _wanted() if item.lstrip("-") not in groups and item != "none"]:
        raise PluginError(
            f"{SETTING} names {', '.join(unknown)}; installed plugins are: {', '.join(sorted(groups)) or 'none'}"
        )


def _switched_off(name: str) -> bool:
    only = [item for item in _wanted() if not item.startswith("-")]
    return f"-{name}" in _wanted() or (bool(only) and name not in only)


def _wanted() -> list[str]:
    return [item.strip() for item in os.environ.get(SETTING, "").split(",") if item.strip()]


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return re.sub(r"[-_.]+", "-", _label(entry).partition(" ")[0]).lower()


def _label(entry: importlib.metadata.EntryPoint) -> str:
    """Its distribution's name and version; of metadata that lost its METADATA file, the folder's name."""
    if entry.dist is None:
        return ""
    if entry.dist.read_text("METADATA") or entry.dist.read_text("PKG-INFO"):
        return f"{entry.dist.name} {entry.dist.version}"
    return str(getattr(getattr(entry.dist, "_path", None), "name", "a distribution without metadata"))


def _load_entry_point(name: str, group: list[importlib.metadata.EntryPoint], known: dict[str, Plugin]) -> Plugin:
    entry = group[0]
    package = re.split(r"[.:\s]", entry.value)[0]
    origin = ", ".join(filter(None, (_label(entry), entry.value)))
    if _switched_off(name):
        return Plugin(name, origin, "off", error=f"switched off by {SETTING}")
    if len(group) > 1:
        claims = " and ".join(sorted(f"{_label(e)} ({e.value})" for e in group))
        error = (
            f"two distributions claim the name: {claims}; uninstall one, or leave '{name}' out with {SETTING}=-{name}"
        )
        return Plugin(name, origin, "broken", error=error)
    if name in known and known[name].origin == origin:
        return known[name]
    before, ops = set(sys.modules), set(_OPS)
    try:
        target = entry.load()
        for declared in set(_OPS) - ops:  # one that cannot be checked or registered is not to fail every bind
            _ = _OPS[declared].checker, _OPS[declared].schema
    except BaseException as error:
        _roll_back(package, before, ops)
        if isinstance(error, FATAL):
            raise
        return _broken(name, origin, error)
    plugin = _load(name, origin, target)
    if plugin.state == "broken":
        _roll_back(package, before, ops)
    return plugin


def _load_registered(name: str, plugin: object, installed: list[Plugin]) -> Plugin:
    for other in installed:
        if other.name == name:
            error = f"an installed plugin has the name too: {other.origin}; unregister('{name}'), or uninstall that one"
            return Plugin(name, IN_PROCESS, "broken", error=error)
    return _load(name, IN_PROCESS, plugin)


def _roll_back(package: str, modules: set[str], ops: set[str]) -> None:
    """Forget the modules and op declarations that a failed plugin brought, so that a retry starts clean."""
    for module in set(sys.modules) - modules:
        if module.partition(".")[0] == package:
            del sys.modules[module]
    for op in set(_OPS) - ops:
        del _OPS[op]


def _load(name: str, origin: str, target: object) -> Plugin:
    """Register hooks and collect kernels, all or nothing."""
    try:
        if (name == NATIVE and origin != NATIVE) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise PluginError(
                f"'{name}' is no plugin name: use lower-case letters, digits and '_'; '{NATIVE}' is reserved"
            )
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(target, name)
        _check_hooks(manager, target)
        batches = manager.hook.torch_hal_kernels()
        kernels, notes = _accept(name, [kernel for batch in batches for kernel in batch])
        if not batches and manager.hook.torch_hal_kernels.get_hookimpls():
            notes += ("torch_hal_kernels returned None, so no kernel: is a `yield` or `return` missing?",)
    except FATAL:
        raise
    except BaseException as error:
        return _broken(name, origin, error)
    return Plugin(name, origin, "loaded", kernels=kernels, notes=notes, hooks=manager.hook, target=target)


def _check_hooks(manager: pluggy.PluginManager, target: object) -> None:
    """A hook that is mistyped, or not marked, would be ignored in silence: refuse it by name."""
    known = [name for name in dir(hookspecs) if name.startswith("torch_hal_")]
    marked = {caller.name for caller in manager.get_hookcallers(target) or []}
    for name in sorted(marked - set(known)):
        close = difflib.get_close_matches(name, known, 1)
        raise PluginError(
            f"hook '{name}' does not exist"
            + (f"; did you mean '{close[0]}'?" if close else f"; hooks are {', '.join(known)}")
        )
    for name in known:
        if name not in marked and callable(getattr(target, name, None)):
            raise PluginError(f"'{name}' is defined but not marked with @hookimpl")
    if not marked:
        raise PluginError(f"implements no hook; hooks are {', '.join(known)}")


def _accept(plugin: str, offered: Iterable[Any]) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    kernels: list[Kernel] = []
    notes = []
    for position, kernel in enumerate(offered):
        if not isinstance(kernel, Kernel):
            raise PluginError(f"torch_hal_kernels yielded {kernel!r}, expected a Kernel")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name) or (kernel.name == NATIVE and plugin != NATIVE):
            raise PluginError(
                f"kernel name {kernel.name!r} for {kernel.op}: use lower-case letters, digits and '_', not '{NATIVE}'"
            )
        if any((kernel.op, kernel.name) == (other.op, other.name) for other in kernels):
            raise PluginError(f"offers kernel '{kernel.name}' for {kernel.op} twice")
        if kernel.op not in _OPS:
            notes.append(f"offers {kernel.op}, an op that this torch_hal does not declare (made for a newer one?)")
        kernels.append(replace(kernel, plugin=plugin, position=position))
    return tuple(kernels), tuple(notes)


def _broken(name: str, origin: str, error: BaseException) -> Plugin:
    return Plugin(name, origin, "broken", error=describe(error), detail="".join(traceback.format_exception(error)))


def plugin_devices(plugin: Plugin) -> list[DeviceInfo]:
    """The devices that a plugin names; an exception there counts as none, with a warning."""
    with no_return(("devices", plugin.name), "torch_hal_devices binds, or lists devices, itself"):
        return _plugin_devices(plugin)


def _plugin_devices(plugin: Plugin) -> list[DeviceInfo]:
    try:
        found = [device for batch in plugin.hooks.torch_hal_devices() for device in batch]
        if strange := [device for device in found if not isinstance(device, DeviceInfo)]:
            raise TypeError(f"torch_hal_devices gave {strange[0]!r}, expected a DeviceInfo")
        if any(device.type == "cpu" for device in found):
            raise PluginError("torch_hal_devices claims the host, which is torch_hal's own; offer kernels for it alone")
        if twice := [device for i, device in enumerate(found) if str(device) in map(str, found[:i])]:
            raise PluginError(f"torch_hal_devices names {twice[0]} twice")
        return found
    except FATAL:
        raise
    except BaseException as error:
        warnings.warn(
            f"plugin '{plugin.name}' could not list its devices: {describe(error)}. "
            f"To leave it out: {leave_out(plugin)}",
            PluginWarning,
            stacklevel=4,
        )
        return []


def leave_out(plugin: Plugin) -> str:
    """How a user does without the plugin."""
    return f"unregister('{plugin.name}')" if plugin.origin == IN_PROCESS else f"{SETTING}=-{plugin.name}"
