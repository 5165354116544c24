"""Matrix multiplications with weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import draw_fp8
from ..draw import Draw
from ..spec import Spec, core, deepseek, full

BF16 = ("bfloat16",)
REGIMES = ("tiny", "shifted", "zeros", "nonfinite")


def nonfinite(draw: Draw, x: Tensor) -> Tensor:
    """``x`` [..., K]; in regime "nonfinite" NaN and inf in some of its rows, where they must stay."""
    if draw.regime == "nonfinite":
        rows = x.flatten(0, -2)
        rows[1, 2], rows[3, 5], rows[-1, 0] = math.nan, math.inf, -math.inf
    return x


def linear(draw: Draw, M: int, N: int, K: int, B: int | None = None) -> dict[str, Any]:
    shape = (M, K) if B is None else (B, M, K)
    return {"x": nonfinite(draw, draw.values(*shape)), "weight": draw.normal(N, K, scale=max(K, 1) ** -0.5)}


def router_gemm(draw: Draw, T: int, E: int, D: int, weight: str = "same") -> dict[str, Any]:
    dtype = torch.float32 if weight == "float32" else draw.dtype
    return {"x": nonfinite(draw, draw.values(T, D)), "weight": draw.normal(E, D, dtype=dtype, scale=D**-0.5)}


def absorbed_bmm(draw: Draw, T: int, H: int, K: int, N: int) -> dict[str, Any]:
    """Where strides are looked at, the weight is a transposed one, as W_UVᵀ is of a checkpoint's."""
    x, scale = nonfinite(draw, draw.values(T, H, K)), max(K, 1) ** -0.5
    if draw.regime == "b25_strides":
        return {"x": x, "weight": draw.normal(H, N, K, scale=scale).mT}
    return {"x": x, "weight": draw.normal(H, K, N, scale=scale)}


def fp8_block_linear(
    draw: Draw, M: int, N: int, K: int, layout: str = "row_f32", fp8: str = "e4m3fn"
) -> dict[str, Any]:
    fp8 = draw_fp8.kind(draw, fp8)
    return {
        **draw_fp8.rows(draw, M, K, fp8=fp8, layout=layout),
        **draw_fp8.weights(draw, N, K, fp8=fp8),
        "out_dtype": draw.dtype,
        "x_scale_layout": layout,
    }


LINEAR = (
    core(M=17, N=136, K=320),
    core(M=1, N=136, K=320),
    core(regime="b24_empty", M=0, N=136, K=320),
    core(regime="b24_empty", M=5, N=136, K=0),
    core(M=17, N=33, K=71),
    core(M=5, N=48, K=320, B=3),
    core(M=130, N=96, K=96),  # square: transposed, it would fit too
    deepseek(M=17, N=576, K=2048),  # V2-Lite: latent and rotary key
    deepseek(M=5, N=3072, K=2048, dtypes=BF16),  # V2-Lite: q
    deepseek(M=3, N=2112, K=5120, dtypes=BF16),  # V2: q_a, latent and rotary key
    deepseek(M=1, N=3072, K=1536, dtypes=BF16),  # V2, V3: q_b on eight ranks
    deepseek(M=16, N=1056, K=7168, dtypes=BF16),  # V3: q_a, latent and rotary key, one half
    deepseek(M=2, N=7168, K=1024, dtypes=BF16),  # V3: o on sixteen ranks
    full(M=65537, N=48, K=64, dtypes=BF16),
    full(M=1, N=129280, K=64, dtypes=BF16),
)
ROUTER = (
    core(T=17, E=64, D=320),
    core(T=17, E=64, D=320, weight="float32"),
    core(T=1, E=64, D=320),
    core(regime="b24_empty", T=0, E=64, D=320),
    core(T=9, E=37, D=203),
    deepseek(T=17, E=64, D=2048),
    deepseek(T=5, E=160, D=5120),
    deepseek(T=7, E=256, D=7168),
    deepseek(T=7, E=256, D=7168, weight="float32", dtypes=BF16),
    full(T=65537, E=16, D=64, dtypes=BF16),
)
ABSORBED = (
    core(T=17, H=3, K=128, N=48),
    core(T=1, H=3, K=128, N=48),
    core(regime="b24_empty", T=0, H=3, K=128, N=48),
    core(T=5, H=7, K=33, N=71),
    core(T=67, H=2, K=48, N=48),
    deepseek(T=5, H=16, K=128, N=512),  # V2-Lite, or V3 on eight ranks: q to the latent space
    deepseek(T=5, H=16, K=512, N=128),  # and back
    deepseek(T=2, H=128, K=128, N=512, dtypes=BF16),
    full(T=65537, H=2, K=16, N=24, dtypes=BF16),
)
MN = ("mn_f32", "mn_f32_tma", "mn_ue8m0")
FP8_LINEAR = (
    core(M=17, N=256, K=640),  # five groups along K: more than one word of packed exponents
    *(core(M=17, N=256, K=640, layout=layout, dtypes=BF16) for layout in MN),
    *(core(regime="b27_scales", M=17, N=256, K=640, layout=layout, dtypes=BF16) for layout in MN),
    core(M=17, N=200, K=704),
    core(regime="b27_scales", M=17, N=200, K=704, dtypes=BF16),
    core(M=17, N=200, K=704, layout="mn_ue8m0", dtypes=BF16),
    core(M=5, N=24, K=80, dtypes=BF16),
    core(M=1, N=256, K=640, dtypes=BF16),
    core(M=1, N=256, K=640, layout="mn_ue8m0", dtypes=BF16),
    core(M=130, N=256, K=256, layout="mn_f32_tma", dtypes=BF16),
    core(M=16, N=384, K=1024, dtypes=BF16),
    core(M=512, N=128, K=128, dtypes=BF16),
    core(regime="b24_empty", M=0, N=256, K=640),
    core(regime="b24_empty", M=0, N=256, K=640, layout="mn_ue8m0", dtypes=BF16),
    core(regime="b24_empty", M=5, N=256, K=0, dtypes=BF16),
    core(regime="b29_fnuz", M=17, N=256, K=640, layout="mn_ue8m0", dtypes=BF16),
    deepseek(M=17, N=576, K=2048, dtypes=BF16),  # the last of five rows of scales is for 64
    deepseek(M=3, N=2112, K=5120, layout="mn_f32_tma", dtypes=BF16),
    deepseek(M=5, N=576, K=7168, layout="mn_ue8m0", dtypes=BF16),
    deepseek(M=16, N=1056, K=7168, dtypes=BF16),
    deepseek(M=2, N=7168, K=1024, layout="mn_f32", dtypes=BF16),
    full(M=65537, N=32, K=128, dtypes=BF16),
    full(M=65537, N=32, K=128, layout="mn_ue8m0", dtypes=BF16),
)
STRUCTURAL = frozenset({"zeros"})

SPECS = (
    Spec("linear", linear, LINEAR, regimes=REGIMES, rows=("x",), structural=STRUCTURAL),
    Spec("router_gemm", router_gemm, ROUTER, regimes=REGIMES, rows=("x",), structural=STRUCTURAL),
    Spec(
        "absorbed_bmm",
        absorbed_bmm,
        ABSORBED,
        regimes=REGIMES,
        fixed=frozenset({"weight"}),
        rows=("x",),
        structural=STRUCTURAL,
    ),
    Spec(
        "fp8_block_linear",
        fp8_block_linear,
        FP8_LINEAR,
        regimes=draw_fp8.CODES_REGIMES,
        fixed=frozenset({"x_scale"}),
        rows=("x", "x_scale"),
    ),
)
