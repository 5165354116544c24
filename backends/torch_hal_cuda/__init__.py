"""NVIDIA: the device, and kernels of sgl_kernel, DeepGEMM, FlashMLA and NCCL behind the ops' contracts.

Importing this package imports no kernel library and creates no CUDA context. What each kernel cannot do is in
`limits`; the adapters themselves are in one module a family, which import their library when first loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch_hal.device import DeviceInfo
from torch_hal.hookspecs import hookimpl
from torch_hal.kernel import Kernel

from . import device as _device
from .kernels import KERNELS


@hookimpl
def torch_hal_devices() -> Iterable[DeviceInfo]:
    return _device.devices()


@hookimpl
def torch_hal_kernels() -> Iterable[Kernel]:
    return KERNELS


@hookimpl
def torch_hal_probe(device: DeviceInfo) -> DeviceInfo | None:
    return _device.probe(device)


@hookimpl
def torch_hal_diagnose(device_type: str) -> str | None:
    return _device.diagnose(device_type)
