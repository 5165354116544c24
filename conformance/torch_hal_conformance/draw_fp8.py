"""Codes and scales for ops that multiply or move them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hal.check import ceil_div
from torch_hal.formats import BLOCK, FP8_KINDS, SCALE_LAYOUTS, ceil_to_ue8m0

from .draw import Draw

LEAST = 1e-10 / 448  # the scale that quantisation gives a group of zeros
CODES_REGIMES = ("tiny", "b27_scales", "b28_zero_groups", "b29_fnuz", "nan_codes", "one_sign")


def kind(draw: Draw, fp8: str = "e4m3fn") -> str:
    """The kind of codes: fnuz where the regime says so."""
    return "e4m3fnuz" if draw.regime == "b29_fnuz" else fp8


def codes(draw: Draw, *shape: int, fp8: str = "e4m3fn") -> Tensor:
    """An activation's codes, which use their range; in regime "tiny" subnormals, which have a digit or two."""
    return draw.codes(*shape, fp8=fp8, scale=2.0**-8 if draw.regime == "tiny" else 100.0)


def scales(draw: Draw, *shape: int) -> Tensor:
    """Scales [..., rows, groups], with which sums fit float16; neighbours are far apart in either direction."""
    if draw.regime == "b27_scales":
        row, group = (torch.arange(n) for n in shape[-2:])
        turn = int(draw.integers(0, 7, 1))
        power = (3 * row[:, None] + 5 * group + turn) % 7 - 3  # neither transposed nor shifted is it the same
        found = torch.exp2(power.float()).expand(shape).clone()
        for i, matrix in enumerate(found.view(-1, *shape[-2:])):
            matrix.copy_(matrix.roll(i % 5, -1) * 2.0 ** (i % 3))  # nor another expert's
        return found / 2048
    return draw.uniform(0.25, 1.75, *shape) / 500


def stored(draw: Draw, scale: Tensor, layout: str) -> Tensor:
    """Scales [..., M, G] as ``layout`` stores them, powers of two where it can store nothing else."""
    form = SCALE_LAYOUTS[layout]
    return form.pack(ceil_to_ue8m0(scale) if form.power_of_two else scale)


def rows(draw: Draw, *shape: int, fp8: str, layout: str) -> dict[str, Any]:
    """Codes ``x`` [..., M, K] and their scales ``x_scale``, stored."""
    x, scale = codes(draw, *shape, fp8=fp8), scales(draw, *shape[:-1], ceil_div(shape[-1], BLOCK))
    if draw.regime == "b28_zero_groups":
        bytes_of(x)[..., ::2, :BLOCK] = 0
        bytes_of(x)[..., -1:, :] = 0
        scale[..., ::2, 0] = LEAST
        scale[..., -1:, :] = LEAST
    if draw.regime == "one_sign":  # sums grow all along K, and with them what a short accumulator loses
        bytes_of(x)[:] &= 0x7F
    if draw.regime == "nan_codes" and x.numel():
        bytes_of(x)[..., 1, 3] = nan_byte(fp8)
    return {"x": x, "x_scale": stored(draw, scale, layout)}


def weights(draw: Draw, *shape: int, fp8: str) -> dict[str, Any]:
    """Codes ``weight`` [..., N, K] and a scale for each of their blocks."""
    weight = draw.codes(*shape, fp8=fp8)
    scale = scales(draw, *shape[:-2], *(ceil_div(n, BLOCK) for n in shape[-2:]))
    if draw.regime == "b28_zero_groups":
        bytes_of(weight)[..., :BLOCK, BLOCK : 2 * BLOCK] = 0
        scale[..., 0, 1:2] = LEAST
    if draw.regime == "one_sign":
        bytes_of(weight)[:] &= 0x7F
    if draw.regime == "nan_codes" and weight.numel():
        bytes_of(weight)[..., 5, 7] = nan_byte(fp8)
    return {"weight": weight, "weight_scale": scale}


def nan_byte(fp8: str) -> int:
    return 0x7F if FP8_KINDS[fp8].negative_zero else 0x80


def bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
