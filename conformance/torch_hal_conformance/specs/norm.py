"""Normalisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import Spec, core, deepseek, full


def rms_norm(
    draw: Draw, M: int | None, D: int, B: int | None = None, weight: str = "", eps: str = "1e-6"
) -> dict[str, Any]:
    return {"x": rows(draw, D, M, B), "weight": weights(draw, D, weight), "eps": float(eps)}


def fused_add(
    draw: Draw, M: int | None, D: int, B: int | None = None, weight: str = "", eps: str = "1e-6"
) -> dict[str, Any]:
    x, residual = rows(draw, D, M, B), rows(draw, D, M, B)
    return {"x": x, "residual": residual, "weight": weights(draw, D, weight), "eps": float(eps)}


def rows(draw: Draw, D: int, M: int | None, B: int | None = None) -> Tensor:
    """x [M, D], or [B, M, D], or [D]."""
    x: Tensor = draw.values(*(n for n in (B, M, D) if n is not None))
    if draw.regime == "zero_rows":
        x[::3] = 0
    if draw.regime == "nonfinite":
        x[1, 5], x[3, 0], x[3, 7], x[4] = math.nan, math.inf, -math.inf, math.nan
    if draw.regime == "b27_scales":  # beside eps every row's norm is another
        x = x * 0.5 ** torch.arange(x.shape[-2])[:, None]
    return x.to(draw.dtype)


def weights(draw: Draw, D: int, dtype: str = "") -> Tensor:
    """weight [D] in the data's dtype, or as ``dtype`` says."""
    chosen: torch.dtype = getattr(torch, dtype) if dtype else draw.dtype
    return draw.normal(D, shift=1.0, scale=0.2, dtype=chosen)


SHAPES = (
    core(M=17, D=512),
    core(M=1, D=512),
    core(regime="b24_empty", M=0, D=512),
    core(M=3, D=1536),
    core(M=17, D=512, weight="float32", dtypes=("bfloat16", "float16")),
    core(M=23, D=63),
    core(M=300, D=1),
    core(B=3, M=5, D=100),
    core("tiny", M=8, D=512, eps="1e-3"),
    core("tiny", M=4, D=512, eps="1e-5"),
    core(M=None, D=512),
    core(M=2, D=7168, dtypes=("bfloat16",)),
    deepseek(M=33, D=2048),
    deepseek(M=5, D=5120),
    deepseek(M=17, D=7168),
    deepseek(M=1, D=7168),
    full(M=65535, D=64, dtypes=("bfloat16",)),
    full(M=65537, D=64, dtypes=("bfloat16",)),
)
REGIMES = ("tiny", "shifted", "saturating", "zero_rows", "nonfinite")

SPECS = (
    Spec("rms_norm", rms_norm, SHAPES, regimes=REGIMES, rows=("x",)),
    Spec("fused_add_rms_norm", fused_add, SHAPES, regimes=REGIMES, rows=("x", "residual")),
    Spec("fused_add_rms_norm_", fused_add, SHAPES, regimes=REGIMES, rows=("x", "residual")),
)
