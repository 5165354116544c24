"""What the references of the mixture-of-experts ops share: rows by expert, and tokens through blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..check import ceil_div
from ..numerics import wide


def is_expert(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Where an id names an expert; -1 and whatever else is outside [0, num_experts) does not."""
    return (topk_ids >= 0) & (topk_ids < num_experts)


def repeats(topk_ids: Tensor) -> Tensor:
    """How often a token names each of its experts: errors of one expert's output do not cancel between its repeats."""
    return (topk_ids[:, :, None] == topk_ids[:, None]).sum(-1)


def max_expert_rows(assignments: int, groups: int, alignment: int) -> int:
    """Rows that are enough however ``assignments`` spread over ``groups``, each padded to a multiple of ``alignment``.

    The least such number: each group that can have one row has just one in a last part of ``alignment`` rows.
    """
    if groups == 0:
        return 0
    return (assignments + min(groups, assignments) * (alignment - 1)) // alignment * alignment


class Places(NamedTuple):
    """Where assignments go when they are sorted by group and each group's rows padded. All sizes are static."""

    row: Tensor  # [assignments] int64
    end: Tensor  # [groups] int64, one past each group's last row, padding included


def sort_by_group(group: Tensor, groups: int, alignment: int) -> Places:
    """The places of assignments by their ``group`` [assignments] int64; within a group they keep their order."""
    sorted_group, order = torch.sort(group, stable=True)
    start = torch.searchsorted(sorted_group, torch.arange(groups + 1, device=group.device))
    padded = (start.diff() + alignment - 1) // alignment * alignment
    end = padded.cumsum(0)
    rank = torch.arange(group.shape[0], device=group.device) - start[sorted_group]
    return Places(torch.empty_like(group).scatter(0, order, (end - padded)[sorted_group] + rank), end)


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` along the first dim."""
    return as_bits(x)[index].view(x.dtype)


def as_bits(x: Tensor) -> Tensor:
    """``x``, but 8-bit floats as bytes: they cannot be indexed or filled everywhere."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def through_experts(
    topk_weights: Tensor, topk_ids: Tensor, like: Tensor, num_experts: int, run: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Σ_k weight · output, in `wide` and the shape [T, D] of ``like``; ids that are no expert's contribute exactly 0.

    ``run(experts [blocks], tokens [blocks, rows])`` gives outputs [blocks, rows, D], each block one expert's. It gets
    K blocks at a time, hence gathers the weights of one token's experts at a time.
    """
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0 or num_experts == 0:
        return wide(torch.zeros_like(like))
    valid = is_expert(topk_ids, num_experts)
    expert, token, row = _block_by_expert(topk_ids, valid, num_experts)
    parts = [run(expert[i : i + top_k], token[i : i + top_k]) for i in range(0, expert.shape[0], top_k)]
    outputs = torch.cat(parts).flatten(0, 1)[row.view(num_tokens, top_k)]
    weighted = outputs * topk_weights.unsqueeze(-1)
    return torch.where(valid.unsqueeze(-1), weighted, 0.0).sum(1)  # not times 0: an unchosen expert may overflow


class ExpertBlocks(NamedTuple):
    """Assignments (token, k) packed into blocks of one expert each."""

    expert: Tensor  # [blocks] the expert of each block; blocks nobody needs have a valid one too
    token: Tensor  # [blocks, rows] the token in each row; spare rows hold token 0, and nothing reads their results
    row: Tensor  # [T * K] where each assignment went, counted over all blocks


def _block_by_expert(topk_ids: Tensor, valid: Tensor, num_experts: int) -> ExpertBlocks:
    """Sort assignments by expert and pad each expert's run to whole blocks, without asking the host how many.

    Blocks have ⌈assignments / experts⌉ rows: one for a decoded token, about an even share of a long prompt, so that
    at most twice the needed rows are computed. Assignments without a valid id form a last group of their own.
    """
    assignments, top_k = topk_ids.numel(), topk_ids.shape[1]
    rows = ceil_div(assignments, num_experts)
    group = torch.where(valid, topk_ids, num_experts).flatten().to(torch.int64)
    row, end = sort_by_group(group, num_experts + 1, rows)
    total = max_expert_rows(assignments, num_experts + 1, rows)
    count = torch.arange(total, device=row.device)
    token = torch.zeros_like(count).scatter(0, row, count[:assignments] // top_k)
    first = torch.arange(0, total, rows, device=row.device)
    expert = torch.searchsorted(end, first, right=True).clamp(max=num_experts - 1)
    return ExpertBlocks(expert, token.view(total // rows, rows), row)
