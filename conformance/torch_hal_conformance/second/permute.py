"""Second oracles of sorting tokens by expert and bringing them together again.

Within an expert's run the order of assignments is left open: the canonical one is that of the assignments,
i = t · K + k. A padding row may hold anything: canonical rows and scales of padding are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .convert import Array, Canonical, Codes, Oracle, as_stored, unpack_scales

BLOCK = 128


def room_for(assignments: int, groups: int, alignment: int) -> int:
    """The most rows that any spread of assignments over groups can take, each group padded to the alignment.

    The costliest spread gives every group one assignment first, which opens a part of ``alignment`` rows; after that a
    new part needs a whole ``alignment`` of assignments in one group.
    """
    if groups == 0:
        return 0
    parts = 0
    left = assignments
    for _ in range(groups):
        if left > 0:
            parts += 1
            left -= 1
    while left >= alignment:
        parts += 1
        left -= alignment
    return parts * alignment


def by_expert(topk_ids: Array, experts: list[int]) -> dict[int, list[int]]:
    """Assignments, ascending, of each expert. Ids that are no expert's belong to −1."""
    runs: dict[int, list[int]] = {expert: [] for expert in [-1, *experts]}
    for assignment, expert in enumerate(topk_ids.reshape(-1).tolist()):
        runs[expert if expert in runs else -1].append(assignment)
    return runs


