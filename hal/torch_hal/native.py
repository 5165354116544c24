"""The built-in provider: every op's reference, on any device, always last."""

from __future__ import annotations

import os
import platform

from .device import DeviceInfo
from .kernel import ANY_LAYOUT, Band, Kernel, Trait
from .op import Op, declared

NATIVE = "native"
_TRAITS = frozenset({Trait.TRACEABLE, Trait.GRAPH_SAFE, Trait.DETERMINISTIC})


def native_kernel(op: Op[..., object]) -> Kernel:
    """The reference of ``op`` as a kernel. It needs no plan, so it accepts any; weights it reads as they are."""
    reads = frozenset({ANY_LAYOUT}) if op.plan else None
    return Kernel(
        op.name,
        NATIVE,
        op.reference,
        reads=reads,
        traits=_TRAITS,
        band=Band.REFERENCE,
        version=op.version,
        plugin=NATIVE,
    )


def native_kernels() -> list[Kernel]:
    return [native_kernel(op) for op in declared().values()]


def cpu() -> DeviceInfo:
    """The host."""
    return DeviceInfo(
        vendor="cpu",
        type="cpu",
        name=platform.processor() or platform.machine(),
        arch=platform.machine(),
        memory_total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        integrated=True,
        fp8="e4m3fn",
        probed=True,
    )
