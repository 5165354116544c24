"""Second oracles of routing: softmax and sigmoid scores, group limits, weights.

A row whose weights are all NaN may name any experts, each once: its canonical ids are 0, 1, 2, …
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .convert import Array, Canonical, Oracle


def softmax(row: Array) -> list[float]:
    """p_i = e^(x_i − m) / Σ_j e^(x_j − m), m the highest. NaN, +inf or nothing but −inf in the row: NaN throughout."""
    highest = max(row) if not any(math.isnan(x) for x in row) else math.nan
    if not math.isfinite(highest):
        return [math.nan] * len(row)
    powers = [math.exp(x - highest) for x in row]
    total = math.fsum(powers)
    return [power / total for power in powers]


def sigmoid(x: float) -> float:
    """1 / (1 + e^−x), without overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the highest scores, descending; equal ones in order of index, NaN before everything."""
    nans = [i for i, score in enumerate(scores) if math.isnan(score)]
    others = [i for i, score in enumerate(scores) if not math.isnan(score)]
    order = nans + sorted(others, key=lambda i: (-scores[i], i))
    return order[:count]


def weigh(scores: list[float], ids: list[int], renormalize: bool, scale: float) -> list[float]:
    """The chosen experts' scores, over their sum + 1e-20 if asked, times the routed scaling factor."""
    chosen = [scores[i] for i in ids]
    if renormalize:
        total = math.fsum(chosen) + 1e-20
        chosen = [score / total for score in chosen]
    return [score * scale for score in chosen]


def groups_of(experts: int, num_groups: int) -> list[range]:
    """Equal runs of experts."""
    size = experts // num_groups
    return [range(group * size, (group + 1) * size) for group in range(num_groups)]


def _results(rows: list[tuple[list[float], list[int]]], top_k: int) -> list[Array]:
    weights = np.array([row[0] for row in rows], dtype=np.float64).reshape(len(rows), top_k)
    ids = np.array([row[1] for row in rows], dtype=np.int64).reshape(len(rows), top_k)
    for token in range(len(rows)):
        if np.isnan(weights[token]).all():
            ids[token] = range(top_k)
    return [weights, ids]


def topk_softmax(logits: Array, top_k: int, renormalize: bool) -> list[Array]:
    """The experts of highest probability. Probabilities are of a softmax over all experts."""
    rows = []
    for row in logits:
        probabilities = softmax(row)
        ids = best(probabilities, top_k)
        rows.append((weigh(probabilities, ids, renormalize, 1.0), ids))
    return _results(rows, top_k)


def grouped_topk(
    logits: Array, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> list[Array]:
    """A group scores its highest probability; outside the best groups a probability counts as 0."""
    rows = []
    for row in logits:
        probabilities = softmax(row)
        if math.isnan(probabilities[0]):
            rows.append(([math.nan] * top_k, list(range(top_k))))
            continue
        groups = groups_of(len(row), num_groups)
        kept = best([max(probabilities[i] for i in group) for group in groups], topk_groups)
        limited = [0.0] * len(row)
        for group in kept:
            for i in groups[group]:
                limited[i] = probabilities[i]
        ids = best(limited, top_k)
        rows.append((weigh(limited, ids, renormalize, scale), ids))
    return _results(rows, top_k)


def biased_grouped_topk(
    logits: Array, bias: Array, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> list[Array]:
    """Chosen by σ(logit) + bias, weighted by σ(logit). A group scores its two highest biased scores' sum."""
    rows = []
    for row in logits:
        unbiased = [sigmoid(float(x)) for x in row]
        biased = [score + float(b) for score, b in zip(unbiased, bias, strict=True)]
        groups = groups_of(len(row), num_groups)
        group_scores = []
        for group in groups:
            first, second = best([biased[i] for i in group], 2)
            group_scores.append(biased[group[first]] + biased[group[second]])
        limited = [-math.inf] * len(row)
        for number in best(group_scores, topk_groups):
            for i in groups[number]:
                limited[i] = biased[i]
        ids = best(limited, top_k)
        rows.append((weigh(unbiased, ids, renormalize, scale), ids))
    return _results(rows, top_k)


def canonical_routing(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Where a row's weights are all NaN, and its ids valid and distinct, they become 0, 1, 2, …"""
    weights, ids = results[0], results[1].copy()
    experts = arguments["logits"].shape[1]
    for token in range(len(ids)):
        distinct = len(set(ids[token].tolist())) == ids.shape[1]
        valid = ((ids[token] >= 0) & (ids[token] < experts)).all()
        if np.isnan(weights[token]).all() and distinct and valid:
            ids[token] = range(ids.shape[1])
    return [weights, ids, *results[2:]]


ORACLES: dict[str, Oracle] = {
    "topk_softmax": topk_softmax,
    "grouped_topk": grouped_topk,
    "biased_grouped_topk": biased_grouped_topk,
}
CANONICAL: dict[str, Canonical] = dict.fromkeys(ORACLES, canonical_routing)
