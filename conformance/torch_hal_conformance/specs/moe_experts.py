"""Mixture-of-experts computation: each token through its experts, and the sums that bring them together."""

from __future__ import annotations

import math
from typing import Any

from ..draw import Draw
from ..draw_experts import INDEX, expert_ids, hide_strangers, hide_unchosen
from ..spec import Spec, core, deepseek, full

BF16 = ("bfloat16",)


def fused_experts(draw: Draw, T: int, E: int, D: int, I: int, K: int, ids: str = "int32") -> dict[str, Any]:  # noqa: E741
    topk_ids = expert_ids(draw, T, K, E, INDEX[ids])
    x = draw.values(T, D)
    if draw.regime == "b31_padding":  # rows that a captured graph has to spare
        topk_ids[::3] = -1
        x[::3] = math.nan
    if draw.regime == "nan_row":
        x[3, 1] = math.nan
    w13, w2 = draw.normal(E, 2 * I, D, scale=D**-0.5), draw.normal(E, D, I, scale=I**-0.5)
    weights = draw.uniform(0.1, 1, T, K)
    if draw.regime == "cancelling":  # two experts' outputs are large, their sum is small
        topk_ids[:, 0] = 2 * draw.integers(0, E // 2 - 1, T)
        topk_ids[:, 1], topk_ids[:, 2:], weights[:] = topk_ids[:, 0] + 1, -1, 0.5
        x, w13, w2 = x.abs(), w13.abs(), w2.abs()
        w13[1::2] = w13[::2]
        w2[1::2] = -w2[::2] * draw.normal(E // 2, D, I, scale=0.02, shift=1.0)
    return {
        "x": x,
        "w13": hide_unchosen(w13, topk_ids),
        "w2": hide_unchosen(w2, topk_ids),
        "topk_weights": hide_strangers(weights, topk_ids, E),
        "topk_ids": topk_ids,
    }


def moe_sum_reduce(draw: Draw, T: int, K: int, D: int, scale: str = "2.5") -> dict[str, Any]:
    x = draw.values(T, K, D)
    if draw.regime == "nonfinite":
        x[1, 0, 2], x[3, -1, 5] = math.nan, math.inf
    return {"x": x, "scale": float(scale)}


def shared_expert_add(draw: Draw, T: int, D: int, alpha: str = "0.4") -> dict[str, Any]:
    routed, shared = draw.values(T, D), draw.values(T, D)
    if draw.regime == "cancelling":
        shared[:, ::2] = (-routed.double() / float(alpha)).to(draw.dtype)[:, ::2]
    if draw.regime == "nonfinite":
        routed[1, 2], shared[3, 5] = math.nan, math.inf
    return {"routed": routed, "shared": shared, "alpha": float(alpha)}


EXPERTS = (
    core(T=17, E=8, D=96, I=48, K=3),
    core(T=17, E=8, D=96, I=48, K=3, ids="int64"),
    core(regime="b32_sentinels", T=17, E=8, D=96, I=48, K=3, ids="int64"),
    core(T=1, E=8, D=96, I=48, K=3),
    core(T=2, E=8, D=96, I=48, K=8),
    core(T=70, E=4, D=64, I=64, K=2),
    core(T=128, E=256, D=32, I=16, K=8, dtypes=BF16),  # as many experts as V3 has
    core(T=9, E=1, D=96, I=48, K=1),
    core(T=9, E=5, D=71, I=33, K=1),
    core(regime="b24_empty", T=0, E=8, D=96, I=48, K=3),
    core(regime="b24_empty", T=5, E=0, D=96, I=48, K=3),
    deepseek(T=7, E=8, D=2048, I=176, K=6, dtypes=BF16),  # V2-Lite: eight experts, on eight ranks
    deepseek(T=3, E=4, D=5120, I=192, K=3, dtypes=BF16),  # V2
    deepseek(T=3, E=4, D=7168, I=128, K=3, dtypes=BF16),  # V3, on sixteen ranks
    deepseek(T=2, E=2, D=2048, I=1408, K=2, dtypes=BF16),
    full(T=65537, E=4, D=32, I=16, K=2, dtypes=BF16),
)
SUM = (
    core(T=17, K=6, D=200),  # 200 = 12 · 16 + 8: a tail for wide vectors
    core(T=1, K=6, D=200),
    core(T=300, K=8, D=24),
    core(T=5, K=1, D=200),
    core(T=5, K=1, D=200, scale="1"),
    core(T=5, K=2, D=200, scale="1"),
    core(T=5, K=9, D=71, scale="16"),
    core(regime="b24_empty", T=0, K=6, D=200),
    core(regime="b24_empty", T=5, K=0, D=200),
    deepseek(T=17, K=6, D=2048),
    deepseek(T=17, K=6, D=5120, scale="16"),
    deepseek(T=17, K=8, D=7168),
    full(T=65537, K=8, D=24, dtypes=BF16),
)
SHARED = (
    core(T=17, D=200),
    core(T=1, D=200),
    core(T=5, D=71, alpha="1"),
    core(T=300, D=24),
    core(T=5, D=200, alpha="0.0625"),
    core(regime="b24_empty", T=0, D=200),
    deepseek(T=17, D=2048),
    deepseek(T=17, D=5120, alpha="0.0625"),
    deepseek(T=17, D=7168),
    full(T=65537, D=64, dtypes=BF16),
)
REGIMES = (
    "shifted", "zeros", "cancelling", "b31_padding", "b32_sentinels", "one_expert", "nobody", "repeats", "nan_row",
)  # fmt: skip

SPECS = (
    Spec(
        "fused_experts",
        fused_experts,
        EXPERTS,
        regimes=REGIMES,
        rows=("x", "topk_weights", "topk_ids"),
        structural=frozenset({"zeros", "nobody"}),
    ),
    Spec(
        "moe_sum_reduce",
        moe_sum_reduce,
        SUM,
        regimes=("tiny", "shifted", "zeros", "nonfinite"),
        rows=("x",),
        structural=frozenset({"zeros"}),
    ),
    Spec(
        "shared_expert_add",
        shared_expert_add,
        SHARED,
        regimes=("tiny", "zeros", "cancelling", "nonfinite"),
        rows=("routed", "shared"),
        structural=frozenset({"zeros"}),
    ),
)
