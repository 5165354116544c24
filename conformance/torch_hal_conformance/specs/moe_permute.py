"""Bringing a mixture-of-experts' tokens into the order of their experts, and back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_hal.check import ceil_div
from torch_hal.formats import BLOCK, SCALE_LAYOUTS

from .. import draw_fp8
from ..draw import Draw
from ..draw_experts import ID_REGIMES, INDEX, expert_ids
from ..spec import Spec, core, deepseek, full
from ..verdicts_permute import aligned, padding_rows, scattered, scattered_fp8

BF16 = ("bfloat16",)
FN = ("float8_e4m3fn",)
KINDS = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}


def align(draw: Draw, T: int, K: int, E: int, block: int) -> dict[str, Any]:
    return {"topk_ids": expert_ids(draw, T, K, E, draw.dtype), "num_experts": E, "block_size": block}


def scatter(draw: Draw, T: int, K: int, E: int, D: int, align: int, ids: str = "int32") -> dict[str, Any]:
    topk_ids = expert_ids(draw, T, K, E, INDEX[ids])
    x = draw.values(T, D)
    if draw.regime == "specials":
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-40, 6e-8]).to(draw.dtype)
        x[:, ::3] = odd[draw.integers(0, len(odd), *x[:, ::3].shape)]
    x[_unsent(topk_ids, E)] = math.nan
    return {"x": x, "topk_ids": topk_ids, "num_experts": E, "alignment": align}


def _unsent(topk_ids: Tensor, experts: int) -> Tensor:
    """Tokens that go to no expert here."""
    return ((topk_ids < 0) | (topk_ids >= experts)).all(-1)


def scatter_fp8(
    draw: Draw, T: int, K: int, E: int, D: int, align: int,
    ids: str = "int32", layout: str = "row_f32", out: str = "row_f32",
) -> dict[str, Any]:  # fmt: skip
    """Bytes of any kind, NaN among them. What is to be stored as exponents are powers of two, but for one scale."""
    codes = draw.integers(0, 256, T, D).to(torch.uint8).view(draw.dtype)
    scales = draw_fp8.scales(draw, T, ceil_div(D, BLOCK))
    if SCALE_LAYOUTS[out].power_of_two or SCALE_LAYOUTS[layout].power_of_two:
        scales = torch.exp2(draw.integers(-20, 20, *scales.shape).float())
        if draw.regime == "no_power" and layout == "row_f32":
            scales[1::3, -1] *= 1.5
    return {
        "x": codes,
        "x_scale": SCALE_LAYOUTS[layout].pack(scales),
        "topk_ids": expert_ids(draw, T, K, E, INDEX[ids]),
        "num_experts": E,
        "alignment": align,
        "x_scale_layout": layout,
        "scale_layout": out,
    }


def gather(draw: Draw, T: int, K: int, D: int, M: int) -> dict[str, Any]:
    """Every row at most once (unless repeated), some assignments nowhere; what nobody reads is NaN."""
    index = draw.permutation(max(M, T * K), torch.int32)[: T * K].view(T, K)
    index = torch.where(draw.uniform(0, 1, T, K) < 0.2, -1, index)
    index[index >= M] = -1
    if T > 2:
        index[2] = -1
    if draw.regime == "repeated":
        index[::2] = index[:1]
    if draw.regime == "b32_sentinels":
        info = torch.iinfo(torch.int32)
        outside = torch.tensor([-1, M, -M, M + 1, -2, info.max, info.min], dtype=torch.int32)
        index = torch.where(index < 0, outside[draw.integers(0, len(outside), T, K)], index)
    if draw.regime == "nobody":
        index[:] = -1
    valid = (index >= 0) & (index < M)
    rows = draw.values(M, D)
    rows[~torch.isin(torch.arange(M), index[valid])] = math.nan
    if draw.regime == "nan_row" and M:
        rows[index[valid][0].long(), 1] = math.nan
    weights = draw.uniform(0.1, 1, T, K).masked_fill(~valid, math.nan)
    return {"rows": rows, "output_index": index, "topk_weights": weights}


ALIGN = (
    core(T=17, K=4, E=8, block=16),
    core(T=1, K=4, E=8, block=16),
    core(T=17, K=4, E=8, block=1),
    core(T=17, K=3, E=8, block=5),
    core(T=90, K=2, E=3, block=64),
    core(T=40, K=8, E=256, block=16),
    core(T=3, K=8, E=300, block=128),
    core(T=9, K=1, E=1, block=16),
    core(T=33, K=8, E=1500, block=4),
    core(regime="one_expert", T=70, K=4, E=8, block=16),
    core(regime="b24_empty", T=0, K=4, E=8, block=16),
    core(regime="b24_empty", T=5, K=4, E=0, block=16),
    deepseek(T=64, K=6, E=64, block=64),
    deepseek(T=64, K=6, E=160, block=64),
    deepseek(T=128, K=8, E=256, block=128),
    deepseek(T=4096, K=8, E=257, block=64),  # V3 with its shared expert among the others
    full(T=65537, K=8, E=256, block=128),
)
SCATTER = (
    core(T=17, K=4, E=6, D=72, align=16),
    core(T=17, K=4, E=6, D=72, align=16, ids="int64"),
    core(regime="b32_sentinels", T=17, K=4, E=6, D=72, align=16, ids="int64", dtypes=BF16),
    core(T=17, K=4, E=6, D=72, align=128, dtypes=BF16),
    core(T=1, K=4, E=6, D=72, align=16),
    core(T=33, K=2, E=40, D=7, align=1, dtypes=BF16),
    core(T=9, K=3, E=5, D=33, align=3, dtypes=BF16),
    core(T=70, K=1, E=1, D=16, align=16, dtypes=BF16),
    core(regime="one_expert", T=70, K=2, E=6, D=16, align=16, dtypes=BF16),
    core(regime="b24_empty", T=0, K=4, E=6, D=72, align=16),
    core(regime="b24_empty", T=5, K=4, E=0, D=72, align=16),
    deepseek(T=17, K=6, E=8, D=2048, align=128, dtypes=BF16),  # V2-Lite, on eight ranks
    deepseek(T=17, K=6, E=20, D=5120, align=128, dtypes=BF16),
    deepseek(T=17, K=8, E=8, D=7168, align=128, dtypes=BF16),  # V3, on thirty-two ranks
    full(T=65537, K=2, E=8, D=16, align=128, dtypes=BF16),
)
SCATTER_FP8 = (
    core(T=17, K=4, E=6, D=640, align=16),
    *(
        core(T=17, K=4, E=6, D=640, align=16, layout=layout, out=out, dtypes=FN)
        for layout, out in (
            ("row_f32", "mn_f32"),
            ("row_f32", "mn_f32_tma"),
            ("mn_f32", "row_f32"),
            ("mn_f32_tma", "mn_f32_tma"),
            ("row_f32", "mn_ue8m0"),
            ("mn_ue8m0", "mn_ue8m0"),
            ("mn_ue8m0", "row_f32"),
        )
    ),
    core(regime="no_power", T=17, K=4, E=6, D=640, align=16, layout="row_f32", out="mn_ue8m0", dtypes=FN),
    core(regime="b27_scales", T=17, K=4, E=6, D=640, align=16, layout="mn_f32_tma", out="mn_f32", dtypes=FN),
    core(regime="b32_sentinels", T=17, K=4, E=6, D=640, align=16, ids="int64", dtypes=FN),
    core(T=17, K=4, E=6, D=200, align=128, ids="int64", out="mn_f32_tma", dtypes=FN),
    core(T=1, K=4, E=6, D=640, align=16, dtypes=FN),
    core(T=9, K=3, E=5, D=33, align=3, out="mn_f32_tma", dtypes=FN),
    core(T=70, K=1, E=3, D=128, align=16, dtypes=FN),
    core(regime="b24_empty", T=0, K=4, E=6, D=640, align=16),
    core(regime="b24_empty", T=0, K=4, E=6, D=640, align=16, layout="mn_ue8m0", out="mn_ue8m0", dtypes=FN),
    core(regime="b24_empty", T=5, K=4, E=0, D=640, align=16, dtypes=FN),
    deepseek(T=17, K=6, E=8, D=2048, align=128, out="mn_f32_tma", dtypes=FN),
    deepseek(T=17, K=8, E=8, D=7168, align=128, out="mn_ue8m0", dtypes=FN),
    full(T=65537, K=2, E=8, D=128, align=128, out="mn_f32_tma", dtypes=FN),
    # 33 rows, which columns are padded from
    core(T=9, K=3, E=4, D=640, align=3, out="mn_f32_tma", dtypes=FN),
    core(T=9, K=3, E=4, D=640, align=3, layout="mn_ue8m0", out="mn_ue8m0", dtypes=FN),
)
GATHER = (
    core(T=17, K=4, D=72, M=128),
    core(T=1, K=4, D=72, M=128),
    core(T=17, K=8, D=33, M=200),
    core(T=70, K=1, D=24, M=40),
    core(regime="b24_empty", T=0, K=4, D=72, M=128),
    core(regime="b24_empty", T=5, K=4, D=72, M=0),
    core(regime="b24_empty", T=5, K=0, D=72, M=8),
    deepseek(T=17, K=6, D=2048, M=384),
    deepseek(T=17, K=6, D=5120, M=256, dtypes=BF16),
    deepseek(T=17, K=8, D=7168, M=256, dtypes=BF16),
    full(T=65537, K=2, D=16, M=140000, dtypes=BF16),
)
NOBODY = frozenset({"nobody"})

SPECS = (
    Spec(
        "moe_align_block_size",
        align,
        ALIGN,
        dtypes=("int32", "int64"),
        regimes=ID_REGIMES,
        structural=NOBODY,
        verdict=aligned,
    ),
    Spec(
        "ep_scatter",
        scatter,
        SCATTER,
        regimes=(*ID_REGIMES, "specials"),
        structural=NOBODY,
        verdict=scattered,
        unwritten=padding_rows,
    ),
    Spec(
        "ep_scatter_fp8",
        scatter_fp8,
        SCATTER_FP8,
        dtypes=("float8_e4m3fn", "float8_e4m3fnuz"),
        regimes=(*ID_REGIMES, "b27_scales"),
        fixed=frozenset({"x_scale"}),
        structural=NOBODY,
        verdict=scattered_fp8,
        unwritten=padding_rows,
    ),
    Spec(
        "ep_gather",
        gather,
        GATHER,
        regimes=("shifted", "zeros", "b32_sentinels", "repeated", "nobody", "nan_row"),
        rows=("output_index", "topk_weights"),
        structural=frozenset({"zeros", "nobody"}),
    ),
)
