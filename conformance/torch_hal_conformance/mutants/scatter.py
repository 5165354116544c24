"""Wrong ways to the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel
from .permute import PADDED

SCATTER = "core/T17-K4-E6-D72-align16"
SCATTER_UNIT, SCATTER_BF16 = f"{SCATTER}/float32/contiguous/unit/0", f"{SCATTER}/bfloat16/contiguous/unit/0"
CODES = "core/T17-K4-E6-D640-align16"
CODES_UNIT = f"{CODES}/float8_e4m3fn/contiguous/unit/0"
LAID = f"{CODES}-{{}}/float8_e4m3fn/contiguous/unit/0"
INDICES = "m_indices = torch.where(source >= 0, group[assignment], -1)"
INDEX = "output_index = torch.where(valid, row, -1)"
COPY = "as_bits(x)[token]"

MUTANTS = (
    edit(
        "ep_scatter",
        "no_padding",
        "does not pad experts' runs",
        PADDED,
        "padded = start.diff()",
        SCATTER_UNIT,
        "experts",
        module="_moe",
    ),
    edit(
        "ep_scatter",
        "room_for_nobody",
        "gives an expert without tokens a run of its own",
        PADDED,
        PADDED.replace("start.diff()", "start.diff().clamp(min=1)"),
        SCATTER_UNIT,
        "experts",
        module="_moe",
    ),
    edit(
        "ep_scatter",
        "padding_has_experts",
        "padding has the run's expert",
        INDICES,
        f"{INDICES}.cummax(0).values",
        SCATTER_BF16,
        "experts",
    ),
    edit(
        "ep_scatter",
        "next_expert",
        "gives rows the next expert's number",
        INDICES,
        INDICES.replace("[assignment]", "[assignment] + 1"),
        SCATTER_BF16,
        "experts",
    ),
    edit(
        "ep_scatter",
        "zero_for_nobody",
        "points to row 0 for nobody's assignments",
        INDEX,
        INDEX.replace("-1", "0"),
        SCATTER_UNIT,
        "nobody",
    ),
    edit(
        "ep_scatter",
        "next_row",
        "points one row too far",
        INDEX,
        INDEX.replace("row,", "(row + 1) % num_rows,"),
        SCATTER_UNIT,
        "slots",
    ),
    edit(
        "ep_scatter",
        "next_token",
        "copies another token's row",
        COPY,
        f"{COPY.replace('token', '(token + 1) % len(x)')}",
        SCATTER_UNIT,
        "rows",
    ),
    edit(
        "ep_scatter",
        "half_a_row",
        "copies 64 columns",
        f"{COPY}.masked_fill((m_indices < 0)[:, None], 0)",
        "(as_bits(x) * (torch.arange(x.shape[1]) < 64))[token]",
        SCATTER_BF16,
        "rows",
    ),
    edit(
        "ep_scatter",
        "through_arithmetic",
        "adds zero to what it copies: -0 is lost",
        COPY,
        "(as_bits(x) + 0)[token]",
        f"{SCATTER}/bfloat16/contiguous/specials/0",
        "rows",
    ),
    edit(
        "ep_scatter_fp8",
        "no_padding",
        "does not pad experts' runs",
        PADDED,
        "padded = start.diff()",
        CODES_UNIT,
        "experts",
        module="_moe",
    ),
    edit(
        "ep_scatter_fp8",
        "scales_of_next",
        "takes another token's scales along",
        "_copy_rows(scales, token, m_indices)",
        "_copy_rows(scales, (token + 1) % len(x), m_indices)",
        CODES_UNIT,
        "scales",
    ),
    edit(
        "ep_scatter_fp8",
        "first_scales",
        "takes the first scale of a row along for all",
        "_copy_rows(scales, token",
        "_copy_rows(scales[:, :1].expand_as(scales), token",
        CODES_UNIT,
        "scales",
    ),
    edit(
        "ep_scatter_fp8",
        "through_arithmetic",
        "adds zero to the codes that it copies: -0 is lost",
        "return _copy_rows(x, token, m_indices), row_scale",
        "return _copy_rows((x.float() + 0).to(x.dtype), token, m_indices), row_scale",
        CODES_UNIT,
        "rows",
    ),
    edit(
        "ep_scatter_fp8",
        "stores_by_rows",
        "stores scales by rows whatever the layout",
        'scales.contiguous() if self.major == "k" else',
        "scales.contiguous() if True else",
        LAID.format("row_f32-mn_f32"),
        "strides",
        module="formats",
    ),
    edit(
        "ep_scatter_fp8",
        "unpadded_columns",
        "does not pad the columns of scales",
        "ceil_div(rows, alignment) * alignment)\n    storage",
        "rows)\n    storage",
        "core/T9-K3-E4-D640-align3-mn_f32_tma/float8_e4m3fn/contiguous/unit/0",
        "strides",
        module="formats",
    ),
    edit(
        "ep_scatter_fp8",
        "cuts_scales",
        "cuts a scale that is no power of two down to one, in silence",
        "torch.where(positive_power, bits >> 23, 0xFF)",
        "bits >> 23",
        f"{CODES}-row_f32-mn_ue8m0/float8_e4m3fn/contiguous/no_power/0",
        "scales",
        module="formats",
    ),
    edit(
        "ep_scatter_fp8",
        "exponents_backwards",
        "packs the first exponent into the highest byte",
        "torch.arange(0, 8 * per_word, 8, dtype=torch.int32, device=device)",
        "torch.arange(0, 8 * per_word, 8, dtype=torch.int32, device=device).flip(0)",
        LAID.format("row_f32-mn_ue8m0"),
        "scales",
        module="formats",
    ),
    edit(
        "ep_scatter_fp8",
        "one_word",
        "unpacks the first word of exponents for all",
        "exponents = words.unsqueeze(-1)",
        "exponents = words[..., :1].expand_as(words).unsqueeze(-1)",
        LAID.format("mn_ue8m0-row_f32"),
        "scales",
        module="formats",
    ),
)


@kernel("ep_scatter", "last_expert_for_nobody", "an id of -1 counts from the end", SCATTER_UNIT, "experts")
def last_expert_for_nobody(scatter: Any, x: Tensor, topk_ids: Tensor, num_experts: int, alignment: int) -> Any:
    return scatter(x, torch.where(topk_ids < 0, topk_ids + num_experts, topk_ids), num_experts, alignment)


@kernel(
    "ep_scatter", "cuts_ids", "cuts ids to 32 bits", f"{SCATTER}-int64/bfloat16/contiguous/b32_sentinels/0", "experts"
)
def cuts_scattered_ids(scatter: Any, x: Tensor, topk_ids: Tensor, num_experts: int, alignment: int) -> Any:
    return scatter(x, topk_ids.int(), num_experts, alignment)


@kernel("ep_scatter", "no_atomics", "sends all tokens of an expert to its first row", SCATTER_BF16, "slots")
def no_atomics(scatter: Any, x: Tensor, topk_ids: Tensor, num_experts: int, alignment: int) -> Any:
    rows, m_indices, output_index = scatter(x, topk_ids, num_experts, alignment)
    firsts = (m_indices.unsqueeze(1) == topk_ids.flatten()).int().argmax(0).view(topk_ids.shape)
    return rows, m_indices, torch.where(output_index >= 0, firsts, -1).int()


@kernel(
    "ep_scatter_fp8",
    "reads_by_rows",
    "reads scales by rows whatever their layout",
    LAID.format("mn_f32-row_f32"),
    "scales",
)
def reads_by_rows(scatter: Any, x: Tensor, x_scale: Tensor, *rest: Any) -> Any:
    laid = x_scale.as_strided(x_scale.shape, (x_scale.shape[1], 1))
    return scatter(x, laid.clone() if rest[-2] == "row_f32" else laid.t().contiguous().t(), *rest)
