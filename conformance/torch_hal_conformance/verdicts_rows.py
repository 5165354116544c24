"""The verdict where rows of the result may hold anything: on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .verdict import Evidence, Score, bounded


def among(evidence: Evidence, rows: Tensor) -> Evidence:
    """The same of the rows of its one result for which ``rows``, a mask over its leading dims, is true."""
    exact = evidence.exact
    true = exact.results[0]
    terms, middles = (
        [y if y is None else y.expand_as(true)[rows] for y in values] for values in (exact.terms, exact.middles)
    )
    return replace(
        evidence,
        got=[evidence.got[0][rows]],
        exact=replace(exact, results=[true[rows]], terms=terms, middles=middles),
        native=[evidence.native[0][rows]],
    )


def padding_rows(arguments: dict[str, Any], outputs: list[Any]) -> list[Tensor | None]:
    """Of rows of one matrix, those of no expert."""
    return [arguments["m_indices"] < 0 for _ in outputs]


def rows_beyond(arguments: dict[str, Any], outputs: list[Any]) -> list[Tensor | None]:
    """Of a matrix an expert, the rows that are not in use."""
    filled = arguments["masked_m"]
    return [torch.arange(y.shape[1], device=filled.device) >= filled[:, None] for y in outputs]


def contiguous_rows(evidence: Evidence) -> Score:
    """Grouped products of rows of one matrix: all but padding."""
    (padding,) = padding_rows(evidence.arguments, evidence.got)
    assert padding is not None
    return bounded(among(evidence, ~padding))


def masked_rows(evidence: Evidence) -> Score:
    """Grouped products of a matrix an expert: the rows in use."""
    (beyond,) = rows_beyond(evidence.arguments, evidence.got)
    assert beyond is not None
    return bounded(among(evidence, ~beyond))
