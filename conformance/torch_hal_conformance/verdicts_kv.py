"""The verdict on 8-bit rows of a cache, which rounding decides: codes, scales and the slots between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hal.formats import FP8_KINDS, Fp8Kind
from torch_hal.kv_formats import KV_FORMATS

from .verdict import Evidence, Failure, Score

ROUNDING = 2.0**-22  # four units: a float32 division, or a product with a reciprocal


def stored_codes(evidence: Evidence) -> Score:
    """`mla_kv_store_fp8`: named rows mean what was stored, to the nearest code; all others keep their bits.

    A code may be the other neighbour where the exact quotient is so near half-way that float32 cannot tell, not where
    float32 holds it: without a scale, or with one that is a power of two. Tiles with inf or NaN may hold anything.
    """
    arguments, got, exact = evidence.arguments, evidence.got[0], evidence.exact.results[0]
    layout = KV_FORMATS[arguments["kv_format"]]
    kind = next(kind for kind in FP8_KINDS.values() if kind.dtype == got.dtype)
    before, after, expected = (_bytes(x) for x in (arguments["cache"], got, exact))
    slots = arguments["slots"].long()
    tokens = torch.nonzero((slots >= 0) & (slots < len(before)))[:, 0]
    _others_kept(before, after, slots[tokens])
    after, expected = after[slots[tokens]], expected[slots[tokens]]
    c_kv, k_pe = (arguments[name][tokens].double() for name in ("c_kv", "k_pe"))
    rank, end = c_kv.shape[-1], c_kv.shape[-1] + layout.scale_bytes(c_kv.shape[-1])
    unsure, open_ = torch.zeros_like(c_kv), torch.zeros_like(c_kv, dtype=torch.bool)
    if layout.tile:
        found = _scales(evidence, c_kv, after[:, rank:end], layout.tile, kind)
        scales, unsure, open_ = (x.repeat_interleave(layout.tile, -1) for x in found)
        c_kv = c_kv / scales
    check_codes(after[:, :rank], expected[:, :rank], c_kv, kind, unsure, open_)
    if layout.rope_bytes == 1:
        check_codes(after[:, end:], expected[:, end:], k_pe, kind)
    else:
        _rotated(after[:, end:], expected[:, end:])
    return Score()


def _bytes(cache: Tensor) -> Tensor:
    """A cache [pages, page_size, W] as rows [slots, W]."""
    return cache.contiguous().view(torch.uint8).flatten(0, 1)


def _others_kept(before: Tensor, after: Tensor, named: Tensor) -> None:
    changed = (before != after).any(-1)
    changed[named] = False
    if changed.any():
        slots = torch.nonzero(changed)[:, 0].tolist()
        raise Failure("slots", f"slot {slots[0]} was written, which no token names; {len(slots)} such slots changed")


def _scales(
    evidence: Evidence, c_kv: Tensor, stored: Tensor, tile: int, kind: Fp8Kind
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row and tile: the exact scale; how far, relatively, quotients may be off; whether anything may stand."""
    eps: Any = evidence.op.bind(**evidence.arguments)["eps"]
    amax = c_kv.reshape(len(c_kv), c_kv.shape[-1] // tile, tile).abs().amax(-1)
    open_ = ~amax.isfinite()
    exact = amax.clamp(min=eps) / kind.quant_max
    have = stored.contiguous().view(torch.float32).double()
    wrong = ~((have - exact).abs() <= ROUNDING * exact) & ~open_
    if wrong.any():
        row, i = torch.nonzero(wrong)[0].tolist()
        raise Failure(
            "scales",
            f"the scale of stored row {row}, tile {i}: expected {exact[row, i]:.9g}, got {have[row, i]:.9g}; "
            f"{int(wrong.sum())} of {wrong.numel()} scales are wrong",
        )
    sure = (torch.frexp(exact).mantissa == 0.5) & (have == exact)
    return exact, torch.where(sure, 0.0, 2 * ROUNDING), open_


def check_codes(
    got: Tensor,
    expected: Tensor,
    exact: Tensor,
    kind: Fp8Kind,
    unsure: Tensor | float = 0.0,
    open_: Tensor | bool = False,
) -> None:
    """Bytes ``got`` mean what ``expected`` mean, except next to the middle of two neighbouring codes.

    exact: what was rounded; unsure: how far, relatively, float32 may have been off; open_: where anything may stand.
    """
    have, want = (codes.contiguous().view(kind.dtype).double() for codes in (got, expected))
    same = (have == want) | (have.isnan() & want.isnan())
    clamped = exact.clamp(-kind.quant_max, kind.quant_max)
    off = (clamped - (have + want) / 2).abs()
    neighbours = (_rank(got) - _rank(expected)).abs() == 1
    wrong = ~(same | open_ | (neighbours & (off < unsure * clamped.abs())))
    if wrong.any():
        row, i = torch.nonzero(wrong)[0].tolist()
        raise Failure(
            "codes",
            f"stored row {row}, element {i} of {exact[row, i]:.9g} in units of its scale: expected {want[row, i]:g} "
            f"(byte {int(expected[row, i]):#04x}), got {have[row, i]:g} (byte {int(got[row, i]):#04x}); "
            f"{int(wrong.sum())} of {wrong.numel()} codes are wrong",
        )


def _rank(codes: Tensor) -> Tensor:
    """Where a code stands among all, ordered by value."""
    magnitude = (codes & 0x7F).int()
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def _rotated(got: Tensor, expected: Tensor) -> None:
    """bfloat16, rounded once: equal, any NaN for NaN."""
    have, want = (x.contiguous().view(torch.bfloat16) for x in (got, expected))
    wrong = (have.view(torch.int16) != want.view(torch.int16)) & ~(have.isnan() & want.isnan())
    if wrong.any():
        row, i = torch.nonzero(wrong)[0].tolist()
        raise Failure(
            "rotated",
            f"the rotated part of stored row {row}, element {i}: expected {want[row, i]:g}, got {have[row, i]:g}; "
            f"{int(wrong.sum())} of {wrong.numel()} are wrong",
        )
