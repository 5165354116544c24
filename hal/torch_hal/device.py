"""What a device is: facts that decide which kernels may run on it."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch

from .errors import DeviceUnavailable, PluginError, describe
from .fields import check_fields, collect


@dataclass(frozen=True)
class DeviceInfo:
    """One device as torch sees it: ``DeviceInfo`` *i* of a type describes torch's device *i*.

    ``arch`` lives in its vendor's own domain (``sm_90``, ``gfx942``, ``mp_31``) and is never compared across
    domains. Fields that only a device context can tell are None until the device has been probed.
    """

    vendor: str
    type: str
    index: int = 0
    name: str = ""
    arch: str | None = None
    features: frozenset[str] = frozenset()
    memory_total: int | None = None  # bytes
    integrated: bool = False  # shares memory with the host: the host says what is available
    fp8: str | None = None  # the kind of its 8-bit floats, a name in `formats.FP8_KINDS`
    warp_size: int | None = None
    dist_backend: str = "gloo"  # torch.distributed's backend for this device's tensors
    dispatch_key: str = "CPU"
    graph_class: str | None = None  # attribute of the torch device module, e.g. "CUDAGraph"
    probed: bool = False
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)  # library -> version

    def __post_init__(self) -> None:
        collect(self, "features", frozenset)
        check_fields(self, f"device {self.type!r} of vendor {self.vendor!r}", named=("vendor", "type"))
        if not re.fullmatch(r"[a-z]\w*", self.type) or self.index < 0:
            raise PluginError(f"device {self}: expected a type such as 'cuda' and an index from 0 up")
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))

    @property
    def torch_device(self) -> torch.device:
        try:
            return torch.device(self.type) if self.type == "cpu" else torch.device(self.type, self.index)
        except Exception as error:  # the vendor's package, which teaches torch the type, was not imported
            raise DeviceUnavailable(f"device {self}: torch does not know it: {describe(error)}") from error

    def __str__(self) -> str:  # not by torch, which may not know the type before its vendor's package is imported
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"

    def __reduce__(self) -> tuple[Any, ...]:  # for worker processes: a mapping proxy cannot be pickled
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return functools.partial(DeviceInfo, **{**values, "versions": dict(self.versions)}), ()


def arch_matches(arch: str | None, pattern: str) -> bool:
    """Whether ``arch`` satisfies ``pattern``, within one vendor's domain.

    ``sm_90`` is exact; ``sm_100f`` is the family that shares the leading digits (sm_100, sm_103; not sm_120);
    ``sm_80+`` is that number or a higher one; ``gfx94?`` is a glob.
    """
    if arch is None:
        return False
    if pattern.endswith("+"):
        have, need = _split(arch), _split(pattern[:-1])
        return have is not None and need is not None and have[0] == need[0] and have[1] >= need[1]
    if pattern.endswith("f") and _split(pattern[:-1]) is not None:
        have, need = _split(arch), _split(pattern[:-1])
        return have is not None and need is not None and have[0] == need[0] and have[1] // 10 == need[1] // 10
    return fnmatch.fnmatchcase(arch, pattern)


def _split(arch: str) -> tuple[str, int] | None:
    """``sm_90`` -> ("sm_", 90). Only decimal arch numbers have an order; gfx names are hexadecimal and have none."""
    match = re.fullmatch(r"([a-z]+_)(\d+)", arch)
    return (match[1], int(match[2])) if match else None
