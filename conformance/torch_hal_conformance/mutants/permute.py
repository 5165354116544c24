"""Wrong sorting by expert, and wrong ways back from the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hal.check import ceil_div

from . import edit, kernel

ALIGN = "core/T17-K4-E8-block16"
ALIGN_UNIT = f"{ALIGN}/int32/contiguous/unit/0"
GATHER = "core/T17-K4-D72-M128"
GATHER_F32, GATHER_BF16 = f"{GATHER}/float32/contiguous/unit/0", f"{GATHER}/bfloat16/contiguous/unit/0"
NOBODY = "torch.where(is_expert(topk_ids, num_experts), topk_ids + 1, 0)"
PADDED = "padded = (start.diff() + alignment - 1) // alignment * alignment"
PICKED = "rows[output_index.clamp(0, num_rows - 1)] * topk_weights.unsqueeze(-1)"
GATHERED = "torch.where(valid.unsqueeze(-1), picked, 0.0).sum(1)"

MUTANTS = (
    edit(
        "moe_align_block_size",
        "nobody_last",
        "sorts assignments of nobody to the last expert",
        NOBODY,
        NOBODY.replace(", 0)", ", num_experts)"),
        ALIGN_UNIT,
        "count",
    ),
    edit(
        "moe_align_block_size",
        "id_off_by_one",
        "gives each block the number of the next expert",
        "right=True) - 1, -1)",
        "right=True), -1)",
        ALIGN_UNIT,
        "experts",
    ),
    edit(
        "moe_align_block_size",
        "zero_for_unused",
        "gives blocks beyond those in use to expert 0",
        "right=True) - 1, -1)",
        "right=True) - 1, 0)",
        ALIGN_UNIT,
        "experts",
    ),
    edit(
        "moe_align_block_size",
        "pads_with_zero",
        "pads with assignment 0",
        "torch.full_like(count, assignments)",
        "torch.zeros_like(count)",
        ALIGN_UNIT,
        "padding",
    ),
    edit(
        "moe_align_block_size",
        "pads_with_minus_one",
        "pads with -1",
        "torch.full_like(count, assignments)",
        "torch.full_like(count, -1)",
        ALIGN_UNIT,
        "padding",
    ),
    edit(
        "moe_align_block_size",
        "gives_tokens",
        "gives tokens where assignments are asked for",
        "scatter(0, row, count[:assignments])",
        "scatter(0, row, count[:assignments] // topk_ids.shape[1])",
        ALIGN_UNIT,
        "assignments",
    ),
    edit(
        "moe_align_block_size",
        "counts_assignments",
        "counts assignments, not the rows that they take with their padding",
        "end[-1:].to(torch.int32)",
        "end[-1:].to(torch.int32) * 0 + assignments",
        ALIGN_UNIT,
        "count",
    ),
    edit(
        "moe_align_block_size",
        "no_padding",
        "does not pad experts' runs",
        PADDED,
        "padded = start.diff()",
        ALIGN_UNIT,
        "count",
        module="_moe",
    ),
    edit(
        "moe_align_block_size",
        "block_for_nobody",
        "gives an expert without assignments a block too",
        PADDED,
        PADDED.replace("start.diff()", "start.diff().clamp(min=1)"),
        ALIGN_UNIT,
        "count",
        module="_moe",
    ),
    edit(
        "ep_gather",
        "no_weights",
        "forgets the weights",
        PICKED,
        PICKED.replace(" * topk_weights.unsqueeze(-1)", ""),
        GATHER_F32,
    ),
    edit(
        "ep_gather",
        "last_row_for_nobody",
        "an index of -1 counts from the end",
        "valid = (output_index >= 0) & (output_index < num_rows)",
        "valid = output_index < num_rows",
        GATHER_BF16,
        "nonfinite",
    ),
    edit(
        "ep_gather",
        "clamps",
        "an index beyond the last row is the last row's",
        "valid = (output_index >= 0) & (output_index < num_rows)",
        "valid = output_index >= 0",
        f"{GATHER}/float32/contiguous/b32_sentinels/0",
        "nonfinite",
    ),
    edit(
        "ep_gather",
        "zero_times",
        "multiplies by zero what nobody's index gave",
        GATHERED,
        "(picked * valid.unsqueeze(-1)).sum(1)",
        GATHER_F32,
        "nonfinite",
    ),
    edit(
        "ep_gather",
        "next_row",
        "takes the next row",
        "rows[output_index.",
        "rows.roll(-1, 0)[output_index.",
        GATHER_F32,
        "nonfinite",
    ),
    edit(
        "ep_gather",
        "drops_the_last",
        "leaves out each token's last expert",
        GATHERED,
        GATHERED.replace(".sum", "[:, :-1].sum"),
        GATHER_BF16,
    ),
    edit(
        "ep_gather",
        "rounds_products",
        "rounds weighted rows before it adds them up",
        "return narrow(_gather(wide(rows), output_index, topk_weights), rows)",
        "return narrow(sum((wide(narrow(_gather(wide(rows), i, w), rows)) for i, w in zip(output_index.split(1, 1), "
        "topk_weights.split(1, 1))), 0 * wide(rows[: len(output_index)]).nan_to_num()), rows)",
        GATHER_BF16,
    ),
    edit(
        "ep_gather",
        "weights_in_bf16",
        "rounds weights to the rows' type",
        "_gather(wide(rows), output_index, topk_weights)",
        "_gather(wide(rows), output_index, topk_weights.to(rows.dtype).to(topk_weights.dtype))",
        GATHER_BF16,
    ),
)


@kernel(
    "moe_align_block_size",
    "thousand_experts",
    "knows 1024 experts at most",
    "core/T33-K8-E1500-block4/int32/contiguous/unit/0",
    "count",
)
def thousand_experts(align: Any, topk_ids: Tensor, num_experts: int, block_size: int) -> Any:
    return align(topk_ids.masked_fill(topk_ids >= 1024, -1), num_experts, block_size)


@kernel("moe_align_block_size", "cuts_ids", "cuts ids to 32 bits", f"{ALIGN}/int64/contiguous/b32_sentinels/0", "count")
def cuts_ids(align: Any, topk_ids: Tensor, num_experts: int, block_size: int) -> Any:
    return align(topk_ids.int(), num_experts, block_size)


@kernel(
    "moe_align_block_size", "unwritten_tail", "leaves what is beyond the rows in use unwritten", ALIGN_UNIT, "experts"
)
def unwritten_tail(align: Any, topk_ids: Tensor, num_experts: int, block_size: int) -> Any:
    results = align(topk_ids, num_experts, block_size)
    sorted_ids, expert_ids = (torch.empty_like(x) for x in results[:2])
    used = int(results[2])
    sorted_ids[:used], expert_ids[: used // block_size] = results[0][:used], results[1][: used // block_size]
    return sorted_ids, expert_ids, results[2]


@kernel(
    "moe_align_block_size",
    "swaps_experts",
    "sorts a pair of assignments to each other's experts",
    ALIGN_UNIT,
    "assignments",
)
def swaps_experts(align: Any, topk_ids: Tensor, num_experts: int, block_size: int) -> Any:
    sorted_ids, expert_ids, used = align(topk_ids, num_experts, block_size)
    last = ceil_div(int(used), block_size) * block_size - block_size
    sorted_ids[[0, last]] = sorted_ids[[last, 0]]
    return sorted_ids, expert_ids, used


@kernel("ep_gather", "unwritten_tokens", "leaves tokens without rows unwritten", GATHER_F32, "nonfinite")
def unwritten_tokens(gather: Any, rows: Tensor, output_index: Tensor, topk_weights: Tensor) -> Tensor:
    out = rows.new_empty(len(output_index), rows.shape[1])
    named = (output_index >= 0).any(-1)
    out[named] = gather(rows, output_index, topk_weights)[named]
    return out
