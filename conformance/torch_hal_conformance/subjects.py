"""Who is judged: one backend's kernels on one device, and what of them cannot run here."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch_hal as hal
from torch_hal import plugins
from torch_hal.native import NATIVE
from torch_hal.op import declared
from torch_hal.runtime import Runtime
from torch_hal.selection import Cause


class SubjectError(Exception):
    """There is nothing to judge, and why: one line."""


@dataclass(frozen=True)
class Subject:
    """A backend on a device: op -> its kernels that may run there, and op -> kernel -> why one may not."""

    backend: str
    device: hal.DeviceInfo
    kernels: dict[str, tuple[str, ...]]
    unavailable: dict[str, dict[str, str]] = field(default_factory=dict)
    broken: dict[str, dict[str, str]] = field(default_factory=dict)  # these count as declared, and fail
    folder: str = ""  # of the backend's own package, where its list of known failures may lie
    distribution: tuple[str, str] = ("", "")  # name and version of what brought the backend
    memory_gib: float = 0.0  # of the host
    notes: tuple[str, ...] = ()  # what is wrong with what it offers: kernels of ops that there are not

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """Every kernel that must answer for itself here."""
        ops = sorted({*self.kernels, *self.broken})
        return {op: self.kernels.get(op, ()) + tuple(self.broken.get(op, ())) for op in ops}

    def answers(self, op: str, kernel: str) -> bool:
        """Whether the backend has such a kernel, able to run here or not; any, if ``kernel`` is empty."""
        names = {*self.declared.get(op, ()), *self.unavailable.get(op, ())}
        return bool(names) if not kernel else kernel in names

    def to_json(self) -> str:
        device = {k: getattr(self.device, k) for k in self.device.__dataclass_fields__}
        device |= {"features": sorted(self.device.features), "versions": dict(self.device.versions)}
        return json.dumps({**{k: v for k, v in vars(self).items() if k != "device"}, "device": device})

    @classmethod
    def from_json(cls, text: str) -> Subject:
        values: dict[str, Any] = json.loads(text)
        values["device"] = hal.DeviceInfo(**{**values["device"], "features": frozenset(values["device"]["features"])})
        values["kernels"] = {op: tuple(kernels) for op, kernels in values["kernels"].items()}
        values |= {name: tuple(values[name]) for name in ("distribution", "notes")}
        return cls(**values)


def find(backend: str, device: str | None = None) -> Subject:
    """The backend's kernels on ``device``; by default on the first device that it names itself, or, if it names none,
    on the machine's accelerator or else the host, whichever first has a kernel of it.

    ``backend`` is a plugin's name, or ``plugin.kernel`` for those kernels alone. Raises SubjectError.
    """
    name, _, wanted = backend.partition(".")
    _check_plugin(name)
    found = [_on(backend, info) for info in _devices(name, device)]
    if subject := next((subject for subject in found if subject.declared), None):
        return subject
    if wanted and wanted not in (names := sorted({k.name for k in plugins.discover().kernels if k.plugin == name})):
        raise SubjectError(f"backend '{name}' has no kernel '{wanted}'; it has {', '.join(names)}")
    reasons = sorted({why for subject in found for whys in subject.unavailable.values() for why in whys.values()})
    where = " or ".join(str(subject.device) for subject in found)
    raise SubjectError(f"backend '{backend}' offers no kernel on {where}: {'; '.join(reasons) or 'it has none'}")


def _on(backend: str, info: hal.DeviceInfo) -> Subject:
    name, _, wanted = backend.partition(".")
    kernels: dict[str, tuple[str, ...]] = {}
    unavailable: dict[str, dict[str, str]] = {}
    broken: dict[str, dict[str, str]] = {}
    for op in declared():
        for verdict in hal.explain(op, str(info), hal.Policy()).verdicts:
            kernel = verdict.kernel
            if kernel.plugin != name or (wanted and kernel.name != wanted):
                continue
            if not verdict.refused:
                kernels[op] = (*kernels.get(op, ()), kernel.id)
            elif verdict.cause in (Cause.BROKEN, Cause.LAYOUT):
                broken.setdefault(op, {})[kernel.id] = verdict.refused
            else:
                unavailable.setdefault(op, {})[kernel.id] = verdict.refused
    memory = round(Runtime(hal.bind("cpu").device).memory().total / 2**30, 1)
    found = next((plugin for plugin in plugins.discover().loaded if plugin.name == name), None)
    notes = found.notes if found is not None else ()
    return Subject(backend, info, kernels, unavailable, broken, _folder(name), _distribution(name), memory, notes)


def _distribution(name: str) -> tuple[str, str]:
    """Name and version of what brought the backend."""
    if name == NATIVE:
        return "torch-hal", hal.__version__
    for entry in importlib.metadata.entry_points(group=plugins.GROUP):
        if entry.name == name and entry.dist is not None:
            return entry.dist.name or "", entry.dist.version or ""
    found = next((p for p in plugins.discover().loaded if p.name == name), None)
    if found is not None and found.origin == plugins.IN_PROCESS:
        module = getattr(found.target, "__name__", type(found.target).__module__)
        return plugins.IN_PROCESS, str(getattr(sys.modules.get(module), "__version__", "in process"))
    return "", ""


def _folder(name: str) -> str:
    """Where the module lies that the entry point, or `torch_hal.register`, names."""
    for plugin in plugins.discover().loaded:
        if plugin.name == name:
            module = getattr(plugin.target, "__name__", None) or type(plugin.target).__module__
            found = importlib.util.find_spec(module)
            return str(Path(found.origin).parent) if found is not None and found.origin else ""
    return ""


def _check_plugin(name: str) -> None:
    if name == NATIVE:
        return
    known = {plugin.name: plugin for plugin in plugins.discover().plugins}
    if name not in known:
        close = difflib.get_close_matches(name, [*known, NATIVE], 1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise SubjectError(f"no backend '{name}': {hint}installed are {', '.join(sorted([*known, NATIVE]))}")
    if known[name].state != "loaded":
        raise SubjectError(f"backend '{name}' ({known[name].origin}) is {known[name].state}: {known[name].error}")


def _devices(name: str, device: str | None) -> list[hal.DeviceInfo]:
    """Where to look for the backend's kernels, in this order."""
    if device is not None:
        return [hal.bind(device).device]
    if name == NATIVE:
        return [hal.bind("cpu").device]
    for plugin in plugins.discover().loaded:
        if plugin.name == name and (own := plugins.plugin_devices(plugin)):
            return [hal.bind(str(own[0])).device]
    infos = [hal.bind(None).device, hal.bind("cpu").device]
    return infos[:1] if infos[0].type == "cpu" else infos


@functools.lru_cache(maxsize=256)
def bound(op: str, kernel: str, device: str, trace: bool = True) -> hal.OpSet:
    """Op set in which ``op`` is that kernel, by its id, or nothing."""
    pattern = kernel if "." in kernel else f"{kernel}.{kernel}"
    return hal.bind(device, hal.Policy(require={op: (pattern,)}, trace=trace))
