"""A second, slow fp8 codec, from the formats' definitions: 1 sign, 4 exponent and 3 mantissa bits."""

from __future__ import annotations

import bisect
import functools
import math


def decode(code: int, kind: str) -> float:
    """The value of a byte. Bias 7 with NaN at 0x7F and 0xFF (fn), or bias 8 with NaN in place of −0 (fnuz)."""
    if code in ((0x7F, 0xFF) if kind == "e4m3fn" else (0x80,)):
        return math.nan
    bias = 7 if kind == "e4m3fn" else 8
    exponent, mantissa = code >> 3 & 0xF, code & 7
    magnitude = mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    return -magnitude if code & 0x80 else magnitude


@functools.cache
def _magnitudes(kind: str) -> tuple[float, ...]:
    """The values of the codes from 0 up to the quantisation maximum."""
    return tuple(decode(code, kind) for code in range(0x7F))


def encode(value: float, kind: str) -> int:
    """The byte nearest to ``value``, ties to the even code, clamped at the quantisation maximum, code 0x7E."""
    if math.isnan(value):
        return 0x7F if kind == "e4m3fn" else 0x80
    table = _magnitudes(kind)
    magnitude = min(abs(value), table[-1])
    above = bisect.bisect_left(table, magnitude)  # the least code whose value is not below
    code = min(range(max(above - 1, 0), above + 1), key=lambda c: (abs(table[c] - magnitude), c & 1))
    negative = math.copysign(1, value) < 0 and (code > 0 or kind == "e4m3fn")
    return code | 0x80 if negative else code
