"""Activations of gated MLPs."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..draw import Draw
from ..spec import Spec, core, deepseek, full


def gated(draw: Draw, M: int | None, d: int, B: int | None = None) -> dict[str, Any]:
    return {"x": gate_and_up(draw, d, M, B)}


def gate_and_up(draw: Draw, d: int, M: int | None, B: int | None = None) -> Tensor:
    """x [M, 2·d], or [B, M, 2·d], or [2·d]."""
    x = draw.values(*(n for n in (B, M, 2 * d) if n is not None))
    if draw.regime == "negative":  # where 1 + erf and 1 + tanh cancel, and e⁻ᵃ is large; beyond −88 float32 has none
        x[..., :d] = -(x[..., :d].abs() * 8).clamp(max=60)
    if draw.regime == "one_sided":  # gates beyond which the activation is 0 or the gate itself
        x[..., :d] = x[..., :d].sign() * 60
    if draw.regime == "nonfinite":
        flat = x.view(-1, 2 * d)
        flat[0, 0], flat[1, 1], flat[2, 2] = math.nan, math.inf, -math.inf
        flat[3, d + 3], flat[4, d + 4], flat[5, d + 5] = math.nan, math.inf, -math.inf
        flat[6], flat[7] = math.nan, math.inf
    return x


SHAPES = (
    core(M=17, d=352),
    core(M=1, d=352),
    core(regime="b24_empty", M=0, d=352),
    core(M=33, d=11),
    core(M=300, d=1),
    core(B=3, M=5, d=100),
    core(M=8, d=2048, dtypes=("bfloat16",)),
    core(M=None, d=352),
    deepseek(M=17, d=1408),  # V2-Lite's experts
    deepseek(M=5, d=2816),  # its two shared ones
    deepseek(M=3, d=10944),  # its dense layer
    deepseek(M=17, d=1536),  # V2
    deepseek(M=3, d=12288),
    deepseek(M=17, d=2048),  # V3
    deepseek(M=3, d=18432),
    full(M=65535, d=32, dtypes=("bfloat16",)),
    full(M=65537, d=32, dtypes=("bfloat16",)),
)
REGIMES = ("tiny", "shifted", "saturating", "negative", "one_sided", "nonfinite")

SPECS = (
    Spec("silu_and_mul", gated, SHAPES, regimes=REGIMES, rows=("x",)),
    Spec("gelu_and_mul", gated, SHAPES, regimes=REGIMES, rows=("x",)),
    Spec("gelu_tanh_and_mul", gated, SHAPES, regimes=REGIMES, rows=("x",)),
)
