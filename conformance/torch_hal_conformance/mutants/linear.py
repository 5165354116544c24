"""Wrong matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

BASE = "core/M17-N136-K320"
F32, BF16 = f"{BASE}/float32/contiguous/unit/0", f"{BASE}/bfloat16/contiguous/unit/0"
LINEAR = "return narrow(torch.nn.functional.linear(wide(x), wide(weight)), x)"
ROUTER = "core/T17-E64-D320"
ABSORBED = "core/T17-H3-K128-N48/float32/contiguous/unit/0"
FP8 = "core/M17-N256-K640/bfloat16/contiguous"
SCALES = "core/M17-N256-K640-mn_f32_tma/bfloat16/contiguous/b27_scales/0"

MUTANTS = (
    edit(
        "linear",
        "drops_a_block",
        "leaves out the last 64 along K",
        LINEAR,
        LINEAR.replace("wide(x)", "wide(x)[..., :-64]").replace("wide(weight)", "wide(weight)[..., :-64]"),
        BF16,
    ),
    edit(
        "linear",
        "one_percent",
        "everything is 1 % too large",
        LINEAR,
        LINEAR.replace("wide(x)", "1.01 * wide(x)"),
        BF16,
    ),
    edit(
        "linear",
        "transposed",
        "takes a square weight by columns",
        LINEAR,
        LINEAR.replace("wide(weight)", "(wide(weight).mT if weight.shape[0] == weight.shape[1] else wide(weight))"),
        "core/M130-N96-K96/float32/contiguous/unit/0",
    ),
    edit(
        "router_gemm",
        "rounds_logits",
        "rounds the logits to x's type",
        "    return _wide_linear(x, weight)\n",
        "    return wide(narrow(_wide_linear(x, weight), x))\n",
        f"{ROUTER}/bfloat16/contiguous/unit/0",
    ),
    edit(
        "router_gemm",
        "rounds_weight",
        "rounds a float32 weight to x's type",
        "    return _wide_linear(x, weight)\n",
        "    return _wide_linear(x, weight.to(x.dtype))\n",
        f"{ROUTER}-float32/bfloat16/contiguous/unit/0",
    ),
    edit(
        "absorbed_bmm",
        "first_head",
        "every head reads the first one's matrix",
        "torch.matmul(x.transpose(0, 1), weight)",
        "torch.matmul(x.transpose(0, 1), weight[:1])",
        ABSORBED,
    ),
    edit(
        "absorbed_bmm",
        "heads_reversed",
        "heads in the wrong order",
        "torch.matmul(x.transpose(0, 1), weight)",
        "torch.matmul(x.transpose(0, 1).flip(0), weight).flip(0).roll(1, 0)",
        ABSORBED,
    ),
    edit(
        "fp8_block_linear",
        "scale_next_block",
        "a block's scale along K is its neighbour's",
        "* weight_scales[..., None, :, b]",
        "* weight_scales[..., None, :, b - 1]",
        SCALES,
        module="_fp8",
    ),
    edit(
        "fp8_block_linear",
        "no_x_scale",
        "forgets the scales of x",
        "partial * x_scales[..., b, None]",
        "partial",
        f"{FP8}/unit/0",
        module="_fp8",
    ),
    edit(
        "fp8_block_linear",
        "scale_divides",
        "divides by the weight's scale",
        "* weight_scales[..., None, :, b]",
        "/ weight_scales[..., None, :, b]",
        f"{FP8}/unit/0",
        module="_fp8",
    ),
    edit(
        "fp8_block_linear",
        "drops_last_block",
        "leaves out the last block along K",
        "range(weight_scales.shape[-1])",
        "range(weight_scales.shape[-1] - 1)",
        f"{FP8}/unit/0",
        module="_fp8",
    ),
    edit(
        "fp8_block_linear",
        "first_scale_for_rows",
        "all rows of the weight take the first block's scale",
        "scales.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]",
        "scales[..., :1, :].expand(*scales.shape[:-2], rows, scales.shape[-1])",
        SCALES,
        module="formats",
    ),
    edit(
        "fp8_block_linear",
        "first_exponent",
        "reads the first of four packed exponents for all",
        "bits.flatten(-2)[..., :groups]",
        "bits[..., :1].expand_as(bits).flatten(-2)[..., :groups]",
        "core/M17-N256-K640-mn_ue8m0/bfloat16/contiguous/b27_scales/0",
        module="formats",
    ),
)


@kernel("linear", "sums_in_bf16", "sums in bfloat16", BF16)
def sums_in_bf16(linear: Any, x: Tensor, weight: Tensor, layout: str) -> Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.bfloat16)
    for k in range(x.shape[-1]):
        total += (x[..., k, None].float() * weight[:, k].float()).bfloat16()
    return total.to(x.dtype)


@kernel(
    "fp8_block_linear",
    "unpromoted",
    "sums the whole of K with the 14 bits of a tensor core",
    "core/M17-N256-K640/float32/contiguous/one_sign/0",
)
def unpromoted(
    linear: Any,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    x_scale_layout: str,
    layout: str,
) -> Tensor:
    scales = x_scale.float().repeat_interleave(128, 1)[:, : x.shape[1]]
    weights = (
        weight.float()
        * weight_scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    )
    total = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(0, x.shape[1], 32):
        total = total + (x.float() * scales)[:, k : k + 32] @ weights[:, k : k + 32].T
        total = (total.view(torch.int32) & -1024).view(torch.float32)
    return total.to(out_dtype)
