"""What the commands say, as plain dicts and lists: printed as JSON or drawn by `cli.render`."""

from __future__ import annotations

import os
import platform
import warnings
from dataclasses import asdict
from typing import Any

import torch

import torch_hal as hal

from .. import detect, native, plugins
from ..errors import FATAL, describe
from ..kernel import Kernel, Library, by_name
from ..loading import load_kernel
from ..op import Op, declared
from ..probing import probe_library
from ..twins import with_twins


def devices(probe: bool) -> list[dict[str, Any]]:
    """Every device; with ``probe`` its facts, which uses it."""
    return [_device(device, probe) for device in hal.devices()]


def _device(device: hal.DeviceInfo, probe: bool) -> dict[str, Any]:
    error = ""
    if probe:
        try:
            device = detect.find(device, plugins.discover())
        except hal.HalError as failure:
            error = str(failure)
    facts = {name: getattr(device, name) for name in device.__dataclass_fields__}
    facts["features"], facts["versions"] = sorted(device.features), dict(device.versions)
    state = "broken" if error else "probed" if device.probed else "unprobed"
    return {"device": str(device), "state": state, "error": error, **facts}


def ops(device: str | None) -> list[dict[str, Any]]:
    """Every op with its kernels and their state: on ``device`` if given, else as far as listing can tell."""
    offered = by_name(_offered(plugins.discover()))
    present = hal.devices()
    rows = []
    for name, op in sorted(declared().items(), key=lambda item: (item[1].family, item[0])):
        if device is None:
            kernels = [_listed(kernel, present) for kernel in offered[name]]
        else:
            kernels = hal.explain(name, device).to_dict()["kernels"]
        rows.append(
            {"name": name, "family": op.family, "schema": op.schema, "mutates": list(op.mutates), "kernels": kernels}
        )
    return rows


def _listed(kernel: Kernel, present: tuple[hal.DeviceInfo, ...]) -> dict[str, Any]:
    """A kernel's state without touching any device: what is certain, else ``unprobed``."""
    library = kernel.requires.library
    reasons = [reason for device in present if (reason := _vendor(kernel, device)) is not None]
    if kernel.plugin == native.NATIVE:
        state, reason = "ready", ""
    elif len(reasons) == len(present):
        state, reason = "refused", f"no device of vendor {kernel.requires.vendor} here"
    elif isinstance(library, Library) and (missing := library.missing()):
        state, reason = "refused", missing
    else:
        state, reason = "unprobed", ""
    return {
        "kernel": kernel.name,
        "plugin": kernel.plugin,
        "band": kernel.band.name.lower(),
        "state": state,
        "reason": reason,
    }


def _vendor(kernel: Kernel, device: hal.DeviceInfo) -> str | None:
    return None if kernel.requires.vendor in (None, device.vendor) else f"{device} is {device.vendor}"


def doctor(load: bool, probe: bool) -> dict[str, Any]:
    """Everything that helps to say why something is not chosen."""
    problems = []
    try:
        registry = plugins.discover()
    except hal.PluginError as error:
        problems.append(str(error))
        registry = plugins.refresh(strict=False)
    problems += [f"plugin {p.name}: {p.error}" for p in registry.plugins if p.state == "broken"]
    problems += _policy(registry)
    report: dict[str, Any] = {
        "versions": {"torch_hal": hal.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("TORCH_HAL_")},
        "plugins": [_plugin(p) for p in (_builtin(), *registry.plugins)],
        "devices": [],
        "libraries": [],
    }
    problems += _inventory(report, registry, probe)
    problems += [f"device {d['device']}: {d['error']}" for d in report["devices"] if d["error"]]
    if load:
        failures = _load_all(registry)
        report["kernels_that_do_not_load"] = failures
        problems += [f"kernel {f['kernel']} of {f['op']}: {f['error']}" for f in failures]
    report["problems"] = problems
    return report


def _inventory(report: dict[str, Any], registry: plugins.Registry, probe: bool) -> list[str]:
    """Fill in devices and libraries; returns what plugins could not say of them."""
    problems = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hal.PluginWarning)
        try:
            report["devices"] = devices(probe)
            report["libraries"] = _libraries(registry, probe)
        except hal.HalError as error:
            problems.append(f"devices: {error}")
    for warning in caught:
        if issubclass(warning.category, hal.PluginWarning):
            problems.append(str(warning.message))
        else:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    return list(dict.fromkeys(problems))


def _policy(registry: plugins.Registry) -> list[str]:
    """What is wrong with the policy that variables and file make, if anything."""
    from ..policy import resolve

    absent = {plugin.name: plugin.error for plugin in registry.plugins if plugin.state != "loaded"}
    try:
        resolve(None).check_patterns(declared(), _offered(registry), absent)
    except hal.HalError as error:
        return [str(error)]
    return []


def _offered(registry: plugins.Registry) -> list[Kernel]:
    return [*with_twins(registry.kernels, dict(declared())), *native.native_kernels()]


def _builtin() -> plugins.Plugin:
    return plugins.Plugin(
        native.NATIVE, f"torch-hal {hal.__version__}, built in", "loaded", kernels=tuple(native.native_kernels())
    )


def _plugin(plugin: plugins.Plugin) -> dict[str, Any]:
    shown = {name: getattr(plugin, name) for name in ("name", "origin", "state", "error", "detail")}
    return {**shown, "kernels": len(plugin.kernels), "notes": list(plugin.notes)}


def _libraries(registry: plugins.Registry, probe: bool) -> list[dict[str, Any]]:
    libraries = {
        kernel.requires.library: kernel.requires
        for kernel in registry.kernels
        if isinstance(kernel.requires.library, Library)
    }
    rows = []
    for library, requires in libraries.items():
        state, reason = "unprobed", library.missing() or ""
        hosts = [d for d in hal.devices() if requires.vendor in (None, d.vendor)]
        if reason or not hosts:
            state, reason = "refused", reason or f"no device of vendor {requires.vendor} here"
        elif probe:
            failures = [f"{device}: {why}" for device in hosts if (why := _unusable(library, device, registry))]
            state, reason = ("refused", "; ".join(failures)) if failures else ("ready", "")
        rows.append(
            {**{k: v for k, v in asdict(library).items() if k in ("name", "version")}, "state": state, "reason": reason}
        )
    return rows


def _unusable(library: Library, device: hal.DeviceInfo, registry: plugins.Registry) -> str | None:
    try:
        return probe_library(library, detect.find(device, registry))
    except hal.HalError as error:
        return str(error)


def _load_all(registry: plugins.Registry) -> list[dict[str, str]]:
    """Import every kernel whose library is installed, and check its signatures."""
    failures = []
    for kernel in registry.kernels:
        op: Op[..., Any] | None = declared().get(kernel.op)
        library = kernel.requires.library
        if op is None or (isinstance(library, Library) and library.missing()):
            continue
        try:
            load_kernel(kernel, op)
        except FATAL:
            raise
        except BaseException as error:
            failures.append({"op": kernel.op, "kernel": kernel.id, "error": describe(error)})
    return failures
