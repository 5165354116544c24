"""Mixture-of-experts routing: which experts a token goes to, and with which weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..check import FLOAT
from ..contracts import Contracts
from ..numerics import wide
from ..op import declared, op

RENORM_EPS = 1e-20  # keeps a row whose weights all underflow finite; far below any weight that matters

_GROUPED = {
    "num_groups >= 1 and E % num_groups == 0": "num_groups divides the number of experts",
    "1 <= topk_groups <= num_groups": "topk_groups lies between 1 and num_groups",
    "1 <= top_k <= topk_groups * (E // num_groups)": "top_k lies between 1 and the kept groups' experts",
}
_CONTRACTS = Contracts(
    C7_sentinels="None: every id is a valid expert and a row's ids are distinct. The caller masks padded tokens.",
    C9_rounding="Scores are computed in float32 from logits of any float type; weights stay float32.",
    C10_determinism="Descending by score; equal scores in order of id. A row does not depend on the others.",
    C12_scale_owner="Applies no routed scaling factor: whoever sums the experts' outputs does.",
    C13_ids="Gives int32 ids and float32 weights (float64 for float64 logits).",
)
_SCALED = Contracts(
    C7_sentinels=_CONTRACTS.C7_sentinels,
    C9_rounding=_CONTRACTS.C9_rounding,
    C10_determinism="Descending by score; equal scores, of experts and of groups, in order of id. "
    "A row does not depend on the others.",
    C12_scale_owner="Owns the routed scaling factor: the weights carry `scale`, nothing after them applies it again.",
    C13_ids=_CONTRACTS.C13_ids,
)


@op(
    shapes={"logits": "T E"},
    dtypes={"logits": FLOAT},
    where={"1 <= top_k <= E": "top_k lies between 1 and the number of experts"},
    reduces="E",
    flops="5 * logits.numel()",
    terms=lambda *args, **named: _terms("topk_softmax", *args, **named),
    contracts=_CONTRACTS,
)
def topk_softmax(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of highest probability (DeepSeek V2-Lite's ``greedy``).

    logits: [T, E] of any float type and strides; renormalize: whether a row's weights are divided by their sum
    + 1e-20. Returns (weights float32 [T, top_k], ids int32 [T, top_k]): weights are probabilities of a softmax over
    all E experts, never logits. A NaN in a row makes its weights NaN; its ids stay valid.
    """
    scores = torch.softmax(wide(logits), dim=-1)
    return _weigh(scores, _highest(scores, top_k), renormalize, scale=1.0)


@op(
    shapes={"logits": "T E"},
    dtypes={"logits": FLOAT},
    where=_GROUPED,
    reduces="E",
    flops="6 * logits.numel()",
    terms=lambda *args, **named: _terms("grouped_topk", *args, **named),
    contracts=_SCALED,
)
def grouped_topk(
    logits: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Group-limited softmax routing (DeepSeek V2's ``group_limited_greedy``).

    Experts lie in ``num_groups`` equal runs; a group scores its highest probability; only the ``topk_groups`` best
    groups may serve, the others' probabilities count as 0.0 (a dropped expert is met only where every kept one
    underflowed, and its weight is then 0 too). logits: [T, E]; scale: the routed scaling factor, on the weights.
    Returns (weights float32 [T, top_k], ids int32 [T, top_k]); renormalize, order and NaN as in `topk_softmax`.
    Renormalising and scaling are independent here; V2's own code does one or the other.
    """
    scores = torch.softmax(wide(logits), dim=-1)
    groups = _grouped(scores, num_groups)
    kept = _keep_groups(groups.amax(-1), topk_groups)
    eligible = torch.where(kept.unsqueeze(-1), groups, 0.0).flatten(-2)
    return _weigh(eligible, _highest(eligible, top_k), renormalize, scale)


@op(
    shapes={"logits": "T E", "bias": "E"},
    dtypes={"logits": FLOAT, "bias": (torch.float32, torch.float64)},
    where={**_GROUPED, "E // num_groups >= 2": "a group has the two experts that its score sums"},
    reduces="top_k",
    flops="6 * logits.numel()",
    terms=lambda *args, **named: _terms("biased_grouped_topk", *args, **named),
    contracts=_SCALED,
)
def biased_grouped_topk(
    logits: Tensor, bias: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Group-limited sigmoid routing with a load-balancing bias (DeepSeek V3's ``noaux_tc``).

    Experts are chosen by ``sigmoid(logits) + bias`` and weighted by ``sigmoid(logits)`` alone. A group scores the sum
    of its two highest biased scores; experts outside the ``topk_groups`` best groups count as -inf, since a biased
    score may be negative. logits: [T, E]; bias: [E], float32 whatever the logits are (bfloat16 reorders experts),
    finite. A NaN, of a logit or of the bias, ranks first, ids staying valid; a logit's makes its weight NaN too.
    scale: the routed scaling factor, applied after renormalising.
    Returns (weights float32 [T, top_k], ids int32 [T, top_k]); renormalize and order as in `topk_softmax`.
    """
    scores = torch.sigmoid(wide(logits))
    biased = scores + bias
    groups = _grouped(biased, num_groups)
    kept = _keep_groups(groups.topk(2, dim=-1).values.sum(-1), topk_groups)
    eligible = torch.where(kept.unsqueeze(-1), groups, -torch.inf).flatten(-2)
    return _weigh(scores, _highest(eligible, top_k), renormalize, scale)


def _terms(name: str, logits: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """A weight's terms: itself and, of a softmax, the error of its exponent, which is as large as the chosen logits
    lie below the highest. Ids are exact, and so is the weight of a logit of -inf.
    """
    weights, ids = declared()[name].reference(logits, *args, **named)
    if name == "biased_grouped_topk":
        return weights.abs(), torch.zeros_like(weights)
    x = wide(logits)
    below = (x.amax(-1, keepdim=True) - x).gather(-1, ids.to(torch.int64)).nan_to_num(0.0, posinf=0.0)
    return weights.abs() * (1 + below.amax(-1, keepdim=True)), torch.zeros_like(weights)


def _grouped(scores: Tensor, num_groups: int) -> Tensor:
    """[T, E] as [T, G, E / G]."""
    return scores.reshape(scores.shape[0], num_groups, scores.shape[1] // num_groups)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` highest scores, descending, ties in order of index: torch.topk promises no order."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def _keep_groups(group_scores: Tensor, count: int) -> Tensor:
    """Mask [T, G] of each row's ``count`` best groups."""
    return torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, _highest(group_scores, count), True)


def _weigh(scores: Tensor, ids: Tensor, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORM_EPS)
    return weights * scale, ids.to(torch.int32)
