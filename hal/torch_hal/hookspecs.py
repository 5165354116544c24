"""What a plugin may implement. Every hook is optional.

Neither importing a plugin nor its hooks may bind, explain, list devices or register: these wait for the hooks'
answers, and raise PluginError. The modules that kernels name are imported later, and may.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from .device import DeviceInfo
from .kernel import Kernel

PROJECT = "torch_hal"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def torch_hal_devices() -> Iterable[DeviceInfo]:  # type: ignore[empty-body]
    """The vendor's devices, without creating a context: what only a context tells stays None, ``probed`` False."""


@hookspec
def torch_hal_kernels() -> Iterable[Kernel]:  # type: ignore[empty-body]
    """Every kernel the plugin may ever offer, on any device. Imports no kernel library."""


@hookspec(firstresult=True)
def torch_hal_probe(device: DeviceInfo) -> DeviceInfo | None:
    """``device`` with its facts filled in and ``probed`` True; None if it is another vendor's. May use the device."""


@hookspec(firstresult=True)
def torch_hal_diagnose(device_type: str) -> str | None:
    """Why no device of this torch type is usable here (no hardware, old driver, hidden by a variable), or None."""
