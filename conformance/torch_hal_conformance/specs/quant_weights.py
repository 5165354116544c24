"""FP8 weights in blocks of 128×128."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_hal.check import ceil_div
from torch_hal.formats import BLOCK, FP8_KINDS

from ..draw import Draw
from ..spec import Dim, Shape, Spec, core, deepseek, full
from ..verdict import bitwise
from ..verdicts_quant import in_blocks, requantised, spread
from .quant import BF16, eps, kind, middles, powers_of_two

KINDS = tuple(f"float8_{name}" for name in FP8_KINDS)  # of the codes, in the place of the dtype
FN = KINDS[:1]


def block_quant(
    draw: Draw, N: int, K: int, E: int | None = None, fp8: str = "e4m3fn", ue8m0: bool = False
) -> dict[str, Any]:
    weight = draw.values(*(n for n in (E, N, K) if n is not None))
    blocks = (*weight.shape[:-2], ceil_div(N, BLOCK), ceil_div(K, BLOCK))
    place = torch.arange(math.prod(blocks)).reshape(blocks)
    if draw.regime == "b27_scales":
        weight = weight * spread(distinct(place), weight)
    if draw.regime == "b28_zero_groups":
        weight = torch.where(spread(place % 3 == 1, weight), 0.0, draw.normal(*weight.shape))
    if draw.regime == "b29_fnuz":  # −0 and what rounds to it: 0x80 is NaN in fnuz
        weight[..., 1::7, :], weight[..., 2::7, :] = -0.0, -1e-6
    if draw.regime == "eps":
        weight = torch.where(spread(place % 2 == 0, weight), weight.float() * 2e-11, weight)
    if draw.regime == "ties":
        weight = middles(draw, FP8_KINDS[fp8], *weight.shape)
        weight[..., ::BLOCK, ::BLOCK] = FP8_KINDS[fp8].quant_max
        weight = weight * spread(powers_of_two(draw, *blocks), weight)
    if draw.regime == "nonfinite":
        weight[..., 3, 5], weight[..., -1, -1], weight[..., -1, 0] = math.nan, math.inf, -math.inf
    return {"weight": weight.to(draw.dtype), "ue8m0": ue8m0, **kind(draw, fp8), **eps(draw, own=4.0)}


def distinct(place: Tensor) -> Tensor:
    """A power of two for each block, another one than its neighbours'."""
    return torch.exp2(((7 * place) % 27 - 13).float())


def coded(draw: Draw, N: int, K: int, E: int | None = None) -> dict[str, Any]:
    """Codes [E, N, K] and a scale for each block."""
    shape = tuple(n for n in (E, N, K) if n is not None)
    blocks = (*shape[:-2], ceil_div(N, BLOCK), ceil_div(K, BLOCK))
    weight, scale = codes(draw, *shape), torch.exp2(draw.uniform(-9, -5, *blocks))
    place = torch.arange(math.prod(blocks)).reshape(blocks)
    if draw.regime == "b27_scales":
        scale = scale * distinct(place)
    if draw.regime == "b28_zero_groups":
        weight = torch.where(spread(place % 3 == 1, weight), 0, weight.view(torch.uint8)).view(draw.dtype)
        scale[place % 3 == 2] = 0.0
    if draw.regime == "powers":
        scale = powers_of_two(draw, *blocks)
    if draw.regime == "ties":  # in units of the next power of two a code is three quarters: every second is half-way
        scale = 1.5 * powers_of_two(draw, *blocks)
    if draw.regime == "nonfinite":
        scale[place % 3 == 1] = math.nan
    return {"weight": weight, "weight_scale": scale}


def codes(draw: Draw, *shape: int) -> Tensor:
    """8-bit floats; under behaviour 29 and in units of a power of two, every byte."""
    if draw.regime in ("b29_fnuz", "powers"):
        return draw.integers(0, 256, *shape, dtype=torch.uint8).view(draw.dtype)
    return draw.codes(*shape, fp8=str(draw.dtype).removeprefix("torch.float8_"))


def dequant(draw: Draw, N: int, K: int, E: int | None = None, out: str = "bfloat16") -> dict[str, Any]:
    return {**coded(draw, N, K, E), "out_dtype": getattr(torch, out)}


