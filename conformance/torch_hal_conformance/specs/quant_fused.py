"""Activations and norms that end in FP8 codes."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import Shape, Spec, core, deepseek, full
from ..verdicts_quant import in_groups, masked, normed, result_of
from ..verdicts_rows import rows_beyond
from .activation import gate_and_up
from .norm import rows, weights
from .quant import BF16, eps, in_layouts, kind

# As in `quant`; ties are none of a float32 result's.
REGIMES = ("b27_scales", "b28_zero_groups", "b29_fnuz", "saturating", "eps", "own_eps", "nonfinite")


def silu_quant(
    draw: Draw, M: int, d: int, g: int, B: int | None = None,
    layout: str = "row_f32", fp8: str = "e4m3fn", ue8m0: bool = False,
) -> dict[str, Any]:  # fmt: skip
    x = spread(draw, gate_and_up(draw, d, M, B), d, g)
    return {"x": x, "group_size": g, "scale_layout": layout, "ue8m0": ue8m0, **kind(draw, fp8), **eps(draw)}


def masked_silu_quant(
    draw: Draw, E: int, M: int, d: int, g: int, layout: str = "row_f32", fp8: str = "e4m3fn", ue8m0: bool = False
) -> dict[str, Any]:
    """NaN beyond each expert's rows, of which one has none and one all."""
    x = spread(draw, gate_and_up(draw, d, M, E), d, g)
    masked_m = draw.integers(1, max(M, 1) + 1, E).clamp(max=M)
    if draw.regime == "b31_padding":  # experts without tokens all around the one that has some
        masked_m[:2], masked_m[3:] = 0, 0
    elif E > 2:
        masked_m[1], masked_m[2] = 0, M
    x[torch.arange(M) >= masked_m[:, None]] = math.nan
    options = {"group_size": g, "scale_layout": layout, "ue8m0": ue8m0, **kind(draw, fp8), **eps(draw)}
    return {"x": x, "masked_m": masked_m, **options}


