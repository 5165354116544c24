"""Mixture-of-experts computation: each token through its experts, and the sums that bring them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..check import FLOAT, INDEX, ceil_div
from ..contracts import Contracts
from ..numerics import narrow, wide
from ..op import PLAIN, op


def prepare_experts(w13: Tensor, w2: Tensor) -> list[Tensor]:
    """The plain layout: w13 [E, 2I, D] and w2 [E, D, I] as they are."""
    return [w13, w2]


def fused_experts_terms(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = PLAIN
) -> Tensor:
    """Sum of the absolute products of the second GEMM, weighted: the scale of an output's rounding errors."""
    return _through_experts(x, w13, w2.abs(), topk_weights.abs(), topk_ids, lambda hidden: _silu_and_mul(hidden).abs())


def fused_experts_intermediate(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = PLAIN
) -> Tensor:
    """2-norm of the products that the rounded activations enter: how their rounding errors add up."""
    squares = _through_experts(
        x, w13, w2.square(), topk_weights.square(), topk_ids, lambda hidden: _silu_and_mul(hidden).square()
    )
    return squares.sqrt()


@op(
    shapes={"x": "T D", "w13": "E 2*I D", "w2": "E D I", "topk_weights": "T K", "topk_ids": "T K"},
    dtypes={
        "x": FLOAT,
        "w13": "x",
        "w2": "x",
        "topk_weights": (torch.float32, torch.float64),
        "topk_ids": INDEX,
    },
    where={"E >= 1 and K >= 1": "there is an expert, and each token has a place for one"},
    rounds=2,
    reduces="max(D, I)",
    flops="6 * T * K * D * I",
    traffic="(min(E, T * K) * 3 * I * D + 2 * T * D) * x.element_size() + T * K * (4 + topk_ids.element_size())",
    terms=fused_experts_terms,
    intermediate=fused_experts_intermediate,
    prepare=prepare_experts,
    contracts=Contracts(
        C7_sentinels="An id that is -1 or otherwise outside [0, E) contributes exactly 0, whatever its weight.",
        C8_unwritten_rows="Every row is written: a token without any valid id gives zeros.",
        C9_rounding="float32 accumulation; the activation is rounded to x's dtype once, between the GEMMs; experts' "
        "outputs stay float32, are weighted and summed over K in float32, and rounded once.",
        C10_determinism="Terms are summed in the order of K. Other tokens may change a row's last bits (GEMM shapes), "
        "never more: NaN and inf stay in the rows, and with the experts, that hold them.",
        C12_scale_owner="Applies no routed scaling factor: topk_weights carry it.",
        C13_ids="Takes int32 or int64 ids and float32 weights.",
    ),
)
def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = PLAIN
) -> Tensor:
    """``Σ_k weight_k · W2_e · (silu(W1_e x) ⊙ W3_e x)`` with ``e = topk_ids[t, k]``: SwiGLU experts.

    x: [T, D]; w13: [E, 2I, D], the gate's (W1's) rows first; w2: [E, D, I], both x's dtype, or as ``prepare`` gave
    them with ``layout``; topk_weights: float32 [T, K], applied after the second GEMM; topk_ids: [T, K], repeats
    count twice. Any strides. Returns [T, D] in x's dtype.
    """
    return narrow(_through_experts(x, w13, w2, topk_weights, topk_ids, _silu_and_mul), x)


@op(
    shapes={"x": "T K D"},
    dtypes={"x": FLOAT},
    reduces="K",
    flops="x.numel()",
    terms=lambda x, scale: wide(x).abs().sum(1) * abs(scale),
    contracts=Contracts(
        C9_rounding="Summed and scaled in float32, rounded once.",
        C10_determinism="A row does not depend on the others.",
        C12_scale_owner="Applies `scale`: 1.0 where the routing weights carry the routed scaling factor already.",
    ),
)
def moe_sum_reduce(x: Tensor, scale: float) -> Tensor:
    """``scale · Σ_k x[t, k]``: a token's expert outputs, weighted before, brought together.

    x: [T, K, D], any strides and any D (no tail is left unwritten). Returns [T, D] in x's dtype; K = 0 gives zeros.
    """
    return narrow(wide(x).sum(1) * scale, x)