def convert(draw: Draw, M: int, K: int, to: str) -> dict[str, Any]:
    return {"codes": codes(draw, M, K), "scale": torch.exp2(draw.uniform(-9, -5, M, 3)), "fp8": to}


BLOCK_QUANT_SHAPES = (
    core(N=200, K=300),
    core(N=200, K=300, fp8="e4m3fnuz"),
    core("b27_scales", BF16, N=200, K=300, ue8m0=True),
    core("ties", BF16, N=200, K=300, ue8m0=True),
    core("ties", BF16, N=200, K=300, fp8="e4m3fnuz"),
    core("own_eps", BF16, N=200, K=300, ue8m0=True),
    core("b27_scales", BF16, E=3, N=128, K=256),
    core("b27_scales", BF16, E=2, N=130, K=129, fp8="e4m3fnuz", ue8m0=True),
    core(N=1, K=1000, dtypes=BF16),
    core(N=1000, K=1, dtypes=BF16),
    core("b24_empty", N=0, K=300),
    core("b24_empty", E=0, N=128, K=128),
    deepseek("b27_scales", BF16, N=576, K=2048),  # kv_a of V2-Lite: half a block at the end
    deepseek("b27_scales", BF16, N=576, K=7168),  # of V3
    deepseek("b27_scales", BF16, N=684, K=2048),  # V2-Lite's dense layer over 16 ranks
    deepseek("b27_scales", BF16, E=2, N=512, K=1408, ue8m0=True),
    deepseek("b27_scales", BF16, E=2, N=128, K=7168, ue8m0=True),
    full("b27_scales", BF16, N=65537, K=64),
)


def coded_shapes(**more: Dim) -> tuple[Shape, ...]:
    return (
        core("unit", KINDS, N=200, K=300, **more),
        core("unit", KINDS, E=3, N=128, K=256, **more),
        core("unit", KINDS, E=2, N=130, K=129, **more),
        core("unit", FN, N=1, K=1000, **more),
        core("unit", FN, N=1000, K=1, **more),
        core("b24_empty", KINDS, N=0, K=300, **more),
        core("b24_empty", KINDS, E=0, N=128, K=128, **more),
        deepseek("b27_scales", KINDS, N=576, K=2048, **more),
        deepseek("b27_scales", FN, N=576, K=7168, **more),
        deepseek("b27_scales", FN, N=684, K=2048, **more),
        deepseek("b27_scales", FN, E=2, N=512, K=1408, **more),
        deepseek("b27_scales", FN, E=2, N=128, K=7168, **more),
        full("b27_scales", FN, N=65537, K=64, **more),
    )


DEQUANT_SHAPES = (
    *coded_shapes(out="bfloat16"),
    core(N=200, K=300, out="float16"),
    core(N=200, K=300, out="float32"),
    core("b29_fnuz", N=200, K=300, out="float32"),
)
CONVERT_SHAPES = (
    core(M=17, K=640, to="e4m3fnuz"),
    core(M=17, K=640, to="e4m3fn"),
    core("b29_fnuz", M=17, K=640, to="e4m3fn"),
    core(M=1, K=33, to="e4m3fnuz"),
    core("b24_empty", M=0, K=640, to="e4m3fnuz"),
    deepseek("b29_fnuz", M=576, K=2048, to="e4m3fnuz"),
    deepseek("b29_fnuz", M=256, K=7168, to="e4m3fnuz"),
    full("b29_fnuz", M=65537, K=64, to="e4m3fnuz"),
)
REGIMES = ("b27_scales", "b28_zero_groups", "b29_fnuz", "nonfinite")

SPECS = (
    Spec("block_quant_fp8", block_quant, BLOCK_QUANT_SHAPES, verdict=in_blocks,
         regimes=(*REGIMES, "saturating", "ties", "eps", "own_eps")),
    Spec("block_dequant_fp8", dequant, DEQUANT_SHAPES, dtypes=KINDS, regimes=REGIMES),
    Spec("block_requant_ue8m0_fp8", coded, coded_shapes(), dtypes=KINDS, verdict=requantised,
         regimes=(*REGIMES, "powers", "ties")),
    Spec("convert_kind_fp8", convert, CONVERT_SHAPES, dtypes=KINDS, verdict=bitwise, regimes=("b29_fnuz",)),
)  # fmt: skip
