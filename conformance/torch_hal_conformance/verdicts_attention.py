"""The verdicts on attention: within its bound, and exact where nothing is seen or there is nothing to merge."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .verdict import Evidence, Failure, Score, bounded


def attended(evidence: Evidence) -> Score:
    """Out and lse within their bounds. A query that sees no key may itself hold NaN: what it gives has no terms."""
    out, lse = evidence.exact.terms
    empty = evidence.exact.results[1].isneginf()
    terms = [out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, 0)]
    return bounded(replace(evidence, exact=replace(evidence.exact, terms=terms)))


def merged(evidence: Evidence) -> Score:
    """`merge_state`: where one side is empty the other comes back exactly."""
    score = bounded(evidence)
    sides = [(evidence.arguments[f"out_{side}"], evidence.arguments[f"lse_{side}"]) for side in "ab"]
    for (out, lse), (_, other) in (sides, sides[::-1]):
        alone = other.isinf() & ~lse.isinf()
        for i, (name, expected) in enumerate((("out", out), ("lse", lse))):
            _unchanged(name, evidence.got[i][alone], expected[alone])
    return score


def _unchanged(name: str, got: Tensor, expected: Tensor) -> None:
    different = torch.nonzero(got != expected)
    if len(different):
        position = tuple(different[0].tolist())
        raise Failure(
            "alone",
            f"{name} where the other side is empty: expected {expected[position].item():.9g} unchanged, "
            f"got {got[position].item():.9g}; {len(different)} of {got.numel()} numbers differ",
        )
