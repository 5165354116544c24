"""Grouped matrix multiplications: rows of many experts, each times its own expert's weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import draw_fp8
from ..draw import Draw
from ..draw_experts import fills, hide_unchosen, runs
from ..spec import Spec, core, deepseek, full
from ..verdicts_rows import contiguous_rows, masked_rows, padding_rows, rows_beyond

BF16 = ("bfloat16",)


def contiguous(draw: Draw, runs_of: int, E: int, N: int, K: int, align: int) -> dict[str, Any]:
    """``runs_of`` runs of ``align`` rows."""
    m_indices = runs(draw, E, runs_of, align)
    x = draw.values(runs_of * align, K)
    x[m_indices < 0] = math.nan
    weight = hide_unchosen(draw.normal(E, N, K, scale=max(K, 1) ** -0.5), m_indices)
    return {"x": x, "weight": weight, "m_indices": m_indices, "alignment": align}


def masked(draw: Draw, E: int, M: int, N: int, K: int, expected: int = 4) -> dict[str, Any]:
    masked_m = fills(draw, E, M)
    x = draw.values(E, M, K)
    x[_open(masked_m, M)] = math.nan
    weight = draw.normal(E, N, K, scale=max(K, 1) ** -0.5)
    weight[masked_m == 0] = math.nan
    return {"x": x, "weight": weight, "masked_m": masked_m, "expected_m": expected}


def fp8_contiguous(
    draw: Draw, runs_of: int, E: int, N: int, K: int, align: int, layout: str = "row_f32", fp8: str = "e4m3fn"
) -> dict[str, Any]:
    m_indices = runs(draw, E, runs_of, align)
    operands = _operands(draw, (runs_of * align, K), (E, N, K), m_indices < 0, layout, fp8)
    hide_unchosen(operands["weight"], m_indices)
    hide_unchosen(operands["weight_scale"], m_indices)
    return {**operands, "m_indices": m_indices, "alignment": align}


def fp8_masked(
    draw: Draw, E: int, M: int, N: int, K: int, expected: int = 4, layout: str = "row_f32", fp8: str = "e4m3fn"
) -> dict[str, Any]:
    masked_m = fills(draw, E, M)
    operands = _operands(draw, (E, M, K), (E, N, K), _open(masked_m, M), layout, fp8)
    filled = torch.nonzero(masked_m)[:, 0]
    hide_unchosen(operands["weight"], filled)
    hide_unchosen(operands["weight_scale"], filled)
    return {**operands, "masked_m": masked_m, "expected_m": expected}


def _operands(
    draw: Draw, x: tuple[int, ...], weight: tuple[int, ...], open_rows: Tensor, layout: str, fp8: str
) -> dict[str, Any]:
    """Codes and scales, NaN in rows that are padding: 0xFF, packed, is an exponent of NaN."""
    fp8 = draw_fp8.kind(draw, fp8)
    rows = draw_fp8.rows(draw, *x, fp8=fp8, layout=layout)
    draw_fp8.bytes_of(rows["x"])[open_rows] = draw_fp8.nan_byte(fp8)
    rows["x_scale"][open_rows] = -1 if layout == "mn_ue8m0" else math.nan
    return {
        **rows,
        **draw_fp8.weights(draw, *weight, fp8=fp8),
        "out_dtype": draw.dtype,
        "x_scale_layout": layout,
    }


def _open(masked_m: Tensor, rows: int) -> Tensor:
    return torch.arange(rows) >= masked_m[:, None]


CONTIGUOUS = (
    core(runs_of=3, E=6, N=136, K=320, align=128),
    core(runs_of=1, E=6, N=136, K=320, align=128),
    core(runs_of=9, E=4, N=33, K=71, align=16),
    core(runs_of=17, E=5, N=48, K=64, align=1),
    core(runs_of=7, E=1, N=48, K=48, align=4),
    core(regime="b24_empty", runs_of=0, E=6, N=136, K=320, align=128),
    core(regime="b24_empty", runs_of=0, E=0, N=136, K=320, align=128),
    deepseek(runs_of=3, E=3, N=704, K=2048, align=128, dtypes=BF16),  # V2-Lite: gate and up on four ranks
    deepseek(runs_of=2, E=2, N=512, K=7168, align=128, dtypes=BF16),  # V3: gate and up on eight ranks
    deepseek(runs_of=2, E=2, N=7168, K=256, align=128, dtypes=BF16),  # and down
    full(runs_of=512, E=8, N=24, K=64, align=128, dtypes=BF16),
)
MASKED = (
    core(E=5, M=24, N=136, K=320),
    core(E=1, M=17, N=136, K=320),
    core(E=6, M=1, N=136, K=320),
    core(E=4, M=24, N=33, K=71, expected=0),
    core(E=7, M=40, N=48, K=48, expected=1000),
    core(regime="b24_empty", E=5, M=0, N=136, K=320),
    core(regime="b24_empty", E=0, M=24, N=136, K=320),
    deepseek(E=4, M=16, N=704, K=2048, dtypes=BF16),
    deepseek(E=3, M=16, N=512, K=7168, dtypes=BF16),
    deepseek(E=3, M=16, N=7168, K=256, dtypes=BF16),
    full(E=3, M=21846, N=24, K=64, dtypes=BF16),
)
FP8_CONTIGUOUS = (
    core(runs_of=3, E=3, N=256, K=256, align=128),
    *(
        core(
            regime=regime, runs_of=3, E=3, N=128, K=640, align=128, layout=layout, dtypes=BF16
        )  # words of exponents: two
        for layout in ("mn_f32", "mn_f32_tma", "mn_ue8m0")
        for regime in ("unit", "b27_scales")
    ),
    core(runs_of=5, E=4, N=200, K=704, align=8),
    core(regime="b27_scales", runs_of=5, E=4, N=200, K=704, align=8, dtypes=BF16),
    core(runs_of=5, E=3, N=200, K=704, align=5, layout="mn_ue8m0", dtypes=BF16),
    core(runs_of=9, E=3, N=24, K=80, align=1, layout="mn_f32_tma", dtypes=BF16),
    core(runs_of=1, E=3, N=256, K=256, align=128, dtypes=BF16),
    core(runs_of=3, E=1, N=24, K=128, align=16, dtypes=BF16),
    core(regime="b24_empty", runs_of=0, E=4, N=256, K=640, align=128),
    core(regime="b24_empty", runs_of=0, E=0, N=256, K=640, align=128, layout="mn_f32_tma", dtypes=BF16),
    deepseek(runs_of=2, E=3, N=704, K=2048, align=128, layout="mn_f32_tma", dtypes=BF16),
    deepseek(runs_of=2, E=2, N=512, K=7168, align=128, layout="mn_ue8m0", dtypes=BF16),
    deepseek(runs_of=2, E=2, N=7168, K=256, align=128, dtypes=BF16),
    full(runs_of=512, E=8, N=24, K=128, align=128, dtypes=BF16),
)
FP8_MASKED = (
    core(E=4, M=8, N=256, K=256),
    *(
        core(regime=regime, E=4, M=8, N=128, K=640, layout=layout, dtypes=BF16)  # words of exponents: two
        for layout in ("mn_f32", "mn_f32_tma", "mn_ue8m0")
        for regime in ("unit", "b27_scales")
    ),
    core(E=4, M=7, N=200, K=704),
    core(regime="b27_scales", E=4, M=7, N=200, K=704, dtypes=BF16),
    core(E=4, M=7, N=200, K=704, layout="mn_f32_tma", dtypes=BF16),  # each expert's columns are padded
    core(E=4, M=7, N=200, K=704, layout="mn_ue8m0", dtypes=BF16),
    core(E=6, M=1, N=128, K=256, dtypes=BF16),
    core(E=1, M=9, N=24, K=80, expected=0, layout="mn_f32_tma", dtypes=BF16),
    core(E=4, M=40, N=128, K=128, expected=1000, dtypes=BF16),
    core(regime="b24_empty", E=5, M=0, N=256, K=640),
    core(regime="b24_empty", E=0, M=8, N=256, K=640, dtypes=BF16),
    deepseek(E=4, M=16, N=704, K=2048, layout="mn_f32_tma", dtypes=BF16),
    deepseek(E=3, M=16, N=512, K=7168, layout="mn_ue8m0", dtypes=BF16),
    deepseek(E=3, M=16, N=7168, K=256, dtypes=BF16),
    full(E=3, M=21846, N=24, K=128, dtypes=BF16),
)
REGIMES = ("tiny", "shifted", "zeros", "nobody")
STRUCTURAL = frozenset({"zeros", "nobody"})
X_SCALE = frozenset({"x_scale"})
CODES = (*draw_fp8.CODES_REGIMES, "nobody")

SPECS = (
    Spec(
        "grouped_linear_contiguous",
        contiguous,
        CONTIGUOUS,
        regimes=(*REGIMES, "b32_sentinels", "unsorted"),
        structural=STRUCTURAL,
        verdict=contiguous_rows,
        unwritten=padding_rows,
    ),
    Spec(
        "grouped_linear_masked",
        masked,
        MASKED,
        regimes=(*REGIMES, "full"),
        structural=STRUCTURAL,
        verdict=masked_rows,
        unwritten=rows_beyond,
    ),
    Spec(
        "fp8_grouped_linear_contiguous",
        fp8_contiguous,
        FP8_CONTIGUOUS,
        regimes=(*CODES, "b32_sentinels", "unsorted"),
        fixed=X_SCALE,
        structural=STRUCTURAL,
        verdict=contiguous_rows,
        unwritten=padding_rows,
    ),
    Spec(
        "fp8_grouped_linear_masked",
        fp8_masked,
        FP8_MASKED,
        regimes=(*CODES, "full"),
        fixed=X_SCALE,
        structural=STRUCTURAL,
        verdict=masked_rows,
        unwritten=rows_beyond,
    ),
)