def spread(draw: Draw, x: Tensor, d: int, g: int) -> Tensor:
    """Gate and up [..., 2·d] whose product has the regime's scales, in groups of g."""
    if draw.regime == "b28_zero_groups":  # whose zeros lie otherwise in the result
        x = draw.normal(*x.shape)
    up = x[..., d:].reshape(*x.shape[:-1], d // g, g)
    places = torch.arange(up.shape[:-1].numel()).reshape(up.shape[:-1])
    if draw.regime == "b27_scales":
        up = up * torch.exp2(((7 * places) % 23 - 11).float()).unsqueeze(-1)
    if draw.regime == "b28_zero_groups":
        up = torch.where((places % 3 == 1).unsqueeze(-1), 0.0, up)
    if draw.regime == "eps":
        up = torch.where((places % 2 == 0).unsqueeze(-1), up.float() * 2e-11, up)
    return torch.cat((x[..., :d], up.flatten(-2)), -1).to(x.dtype)


def norm_quant(
    draw: Draw, M: int, D: int, g: int, B: int | None = None,
    layout: str = "row_f32", fp8: str = "e4m3fn", ue8m0: bool = False, weight: str = "",
) -> dict[str, Any]:  # fmt: skip
    return {"x": norm_rows(draw, D, M, B), **norm_options(draw, D, g, layout, fp8, ue8m0, weight)}


def add_norm_quant(
    draw: Draw, M: int, D: int, g: int, B: int | None = None,
    layout: str = "row_f32", fp8: str = "e4m3fn", ue8m0: bool = False, weight: str = "",
) -> dict[str, Any]:  # fmt: skip
    x, residual = norm_rows(draw, D, M, B), norm_rows(draw, D, M, B)
    return {"x": x, "residual": residual, **norm_options(draw, D, g, layout, fp8, ue8m0, weight)}


def norm_rows(draw: Draw, D: int, M: int, B: int | None) -> Tensor:
    x = rows(draw, D, M, B)
    if draw.regime == "b29_fnuz":
        x[..., ::7] = -0.0
    return x


def norm_options(draw: Draw, D: int, g: int, layout: str, fp8: str, ue8m0: bool, weight: str) -> dict[str, Any]:
    """Groups of small weights are those beside which ``quant_eps`` matters."""
    w = weights(draw, D, weight).reshape(D // g, g)
    groups = torch.arange(D // g)
    if draw.regime == "b27_scales":
        w = w * torch.exp2(((7 * groups) % 13 - 6).float())[:, None]
    if draw.regime == "eps":
        w = torch.where((groups % 2 == 0)[:, None], w.float() * 2e-11, w)
    options = {"group_size": g, "scale_layout": layout, "ue8m0": ue8m0, **kind(draw, fp8), **eps(draw, "quant_eps")}
    options["eps"] = 0.01 if draw.regime == "own_eps" else 1e-6
    return {"weight": w.flatten().to(getattr(torch, weight) if weight else draw.dtype), **options}


SILU_SHAPES = (
    core(M=17, d=640, g=128),
    *in_layouts(M=17, d=640, g=128),
    core(M=1, d=640, g=128),
    core("b24_empty", M=0, d=640, g=128),
    core(M=23, d=66, g=3, dtypes=BF16),
    core("b27_scales", BF16, B=3, M=5, d=640, g=64, layout="mn_ue8m0"),
    *(
        deepseek("b27_scales", BF16, M=M, d=d, g=128, layout=layout)
        for M, d in ((17, 1408), (17, 1536), (17, 2048), (3, 12288), (3, 18432))
        for layout in ("row_f32", "mn_f32_tma", "mn_ue8m0")
    ),
    full(M=65537, d=32, g=32, layout="mn_f32_tma", dtypes=BF16),
)
MASKED_SHAPES = (
    core(E=4, M=9, d=640, g=128),
    *in_layouts(E=4, M=9, d=640, g=128),
    core("b24_empty", E=0, M=9, d=640, g=128),
    core(E=1, M=17, d=256, g=128, dtypes=BF16),
    core(E=3, M=7, d=66, g=3, dtypes=BF16),
    *(
        deepseek("b27_scales", BF16, E=E, M=5, d=d, g=128, layout=layout)
        for E, d in ((16, 1408), (20, 1536), (32, 2048))
        for layout in ("row_f32", "mn_f32_tma", "mn_ue8m0")
    ),
    full(E=2, M=32769, d=32, g=32, layout="mn_f32_tma", dtypes=BF16),
)


def norm_shapes(*sizes: tuple[int, int]) -> tuple[Shape, ...]:
    return (
        core(M=17, D=640, g=128),
        *in_layouts(M=17, D=640, g=128),
        core(M=17, D=640, g=128, weight="float32", dtypes=("bfloat16", "float16")),
        core(M=1, D=640, g=128),
        core("own_eps", BF16, M=5, D=256, g=64),
        core("b24_empty", M=0, D=640, g=128),
        core(M=23, D=66, g=3, dtypes=BF16),
        core("b27_scales", BF16, B=3, M=5, D=640, g=64, layout="mn_ue8m0"),
        *(
            deepseek("b27_scales", BF16, M=M, D=D, g=128, layout=layout)
            for M, D in sizes
            for layout in ("row_f32", "mn_f32_tma", "mn_ue8m0")
        ),
        full(M=65537, D=64, g=32, layout="mn_f32_tma", dtypes=BF16),
    )


SPECS = (
    Spec("silu_and_mul_quant_fp8", silu_quant, SILU_SHAPES, regimes=(*REGIMES, "negative"), rows=("x",),
         verdict=in_groups(functools.partial(result_of, "silu_and_mul"))),
    Spec("masked_silu_and_mul_quant_fp8", masked_silu_quant, MASKED_SHAPES,
         regimes=("b31_padding", *REGIMES), verdict=in_groups(masked), unwritten=rows_beyond),
    Spec("rms_norm_quant_fp8", norm_quant, norm_shapes((17, 1536), (33, 512), (33, 2048), (7, 5120), (17, 7168)),
         regimes=("tiny", "zero_rows", *REGIMES), rows=("x",),
         verdict=in_groups(functools.partial(normed, "rms_norm"))),
    Spec("fused_add_rms_norm_quant_fp8", add_norm_quant, norm_shapes((33, 2048), (7, 5120), (17, 7168)),
         regimes=("tiny", "shifted", "zero_rows", *REGIMES), rows=("x", "residual"),
         verdict=in_groups(functools.partial(normed, "fused_add_rms_norm"))),
)  # fmt: skip
