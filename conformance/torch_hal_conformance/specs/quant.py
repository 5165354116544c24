"""Quantisation of activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_hal.formats import FP8_KINDS, Fp8Kind

from ..draw import Draw
from ..spec import Dim, Shape, Spec, core, deepseek, full
from ..verdicts_quant import argument, in_groups, static, whole

BF16 = ("bfloat16",)

# Regimes of what is quantised in groups, which `data` and `eps` give a meaning.
REGIMES = ("b27_scales", "b28_zero_groups", "b29_fnuz", "saturating", "ties", "eps", "own_eps", "nonfinite")


def group_quant(
    draw: Draw, M: int, K: int, g: int, B: int | None = None,
    layout: str = "row_f32", fp8: str = "e4m3fn", ue8m0: bool = False,
) -> dict[str, Any]:  # fmt: skip
    x = data(draw, draw.values(*(n for n in (B, M, K) if n is not None)), g, FP8_KINDS[fp8])
    return {"x": x, "group_size": g, "scale_layout": layout, "ue8m0": ue8m0, **kind(draw, fp8), **eps(draw)}


def token_quant(draw: Draw, M: int, K: int, B: int | None = None, fp8: str = "e4m3fn") -> dict[str, Any]:
    x = data(draw, draw.values(*(n for n in (B, M, K) if n is not None)), K, FP8_KINDS[fp8])
    return {"x": x, **kind(draw, fp8), **eps(draw, own=3.1)}


def tensor_quant(draw: Draw, M: int, K: int, fp8: str = "e4m3fn") -> dict[str, Any]:
    x = draw.values(M, K)
    if draw.regime == "ties":
        x = data(draw, x.reshape(1, -1), M * K, FP8_KINDS[fp8]).reshape(M, K)
    if draw.regime == "eps":
        x = x * 2e-11
    if draw.regime == "largest_last":  # which a kernel that looks at a part of the tensor misses
        x[-1, -1] = -100.0
    return {"x": x, **kind(draw, fp8), **eps(draw, own=9.0)}


def static_quant(draw: Draw, M: int, K: int, fp8: str = "e4m3fn") -> dict[str, Any]:
    """The scale puts the largest values out of reach."""
    x, scale = draw.values(M, K), draw.uniform(0.004, 0.006, 1)
    if draw.regime == "ties":
        scale = powers_of_two(draw, 1)
        x = (middles(draw, FP8_KINDS[fp8], M, K) * scale).to(x.dtype)
    if draw.regime == "nonfinite":
        x[0, 1], x[1, 0], x[2, 5] = math.nan, math.inf, -math.inf
    if draw.regime == "saturating":
        x = x * 0.05
    return {"x": x, "scale": scale, **kind(draw, fp8)}


def data(draw: Draw, x: Tensor, g: int, of: Fp8Kind) -> Tensor:
    """``x`` [..., K] as the regime has it, in groups of g."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // g, g)
    places = torch.arange(groups.shape[:-1].numel()).reshape(groups.shape[:-1])
    if draw.regime == "b27_scales":  # neighbours' scales are all different powers of two
        powers = (7 * places) % 27 - 13
        groups = groups * torch.exp2(powers.float()).unsqueeze(-1)
    if draw.regime == "ties":
        groups = middles(draw, of, *groups.shape)
        groups[..., 0] = of.quant_max
        groups = groups * powers_of_two(draw, *groups.shape[:-1], 1)
    if draw.regime == "eps":  # every other group's largest value is near or below eps
        groups = torch.where((places % 2 == 0).unsqueeze(-1), groups.float() * 2e-11, groups)
    if draw.regime == "b29_fnuz":  # −0 and what rounds to it: 0x80 is NaN in fnuz
        groups = groups.clone()
        groups[..., 1], groups[..., 2], groups[..., 3] = -0.0, -1e-6, -groups.abs().amax(-1)
    if draw.regime == "nonfinite":
        groups = groups.clone()
        bad = torch.tensor([math.nan, math.inf, -math.inf]).to(x.dtype)
        groups[places % 5 == 2, 1] = bad[places[places % 5 == 2] % 3]
    return groups.flatten(-2).to(x.dtype)


def middles(draw: Draw, of: Fp8Kind, *shape: int) -> Tensor:
    """Numbers half-way between two neighbouring codes, of either sign."""
    codes = torch.arange(0x80, dtype=torch.uint8).view(of.dtype).float()
    codes = codes[codes <= of.quant_max]
    between = (codes[1:] + codes[:-1]) / 2
    return between[draw.integers(0, len(between), *shape).long()] * (1 - 2 * draw.integers(0, 2, *shape))


def powers_of_two(draw: Draw, *shape: int) -> Tensor:
    return 2.0 ** draw.integers(-6, 6, *shape).float()


def kind(draw: Draw, fp8: str) -> dict[str, Any]:
    return {"fp8": "e4m3fnuz" if draw.regime == "b29_fnuz" else fp8}


