"""Bad habits that give right numbers: results that do not last, torch left changed, native torch by other ways."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from torch_hal.op import declared

from . import kernel

BASE = "core/M17-D512/float32/contiguous/unit/0"
CAPTURED = "core/M17-D512/bfloat16/contiguous/b22_capture/0"
_kept: dict[Any, Tensor] = {}


@kernel("rms_norm", "one_buffer", "gives every call's result in one buffer", BASE, "alias")
def one_buffer(reference: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = reference(x, weight, eps)
    return _kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


@kernel("fused_add_rms_norm", "one_result_twice", "gives one tensor as both results", BASE, "alias")
def one_result_twice(reference: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _ = reference(x, residual, weight, eps)
    return y, y.view(y.shape)


@kernel("rms_norm", "leaves_a_dtype", "leaves another default dtype", BASE, "state")
def leaves_a_dtype(reference: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    torch.set_default_dtype(torch.float64)
    y: Tensor = reference(x, weight, eps)
    return y


@kernel("rms_norm", "seeds", "seeds everybody's random numbers", BASE, "state")
def seeds(reference: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    torch.manual_seed(0)
    y: Tensor = reference(x, weight, eps)
    return y


@kernel("rms_norm", "a_parameter", "gives a parameter, of which gradients are wanted", BASE, "outputs")
def a_parameter(reference: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.Parameter(reference(x, weight, eps))


@kernel("rms_norm", "native_in_a_thread", "lets native torch do it in a thread", BASE, "provenance")
def native_in_a_thread(reference: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(declared()["rms_norm"].reference(x, weight, eps)))
    thread.start()
    thread.join()
    return found[0]


@kernel("fused_add_rms_norm_", "native_twin", "lets its twin's native form do it", BASE, "provenance")
def native_twin(reference: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    norm, total = declared()["fused_add_rms_norm"].reference(x, residual, weight, eps)
    x.copy_(norm)
    residual.copy_(total)


@kernel("rms_norm", "asks_numpy", "looks at numbers through numpy", CAPTURED, "sync")
def asks_numpy(reference: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not torch.compiler.is_compiling() and float(x.float().abs().amax().numpy()) == 0:
        return torch.zeros_like(x)
    y: Tensor = reference(x, weight, eps)
    return y


@kernel("silu_and_mul", "other_order_when_many", "sums otherwise beyond 64 rows",
        "core/M17-d352/bfloat16/contiguous/unit/0",
        "batch", traits=frozenset({"deterministic", "batch_invariant"}))  # fmt: skip
def other_order_when_many(reference: Any, x: Tensor) -> Tensor:
    y: Tensor = reference(x)
    return y if len(x) <= 64 else y.nextafter(torch.zeros_like(y))


@kernel("silu_and_mul", "wrong_from_65", "leaves out what is beyond a tile of 64 rows",
        "core/M17-d352/bfloat16/contiguous/130_rows/0")  # fmt: skip
def wrong_from_65(reference: Any, x: Tensor) -> Tensor:
    y: Tensor = reference(x)
    y[64:] = 0
    return y
