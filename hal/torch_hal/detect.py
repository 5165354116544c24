"""Which devices there are, and the one that is asked for: found, probed, or refused with the cause."""

from __future__ import annotations

import os
import re

import torch

from . import native, plugins
from .device import DeviceInfo
from .errors import FATAL, DeviceUnavailable, PluginError, describe
from .lock import LOCK, no_return
from .plugins import Plugin, Registry

SETTING = "TORCH_HAL_DEVICE"

_probed: dict[tuple[str, str, int], DeviceInfo] = {}


def devices() -> tuple[DeviceInfo, ...]:
    """The host and every device that a plugin names, without creating a device context."""
    return tuple(device for device, _ in _found(plugins.discover()))


def find(device: str | torch.device | DeviceInfo | None, registry: Registry) -> DeviceInfo:
    """The probed device that ``device`` means. None means the only accelerator, else the host.

    Raises DeviceUnavailable with the cause; never answers with another device.
    """
    if isinstance(device, DeviceInfo):
        return device if device.probed else probe(device, registry)
    if device is None:
        device = os.environ.get(SETTING) or _default(registry)
    # Not torch's to parse: a type that it does not know before the vendor's package is imported, a plugin may know.
    match = re.fullmatch(r"([a-z]\w*)(?::(\d+))?", str(device))
    if match is None:
        raise DeviceUnavailable(f"device {device!r}: expected a torch device such as 'cpu' or 'cuda:0'")
    device_type, index = match[1], int(match[2]) if match[2] else _current_index(match[1])
    for found, plugin in _found(registry, device_type):
        if found.index == index:
            return found if found.probed else _probe_once(found, plugin)
    raise DeviceUnavailable(f"device {device}: {_cause(device_type, registry)}")


def probe(device: DeviceInfo, registry: Registry) -> DeviceInfo:
    """``device`` with the facts that only its use tells."""
    owner = next(
        (
            plugin
            for found, plugin in _found(registry, device.type)
            if (found.vendor, found.index) == (device.vendor, device.index)
        ),
        None,
    )
    return _probe_once(device, owner) if owner is not None else device


def _found(registry: Registry, device_type: str | None = None) -> list[tuple[DeviceInfo, Plugin | None]]:
    """Devices, of one type or all, each with the plugin that named it. Two plugins claiming one is a PluginError."""
    found: list[tuple[DeviceInfo, Plugin | None]] = [(native.cpu(), None)]
    owners: dict[tuple[str, int], Plugin] = {}
    for plugin in registry.loaded:
        for device in plugins.plugin_devices(plugin):
            if device_type not in (None, device.type):
                continue
            other = owners.setdefault((device.type, device.index), plugin)
            if other is not plugin:
                raise PluginError(
                    f"plugins '{other.name}' and '{plugin.name}' both claim device {device}; "
                    f"leave one out with {plugins.leave_out(other)} or {plugins.leave_out(plugin)}"
                )
            found.append((device, plugin))
    return [(device, plugin) for device, plugin in found if device_type in (None, device.type)]


def _default(registry: Registry) -> str:
    accelerators = [device for device, _ in _found(registry) if device.type != "cpu"]
    vendors = sorted({device.vendor for device in accelerators})
    if len(vendors) > 1:
        first = {device.vendor: device for device in reversed(accelerators)}
        named = " and ".join(f"{vendor} ({first[vendor]})" for vendor in vendors)
        raise DeviceUnavailable(
            f"devices of several vendors are present: {named}; say which with bind(device=...) or {SETTING}"
        )
    return str(accelerators[0]) if accelerators else "cpu"


def _current_index(device_type: str) -> int:
    """The index that a bare "cuda" means to torch; 0 where nothing has chosen one yet, and for the host."""
    if device_type == "cpu":
        return 0
    module = getattr(torch, device_type, None)
    if module is None or not getattr(module, "is_initialized", lambda: False)():
        return 0
    return int(module.current_device())


def _cause(device_type: str, registry: Registry) -> str:
    if of_type := [str(device) for device, _ in _found(registry, device_type)]:
        return f"there is no such index; present are {', '.join(of_type)}"
    if cause := _diagnosis(device_type, registry):
        return cause
    broken = [f"{p.name} ({p.error})" for p in registry.plugins if p.state != "loaded"]
    hint = f"; not loaded: {', '.join(broken)}" if broken else ""
    return f"no plugin offers devices of type '{device_type}'; present are {', '.join(str(d) for d in devices())}{hint}"


def _diagnosis(device_type: str, registry: Registry) -> str | None:
    """What plugins say stands between torch and devices of the type; failing that, which of them failed to say."""
    failed = []
    for plugin in registry.loaded:
        try:
            with no_return(("diagnosis", plugin.name), "torch_hal_diagnose binds what it is asked about"):
                if cause := plugin.hooks.torch_hal_diagnose(device_type=device_type):
                    return str(cause)
        except FATAL:
            raise
        except BaseException as error:
            failed.append(f"plugin '{plugin.name}' could not say why: {describe(error)}")
    return "; ".join(failed) or None


def _probe_once(device: DeviceInfo, plugin: Plugin | None) -> DeviceInfo:
    key = (device.vendor, device.type, device.index)
    with LOCK, no_return(key, f"torch_hal_probe binds or explains {device}, which it is asked to describe"):
        if key not in _probed:
            try:
                known = plugin.hooks.torch_hal_probe(device=device) if plugin else None
                if known is not None and (known.type, known.index) != (device.type, device.index):
                    raise PluginError(f"torch_hal_probe gave {known}, another device")
            except FATAL:
                raise
            except BaseException as error:
                raise DeviceUnavailable(f"device {device}: probing it failed: {describe(error)}") from error
            _probed[key] = known or device
        return _probed[key]
