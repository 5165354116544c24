"""Experts on FP8 weights, of random values and of such as quantisation leaves as they are."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_hal.check import ceil_div
from torch_hal.formats import BLOCK, FP8_KINDS, to_fp8

from .. import draw_fp8
from ..draw import Draw
from ..draw_experts import INDEX, expert_ids, hide_strangers, hide_unchosen
from ..spec import FLOATS, Spec, core, deepseek, full
from ..verdicts_experts import fp8_experts

BF16 = ("bfloat16",)
OTHERS = ("float32", "float16")
ANCHOR = 5  # the column of each group that gates read, and that has its largest value
EXACT = ("exact", "b29_fnuz")


def experts(
    draw: Draw, T: int, E: int, D: int, I: int, K: int,  # noqa: E741
    ids: str = "int32", fp8: str = "e4m3fn", ue8m0: bool = False,
) -> dict[str, Any]:  # fmt: skip
    topk_ids = expert_ids(draw, T, K, E, INDEX[ids])
    make = _exact if draw.regime in EXACT else _random
    values = make(draw, T, E, D, I, draw_fp8.kind(draw, fp8), ue8m0)
    x = values["x"]
    if draw.regime == "b31_padding":  # rows that a captured graph has to spare
        topk_ids[::3] = -1
        x[::3] = math.nan
    if draw.regime == "nan_row":
        x[3, 1] = math.nan
    return {
        **{name: hide_unchosen(value, topk_ids) if name[0] == "w" else value for name, value in values.items()},
        "topk_weights": hide_strangers(draw.uniform(0.1, 1, T, K), topk_ids, E),
        "topk_ids": topk_ids,
        "ue8m0": ue8m0,
    }


def _random(draw: Draw, T: int, E: int, D: int, I: int, fp8: str, ue8m0: bool) -> dict[str, Any]:  # noqa: E741
    """Weights whose codes use their range, and scales that give outputs of the size of x."""
    blocks = ceil_div(D, BLOCK), ceil_div(I, BLOCK)
    w13, w2 = draw.codes(E, 2 * I, D, fp8=fp8), draw.codes(E, D, I, fp8=fp8)
    if draw.regime == "b28_zero_groups":
        draw_fp8.bytes_of(w13)[:, :BLOCK, :BLOCK] = 0
        draw_fp8.bytes_of(w2)[:, :BLOCK, -BLOCK:] = 0
    return {
        "x": draw.values(T, D),
        "w13": w13,
        "w13_scale": draw_fp8.scales(draw, E, 2 * blocks[1], blocks[0]) * 5 * D**-0.5,
        "w2": w2,
        "w2_scale": draw_fp8.scales(draw, E, blocks[0], blocks[1]) * 5 * max(I, 1) ** -0.5,
    }


def _exact(draw: Draw, T: int, E: int, D: int, I: int, fp8: str, ue8m0: bool) -> dict[str, Any]:  # noqa: E741
    """Values that quantisation and silu leave as they are, so that nothing hides a wrong scale, block or expert.

    A gate reads one large value of x, 2^n (or 7·2^n, which 448 is too, where scales are no powers of two), beyond 50:
    silu(gate) is gate. Up reads one or two small ones of x. All scales of weights are powers of two, neighbours'
    different, and all products small integers times powers of two.
    """
    groups, parts = ceil_div(D, BLOCK), ceil_div(I, BLOCK)
    row, group, unit = torch.arange(I), torch.arange(groups), torch.arange(E)[:, None, None]
    largest, picks = (8, 2) if ue8m0 else (7, 1)
    x = 2.0 ** draw.integers(0, 2, T, D).float() * draw.integers(0, 2, T, D).mul(2).sub(1)
    x[:, ANCHOR::BLOCK] = largest
    token = torch.arange(T)[:, None]
    powers = (token + group) % 2 + token // 2 % 2 if ue8m0 else (token + 2 * group) % 3
    x = x * 2.0 ** powers.repeat_interleave(BLOCK, 1)[:, :D]
    gate, up = torch.zeros(E, I, D), torch.zeros(E, I, D)
    gate[:, row, row % groups * BLOCK + ANCHOR] = 8
    for pick in range(picks):
        column = draw.integers(0, min(BLOCK, D - (groups - 1) * BLOCK) - 1, E, I).long()
        column = (row + 1 + pick) % groups * BLOCK + column + (column >= ANCHOR)
        up.scatter_(2, column[..., None], 1.0)
    rows_of = torch.arange(2 * parts)[:, None]
    w13_scale = 2.0 ** ((unit + 2 * rows_of) % 3 + (unit + rows_of + group) % 2)
    w13_scale[:, parts:] /= 256  # so that what a kernel may hold in float16 fits
    w2_scale = 2.0 ** ((unit + group[:, None] + 2 * torch.arange(parts)) % 3 - 6)
    kind = FP8_KINDS[fp8]
    return {
        "x": x.to(draw.dtype),
        "w13": to_fp8(torch.cat([gate, up], 1), kind),
        "w13_scale": w13_scale,
        "w2": to_fp8(draw.integers(-3, 4, E, D, I).float(), kind),
        "w2_scale": w2_scale,
    }


SHAPES = (
    core(T=17, E=4, D=256, I=256, K=2),
    core(T=17, E=4, D=256, I=256, K=2, ue8m0=True),
    core(regime="exact", T=17, E=4, D=256, I=256, K=2, ue8m0=True, dtypes=FLOATS),
    core(regime="b27_scales", T=17, E=4, D=256, I=256, K=2, ue8m0=True),
    core(T=17, E=4, D=256, I=256, K=2, ids="int64", dtypes=OTHERS),
    core(regime="b32_sentinels", T=17, E=4, D=256, I=256, K=2, ids="int64"),
    core(T=17, E=5, D=200, I=160, K=3),
    core(regime="exact", T=17, E=5, D=200, I=160, K=3, dtypes=FLOATS),
    core(regime="exact", T=17, E=5, D=200, I=160, K=3, ue8m0=True),
    core(regime="exact", T=5, E=3, D=640, I=128, K=2),
    core(regime="exact", T=5, E=3, D=128, I=320, K=2),
    core(T=1, E=5, D=128, I=128, K=3),
    core(regime="exact", T=2, E=5, D=256, I=128, K=5),
    core(T=9, E=1, D=256, I=128, K=1),
    core(regime="exact", T=70, E=4, D=128, I=128, K=2),
    core(T=9, E=3, D=72, I=40, K=1),
    core(regime="b24_empty", T=0, E=4, D=256, I=256, K=2),
    core(regime="b24_empty", T=5, E=0, D=256, I=256, K=2),
    deepseek(T=3, E=4, D=7168, I=128, K=3),  # V3, on sixteen ranks
    deepseek(regime="exact", T=3, E=3, D=7168, I=128, K=3, ue8m0=True),
    deepseek(regime="exact", T=3, E=2, D=512, I=2048, K=2),
    deepseek(T=3, E=3, D=2048, I=704, K=2),  # V2-Lite, on two ranks: half a block
    full(T=65537, E=4, D=32, I=32, K=1),
)
REGIMES = (
    *EXACT, "saturating", "b27_scales", "b28_zero_groups", "b31_padding", "b32_sentinels",
    "one_expert", "nobody", "repeats", "nan_row",
)  # fmt: skip

SPECS = (
    Spec(
        "fused_experts_fp8_block",
        experts,
        SHAPES,
        dtypes=BF16,
        regimes=REGIMES,
        rows=("x", "topk_weights", "topk_ids"),
        structural=frozenset({"nobody"}),
        verdict=fp8_experts,
    ),
)
