"""Verdicts on filters over probabilities, and on what is drawn from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .memory import same_bits
from .verdict import Evidence, Failure, Score, bounded

MANY = 1000  # draws of one row from which their frequencies are looked at
EXPECTED = 8.0  # least expected count of a cell of the chi-square test
SIGMAS = 6.0  # one right kernel in 10⁹ would be refused; cases are fixed, hence none is


def filtered(evidence: Evidence) -> Score:
    """Filters: within the bound, and rows that nothing filters to the last bit."""
    probs, number = evidence.arguments.values()
    untouched: dict[str, Any] = {
        "top_k_renorm": lambda: (number <= 0) | (number >= probs.shape[1]),
        "top_p_renorm": lambda: number >= 1,
        "min_p_renorm": lambda: number <= 0,
    }
    rows = untouched[evidence.op.name]()
    got = evidence.got[0]
    for row in torch.nonzero(rows)[:, 0].tolist():
        if not same_bits(got[row], probs[row]):
            raise Failure("identity", f"row {row}, which {number[row].item()} leaves as it is, has other bits")
    return bounded(evidence)


def drawn(evidence: Evidence) -> Score:
    """`sample`: possible tokens, the same for the same seed and offset, in their proportions; and the right ones."""
    probs, seeds, offsets = (evidence.arguments[name] for name in ("probs", "seeds", "offsets"))
    ids = evidence.got[0].long()
    _possible(probs, ids)
    _repeated(probs, seeds, offsets, ids)
    _frequencies(probs, ids)
    expected = evidence.native[0]
    if not same_bits(evidence.got[0], expected):
        wrong = torch.nonzero(ids != expected)[:, 0]
        row = int(wrong[0])
        raise Failure(
            "draw",
            f"row {row}: seed {int(seeds[row])} and offset {int(offsets[row])} draw token {int(expected[row])}, "
            f"got {int(ids[row])}; {len(wrong)} of {len(ids)} rows are wrong",
        )
    return Score()


def _possible(probs: Tensor, ids: Tensor) -> None:
    outside = (ids < 0) | (ids >= probs.shape[1])
    if outside.any():
        row = int(torch.nonzero(outside)[0])
        raise Failure("ids", f"row {row}: expected a token of 0 … {probs.shape[1] - 1}, got {int(ids[row])}")
    impossible = (probs > 0).any(-1) & ~(probs.gather(1, ids[:, None])[:, 0] > 0)
    if impossible.any():
        row = int(torch.nonzero(impossible)[0])
        raise Failure("support", f"row {row}: token {int(ids[row])} has probability {float(probs[row, ids[row]])}")


def _repeated(probs: Tensor, seeds: Tensor, offsets: Tensor, ids: Tensor) -> None:
    """Rows of one seed and offset draw what the first of them draws, if their probabilities are the same."""
    first: dict[tuple[int, int], int] = {}
    for row, key in enumerate(zip(seeds.tolist(), offsets.tolist(), strict=True)):
        other = first.setdefault(key, row)
        if ids[row] != ids[other] and torch.equal(probs[row], probs[other]):
            raise Failure(
                "seed",
                f"rows {other} and {row}, equal in seed, offset and probabilities, draw {int(ids[other])} and "
                f"{int(ids[row])}",
            )


def _frequencies(probs: Tensor, ids: Tensor) -> None:
    """Pearson's chi-square test, where all rows hold the same probabilities; its quantile after Wilson and Hilferty."""
    if len(probs) < MANY or not (probs == probs[:1]).all():
        return
    expected = probs[0].double() / probs[0].double().sum() * len(ids)
    counts = torch.bincount(ids, minlength=len(expected)).double()
    rare = expected < EXPECTED
    expected, counts = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (expected, counts))
    cells = expected > 0
    statistic = float(((counts - expected).square() / expected)[cells].sum())
    freedom = max(int(cells.sum()) - 1, 1)
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + SIGMAS * spread**0.5) ** 3
    if not statistic <= limit:
        raise Failure(
            "distribution", f"chi-square of {len(ids)} draws is {statistic:.4g}, at most {limit:.4g} is credible"
        )