def eps(draw: Draw, name: str = "eps", own: float = 2.5) -> dict[str, Any]:
    """An eps of its own is one that about half of the groups do not reach: by default, of 128 normal values."""
    return {name: own} if draw.regime == "own_eps" else {}


def in_layouts(**dims: Dim) -> tuple[Shape, ...]:
    """Every layout, kind and rounding of scales, and the regimes that look at them there."""
    layouts = ("mn_f32", "mn_f32_tma", "mn_ue8m0")
    return (
        *(core("b27_scales", BF16, **dims, layout=layout) for layout in layouts),
        *(core("unit", BF16, **dims, layout=layout, fp8="e4m3fnuz") for layout in ("row_f32", *layouts)),
        *(core("b28_zero_groups", BF16, **dims, layout=layout) for layout in ("mn_f32_tma", "mn_ue8m0")),
        core("b27_scales", BF16, **dims, ue8m0=True),
        core("b27_scales", BF16, **dims, layout="mn_f32_tma", ue8m0=True),
        core("own_eps", BF16, **dims, ue8m0=True),
        core("unit", BF16, **{**dims, "M": 1}, layout="mn_f32_tma"),
        core("unit", BF16, **{**dims, "M": 1}, layout="mn_ue8m0"),
        core("b24_empty", BF16, **{**dims, "M": 0}, layout="mn_ue8m0"),
    )


GROUP_SHAPES = (
    core(M=17, K=640, g=128),
    *in_layouts(M=17, K=640, g=128),
    *(core("ties", BF16, M=17, K=640, g=128, **more) for more in ({"ue8m0": True}, {"layout": "mn_ue8m0"})),
    core("ties", BF16, M=17, K=640, g=128, fp8="e4m3fnuz"),
    core("eps", BF16, M=17, K=640, g=128, layout="mn_ue8m0"),
    core(M=1, K=640, g=128),
    core("b24_empty", M=0, K=640, g=128),
    core("b27_scales", BF16, M=17, K=1152, g=128, layout="mn_ue8m0"),
    core("b27_scales", BF16, M=16, K=1024, g=128, layout="mn_ue8m0"),
    core(M=33, K=128, g=128, dtypes=BF16),
    core("b27_scales", BF16, M=33, K=320, g=64, layout="mn_f32_tma"),
    core(M=23, K=66, g=3, dtypes=BF16),
    core(M=23, K=48, g=16, dtypes=BF16),
    *(core("b27_scales", BF16, B=3, M=5, K=640, g=128, layout=x) for x in ("row_f32", "mn_f32_tma", "mn_ue8m0")),
    *(
        deepseek("b27_scales", BF16, M=M, K=K, g=128, layout=layout)
        for M, K in ((33, 2048), (7, 5120), (17, 7168), (17, 1536), (33, 512), (3, 12288), (3, 18432))
        for layout in ("row_f32", "mn_f32_tma", "mn_ue8m0")
    ),
    full(M=65535, K=64, g=32, layout="mn_ue8m0", dtypes=BF16),
    full(M=65537, K=64, g=32, layout="mn_f32_tma", dtypes=BF16),
)

TOKEN_SHAPES = (
    core(M=17, K=576),
    core(M=17, K=576, fp8="e4m3fnuz"),
    core(M=1, K=576),
    core("b24_empty", M=0, K=576),
    core(M=23, K=510, dtypes=BF16),
    core(M=300, K=1, dtypes=BF16),
    core(B=3, M=5, K=100, dtypes=BF16),
    *(deepseek(M=M, K=K, dtypes=BF16) for M, K in ((33, 2048), (7, 5120), (17, 7168), (3, 18432))),
    full(M=65537, K=64, dtypes=BF16),
)

TENSOR_SHAPES = (
    core(M=17, K=576),
    core(M=17, K=576, fp8="e4m3fnuz"),
    core(M=1, K=1000),
    core("b24_empty", M=0, K=576),
    core(M=23, K=51, dtypes=BF16),
    *(deepseek(M=M, K=K, dtypes=BF16) for M, K in ((33, 2048), (7, 5120), (17, 7168), (3, 18432))),
    full(M=65537, K=64, dtypes=BF16),
)

SPECS = (
    Spec("per_token_group_quant_fp8", group_quant, GROUP_SHAPES, regimes=REGIMES, rows=("x",),
         verdict=in_groups(argument)),
    Spec("per_token_quant_fp8", token_quant, TOKEN_SHAPES, regimes=REGIMES, rows=("x",), verdict=in_groups(argument)),
    Spec("per_tensor_quant_fp8", tensor_quant,
         (*TENSOR_SHAPES, core("eps", ("float32", "bfloat16"), M=17, K=576), core("zeros", M=17, K=576)), verdict=whole,
         regimes=("b29_fnuz", "saturating", "ties", "own_eps", "largest_last"), structural=frozenset({"zeros"})),
    Spec("static_quant_fp8", static_quant, TENSOR_SHAPES, rows=("x",), verdict=static,
         regimes=("b29_fnuz", "saturating", "ties", "nonfinite")),
)  # fmt: skip
