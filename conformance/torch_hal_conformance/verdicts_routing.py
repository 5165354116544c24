"""The verdict on routing: whom a token goes to, in which order, and with which weights.

All from float64 scores of the logits as they arrived. Two scores that float32 arithmetic might order either way may
be in either order, of groups too; those of equal logits (and equal biases) are equal however they are computed, and go
in order of id. Weights are judged for the experts that were chosen.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .oracle import Exact
from .verdict import Evidence, Failure, Score, within

BAND = 8 * 2.0**-24  # an exponential, a division and an addition, and that two results are compared
FLUSHED = 2.0**-126  # a score below may be 0
PAIRS = 2**22  # compared at a time


@dataclass(frozen=True)
class Scores:
    """What one call ranks experts by: values [T, E], how far they may be off, and when two of them are equal."""

    logits: Tensor
    bias: Tensor  # [E]; zero where there is none
    values: Tensor
    band: Tensor
    weights: Tensor  # an expert's weight before renormalising

    def take(self, rows: Tensor) -> Scores:
        fields = (self.logits, self.values, self.band, self.weights)
        logits, values, band, weights = (x[rows] for x in fields)
        return Scores(logits, self.bias, values, band, weights)


@dataclass(frozen=True)
class Call:
    """The arguments of a routing op, and what tells the ops apart."""

    top_k: int
    renormalize: bool
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    summed: int = 1  # how many of its best experts a group's score sums
    outside: float = 0.0  # what an expert outside the kept groups counts as


def routed(evidence: Evidence) -> Score:
    """`topk_softmax`, `grouped_topk` and `biased_grouped_topk`."""
    call, scores = _read(evidence)
    weights, ids = evidence.got[0], evidence.got[1].long()
    _distinct(ids, scores.values.shape[1])
    nan = scores.values.isnan().any(-1)  # whose ids may be any
    kept = torch.ones_like(ids[:, :1], dtype=torch.bool).expand(-1, call.num_groups).clone()
    kept[~nan] = _choices(scores.take(~nan), ids[~nan], call, judged=True)
    native_kept = kept.clone()
    native_ids = evidence.native[1].long()
    native_kept[~nan] = _choices(scores.take(~nan), native_ids[~nan], call, judged=False)
    expected = _weights(scores, ids, kept, call)
    spread = scores.logits.masked_fill(~scores.logits.isfinite(), torch.nan)
    spread = (_reduced(spread, torch.amax) - _reduced(spread, torch.amin)).nan_to_num(0.0)
    terms = expected.abs() * (1 + spread)
    off = evidence.native[0].double() - _weights(scores, native_ids, native_kept, call)
    exact = Exact([expected], [terms], [None], evidence.exact.length)
    return within(replace(evidence, got=[weights], exact=exact, native=[expected + off]), 0)


def _reduced(x: Tensor, reduce: Any) -> Tensor:
    fill = -torch.inf if reduce is torch.amax else torch.inf
    reduced: Tensor = reduce(x.nan_to_num(fill), -1, keepdim=True)
    return reduced


def _read(evidence: Evidence) -> tuple[Call, Scores]:
    arguments = evidence.op.bind(**evidence.arguments)
    logits = arguments.pop("logits").double()
    bias = arguments.pop("bias", None)
    if bias is None:
        values = torch.softmax(logits, -1)
        reach = (logits.amax(-1, keepdim=True) - logits).nan_to_num(0.0, 0.0, 0.0)
        band = BAND * values * (1 + reach) + FLUSHED
        return Call(**arguments), Scores(logits, torch.zeros(logits.shape[1]), values, band, values)
    sigmoid, bias = torch.sigmoid(logits), bias.double()
    band = BAND * (sigmoid * (1 + logits.abs().nan_to_num(0.0, 0.0, 0.0)) + bias.abs()) + FLUSHED
    call = Call(**arguments, summed=2, outside=-torch.inf)
    return call, Scores(logits, bias, sigmoid + bias, band, sigmoid)


def _distinct(ids: Tensor, experts: int) -> None:
    wrong = ((ids < 0) | (ids >= experts)).any(-1)
    if wrong.any():
        row = int(torch.nonzero(wrong)[0])
        raise Failure("ids", f"row {row} names {ids[row].tolist()}, of experts 0 … {experts - 1}")
    ordered = ids.sort(-1).values
    wrong = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if wrong.any():
        row = int(torch.nonzero(wrong)[0])
        raise Failure("ids", f"row {row} names an expert twice: {ids[row].tolist()}")


def _choices(scores: Scores, ids: Tensor, call: Call, judged: bool) -> Tensor:
    """The groups [T, G] that each row's ids are right for, of those that may be kept. Raises Failure if ``judged``."""
    kept, unsure = _kept(scores, call)
    wrong = _faults(scores, ids, kept, call)
    for row in torch.nonzero((wrong != 0) & unsure)[:, 0].tolist():
        one = torch.tensor([row])
        for other in _alternatives(scores.take(one), call):
            if not int(_faults(scores.take(one), ids[one], other[None], call)):
                kept[row], wrong[row] = other, 0
                break
    if judged and wrong.any():
        row = int(torch.nonzero(wrong)[0])
        check, what = FAULTS[int(wrong[row])]
        raise Failure(
            check,
            f"row {row}: {what}: got {ids[row].tolist()}{_of_groups(kept[row], call)} "
            f"expected {_best(_eligible(scores, kept, call), call.top_k)[row].tolist()}; "
            f"{int((wrong != 0).sum())} of {len(wrong)} rows are wrong",
        )
    return kept


