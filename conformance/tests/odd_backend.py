"""A backend with a kernel for each way in which things go wrong; tests offer it through an entry point."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.ops import gelu_and_mul as native_gelu
from torch_hal.ops import static_quant_fp8 as native_static


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Right."""
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add(eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype).contiguous()


def one_percent(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms_norm(x.float(), weight, eps) * 1.01).to(x.dtype)


def special(x: Tensor) -> bool:
    """One row of float32: few cases have it, and each of them costs a process or a time-out."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.shape[0] == 1


def silu_and_mul(x: Tensor) -> Tensor:
    """Dies with the process."""
    if special(x):
        os.kill(os.getpid(), signal.SIGSEGV)
    gate, up = x.float().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


def gelu_and_mul(x: Tensor) -> Tensor:
    """Lets native torch answer, unseen."""
    return native_gelu.reference(x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Never answers."""
    if special(x):
        time.sleep(3600)
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def refuse_bfloat16(x: Tensor) -> str | None:
    return "takes no bfloat16" if x.dtype == torch.bfloat16 else None


def shared_expert_add(routed: Tensor, shared: Tensor, alpha: float) -> Tensor:
    """Refuses once it runs, which is too late."""
    raise hal.Unsupported("only on Tuesdays")


def moe_sum_reduce(x: Tensor, scale: float) -> Tensor:
    raise RuntimeError("no image for this device")


def static_quant_fp8(x: Tensor, scale: Tensor, fp8: str = "e4m3fn") -> Tensor:
    return native_static.reference(x, scale, fp8)


def concat_mla_k(k: Tensor) -> Tensor:
    """Not the op's signature."""
    return k


def refuse_all(x: Tensor, scale: Tensor, fp8: str = "e4m3fn") -> str:
    return "takes nothing at all"


@hal.hookimpl
def torch_hal_kernels() -> Iterator[hal.Kernel]:
    yield hal.Kernel(
        "rms_norm", "right", run=rms_norm, traits=frozenset({"deterministic", "batch_invariant", "graph_safe"})
    )
    yield hal.Kernel("rms_norm", "one_percent", run=one_percent)
    yield hal.Kernel("silu_and_mul", "crash", run=silu_and_mul)
    yield hal.Kernel("gelu_and_mul", "sly", run=gelu_and_mul, dynamic=refuse_bfloat16)
    yield hal.Kernel("gelu_tanh_and_mul", "hang", run=gelu_tanh_and_mul)
    yield hal.Kernel("shared_expert_add", "late", run=shared_expert_add)
    yield hal.Kernel("moe_sum_reduce", "raises", run=moe_sum_reduce)
    yield hal.Kernel("static_quant_fp8", "shy", run=static_quant_fp8, dynamic=refuse_all)
    yield hal.Kernel("concat_mla_k", "broken", run=concat_mla_k)
    yield hal.Kernel("rope", "elsewhere", run="nowhere:rope", requires=hal.Requires(library="no_such_library"))