@op(
    shapes={"routed": "T D", "shared": "T D"},
    dtypes={"routed": FLOAT, "shared": "routed"},
    flops="2 * routed.numel()",
    terms=lambda routed, shared, alpha: wide(routed).abs() + wide(shared).abs() * abs(alpha),
    contracts=Contracts(
        C9_rounding="Multiplied and added in float32, rounded once.",
        C10_determinism="Elementwise: equal inputs give bitwise equal results.",
        C12_scale_owner="`alpha` scales the shared expert: 1.0 where the routed part is scaled already, 1 / the routed "
        "scaling factor where the sum will be.",
    ),
)
def shared_expert_add(routed: Tensor, shared: Tensor, alpha: float) -> Tensor:
    """``routed + alpha · shared``: the shared expert joins the routed ones.

    routed, shared: [T, D], one dtype, any strides. Returns that shape and dtype.
    """
    return narrow(wide(routed) + wide(shared) * alpha, routed)


class ExpertBlocks(NamedTuple):
    """Assignments (token, k) packed into blocks of one expert each. All sizes are static, all indices on the device."""

    expert: Tensor  # [blocks] the expert of each block; blocks nobody needs have a valid one too
    token: Tensor  # [blocks, rows] the token in each row; spare rows hold token 0, and nothing reads their results
    row: Tensor  # [T * K] where each assignment went, counted over all blocks


def _block_by_expert(topk_ids: Tensor, num_experts: int) -> ExpertBlocks:
    """Sort assignments by expert and pad each expert's run to whole blocks, without asking the host how many.

    Blocks have ⌈assignments / experts⌉ rows: one for a decoded token, about an even share of a long prompt, so that
    at most twice the needed rows are computed. Assignments without a valid id form a last group of their own.
    """
    assignments, top_k = topk_ids.numel(), topk_ids.shape[1]
    rows = ceil_div(assignments, num_experts)
    groups = num_experts + 1
    blocks = (assignments + min(groups, assignments) * (rows - 1)) // rows  # enough however they are spread
    count = torch.arange(assignments, device=topk_ids.device)

    ids = topk_ids.flatten().to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    sorted_ids, order = torch.sort(ids, stable=True)
    start = torch.searchsorted(sorted_ids, torch.arange(groups + 1, device=ids.device))
    group_blocks = (start.diff() + rows - 1) // rows
    end_block = group_blocks.cumsum(0)
    rank = count - start[sorted_ids]
    row = torch.empty_like(ids).scatter(0, order, (end_block - group_blocks)[sorted_ids] * rows + rank)

    token = torch.zeros(blocks * rows, dtype=torch.int64, device=ids.device).scatter(0, row, count // top_k)
    expert = torch.searchsorted(end_block, count[:blocks], right=True).clamp(max=num_experts - 1)
    return ExpertBlocks(expert, token.view(blocks, rows), row)


def _through_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """The weighted sum over K in `wide`. Weights are gathered one token's worth (K experts) at a time."""
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0:
        return wide(torch.zeros_like(x))
    expert, token, row = _block_by_expert(topk_ids, w13.shape[0])
    parts = []
    for first in range(0, expert.shape[0], top_k):
        experts, tokens = expert[first : first + top_k], token[first : first + top_k]
        hidden = torch.bmm(wide(x[tokens]), wide(w13.index_select(0, experts)).mT)
        activated = narrow(activate(hidden), x)
        parts.append(torch.bmm(wide(activated), wide(w2.index_select(0, experts)).mT))
    outputs = torch.cat(parts).flatten(0, 1)[row.view(num_tokens, top_k)]
    valid = (topk_ids >= 0) & (topk_ids < w13.shape[0])
    weighted = outputs * topk_weights.unsqueeze(-1)
    return torch.where(valid.unsqueeze(-1), weighted, 0.0).sum(1)  # not times 0: an unchosen expert may overflow


def _silu_and_mul(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