def _of_groups(kept: Tensor, call: Call) -> str:
    return f", of kept groups {torch.nonzero(kept)[:, 0].tolist()}" if call.num_groups > 1 else ""


FAULTS = {
    1: ("indices", "a better expert was left out"),
    2: ("ties", "of equal scores, a higher id was taken before a lower one"),
    3: ("order", "not in descending order"),
}


def _faults(scores: Scores, ids: Tensor, kept: Tensor, call: Call) -> Tensor:
    """What is wrong with each row [T]: a key of `FAULTS`, or 0."""
    step = max(1, PAIRS // max(1, ids.shape[1] * scores.values.shape[1]))
    parts = [
        _few_faults(scores.take(rows), ids[rows], kept[rows], call)
        for rows in torch.split(torch.arange(len(ids)), step)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _few_faults(scores: Scores, ids: Tensor, kept: Tensor, call: Call) -> Tensor:
    values, inside = _eligible(scores, kept, call), _by_expert(kept, scores.values.shape[1])
    band = torch.where(inside, scores.band, 0.0)
    chosen = torch.zeros_like(inside).scatter(1, ids, True)
    expert = torch.arange(values.shape[1]).expand_as(values)

    def of(x: Tensor) -> Tensor:
        return x.gather(1, ids)

    def fields(pick: Any) -> tuple[Tensor, ...]:
        bias = scores.bias.expand_as(values)
        return tuple(pick(x) for x in (values, band, scores.logits, bias, inside, expert))

    taken = fields(lambda x: of(x).unsqueeze(2))
    better, earlier = _compare(fields(lambda x: x.unsqueeze(1)), taken)
    left_out = ~chosen.unsqueeze(1)
    later = torch.ones(call.top_k, call.top_k, dtype=torch.bool).triu(1)
    better_later, earlier_later = _compare(fields(lambda x: of(x).unsqueeze(1)), taken)
    fault = torch.zeros(len(ids), dtype=torch.int64)
    fault[(better_later & later).flatten(1).any(-1)] = 3
    fault[(earlier & left_out).flatten(1).any(-1) | (earlier_later & later).flatten(1).any(-1)] = 2
    fault[(better & left_out).flatten(1).any(-1)] = 1
    return fault


def _compare(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Where one is surely better than the other, and where it is as good and has the lower id."""
    value, band, logit, bias, inside, expert = one
    value_, band_, logit_, bias_, inside_, expert_ = other
    equal = (logit == logit_) & (bias == bias_) & inside & inside_ | (value == value_) & (value == 0)
    return value - band > value_ + band_, equal & (expert < expert_)


def _by_expert(kept: Tensor, experts: int) -> Tensor:
    return kept.repeat_interleave(experts // kept.shape[1], 1)


def _eligible(scores: Scores, kept: Tensor, call: Call) -> Tensor:
    return torch.where(_by_expert(kept, scores.values.shape[1]), scores.values, call.outside)


def _best(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _grouped(x: Tensor, call: Call) -> Tensor:
    """[T, E] as [T, G, E / G]."""
    return x.reshape(len(x), call.num_groups, x.shape[1] // call.num_groups)


def _groups(scores: Scores, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Groups' scores [T, G], how far these may be off, and the logits and biases [T, G, 2·summed] they come from."""
    values = _grouped(scores.values, call)
    best = _best(values, call.summed)

    def of(x: Tensor) -> Tensor:
        return _grouped(x.expand_as(scores.values), call).gather(-1, best)

    score = of(scores.values).sum(-1)
    band = of(scores.band).sum(-1) + BAND * score.abs()
    return score, band, torch.cat([of(scores.logits), of(scores.bias)], -1)


def _kept(scores: Scores, call: Call) -> tuple[Tensor, Tensor]:
    """The groups that are kept [T, G], and whether float32 might keep others [T]."""
    score, band, _ = _groups(scores, call)
    kept = torch.zeros_like(score, dtype=torch.bool).scatter(-1, _best(score, call.topk_groups), True)
    lowest = torch.where(kept, score - band, torch.inf).amin(-1)
    highest = torch.where(kept, -torch.inf, score + band).amax(-1)
    return kept, highest >= lowest


def _alternatives(scores: Scores, call: Call) -> list[Tensor]:
    """Every set of groups that float32 may keep of one row."""
    score, band, sources = (x[0] for x in _groups(scores, call))
    better = score[:, None] - band[:, None] > score + band
    first, second = sources.view(-1, 2, call.summed).unbind(-2)
    pairs = torch.stack([first, second], -1)  # [G, summed, (logit, bias)]
    equal = torch.zeros_like(better)
    for other in (pairs, pairs.flip(1)):  # a sum of two is the same whichever comes first
        equal |= (pairs[:, None] == other).flatten(2).all(-1)
    before = better | (equal & torch.ones_like(equal).triu(1))
    found = []
    for groups in _subsets(call.num_groups, call.topk_groups):
        inside = torch.zeros(call.num_groups, dtype=torch.bool)
        inside[list(groups)] = True
        if not before[~inside][:, inside].any():
            found.append(inside)
    return found


@functools.cache
def _subsets(count: int, size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(count), size))


def _weights(scores: Scores, ids: Tensor, kept: Tensor, call: Call) -> Tensor:
    weights = scores.weights
    if call.outside == 0.0:
        weights = torch.where(_by_expert(kept, weights.shape[1]), weights, 0.0)
    weights = weights.gather(1, ids)
    if call.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * call.scale
