"""torch-hal: ops declared once, kernels offered by plugins, one explainable choice of which runs.

import torch_hal as hal
ops = hal.bind("cpu")
y = ops.rms_norm(x, weight, 1e-6)
print(ops.explain("rms_norm"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ops
from .contracts import Contracts
from .detect import devices
from .device import DeviceInfo
from .errors import (
    ArgumentError,
    DeviceUnavailable,
    FallbackWarning,
    HalError,
    PluginError,
    PluginWarning,
    PolicyError,
    Unsupported,
)
from .hookspecs import hookimpl
from .kernel import Band, Kernel, Library, Requires, Trait
from .manifest import Manifest
from .op import Op, op
from .opset import OpSet, bind, explain
from .plugins import refresh, register, unregister
from .prepare import Prepared
from .selection import Explanation

if TYPE_CHECKING:
    from .policy import Policy

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Band",
    "Contracts",
    "DeviceInfo",
    "DeviceUnavailable",
    "Explanation",
    "FallbackWarning",
    "HalError",
    "Kernel",
    "Library",
    "Manifest",
    "Op",
    "OpSet",
    "PluginError",
    "PluginWarning",
    "Policy",
    "PolicyError",
    "Prepared",
    "Requires",
    "Trait",
    "Unsupported",
    "bind",
    "devices",
    "explain",
    "hookimpl",
    "op",
    "ops",
    "refresh",
    "register",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """`Policy` is loaded on first use: pydantic costs more than the rest together."""
    if name == "Policy":
        from .policy import Policy

        return Policy
    raise AttributeError(f"module 'torch_hal' has no attribute '{name}'")
