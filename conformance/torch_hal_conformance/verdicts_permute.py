"""Verdicts on sorting by expert: within an expert's run any order is right, everything else is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .memory import same_bits
from .verdict import Evidence, Failure, Score


def aligned(evidence: Evidence) -> Score:
    """`moe_align_block_size`: each block's expert, and in each expert's run its assignments, then padding."""
    sorted_ids, expert_ids, used = evidence.got
    right_ids, right_experts, right_used = evidence.native
    if int(used) != int(right_used):
        raise Failure("count", f"num_tokens_post_pad: expected {int(right_used)}, got {int(used)}")
    _equal("experts", "expert_ids", expert_ids, right_experts)
    block = evidence.op.bind(**evidence.arguments)["block_size"]
    nothing = evidence.arguments["topk_ids"].numel()
    _equal("padding", "where sorted_ids is padding", sorted_ids == nothing, right_ids == nothing)
    run = _runs(right_experts, int(right_used) // block).repeat_interleave(block)
    _equal("assignments", "sorted_ids, in order within its run", _within(run, sorted_ids), _within(run, right_ids))
    return Score()


def scattered(evidence: Evidence) -> Score:
    """`ep_scatter`: places as any order within an expert's run allows, and in each a copy of its token's row."""
    x = evidence.arguments["x"]
    rows, m_indices, output_index = evidence.got
    token = _tokens(evidence, m_indices, output_index)
    _copied("rows", rows, x, token)
    return Score()


def scattered_fp8(evidence: Evidence) -> Score:
    """`ep_scatter_fp8`: as `scattered`, and scales beside their rows, as their layout stores them."""
    rows, row_scale, m_indices, output_index = evidence.got
    token = _tokens(evidence, m_indices, output_index)
    _copied("rows", rows, evidence.arguments["x"], token)
    right, right_token = evidence.native[1], _token_of(evidence.native[-1], len(m_indices))
    source = torch.zeros(len(evidence.arguments["x"]), right.shape[1], dtype=right.dtype)
    source[right_token[right_token >= 0]] = right[right_token >= 0]
    _copied("scales", row_scale, source, token)
    return Score()


def padding_rows(arguments: dict[str, Any], outputs: list[Any]) -> list[Tensor | None]:
    """Of ``rows`` and, between, their scales, those of no expert; then m_indices and output_index, whole."""
    padding = outputs[-2] < 0
    return [*[padding] * (len(outputs) - 2), None, None]


def _tokens(evidence: Evidence, m_indices: Tensor, output_index: Tensor) -> Tensor:
    """The token of each row, -1 for padding, after looking whether the places are right."""
    _equal("experts", "m_indices", m_indices, evidence.native[-2])
    ids = evidence.arguments["topk_ids"]
    absent = evidence.native[-1] < 0
    _equal("nobody", "where output_index is -1", output_index == -1, absent)
    row = output_index[~absent].long()
    if ((row < 0) | (row >= len(m_indices))).any():
        raise Failure("slots", f"output_index: a row outside of [0, {len(m_indices)})")
    if len(torch.unique(row)) != len(row):
        raise Failure("slots", "output_index: two assignments have one row")
    wrong = m_indices[row] != ids[~absent]
    if wrong.any():
        first = torch.nonzero(wrong)[0, 0]
        raise Failure(
            "slots",
            f"output_index: row {int(row[first])} is expert {int(m_indices[row[first]])}'s, the assignment "
            f"expert {int(ids[~absent][first])}'s; {int(wrong.sum())} of {len(row)} are wrong",
        )
    return _token_of(output_index, len(m_indices))


def _token_of(output_index: Tensor, rows: int) -> Tensor:
    token = torch.full((rows,), -1)
    valid = output_index >= 0
    token[output_index[valid].long()] = torch.nonzero(valid)[:, 0]
    return token


def _copied(what: str, got: Tensor, source: Tensor, token: Tensor) -> None:
    """Rows with a token are that token's row of ``source`` to the last bit."""
    named = token >= 0
    have, want = (_bits(x) for x in (got[named], source[token[named]]))
    wrong = (have != want).any(-1)
    if wrong.any():
        row = torch.nonzero(named)[torch.nonzero(wrong)[0, 0], 0]
        raise Failure(
            what,
            f"{what}[{int(row)}]: expected the bits of token {int(token[row])}, got others; "
            f"{int(wrong.sum())} of {len(wrong)} rows are wrong",
        )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _runs(expert_ids: Tensor, used: int) -> Tensor:
    """The number of each block's run: of one expert's blocks in use, or of what is left."""
    starts = torch.ones(len(expert_ids), dtype=torch.bool)
    starts[1:] = expert_ids[1:] != expert_ids[:-1]
    starts[used : used + 1] = True
    return starts.cumsum(0)


def _within(run: Tensor, ids: Tensor) -> Tensor:
    """ids sorted within each run."""
    order = ids.argsort(stable=True)
    return ids[order[run[order].argsort(stable=True)]]


def _equal(check: str, what: str, got: Any, expected: Tensor) -> None:
    if same_bits(got, expected):
        return
    if got.shape != expected.shape:
        raise Failure(check, f"{what}: expected shape {list(expected.shape)}, got {list(got.shape)}")
    wrong = torch.nonzero(got != expected)
    at = wrong[0].tolist()
    raise Failure(
        check,
        f"{what}, at {at}: expected {expected[tuple(at)].item()}, got {got[tuple(at)].item()}; "
        f"{len(wrong)} of {got.numel()} elements are wrong",
    )
