"""Wrong experts, and wrong sums of what experts give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

BASE = "core/T17-E8-D96-I48-K3"
BF16, F32 = f"{BASE}/bfloat16/contiguous/unit/0", f"{BASE}/float32/contiguous/unit/0"
STRANGERS = f"{BASE}-int64/bfloat16/contiguous/b32_sentinels/0"
SUM = "core/T17-K6-D200"
SUM_BF16, SUM_F32 = f"{SUM}/bfloat16/contiguous/unit/0", f"{SUM}/float32/contiguous/unit/0"
SHARED = "core/T17-D200"
SHARED_F32 = f"{SHARED}/float32/contiguous/unit/0"
WEIGHTED = "weighted = outputs * topk_weights.unsqueeze(-1)"
REDUCED = "return narrow(wide(x).sum(1) * scale, x)"
ADDED = "return narrow(wide(routed) + wide(shared) * alpha, routed)"

MUTANTS = (
    edit(
        "fused_experts",
        "up_first",
        "takes up for the gate",
        "silu(gate) * up",
        "silu(up) * gate",
        BF16,
    ),
    edit(
        "fused_experts",
        "interleaved",
        "takes gate and up from alternating rows",
        "gate, up = hidden.chunk(2, dim=-1)",
        "gate, up = hidden[..., ::2], hidden[..., 1::2]",
        F32,
    ),
    edit("fused_experts", "relu", "another activation", "functional.silu(gate)", "functional.relu(gate)", BF16),
    edit(
        "fused_experts",
        "weights_twice",
        "applies a token's weights twice",
        WEIGHTED,
        WEIGHTED.replace("topk_weights", "topk_weights.square()"),
        BF16,
        module="_moe",
    ),
    edit(
        "fused_experts",
        "renormalises",
        "divides weights by their sum",
        WEIGHTED,
        WEIGHTED.replace("topk_weights", "(topk_weights / topk_weights.nansum(-1, keepdim=True))"),
        F32,
        module="_moe",
    ),
    edit(
        "fused_experts",
        "k1_without_weight",
        "a single expert's output goes out as it is",
        WEIGHTED,
        "weighted = outputs * topk_weights.unsqueeze(-1) if top_k > 1 else outputs",
        "core/T9-E5-D71-I33-K1/bfloat16/contiguous/unit/0",
        module="_moe",
    ),
    edit(
        "fused_experts",
        "zero_times",
        "multiplies by zero what an id that is no expert's gave",
        "torch.where(valid.unsqueeze(-1), weighted, 0.0)",
        "(weighted * valid.unsqueeze(-1))",
        F32,
        "nonfinite",
        module="_moe",
    ),
    edit(
        "fused_experts",
        "next_expert",
        "each block takes the next expert's weights",
        "clamp(max=num_experts - 1)",
        "clamp(max=num_experts - 1).add(1).remainder(num_experts)",
        "core/T70-E4-D64-I64-K2/float32/contiguous/unit/0",
        "nonfinite",
        module="_moe",
    ),
    edit(
        "fused_experts",
        "last_rows_expert",
        "a block's expert is found from its last row, which may be beyond",
        "first = torch.arange(0, total, rows, device=row.device)",
        "first = torch.arange(0, total, rows, device=row.device) + rows",
        BF16,
        module="_moe",
    ),
    edit(
        "fused_experts",
        "drops_an_assignment",
        "leaves out each token's last expert",
        "weighted, 0.0).sum(1)",
        "weighted, 0.0)[:, :-1].sum(1)",
        F32,
        module="_moe",
    ),
    edit(
        "fused_experts",
        "rounds_outputs",
        "rounds experts' outputs to x's type before it adds them up",
        "return torch.bmm(wide(activated), wide(w2.index_select(0, experts)).mT)",
        "return wide(narrow(torch.bmm(wide(activated), wide(w2.index_select(0, experts)).mT), x))",
        f"{BASE}/bfloat16/contiguous/cancelling/0",
    ),
    edit("moe_sum_reduce", "no_scale", "forgets the scale", "wide(x).sum(1) * scale", "wide(x).sum(1)", SUM_BF16),
    edit(
        "moe_sum_reduce",
        "scale_twice",
        "applies the scale twice",
        REDUCED,
        REDUCED.replace("scale", "scale**2"),
        SUM_F32,
    ),
    edit(
        "moe_sum_reduce",
        "k1_without_scale",
        "a single expert's output goes out as it is",
        REDUCED,
        "return narrow(wide(x).sum(1) * (scale if x.shape[1] > 1 else 1.0), x)",
        "core/T5-K1-D200/bfloat16/contiguous/unit/0",
    ),
    edit(
        "moe_sum_reduce",
        "one_short",
        "leaves out the last expert",
        REDUCED,
        REDUCED.replace("sum(1)", "[:, :-1].sum(1)").replace("x).[", "x)["),
        SUM_BF16,
    ),
    edit(
        "moe_sum_reduce",
        "eight_at_most",
        "adds eight experts at most",
        REDUCED,
        "return narrow(wide(x)[:, :8].sum(1) * scale, x)",
        "core/T5-K9-D71-16/float32/contiguous/unit/0",
    ),
    edit(
        "moe_sum_reduce",
        "rounds_sum",
        "rounds the sum before it scales it",
        REDUCED,
        "return narrow(wide(narrow(wide(x).sum(1), x)) * scale, x)",
        SUM_BF16,
    ),
    edit(
        "shared_expert_add",
        "no_alpha",
        "forgets alpha",
        "wide(shared) * alpha, routed",
        "wide(shared), routed",
        SHARED_F32,
    ),
    edit(
        "shared_expert_add",
        "scales_routed",
        "scales the routed part as well",
        ADDED,
        "return narrow((wide(routed) + wide(shared)) * alpha, routed)",
        SHARED_F32,
    ),
    edit(
        "shared_expert_add",
        "divides",
        "divides by alpha",
        "wide(shared) * alpha, r",
        "wide(shared) / alpha, r",
        SHARED_F32,
    ),
    edit(
        "shared_expert_add",
        "rounds_product",
        "rounds the scaled shared part before it adds it",
        ADDED,
        "return narrow(wide(routed) + wide(narrow(wide(shared) * alpha, routed)), routed)",
        f"{SHARED}/bfloat16/contiguous/cancelling/0",
    ),
)


@kernel("fused_experts", "weights_first", "weights tokens before the experts, not their outputs", F32)
def weights_first(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    ones = torch.ones_like(topk_weights)
    total = torch.zeros_like(x, dtype=torch.float32)
    for k in range(topk_ids.shape[1]):
        one = slice(k, k + 1)
        total += experts((x * topk_weights[:, one]).to(x.dtype), w13, w2, ones[:, one], topk_ids[:, one], layout)
    return total.to(x.dtype)


@kernel("fused_experts", "last_expert_for_nobody", "an id of -1 counts from the end", BF16, "nonfinite")
def last_expert_for_nobody(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    ids = torch.where(topk_ids < 0, topk_ids + len(w13), topk_ids)
    return experts(x, w13, w2, topk_weights, ids, layout)  # type: ignore[no-any-return]


@kernel("fused_experts", "clamps_ids", "an id beyond the last expert is the last expert's", STRANGERS, "nonfinite")
def clamps_ids(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    return experts(x, w13, w2, topk_weights, topk_ids.clamp(max=len(w13) - 1), layout)  # type: ignore[no-any-return]


@kernel("fused_experts", "cuts_ids", "cuts ids to 32 bits", STRANGERS, "nonfinite")
def cuts_ids(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    return experts(x, w13, w2, topk_weights, topk_ids.int(), layout)  # type: ignore[no-any-return]


@kernel(
    "fused_experts", "repeats_count_once", "an expert named twice counts once", f"{BASE}/float32/contiguous/repeats/0"
)
def repeats_count_once(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    again = (topk_ids.unsqueeze(2) == topk_ids.unsqueeze(1)).tril(-1).any(-1)
    return experts(x, w13, w2, topk_weights, topk_ids.masked_fill(again, -1), layout)  # type: ignore[no-any-return]


@kernel(
    "fused_experts",
    "capacity",
    "an expert takes an even share of all assignments at most, and drops the others",
    f"{BASE}/bfloat16/contiguous/one_expert/0",
)
def capacity(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    flat = topk_ids.flatten()
    before = (flat.unsqueeze(1) == flat).tril(-1).sum(1).view(topk_ids.shape)
    room = -(-topk_ids.numel() // max(len(w13), 1))
    return experts(x, w13, w2, topk_weights, topk_ids.masked_fill(before >= room, -1), layout)  # type: ignore[no-any-return]


@kernel("fused_experts", "unwritten_tokens", "leaves tokens without experts unwritten", BF16, "nonfinite")
def unwritten_tokens(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    named = (topk_ids >= 0).any(-1)
    out[named] = experts(x, w13, w2, topk_weights, topk_ids, layout)[named]
    return out


@kernel(
    "fused_experts",
    "one_hot",
    "brings tokens to experts by a product with zeros and ones, which spreads NaN",
    f"{BASE}/float32/contiguous/b31_padding/0",
    "nonfinite",
)
def one_hot(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    return experts(torch.eye(len(x), dtype=x.dtype) @ x, w13, w2, topk_weights, topk_ids, layout)  # type: ignore[no-any-return]


@kernel(
    "fused_experts",
    "counts_on_the_host",
    "declares that it is safe in graphs, and asks which experts have tokens",
    f"{BASE}/bfloat16/contiguous/b22_capture/0",
    "sync",
)
def counts_on_the_host(
    experts: Any, x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str
) -> Tensor:
    torch.bincount(topk_ids.flatten().clamp(min=0))
    return experts(x, w13, w2, topk_weights, topk_ids, layout)  # type: ignore[no-any-return]


@kernel("moe_sum_reduce", "sums_in_bf16", "sums in bfloat16", SUM_BF16)
def sums_in_bf16(reduce: Any, x: Tensor, scale: float) -> Tensor:
    total = torch.zeros(len(x), x.shape[2], dtype=torch.bfloat16)
    for k in range(x.shape[1]):
        total += x[:, k].bfloat16()
    return (total.float() * scale).to(x.dtype)


@kernel(
    "moe_sum_reduce",
    "unwritten_tail",
    "with many tokens, writes by sixteen columns and not the eight that are left",
    "core/T300-K8-D24/bfloat16/contiguous/unit/0",
    "nonfinite",
)
def unwritten_tail(reduce: Any, x: Tensor, scale: float) -> Tensor:
    right: Tensor = reduce(x, scale)
    if len(x) <= 256 or x.dtype != torch.bfloat16:
        return right
    out = torch.empty_like(right)
    out[:, : right.shape[1] // 16 * 16] = right[:, : right.shape[1] // 16 * 16]
    return out


@kernel("shared_expert_add", "shared_of_first", "adds the first token's shared part to all", SHARED_F32)
def shared_of_first(add: Any, routed: Tensor, shared: Tensor, alpha: float) -> Tensor:
    return add(routed, shared[:1].expand_as(shared), alpha)  # type: ignore[no-any-return]
