"""The paged caches of 8-bit numbers: rows that are quantised, and what they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hal.formats import FP8_KINDS, Fp8Kind, to_fp8
from torch_hal.kv_formats import KV_FORMATS

from ..draw import Draw
from ..spec import Dim, Spec, core, deepseek
from ..verdicts_kv import stored_codes
from .kv_cache import hide_others, mla_shapes, named_slots, read_slots, token_rows

EPS = 0.5  # in regime "eps": above the largest values of some tiles, below those of others


def fp8_kind(draw: Draw) -> Fp8Kind:
    return FP8_KINDS["e4m3fnuz" if draw.regime == "b29_fnuz" else "e4m3fn"]


def nan_byte(kind: Fp8Kind) -> int:
    return 0xFF if kind.negative_zero else 0x80


def mla_kv_store_fp8(
    draw: Draw, T: int, pages: int, page: int, L: int, R: int, kv_format: str, index: str = "int64"
) -> dict[str, Any]:
    slots, kind = named_slots(draw, T, pages * page, index), fp8_kind(draw)
    tile = KV_FORMATS[kv_format].tile or L
    before = draw.integers(0, 256, pages, page, KV_FORMATS[kv_format].row_bytes(L, R), dtype=torch.uint8)
    arguments = {
        "cache": before.view(kind.dtype),
        "slots": slots,
        "c_kv": _to_store(draw, token_rows(draw, slots, L), tile, kind),
        "k_pe": _to_store(draw, token_rows(draw, slots, R), R, kind),
        "kv_format": kv_format,
    }
    return arguments | ({"eps": EPS} if draw.regime == "eps" else {})


def _to_store(draw: Draw, x: Tensor, tile: int, kind: Fp8Kind) -> Tensor:
    """``x`` as the regime has it: with tiles far apart, some of them below ``eps``, with NaN and inf, with ties."""
    if draw.regime in ("b27_scales", "eps"):
        factors = 4.0 ** (draw.permutation(x.shape[-1] // tile) - 2.0)
        return (x.double() * factors.repeat_interleave(tile)).to(x.dtype)
    if draw.regime == "nan":
        x[::3, 5], x[1::3, -1], x[2::3, 0] = torch.nan, torch.inf, -torch.inf
    if draw.regime == "b29_fnuz":  # beyond the clamp, and what a bare cast turns into -0, whose byte is NaN there
        x[:, ::7], x[:, 1::7] = x[:, ::7] * 200, -1e-6
    if draw.regime == "ties":
        # Odd numbers from 17 to 31 lie half-way between codes, which have four significant bits. The first of a tile,
        # its largest, makes the scale a power of two.
        odd = 17 + 2 * draw.integers(0, 8, *x.shape).double()
        sign = 1 - 2 * draw.integers(0, 2, *x.shape)
        x = (sign * odd * 2.0 ** draw.integers(-9, 3, *x.shape)).to(x.dtype)
        x[:, ::tile] = kind.quant_max
    return x


def encoded(draw: Draw, x: Tensor, L: int, kv_format: str, kind: Fp8Kind) -> Tensor:
    """Rows [..., W] of an 8-bit cache that mean about ``x`` [..., L + R]; every tile has a scale of its own."""
    layout, latent, rope = KV_FORMATS[kv_format], x[..., :L].float(), x[..., L:].float()
    scales = []
    if layout.tile:
        tiles = latent.reshape(*latent.shape[:-1], L // layout.tile, layout.tile)
        spread = 2.0 ** draw.uniform(0, 8 if draw.regime == "b27_scales" else 2, *tiles.shape[:-1])
        scales = [tiles.abs().amax(-1).clamp(min=1e-6) / kind.quant_max * spread]
        latent = (tiles / scales[0][..., None]).flatten(-2)
    codes = to_fp8(latent, kind)
    if draw.regime == "every_code":
        every = (37 * torch.arange(codes.numel()) % 256).to(torch.uint8)
        codes = every.view(codes.shape).view(kind.dtype)
    rotated = to_fp8(rope, kind) if layout.rope_bytes == 1 else rope.to(torch.bfloat16)
    return torch.cat([part.view(torch.uint8) for part in (codes, *scales, rotated)], -1).view(kind.dtype)


def mla_kv_gather_fp8(
    draw: Draw, N: int, pages: int, page: int, L: int, R: int, kv_format: str, index: str = "int64"
) -> dict[str, Any]:
    slots, kind = read_slots(draw, N, pages * page, index), fp8_kind(draw)
    rows = encoded(draw, draw.values(pages, page, L + R, dtype=torch.float32), L, kv_format, kind)
    return {
        "cache": hide_others(rows.view(torch.uint8), slots, nan_byte(kind)).view(kind.dtype),
        "slots": slots,
        "kv_lora_rank": L,
        "kv_format": kv_format,
        "out_dtype": draw.dtype,
    }


FLAT: dict[str, Dim] = {"pages": 2, "page": 64, "L": 512, "R": 64, "kv_format": "flat"}
MANY: dict[str, Dim] = {"L": 64, "kv_format": "flat"}
NARROW: dict[str, Dim] = {"pages": 5, "page": 4, "L": 256, "R": 16, "kv_format": "ds_mla"}

SPECS = (
    Spec(
        "mla_kv_store_fp8",
        mla_kv_store_fp8,
        (
            *mla_shapes("T", MANY, kv_format="ds_mla"),
            *(
                core(regime, None, T=17, **FLAT)
                for regime in ("unit", "saturating", "ties", "nan", "b29_fnuz", "b32_sentinels")
            ),
            core("unit", None, T=11, **NARROW),
            deepseek("unit", None, T=128, **FLAT),
        ),
        regimes=(
            *("tiny", "shifted", "saturating", "ties", "nan", "eps", "repeated", "all_skipped"),
            *("b27_scales", "b28_zero_groups", "b29_fnuz", "b32_sentinels"),
        ),
        verdict=stored_codes,
    ),
    Spec(
        "mla_kv_gather_fp8",
        mla_kv_gather_fp8,
        (
            *mla_shapes("N", MANY, kv_format="ds_mla"),
            *(core(regime, None, N=17, **FLAT) for regime in ("unit", "every_code", "b29_fnuz", "b32_sentinels")),
            core("unit", None, N=11, **NARROW),
            deepseek("unit", None, N=128, **FLAT),
        ),
        regimes=("every_code", "all_skipped", "b27_scales", "b28_zero_groups", "b29_fnuz", "b32_sentinels"),
        rows=("slots",),
        structural=frozenset({"all_skipped"}),
    ),
)
