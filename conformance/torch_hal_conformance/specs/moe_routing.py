"""Routing: which experts a token goes to, and with which weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import Spec, core, deepseek, full
from ..verdicts_routing import routed

BF16 = ("bfloat16",)
FLOAT32 = ("float32",)
SHIFTS = {"offset": 200.0, "eps": -46.0}  # beyond float32's exp; where weights are about as large as 1e-20
SCALES = {"large": 15.0}


def _logits(draw: Draw, T: int, E: int) -> Tensor:
    x = draw.values(T, E, dtype=torch.float32) * SCALES.get(draw.regime, 1.0) + SHIFTS.get(draw.regime, 0.0)
    if draw.regime == "ties":  # few values, and rows of one alone
        x = draw.integers(0, 3, T, E).float()
        x[::5] = x[::5, :1]
    if draw.regime == "minus_inf":  # experts that are not there: in some rows fewer are than are wanted, in one none
        x = x.masked_fill(draw.uniform(0, 1, T, E) < 0.5, -math.inf)
        x[1::4, 2:-1] = -math.inf
    if draw.regime == "nan_row":
        x[3] = math.nan
    return x.to(draw.dtype)


def softmax(draw: Draw, T: int, E: int, K: int, renorm: bool = False) -> dict[str, Any]:
    x = _logits(draw, T, E)
    if draw.regime == "minus_inf":
        x[2] = -math.inf
    if draw.regime == "nan_row":
        x[5, E // 2] = math.nan
    return {"logits": x, "top_k": K, "renormalize": renorm}


def grouped(
    draw: Draw, T: int, E: int, K: int, G: int, keep: int, renorm: bool = False, scale: str = "16"
) -> dict[str, Any]:
    """In regime "minus_inf" some rows have one expert in each kept group, the last, and then those of no weight."""
    arguments = softmax(draw, T, E, K, renorm)
    if draw.regime == "minus_inf":
        rows, last = arguments["logits"][3::4], torch.arange(E // G - 1, E, E // G)[-keep:]
        rows[:] = -math.inf
        rows[:, last] = draw.normal(len(rows), keep)
    return {**arguments, "num_groups": G, "topk_groups": keep, "scale": float(scale)}


def biased(
    draw: Draw, T: int, E: int, K: int, G: int, keep: int, renorm: bool = True, scale: str = "2.5"
) -> dict[str, Any]:
    """Some biased scores are negative; in regime "b30_masked_groups" all are."""
    bias = draw.normal(E, dtype=torch.float32, scale=0.5, shift=-0.7)
    if draw.regime == "b30_masked_groups":
        bias = bias - 3
    if draw.regime == "ties":
        bias = -draw.integers(1, 3, E) / 2
    if draw.regime == "fine_bias":  # bfloat16 could not tell most of them apart
        bias = draw.normal(E, dtype=torch.float32, scale=0.01, shift=8.0)
    return {
        "logits": _logits(draw, T, E) * (0.01 if draw.regime == "fine_bias" else 1.0),
        "bias": bias,
        "top_k": K,
        "num_groups": G,
        "topk_groups": keep,
        "renormalize": renorm,
        "scale": float(scale),
    }


SOFTMAX = (
    core(T=47, E=64, K=6),
    core(T=47, E=64, K=6, renorm=True),
    core(T=1, E=64, K=6),
    core(T=47, E=128, K=8, renorm=True, dtypes=FLOAT32),
    core(T=47, E=72, K=7, dtypes=BF16),
    core(regime="ties", T=47, E=37, K=5, dtypes=BF16),
    core(T=17, E=60, K=1),
    core(T=5, E=16, K=16, renorm=True, dtypes=FLOAT32),
    core(T=9, E=600, K=6, dtypes=FLOAT32),
    core(regime="single", T=5, E=1, K=1, dtypes=FLOAT32),
    core(regime="b24_empty", T=0, E=64, K=6),
    deepseek(T=128, E=64, K=6),  # V2-Lite
    deepseek(T=64, E=160, K=6),
    deepseek(T=64, E=256, K=8, renorm=True),
    full(T=65537, E=64, K=6, dtypes=BF16),
)
GROUPED = (
    core(T=47, E=64, K=6, G=8, keep=3),
    core(T=47, E=64, K=6, G=8, keep=3, renorm=True, scale="1", dtypes=BF16),
    core(T=47, E=64, K=6, G=8, keep=3, renorm=True, dtypes=FLOAT32),
    core(T=47, E=160, K=6, G=8, keep=3),  # V2
    core(regime="ties", T=47, E=160, K=6, G=8, keep=3, dtypes=BF16),
    core(T=1, E=64, K=6, G=8, keep=3),
    core(T=33, E=36, K=8, G=4, keep=1, dtypes=FLOAT32),
    core(T=33, E=24, K=6, G=3, keep=2, dtypes=BF16),
    core(T=33, E=16, K=4, G=16, keep=4, dtypes=FLOAT32),
    core(T=33, E=64, K=8, G=1, keep=1, dtypes=BF16),
    core(T=33, E=64, K=8, G=8, keep=8, dtypes=FLOAT32),
    core(regime="b24_empty", T=0, E=64, K=6, G=8, keep=3),
    deepseek(T=256, E=160, K=6, G=8, keep=3),
    full(T=65537, E=64, K=6, G=8, keep=3, dtypes=BF16),
)
BIASED = (
    core(T=47, E=64, K=8, G=8, keep=4),
    core(T=47, E=64, K=8, G=8, keep=4, renorm=False, dtypes=BF16),
    core(T=47, E=64, K=8, G=8, keep=4, scale="1", dtypes=FLOAT32),
    core(T=47, E=256, K=8, G=8, keep=4),  # V3
    core(regime="ties", T=47, E=256, K=8, G=8, keep=4, dtypes=BF16),
    core(regime="b30_masked_groups", T=47, E=256, K=8, G=8, keep=4, dtypes=FLOAT32),
    core(T=1, E=64, K=8, G=8, keep=4),
    core(T=33, E=16, K=4, G=8, keep=2, dtypes=FLOAT32),
    core(regime="b30_masked_groups", T=33, E=32, K=8, G=4, keep=1, dtypes=FLOAT32),
    core(T=33, E=72, K=7, G=3, keep=2, dtypes=BF16),
    core(T=33, E=384, K=8, G=1, keep=1, dtypes=FLOAT32),
    core(T=33, E=64, K=8, G=8, keep=8, dtypes=BF16),
    core(regime="b24_empty", T=0, E=64, K=8, G=8, keep=4),
    deepseek(T=256, E=256, K=8, G=8, keep=4),
    deepseek(T=64, E=256, K=8, G=16, keep=4, dtypes=BF16),
    full(T=65537, E=64, K=8, G=8, keep=4, dtypes=BF16),
)
REGIMES = ("tiny", "shifted", "offset", "large", "ties", "minus_inf", "nan_row")
BIASED_REGIMES = ("tiny", "shifted", "large", "ties", "minus_inf", "nan_row", "b30_masked_groups", "fine_bias", "eps")

SPECS = (
    Spec(
        "topk_softmax",
        softmax,
        SOFTMAX,
        regimes=REGIMES,
        rows=("logits",),
        structural=frozenset({"single"}),
        verdict=routed,
    ),
    Spec("grouped_topk", grouped, GROUPED, regimes=REGIMES, rows=("logits",), verdict=routed),
    Spec("biased_grouped_topk", biased, BIASED, regimes=BIASED_REGIMES, rows=("logits",), verdict=routed),
)
