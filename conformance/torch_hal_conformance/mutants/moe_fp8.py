"""Wrong experts on codes: most of what is wrong is a matter of scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

OP = "fused_experts_fp8_block"
BASE = "core/T17-E4-D256-I256-K2"
UNIT = f"{BASE}/bfloat16/contiguous/unit/0"
EXACT = f"{BASE}/bfloat16/contiguous/exact/0"
POWERS = f"{BASE}-ue8m0/float32/contiguous/exact/0"
PARTIAL = "core/T17-E5-D200-I160-K3/float32/contiguous/exact/0"
HALVES = "w13_scales = torch.cat([expand_block_scales(half, w2.shape[2]) for half in halves], dim=1)"
MULTIPLY = "return multiply(activated, activated_scales, take(w2, experts), w2_scales)"
WEIGHTED = "weighted = outputs * topk_weights.unsqueeze(-1)"
PADDED = "padded = torch.nn.functional.pad(x, (0, ceil_div(width, BLOCK) * BLOCK - width))"
CALLED = "quantise_groups(padded, BLOCK, FP8_KINDS[FP8_NAMES[fp8]],"

MUTANTS = (
    edit(OP, "up_first", "takes up for the gate", "silu(gate) * up", "silu(up) * gate", EXACT),
    edit(
        OP,
        "up_scales_first",
        "gate takes up's scales, and up the gate's",
        HALVES,
        HALVES.replace("in halves", "in halves[::-1]"),
        EXACT,
    ),
    edit(
        OP,
        "blocks_across_halves",
        "counts w13's blocks from its first row on, up's too, where the gate ends in a partial block",
        HALVES,
        "w13_scales = expand_block_scales(wide(w13_scale[experts]), 2 * w2.shape[2])",
        PARTIAL,
    ),
    edit(
        OP,
        "scale_next_block",
        "a block's scale along K is its neighbour's",
        "* weight_scales[..., None, :, b]",
        "* weight_scales[..., None, :, b - 1]",
        EXACT,
        module="_fp8",
    ),
    edit(
        OP,
        "scale_next_group",
        "a group's scale is its neighbour's",
        "partial * x_scales[..., b, None]",
        "partial * x_scales[..., b - 1, None]",
        EXACT,
        module="_fp8",
    ),
    edit(
        OP,
        "drops_partial_block",
        "leaves out the last block along K if it is not whole",
        "range(weight_scales.shape[-1])",
        "range(weight.shape[-1] // BLOCK)",
        PARTIAL,
        module="_fp8",
    ),
    edit(
        OP,
        "first_scale_for_rows",
        "all rows of a weight take the first block's scale",
        "scales.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]",
        "scales[..., :1, :].expand(*scales.shape[:-2], rows, scales.shape[-1])",
        EXACT,
        module="formats",
    ),
    edit(
        OP,
        "no_activation_scale",
        "forgets the scales of the activation",
        MULTIPLY,
        MULTIPLY.replace("activated_scales", "torch.ones_like(activated_scales)"),
        UNIT,
    ),
    edit(
        OP,
        "w2_scale_next_expert",
        "takes w2's scales of another expert",
        "wide(w2_scale[experts])",
        "wide(w2_scale[experts - 1])",
        EXACT,
        "nonfinite",
    ),
    edit(
        OP,
        "w13_scale_twice",
        "multiplies by w13's scale twice",
        "halves = wide(w13_scale[experts])",
        "halves = wide(w13_scale[experts]).square()",
        EXACT,
    ),
    edit(
        OP,
        "one_scale_a_token",
        "one scale for a whole row of x",
        "x.to(torch.float32), w13.dtype, ue8m0)",
        "x.to(torch.float32), w13.dtype, ue8m0)\n"
        "    scales = scales.amax(-1, keepdim=True).expand_as(scales)\n"
        "    codes = (x.float() / scales.repeat_interleave(BLOCK, -1)[:, : x.shape[1]]).to(w13.dtype)",
        UNIT,
        "rms",
    ),
    edit(
        OP,
        "exact_scales",
        "does not round scales up to powers of two where it is told to",
        "_EPS, ue8m0)",
        "_EPS, False)",
        POWERS,
        module="_fp8",
    ),
    edit(
        OP,
        "rounds_scales",
        "rounds scales up to powers of two where it is not told to",
        "_EPS, ue8m0)",
        "_EPS, True)",
        f"{BASE}/bfloat16/contiguous/repeats/0",
        module="_fp8",
    ),
    edit(
        OP,
        "e4m3_max_240",
        "maps the largest value to 240",
        CALLED,
        "quantise_groups(padded, BLOCK, __import__('dataclasses').replace(FP8_KINDS[FP8_NAMES[fp8]], quant_max=240.0),",
        EXACT,
        module="_fp8",
    ),
    edit(
        OP,
        "zero_scale",
        "a group of zeros has scale 0, and NaN for codes",
        "_EPS = 1e-10",
        "_EPS = 0.0",
        f"{BASE}/bfloat16/contiguous/b28_zero_groups/0",
        "nonfinite",
        module="_fp8",
    ),
    edit(
        OP,
        "weights_twice",
        "applies a token's weights twice",
        WEIGHTED,
        WEIGHTED.replace("topk_weights", "topk_weights.square()"),
        EXACT,
        module="_moe",
    ),
    edit(
        OP,
        "k1_without_weight",
        "a single expert's output goes out as it is",
        WEIGHTED,
        "weighted = outputs * topk_weights.unsqueeze(-1) if top_k > 1 else outputs",
        "core/T9-E1-D256-I128-K1/bfloat16/contiguous/unit/0",
        module="_moe",
    ),
    edit(
        OP,
        "drops_an_assignment",
        "leaves out each token's last expert",
        "weighted, 0.0).sum(1)",
        "weighted, 0.0)[:, :-1].sum(1)",
        EXACT,
        module="_moe",
    ),
)


@kernel(OP, "last_expert_for_nobody", "an id of -1 counts from the end", UNIT, "nonfinite")
def last_expert_for_nobody(experts: Any, x: Tensor, w13: Tensor, *rest: Any) -> Tensor:
    *scales, topk_weights, topk_ids, ue8m0, layout = rest
    ids = torch.where(topk_ids < 0, topk_ids + len(w13), topk_ids)
    return experts(x, w13, *scales, topk_weights, ids, ue8m0, layout)  # type: ignore[no-any-return]


@kernel(OP, "fn_for_fnuz", "reads e4m3fnuz as e4m3fn", f"{BASE}/bfloat16/contiguous/b29_fnuz/0")
def fn_for_fnuz(experts: Any, x: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, *rest: Any) -> Tensor:
    fn = torch.float8_e4m3fn
    return experts(x, w13.view(fn), w13_scale, w2.view(fn), *rest)  # type: ignore[no-any-return]


@kernel(OP, "unwritten_tokens", "leaves tokens without experts unwritten", UNIT, "nonfinite")
def unwritten_tokens(experts: Any, x: Tensor, *rest: Any) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    named = (rest[5] >= 0).any(-1)
    out[named] = experts(x, *rest)[named]
    return out