def moe_align_block_size(topk_ids: Array, num_experts: int, block_size: int) -> list[Array]:
    """Blocks of nobody's assignments, then of each expert's, padded with T · K."""
    nothing = topk_ids.size
    rows = room_for(topk_ids.size, num_experts + 1, block_size)
    runs = by_expert(topk_ids, list(range(num_experts)))
    sorted_ids: list[int] = []
    expert_ids: list[int] = []
    for expert in [-1, *range(num_experts)]:
        run = runs[expert]
        while len(run) % block_size:
            run = [*run, nothing]
        sorted_ids += run
        expert_ids += [expert] * (len(run) // block_size)
    used = len(sorted_ids)
    sorted_ids += [nothing] * (rows - used)
    expert_ids += [-1] * (rows // block_size - len(expert_ids))
    return [np.array(values, dtype=np.int64) for values in (sorted_ids, expert_ids, [used])]


def canonical_align(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Each run of blocks of one expert in order of assignment, if its padding comes last."""
    sorted_ids, expert_ids, used = results[0].copy(), results[1], results[2]
    nothing, block_size = arguments["topk_ids"].size, arguments["block_size"]
    row = 0
    while row < min(int(used[0]), len(sorted_ids)):
        end = row
        while end < int(used[0]) and expert_ids[end // block_size] == expert_ids[row // block_size]:
            end += block_size
        run = sorted_ids[row:end]
        entries = int((run != nothing).sum())
        if (run[:entries] != nothing).all():
            run[:entries] = np.sort(run[:entries])
        row = end
    return [sorted_ids, expert_ids, used]


def _places(topk_ids: Array, num_experts: int, alignment: int) -> tuple[list[int], Array, Array]:
    """Each row's token (−1: padding), its expert, and each assignment's row."""
    rows = room_for(topk_ids.size, num_experts, alignment)
    top_k = topk_ids.shape[1]
    tokens = [-1] * rows
    m_indices = np.full(rows, -1, dtype=np.int64)
    output_index = np.full(topk_ids.shape, -1, dtype=np.int64)
    runs = by_expert(topk_ids, list(range(num_experts)))
    row = 0
    for expert in range(num_experts):
        for assignment in runs[expert]:
            tokens[row] = assignment // top_k
            m_indices[row] = expert
            output_index[assignment // top_k, assignment % top_k] = row
            row += 1
        while row % alignment:
            row += 1
    return tokens, m_indices, output_index


def _copies(x: Array, tokens: list[int]) -> Array:
    rows = np.zeros((len(tokens), x.shape[1]), dtype=x.dtype)
    for row, token in enumerate(tokens):
        if token >= 0:
            rows[row] = x[token]
    return rows


def ep_scatter(x: Array, topk_ids: Array, num_experts: int, alignment: int) -> list[Array]:
    """A copy of a token's row for each of its experts, by expert, each run padded to the alignment."""
    tokens, m_indices, output_index = _places(topk_ids, num_experts, alignment)
    return [_copies(x, tokens), m_indices, output_index]


def ep_scatter_fp8(
    x: Codes,
    x_scale: Array,
    topk_ids: Array,
    num_experts: int,
    alignment: int,
    x_scale_layout: str = "row_f32",
    scale_layout: str = "row_f32",
) -> list[Any]:
    """`ep_scatter` of codes and of their scales; the scales of the result are logical ones, unpacked."""
    tokens, m_indices, output_index = _places(topk_ids, num_experts, alignment)
    scales = unpack_scales(x_scale, x_scale_layout, -(-x.bits.shape[1] // BLOCK))
    rows = Codes(_copies(x.bits, tokens), x.kind)
    return [rows, as_stored(_copies(scales, tokens), scale_layout), m_indices, output_index]


def _in_order(m_indices: Array, output_index: Array) -> Array | None:
    """For each row, the row that stands there in canonical order; None where the places contradict each other."""
    order = np.arange(len(m_indices))
    owner: dict[int, int] = {}
    for assignment, row in enumerate(output_index.reshape(-1).tolist()):
        if row == -1:
            continue
        if not 0 <= row < len(m_indices) or row in owner or m_indices[row] < 0:
            return None
        owner[row] = assignment
    if len(owner) != int((m_indices >= 0).sum()):
        return None
    for expert in set(m_indices.tolist()) - {-1}:
        rows = [row for row in range(len(m_indices)) if m_indices[row] == expert]
        order[rows] = sorted(rows, key=lambda row: owner[row])
    return order


def _canonical_scatter(results: list[Any], carried: list[Array]) -> list[Any]:
    m_indices, output_index = results[-2], results[-1].copy()
    order = _in_order(m_indices, output_index)
    if order is None:
        return [*carried, m_indices, output_index]
    moved = {int(old): new for new, old in enumerate(order)}
    for position, row in np.ndenumerate(output_index):
        output_index[position] = moved.get(int(row), -1)
    padding = m_indices < 0
    reordered = [np.where(padding[:, None], np.zeros((), values.dtype), values[order]) for values in carried]
    return [*reordered, m_indices, output_index]


def canonical_scatter(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Each expert's rows in order of assignment, padding rows zero."""
    return _canonical_scatter(results, [results[0]])


def canonical_scatter_fp8(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Each expert's codes and scales in order of assignment, padding zero, scales unpacked."""
    codes, stored = results[:2]
    scales = unpack_scales(stored, arguments.get("scale_layout", "row_f32"), -(-codes.bits.shape[1] // BLOCK))
    bits, scales, *places = _canonical_scatter(results, [codes.bits, scales])
    return [Codes(bits, codes.kind), scales, *places]


def ep_gather(rows: Array, output_index: Array, topk_weights: Array) -> list[Array]:
    """Σ_k weight · row, over the indices that name a row."""
    out = np.zeros((output_index.shape[0], rows.shape[1]))
    for token in range(output_index.shape[0]):
        for k in range(output_index.shape[1]):
            row = int(output_index[token, k])
            if 0 <= row < rows.shape[0]:
                out[token] += topk_weights[token, k] * rows[row]
    return [out]


ORACLES: dict[str, Oracle] = {
    "moe_align_block_size": moe_align_block_size,
    "ep_scatter": ep_scatter,
    "ep_scatter_fp8": ep_scatter_fp8,
    "ep_gather": ep_gather,
}
CANONICAL: dict[str, Canonical] = {
    "moe_align_block_size": canonical_align,
    "ep_scatter": canonical_scatter,
    "ep_scatter_fp8": canonical_scatter_fp8,
}
