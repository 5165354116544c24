"""What the core's tests share: plugins of this process, throw-away distributions, kernels and emulated devices."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_hal as hal

GROUP = "torch_hal.backends"
H200 = hal.DeviceInfo(
    "nvidia",
    "cuda",
    name="H200",
    arch="sm_90",
    features=frozenset({"bf16", "fp8", "tma", "pdl"}),
    memory_total=140 << 30,
    fp8="e4m3fn",
    dist_backend="nccl",
    dispatch_key="CUDA",
    graph_class="CUDAGraph",
    probed=True,
)

ACME = """
from torch_hal import Band, Kernel, Requires, hookimpl

@hookimpl
def torch_hal_kernels():
    yield Kernel("rms_norm", "acme", run="acme_kernels:rms_norm", requires=Requires(vendor="cpu"), band=Band.TUNED)
"""
ACME_KERNELS = """
def rms_norm(x, weight, eps):
    return x * 0 + 7
"""


class Offer:
    """A plugin of this process, with just the hooks that a test gives it."""

    def __init__(self, *kernels: hal.Kernel, **hooks: Callable[..., Any]) -> None:
        if kernels:
            hooks["torch_hal_kernels"] = lambda: kernels
        for name, function in hooks.items():
            setattr(self, name, hal.hookimpl(function))


def rms_norm_kernel(
    name: str = "acme", value: float = 7.0, op: str = "rms_norm", band: hal.Band = hal.Band.TUNED, **fields: Any
) -> hal.Kernel:
    """A kernel for rms_norm that is recognised by its result: every element is ``value``."""

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, value)

    return hal.Kernel(op, name, **{"run": run, "band": band, **fields})


def refuse_bfloat16(x: Tensor, weight: Tensor, eps: float) -> str | None:
    return "takes no bfloat16" if x.dtype == torch.bfloat16 else None


def refuse_long(x: Tensor, weight: Tensor, eps: float) -> str | None:
    return f"takes at most 4 rows, got {x.shape[0]}" if x.shape[0] > 4 else None


def refuse_by_mistake(x: Tensor, weight: Tensor, eps: float) -> str | None:
    raise ZeroDivisionError("a refusal's own mistake")


def rms_norm_arguments(rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, float]:
    return torch.randn(rows, 8).to(dtype), torch.ones(8, dtype=dtype), 1e-6


def write_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    group: str = GROUP,
    metadata: bool = True,
) -> None:
    """What installing a distribution leaves behind: its modules and its ``dist-info``."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    if metadata:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {value}" for entry, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for module, source in (modules or {}).items():
        path = folder / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))


def write_acme(folder: Path) -> None:
    """The whole of a third party's working plugin."""
    write_distribution(folder, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": ACME, "acme_kernels": ACME_KERNELS})


def state_of(name: str) -> Any:
    """The discovered plugin of that name."""
    from torch_hal.plugins import discover

    [plugin] = [plugin for plugin in discover().plugins if plugin.name == name]
    return plugin


@contextmanager
def collected() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning of the block, repeats included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def messages(caught: Iterable[warnings.WarningMessage], category: type[Warning]) -> list[str]:
    return [str(warning.message) for warning in caught if issubclass(warning.category, category)]


def verdicts(explanation: hal.Explanation) -> dict[str, tuple[str, str]]:
    """Kernel id -> (state, reason)."""
    return {v.kernel.id: ("refused" if v.refused else v.role, v.refused or "") for v in explanation.verdicts}
