"""NVIDIA devices: which there are, what they are, and why there are none."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import sys
from pathlib import Path

import torch

from torch_hal.device import DeviceInfo

VENDOR = "nvidia"
_PCI = Path("/sys/bus/pci/devices")
_DISTRIBUTIONS = ("sglang-kernel", "sgl-deep-gemm", "deep-gemm", "flashinfer-python", "triton")


def devices() -> list[DeviceInfo]:
    """One `DeviceInfo` for each device that torch will number. Counts with NVML; creates no context."""
    if _build_cause() or _driver_cause():
        return []
    return [
        DeviceInfo(VENDOR, "cuda", index, dist_backend="nccl", dispatch_key="CUDA", graph_class="CUDAGraph")
        for index in range(torch.cuda.device_count())
    ]


def probe(device: DeviceInfo) -> DeviceInfo | None:
    """``device`` with what its context tells; None if it is another vendor's."""
    if device.vendor != VENDOR:
        return None
    properties = torch.cuda.get_device_properties(device.index)
    capability = (properties.major, properties.minor)
    return dataclasses.replace(
        device,
        name=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        features=features(capability),
        memory_total=properties.total_memory,
        integrated=bool(getattr(properties, "is_integrated", False)),
        fp8="e4m3fn" if "fp8" in features(capability) else None,
        warp_size=getattr(properties, "warp_size", 32),
        probed=True,
        versions=_versions(),
    )


def features(capability: tuple[int, int]) -> frozenset[str]:
    """What kernels may ask of the hardware: tensor-core bf16 and fp8, the bulk copy engine, dependent launch."""
    since = {"bf16": (8, 0), "fp8": (8, 9), "tma": (9, 0), "pdl": (9, 0)}
    return frozenset(feature for feature, first in since.items() if capability >= first)


def diagnose(device_type: str) -> str | None:
    """Why torch can use no NVIDIA device here; None if nothing stands in the way, or if the type is not "cuda"."""
    if device_type != "cuda":
        return None
    return _build_cause() or _driver_cause() or _visibility_cause()


def _build_cause() -> str | None:
    """Why this torch drives no NVIDIA GPU. ROCm's torch calls its devices "cuda" too, so it is asked first."""
    if musa := getattr(torch.version, "musa", None):
        return f"this torch ({torch.__version__}) is built for MUSA {musa}, whose devices are of type 'musa'"
    if hip := torch.version.hip:
        return f"this torch ({torch.__version__}) is built for ROCm {hip}: its 'cuda' devices are AMD GPUs"
    if torch.version.cuda is None:
        seen = " (an NVIDIA GPU is on the PCI bus)" if _gpu_on_bus() else ""
        return f"this torch ({torch.__version__}) is built without CUDA{seen}; install a CUDA build of torch"
    return None


def _driver_cause() -> str | None:
    """Why the driver cannot serve this torch: absent, or older than the CUDA that torch was built with."""
    driver = driver_version()
    if driver is None:
        if _gpu_on_bus():
            return "an NVIDIA GPU is on the PCI bus, but its driver (libcuda) is not installed"
        return "no NVIDIA GPU and no NVIDIA driver (libcuda) on this machine"
    wanted = int(str(torch.version.cuda).partition(".")[0])
    if driver[0] < wanted:  # within one major version any driver serves any toolkit
        return (
            f"the NVIDIA driver is too old: it serves CUDA {driver[0]}.{driver[1]}, torch is built for CUDA "
            f"{torch.version.cuda}; update the driver, or install a torch built for CUDA {driver[0]}"
        )
    return None


def _visibility_cause() -> str | None:
    if torch.cuda.device_count() > 0:
        return None
    setting, present = os.environ.get("CUDA_VISIBLE_DEVICES"), _present()
    if setting is not None and present != 0:
        count = f"{present} present" if present else "their number is unknown"
        return f"GPUs are hidden by CUDA_VISIBLE_DEVICES={setting!r} ({count}); unset it, or name devices that exist"
    return "the NVIDIA driver is installed but reports no GPU; see what `nvidia-smi` says"


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver serves; None without a driver. Neither initialises CUDA nor makes a context."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _present() -> int | None:
    """How many GPUs the driver knows, whatever is visible; None where it cannot be told."""
    count = getattr(torch.cuda, "_raw_device_count_nvml", lambda: -1)()
    return count if count >= 0 else None


def _gpu_on_bus() -> bool:
    """Whether the PCI bus shows an NVIDIA display or compute device."""
    for slot in _PCI.glob("*"):
        try:
            if (slot / "vendor").read_text().strip() == "0x10de" and (slot / "class").read_text().startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def _versions() -> dict[str, str]:
    driver, cudnn = driver_version(), torch.backends.cudnn.version()
    found = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": ".".join(map(str, driver)) if driver else "",
        "cudnn": str(cudnn or ""),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "",
    }
    for distribution in _DISTRIBUTIONS:
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {library: version for library, version in found.items() if version}
