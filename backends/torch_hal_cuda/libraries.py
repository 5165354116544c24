"""Whether a kernel library works on a device. "Installed" is not "usable": each probe runs its library's smallest job.

A probe returns None or the reason. It never raises for what a library may do wrong: a wheel for another torch (ABI)
or CUDA, an image for another GPU, a compiler that is missing, another vendor's package under the same name.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from torch_hal.device import DeviceInfo

Probe = Callable[[DeviceInfo], str | None]


def _probe(library: str) -> Callable[[Callable[[torch.device], str | None]], Probe]:
    """A probe from a check, which runs with the device current (libraries choose an image by it) and may raise."""

    def decorate(check: Callable[[torch.device], str | None]) -> Probe:
        @functools.wraps(check)
        def probe(device: DeviceInfo) -> str | None:
            try:
                with torch.cuda.device(device.index), torch.no_grad():
                    return check(device.torch_device)
            except ImportError as error:
                return f"{library} does not import: {_first_line(error)}"
            except Exception as error:
                return f"{library} does not run on {device.arch or device}: {_first_line(error)}"

        return probe

    return decorate


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@_probe("sgl_kernel")
def sgl_kernel(device: torch.device) -> str | None:
    from .norm import fused_add_rms_norm_

    x, residual = (torch.full((2, 64), 3.0, dtype=torch.bfloat16, device=device) for _ in range(2))
    fused_add_rms_norm_(x, residual, torch.full_like(x[0], 3.0), 0.0)
    return None if _all(x, 3.0) and _all(residual, 6.0) else "sgl_kernel computes a wrong norm here"


@_probe("sgl_kernel's FlashMLA")
def flash_mla(device: torch.device) -> str | None:
    module = importlib.import_module("sgl_kernel.flash_mla")
    if (error := getattr(module, "_flashmla_import_error", None)) is not None:
        return f"sgl_kernel's FlashMLA does not import: {_first_line(error)}"
    from .attention import mla_decode

    one = functools.partial(torch.ones, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.full((1,), 8, dtype=torch.int32, device=device)
    out, lse = mla_decode(one(1, 1, 16, 512), one(1, 1, 16, 64), one(1, 64, 576), table, lens, 1 / 576)
    right = _all(out, 1.0) and _all(lse, 1.0 + math.log(8))
    return None if right else "sgl_kernel's FlashMLA computes a wrong attention here"


_deep_gemm_device: torch.device | None = None


@_probe("deep_gemm")
def deep_gemm(device: torch.device) -> str | None:
    global _deep_gemm_device
    if _deep_gemm_device not in (None, device):
        return f"deep_gemm keeps what it compiles for one device a process, which is {_deep_gemm_device}"
    if (reason := _compiler()) is not None:
        return f"deep_gemm compiles its kernels when they are first called: {reason}"
    from .linear import fp8_block_linear

    _deep_gemm_device = device
    one = functools.partial(torch.ones, device=device)
    x, weight = one(4, 128).to(torch.float8_e4m3fn), one(64, 128).to(torch.float8_e4m3fn)
    out = fp8_block_linear(x, one(4, 1), weight, one(1, 1), torch.bfloat16, "mn_f32_tma")
    return None if _all(out, 128.0) else "deep_gemm computes a wrong product here"


def _all(x: torch.Tensor, value: float) -> bool:
    return bool(torch.allclose(x.float(), torch.full_like(x, value, dtype=torch.float32), rtol=1e-2))


def _compiler(oldest: tuple[int, int] = (12, 3)) -> str | None:
    """Why there is no CUDA compiler to build kernels with; None if there is one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return f"no CUDA compiler at {nvcc}; install the CUDA toolkit, or set CUDA_HOME"
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        return f"{nvcc} does not say its version"
    if (int(match[1]), int(match[2])) < oldest:
        return f"{nvcc} is {match[1]}.{match[2]}, {oldest[0]}.{oldest[1]} or newer is needed"
    return None
