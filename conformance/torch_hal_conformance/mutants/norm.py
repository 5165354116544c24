"""Wrong norms, and what can go wrong with any kernel's memory and manners, shown on a norm."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_hal.op import declared

from . import edit, kernel

BF16 = "core/M17-D512/bfloat16/contiguous/unit/0"
F32 = "core/M17-D512/float32/contiguous/unit/0"
TINY = "core/M17-D512/float32/contiguous/tiny/0"
Norm = Callable[[Tensor, Tensor, float], Tensor]

NUMBERS = (
    edit("rms_norm", "eps_times_ten", "eps ten times too large", "+ eps) * wide", "+ 10 * eps) * wide", TINY),
    edit(
        "rms_norm",
        "eps_outside",
        "eps is added to the root, not to the mean square",
        "torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)",
        "(1 / (x.square().mean(-1, keepdim=True).sqrt() + eps))",
        TINY,
    ),
    edit(
        "rms_norm",
        "one_percent",
        "everything is 1 % too large",
        "return narrow(normalise(wide(x), weight, eps), x)",
        "return narrow(1.01 * normalise(wide(x), weight, eps), x)",
        BF16,
    ),
    edit(
        "rms_norm",
        "rounds_before_weight",
        "rounds to the result's type before it multiplies by the weight, and again after",
        "return narrow(normalise(wide(x), weight, eps), x)",
        "return narrow(wide(narrow(normalise(wide(x), torch.ones_like(weight), eps), x)) * wide(weight), x)",
        BF16,
    ),
    edit(
        "rms_norm",
        "sums_in_bf16",
        "squares are summed in bfloat16",
        "x.square().mean(-1, keepdim=True)",
        "x.bfloat16().square().cumsum(-1, dtype=torch.bfloat16)[..., -1:].to(x.dtype) / x.shape[-1]",
        F32,
    ),
    edit(
        "rms_norm",
        "no_float32",
        "computes in the input's own type",
        "return narrow(normalise(wide(x), weight, eps), x)",
        "return normalise(x, weight.to(x.dtype), eps).to(x.dtype)",
        BF16,
    ),
    edit("fused_add_rms_norm", "eps_times_ten", "eps ten times too large", "+ eps) * wide", "+ 10 * eps) * wide", TINY),
    edit(
        "fused_add_rms_norm",
        "norm_of_rounded_sum",
        "the norm reads the rounded sum",
        "    s = wide(x) + wide(residual)\n    return",
        "    s = wide(narrow(wide(x) + wide(residual), x))\n    return",
        "core/M17-D512/bfloat16/contiguous/saturating/0",
    ),
    edit(
        "fused_add_rms_norm_",
        "residual_not_written",
        "the residual stays what it was",
        "    residual.copy_(s)\n",
        "",
        BF16,
    ),
    edit(
        "fused_add_rms_norm_",
        "written_in_the_wrong_order",
        "norm and sum change places",
        "    x.copy_(norm)\n    residual.copy_(s)",
        "    x.copy_(s)\n    residual.copy_(norm)",
        BF16,
    ),
)


@kernel("rms_norm", "truncates", "truncates where it should round to nearest", BF16, "bound")
def truncates(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = norm(x.float(), weight.float(), eps)
    if x.dtype != torch.bfloat16:
        return exact.to(x.dtype)
    return (exact.view(torch.int32) & -65536).view(torch.float32).to(x.dtype)


@kernel("rms_norm", "zeros", "gives zeros", BF16)
def zeros(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


@kernel("rms_norm", "unwritten_rows", "leaves the last row unwritten", BF16, "nonfinite")
def unwritten_rows(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[:-1] = norm(x, weight, eps)[:-1]
    return out


@kernel("rms_norm", "unwritten_tail", "leaves the last columns unwritten", F32, "nonfinite")
def unwritten_tail(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., :500] = norm(x, weight, eps)[..., :500]
    return out


_last: dict[Any, Tensor] = {}


@kernel("rms_norm", "stale", "gives the result of the call before", F32)
def stale(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    key = (x.shape, x.dtype)
    result = _last.get(key, torch.ones_like(x))
    _last[key] = norm(x + 1, weight, eps)
    return result.clone()


@kernel("rms_norm", "writes_input", "normalises in place, and returns a copy", F32, "mutation")
def writes_input(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = norm(x, weight, eps)
    x.copy_(result)
    return result


@kernel("rms_norm", "returns_input", "writes its result into x and returns that", F32, "alias")
def returns_input(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.copy_(norm(x, weight, eps))


@kernel("rms_norm", "float32_result", "gives float32 whatever comes in", BF16, "dtype")
def float32_result(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x.float(), weight.float(), eps)


@kernel("rms_norm", "flat_result", "gives the right numbers in one dim", F32, "shape")
def flat_result(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps).flatten()


@kernel("rms_norm", "elsewhere", "gives its result on another device", F32, "device")
def elsewhere(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps).to("meta")


@kernel("fused_add_rms_norm", "one_result", "forgets the sum", F32, "outputs")
def one_result(norm: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    return norm(x, residual, weight, eps)[0]


@kernel(
    "rms_norm",
    "dense_rows",
    "takes rows to lie one after the other",
    "core/M17-D512/float32/wide/b25_strides/0",
    "nonfinite",
)
def dense_rows(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x.as_strided(x.shape, x.new_empty(x.shape, device="meta").stride()), weight, eps)


@kernel(
    "rms_norm",
    "dense_columns",
    "takes columns to lie side by side",
    "core/M17-D512/float32/columns/b25_strides/0",
    "nonfinite",
)
def dense_columns(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x.as_strided(x.shape, (*x.stride()[:-1], 1)), weight, eps)


@kernel("rms_norm", "one_row_at_most", "is right for a single row alone", F32)
def one_row_at_most(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps) if x.shape[0] <= 1 else norm(x[:1].expand_as(x), weight, eps)


@kernel("rms_norm", "int32_offsets", "reckons offsets in 32 bits", "full/M17-D512/bfloat16/far/b26_far/0")
def int32_offsets(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    offsets = torch.arange(x.shape[0]) * x.stride(0)
    wrapped = offsets.to(torch.int32).to(torch.int64)
    rows = [x[i] if 0 <= int(at) == int(offsets[i]) else x[0] for i, at in enumerate(wrapped)]
    return norm(torch.stack(rows), weight, eps)


@kernel(
    "rms_norm", "writes_beside", "writes one element beyond x", "core/M17-D512/float32/offset/b25_strides/0", "mutation"
)
def writes_beside(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1)
    return norm(x, weight, eps)


@kernel("fused_add_rms_norm_", "writes_beside", "writes one row too many", F32, "canary")
def writes_a_row_beside(norm: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    norm(x, residual, weight, eps)
    residual.as_strided((8,), (1,), residual.storage_offset() + residual.numel()).fill_(1)


@kernel("rms_norm", "native_in_disguise", "calls native torch and takes the credit", F32, "provenance")
def native_in_disguise(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result: Tensor = declared()["rms_norm"].reference(x, weight, eps)
    return result


_counter = itertools.count()


@kernel("rms_norm", "not_deterministic", "declares that it is deterministic, and is not", F32, "repeat")
def not_deterministic(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = norm(x, weight, eps)
    return result if next(_counter) % 2 else torch.nextafter(result, torch.full_like(result, torch.inf))


@kernel("rms_norm", "returns_early", "does not wait for the work that it started", F32, "nonfinite")
def returns_early(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)

    def work() -> None:
        time.sleep(0.2)
        out.copy_(norm(x, weight, eps))

    threading.Thread(target=work, daemon=True).start()
    return out


@kernel(
    "rms_norm", "no_float16", "declares float16 and has no code for it", F32.replace("float32", "float16"), "nonfinite"
)
def no_float16(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    launched = x.dtype != torch.float16
    return norm(x, weight, eps) if launched else torch.empty_like(x, memory_format=torch.contiguous_format)


@kernel("rms_norm", "refuses_late", "refuses from inside, where nobody can fall back", F32, "refusal")
def refuses_late(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import torch_hal as hal

    raise hal.Unsupported("not today")


@kernel(
    "rms_norm",
    "syncs",
    "declares that it is safe in graphs, and reads a number back",
    "core/M17-D512/bfloat16/contiguous/b22_capture/0",
    "sync",
)
def syncs(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps + 0 * float(x[0, 0].item()))


@kernel(
    "rms_norm",
    "batch_matters",
    "declares that rows stand alone, and they do not",
    F32,
    "batch",
    traits=frozenset({"batch_invariant"}),
)
def batch_matters(norm: Norm, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = norm(x, weight, eps)
    return result if x.shape[0] > 2 else torch.nextafter(result, torch.full_like(result, torch.inf))
