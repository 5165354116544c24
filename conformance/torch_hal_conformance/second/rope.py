"""Second oracle of the rotary embedding: every pair of numbers is turned by the angle of its position."""

from __future__ import annotations

import numpy as np

from .convert import Array, Oracle


def _pair(i: int, half: int, interleaved: bool) -> tuple[int, int]:
    """The dims that frequency i turns: neighbours, or one of each half."""
    return (2 * i, 2 * i + 1) if interleaved else (i, i + half)


def _rotated(x: Array, positions: Array, cos_sin_cache: Array, interleaved: bool) -> Array:
    """x [T, heads, D] with its first R dims turned. (a + ib)(cos + i·sin), written out."""
    half = cos_sin_cache.shape[1] // 2
    y = x.copy()
    for token, head in np.ndindex(x.shape[:2]):
        row = cos_sin_cache[positions[token]]
        for i in range(half):
            cos, sin = row[i], row[half + i]
            first, second = _pair(i, half, interleaved)
            a, b = x[token, head, first], x[token, head, second]
            y[token, head, first] = a * cos - b * sin
            y[token, head, second] = b * cos + a * sin
    return y


def rope(q: Array, k: Array, positions: Array, cos_sin_cache: Array, interleaved: bool) -> list[Array]:
    with np.errstate(invalid="ignore"):  # ∞·0, ∞ − ∞
        return [_rotated(x, positions, cos_sin_cache, interleaved) for x in (q, k)]


ORACLES: dict[str, Oracle] = {"rope": rope}
