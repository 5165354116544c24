"""The verdict where rows of the result may hold anything: on the others."""

from __future__ import annotations

from dataclasses import replace

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


def contiguous_rows(evidence: Evidence) -> Score:
    """Grouped products of rows of one matrix: all but padding."""
    return bounded(among(evidence, evidence.arguments["m_indices"] >= 0))


def masked_rows(evidence: Evidence) -> Score:
    """Grouped products of a matrix an expert: the rows in use."""
    filled = evidence.arguments["masked_m"]
    return bounded(among(evidence, torch.arange(evidence.got[0].shape[1]) < filled[:, None]))
