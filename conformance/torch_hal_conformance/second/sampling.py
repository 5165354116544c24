"""Second oracles of sampling: token masks, filters over probabilities, and the draw with its own random numbers.

Sums and comparisons are exact: probabilities are float64, hence fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from .convert import Array, Oracle

WORD = 2**64


def _filtered(probs: Array, keep: Callable[[int, list[float]], list[bool] | None]) -> list[Array]:
    """Each row's kept probabilities over their sum. ``keep(row number, row)`` gives None for a row as it is."""
    out = probs.copy()
    for number, row in enumerate(probs.tolist()):
        if any(math.isnan(p) for p in row):  # zeros in its place tell whether the row would be filtered at all
            kept = None if keep(number, [0.0] * len(row)) is None else [True] * len(row)
        else:
            kept = keep(number, row)
        if kept is None:
            continue
        total = math.fsum(p for p, stays in zip(row, kept, strict=True) if stays)
        for token, p in enumerate(row):
            if math.isnan(total):
                out[number, token] = math.nan
            elif not kept[token] or total == 0:
                out[number, token] = 0.0
            else:
                out[number, token] = p / total
    return [out]


def top_k_renorm(probs: Array, top_k: Array) -> list[Array]:
    """What is at least the k-th highest probability stays. k ≤ 0 or k ≥ V: the row as it is."""

    def keep(number: int, row: list[float]) -> list[bool] | None:
        k = int(top_k[number])
        if k <= 0 or k >= len(row):
            return None
        lowest = sorted(row, reverse=True)[k - 1]
        return [p >= lowest for p in row]

    return _filtered(probs, keep)


def top_p_renorm(probs: Array, top_p: Array) -> list[Array]:
    """What stays is the highest, and each whose higher ones sum to at most ``top_p``. ≥ 1: the row as it is."""

    def keep(number: int, row: list[float]) -> list[bool] | None:
        if top_p[number] >= 1:
            return None
        allowed = Fraction(max(float(top_p[number]), 0.0))
        lowest, *rest = sorted((Fraction(p) for p in row), reverse=True)
        above = lowest
        for p in rest:
            if above > allowed:
                break
            lowest = p
            above += p
        return [Fraction(p) >= lowest for p in row]

    return _filtered(probs, keep)


def min_p_renorm(probs: Array, min_p: Array) -> list[Array]:
    """What is at least ``min_p`` · the highest stays. ≤ 0: the row as it is; ≥ 1: the highest alone."""

    def keep(number: int, row: list[float]) -> list[bool] | None:
        if min_p[number] <= 0:
            return None
        bound = Fraction(min(float(min_p[number]), 1.0)) * Fraction(max(row))
        return [Fraction(p) >= bound for p in row]

    return _filtered(probs, keep)


def splitmix64(state: int) -> tuple[int, int]:
    """The next state and output of SplitMix64 (Steele, Lea and Flood, 2014), in 64-bit words."""
    state = (state + 0x9E3779B97F4A7C15) % WORD
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return state, z ^ (z >> 31)


def uniform(seed: int, offset: int) -> Fraction:
    """Output ``offset``, counted from 0, of the stream that starts at SplitMix64(seed)'s first: its high 53 bits / 2⁵³.

    ``offset`` steps of the generator only add to its state, hence are one addition.
    """
    _, start = splitmix64(seed % WORD)
    state = (start + offset * 0x9E3779B97F4A7C15) % WORD
    _, word = splitmix64(state)
    return Fraction(word >> 11, 2**53)


def sample(probs: Array, seeds: Array, offsets: Array) -> list[Array]:
    """The first token of positive probability whose cumulative probability exceeds uniform · sum."""
    ids = np.zeros(len(probs), dtype=np.int64)
    for number, row in enumerate(probs.tolist()):
        positive = [token for token, p in enumerate(row) if p > 0]
        if not positive or not all(math.isfinite(p) for p in row):
            ids[number] = positive[-1] if positive else 0
            continue
        bound = uniform(int(seeds[number]), int(offsets[number])) * sum(Fraction(p) for p in row)
        cumulative = Fraction(0)
        for token in positive:
            cumulative += Fraction(row[token])
            if cumulative > bound:
                ids[number] = token
                break
    return [ids]


def apply_token_bitmask(logits: Array, bitmask: Array, indices: Array | None = None) -> list[Array]:
    """−inf where a token's bit, lowest first in words of 32, is 0; in the rows that ``indices`` names, or in all."""
    out = logits.copy()
    named = range(len(logits)) if indices is None else [int(i) for i in indices]
    for row in named:
        if not 0 <= row < len(logits):
            continue
        for token in range(logits.shape[1]):
            word = int(bitmask[row, token // 32]) % 2**32
            if word >> (token % 32) & 1 == 0:
                out[row, token] = -math.inf
    return [out]


ORACLES: dict[str, Oracle] = {
    "top_k_renorm": top_k_renorm,
    "top_p_renorm": top_p_renorm,
    "min_p_renorm": min_p_renorm,
    "sample": sample,
    "apply_token_bitmask": apply_token_bitmask,
    "apply_token_bitmask_": apply_token_bitmask,
}
