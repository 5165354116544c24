"""SplitMix64 run backwards: the draw of a seed at which a wanted uniform number comes (Steele, Lea and Flood, 2014)."""

from __future__ import annotations

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def offset_of(uniform: int, seed: int, low_bits: int = 0) -> int:
    """The offset, an int64, at which ``seed``'s stream has uniform / 2⁵³; ``low_bits`` < 2¹¹ are dropped in use."""
    start = _mix((seed + GOLDEN) % WORD)
    state = _unmix(uniform << 11 | low_bits)
    offset = ((state - start) * pow(GOLDEN, -1, WORD) - 1) % WORD
    return offset - WORD if offset >= WORD // 2 else offset


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * FACTORS[0] % WORD
    z = (z ^ (z >> 27)) * FACTORS[1] % WORD
    return z ^ (z >> 31)


def _unmix(z: int) -> int:
    z = z ^ (z >> 31) ^ (z >> 62)
    z = z * pow(FACTORS[1], -1, WORD) % WORD
    z = z ^ (z >> 27) ^ (z >> 54)
    z = z * pow(FACTORS[0], -1, WORD) % WORD
    return z ^ (z >> 30) ^ (z >> 60)
