"""The paged caches of keys and values. MLA's holds one row a token, ``[c_kv | k_pe]``, shared by all heads.

Slot ``n`` is row ``n % page_size`` of page ``n // page_size``. Which slots a sequence owns is the engine's business.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..check import FLOAT, FP8, INDEX
from ..contracts import Contracts
from ..formats import FP8_KINDS, to_fp8
from ..kv_formats import KV_FORMATS
from ..numerics import wide
from ..op import op
from ._fp8 import FP8_NAMES
from .quant import per_token_group_quant_fp8

_STORE = Contracts(
    C1_empties="T = 0 and a cache without pages leave the cache as it is, without a kernel launch.",
    C3_strides="Outer strides are free: c_kv and k_pe are slices of one projection, cache one layer of a pool.",
    C4_mutation="Writes cache, which must not overlap c_kv or k_pe; returns nothing.",
    C7_sentinels="A slot that is negative or ≥ pages·page_size is skipped; slot 0 is a slot like any other.",
    C8_unwritten_rows="Slots that are not named keep their bits, NaN included.",
    C9_rounding="A copy: bitwise.",
    C10_determinism="A slot named twice gets, element by element, one of its rows; which is undefined.",
    C11_capture="No host sync and O(T): the padding of a captured batch takes slot -1.",
    C13_ids="slots are int32 or int64.",
)
_GATHER = Contracts(
    C1_empties="N = 0 gives zero rows; a cache without pages gives zeros, for every slot is out of range.",
    C3_strides="Outer strides are free: cache may be one layer of a pool.",
    C7_sentinels="A slot that is negative or ≥ pages·page_size gives a row of zeros.",
    C9_rounding="A copy: bitwise.",
    C13_ids="slots are int32 or int64.",
)


@op(
    shapes={
        "k_cache": "pages page_size H Dk",
        "v_cache": "pages page_size H Dv",
        "slots": "T",
        "k": "T H Dk",
        "v": "T H Dv",
    },
    free=("T", "pages"),
    dtypes={"k_cache": FLOAT, "v_cache": "k_cache", "slots": INDEX, "k": "k_cache", "v": "k_cache"},
    mutates=("k_cache", "v_cache"),
    traffic="2 * T * H * (Dk + Dv) * k_cache.element_size() + T * slots.element_size()",
    fake=lambda *_, **__: None,
    contracts=replace(
        _STORE,
        C3_strides="Outer strides are free: k and v are slices of one projection, the caches layers of a pool.",
        C4_mutation="Writes k_cache and v_cache, which overlap neither each other nor k and v; returns nothing.",
    ),
)
def mha_kv_store(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write one token a row into the paged caches of multi-head attention: ``k_cache[slot] = k``, and v likewise.

    k_cache: [pages, page_size, H, Dk], v_cache: [pages, page_size, H, Dv], bf16/f16/f32, written in place;
    slots: [T] int32/int64, skipped where negative or ≥ pages·page_size; k: [T, H, Dk], v: [T, H, Dv], of the caches'
    dtype, H the key-value heads. Named slots should differ: of several rows for one slot, any may win.
    Semantics: vLLM's reshape_and_cache_flash with its skipped negative slots.
    """
    _write(k_cache, slots, k)
    _write(v_cache, slots, v)


@op(
    shapes={"cache": "pages page_size L+R", "slots": "T", "c_kv": "T L", "k_pe": "T R"},
    dtypes={"cache": FLOAT, "slots": INDEX, "c_kv": "cache", "k_pe": "cache"},
    mutates=("cache",),
    free=("T", "pages"),
    traffic="2 * T * (L + R) * cache.element_size() + T * slots.element_size()",
    fake=lambda *_, **__: None,
    contracts=_STORE,
)
def mla_kv_store(cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """Write one token a row into the paged MLA cache: ``cache[slot] = [c_kv | k_pe]``.

    cache: [pages, page_size, L + R] bf16/f16/f32, written in place (an 8-bit cache: `mla_kv_store_fp8`);
    slots: [T] int32/int64, skipped where negative or ≥ pages·page_size;
    c_kv: [T, L] the normed latent, L = kv_lora_rank; k_pe: [T, R] the rotated key part; both of cache's dtype.
    Named slots should differ: of several rows for one slot, any may win, element by element.
    Semantics: vLLM's concat_and_cache_mla with its skipped negative slots.
    """
    _write(cache, slots, torch.cat([c_kv, k_pe], -1))


@op(
    shapes={"cache": "pages page_size D", "slots": "N"},
    dtypes={"cache": FLOAT, "slots": INDEX},
    where={"0 < kv_lora_rank <= D": "kv_lora_rank is a part of the cache's row"},
    free=("N", "pages"),
    traffic="2 * N * D * cache.element_size() + N * slots.element_size()",
    contracts=_GATHER,
)
def mla_kv_gather(cache: Tensor, slots: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Read tokens back from the paged MLA cache, e.g. a cached prefix that is to be expanded to full keys and values.

    cache: [pages, page_size, L + R]; slots: [N] int32/int64, in any order and repeated at will; kv_lora_rank: L.
    Returns (c_kv [N, L], k_pe [N, R]), cache's dtype, separate tensors; zeros where a slot is out of range,
    whatever the cache holds.
    """
    rows, skipped = _read(cache, slots)
    c_kv, k_pe = rows[:, :kv_lora_rank], rows[:, kv_lora_rank:]
    return c_kv.masked_fill(skipped, 0), k_pe.masked_fill(skipped, 0)


@op(
    shapes={"cache": "pages page_size W", "slots": "T", "c_kv": "T L", "k_pe": "T R"},
    free=("T", "pages"),
    dtypes={"cache": FP8, "slots": INDEX, "c_kv": FLOAT, "k_pe": "c_kv"},
    where={
        "kv_format in KV_FORMATS": f"the format is one of {', '.join(KV_FORMATS)}",
        "KV_FORMATS[kv_format].fits(W, L)": "the format's tiles divide the latent, and a row of the cache has room",
        "W == KV_FORMATS[kv_format].row_bytes(L, R)": "a row of the cache has the format's bytes for L and R",
        "eps >= 1e-30": "a tile of zeros gets a scale that is a normal float32",
    },
    mutates=("cache",),
    traffic="T * (W + (L + R) * c_kv.element_size() + slots.element_size())",
    fake=lambda *_, **__: None,
    contracts=replace(
        _STORE,
        C5_fp8_kind="cache's dtype: a tile's largest value maps to 448 on e4m3fn, 224 on e4m3fnuz.",
        C6_fp8_cast="Clamped to ±quant_max before the cast; to nearest, ties to even. On fnuz −0 never appears.",
        C9_rounding="Latent / scale, a true float32 division, is rounded once to a code; without scales the value "
        "itself is. The rotated part is rounded once: to a code in `flat`, to bfloat16 in `ds_mla`.",
        C10_determinism="A slot named twice gets, byte by byte, one of its rows; which is undefined.",
    ),
)
def mla_kv_store_fp8(
    cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor, kv_format: str, eps: float = 1e-10
) -> None:
    """Write one token a row into a paged 8-bit MLA cache, quantised as ``kv_format`` says (see `KV_FORMATS`).

    cache: [pages, page_size, W] fp8, of any kind, W the format's bytes for a row; written in place;
    slots: [T] int32/int64, skipped where negative or ≥ pages·page_size; c_kv: [T, L] bf16/f16/f32; k_pe: [T, R].
    ``flat``: every element cast without scale. ``ds_mla``: scale = max(amax, eps) / quant_max for each 128 of c_kv
    (which divide L), code = c_kv / scale; k_pe in bfloat16. eps bounds amax from below: a tile of zeros has codes 0 and
    scale eps / quant_max, where kernels without it divide 0 by 0. NaN stays NaN in ``flat``; a tile of ``ds_mla`` that
    holds inf or NaN has unspecified codes and scale. Named slots should differ.
    """
    _write(cache.view(torch.uint8), slots, _encode(c_kv, k_pe, cache.dtype, kv_format, eps))


@op(
    shapes={"cache": "pages page_size W", "slots": "N"},
    free=("N", "pages"),
    dtypes={"cache": FP8, "slots": INDEX},
    where={
        "kv_format in KV_FORMATS": f"the format is one of {', '.join(KV_FORMATS)}",
        "KV_FORMATS[kv_format].fits(W, kv_lora_rank)": "a row of the cache is one of the format, kv_lora_rank a part",
        "out_dtype in FLOAT": "results are bf16/f16/f32",
    },
    traffic="N * (W + (kv_lora_rank + KV_FORMATS[kv_format].rope_dim(W, kv_lora_rank)) * out_dtype.itemsize"
    " + slots.element_size())",
    terms=lambda *args, **kwargs: tuple(x.abs() for x in _gather_fp8(*args, **kwargs)),
    contracts=replace(
        _GATHER,
        C5_fp8_kind="cache's dtype.",
        C6_fp8_cast="None: codes are read. Those that mean NaN give NaN.",
        C9_rounding="code · scale in float32, rounded once to out_dtype.",
    ),
)
def mla_kv_gather_fp8(
    cache: Tensor, slots: Tensor, kv_lora_rank: int, kv_format: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Read tokens back from a paged 8-bit MLA cache that `mla_kv_store_fp8` wrote in ``kv_format``.

    cache: [pages, page_size, W] fp8; slots: [N] int32/int64, in any order and repeated at will; kv_lora_rank: L;
    out_dtype: bf16/f16/f32. Returns (c_kv [N, L], k_pe [N, R]) of out_dtype, separate tensors: what the codes mean;
    zeros where a slot is out of range, whatever the cache holds.
    """
    return _gather_fp8(cache, slots, kv_lora_rank, kv_format, out_dtype)


def _gather_fp8(
    cache: Tensor, slots: Tensor, kv_lora_rank: int, kv_format: str, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, skipped = _read(cache.view(torch.uint8), slots)
    in_between = torch.promote_types(out_dtype, torch.float32)
    parts = decode_rows(rows, cache.dtype, kv_lora_rank, kv_format, in_between)
    c_kv, k_pe = (part.masked_fill(skipped, 0).to(out_dtype) for part in parts)
    return c_kv, k_pe


def decode_rows(
    rows: Tensor, fp8: torch.dtype, kv_lora_rank: int, kv_format: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Latents [..., L] and rotated parts [..., R] of an 8-bit cache's rows, given as bytes [..., W]."""
    layout, pack = KV_FORMATS[kv_format], torch.contiguous_format
    end = kv_lora_rank + layout.scale_bytes(kv_lora_rank)
    codes, scales, rope = rows[..., :kv_lora_rank], rows[..., kv_lora_rank:end], rows[..., end:]
    c_kv = codes.view(fp8).to(dtype)
    if layout.tile:  # cloned, for the bytes of a wider type to be aligned
        tiles = c_kv.reshape(*c_kv.shape[:-1], kv_lora_rank // layout.tile, layout.tile)
        c_kv = (tiles * scales.clone(memory_format=pack).view(torch.float32).to(dtype)[..., None]).flatten(-2)
    k_pe = rope.view(fp8) if layout.rope_bytes == 1 else rope.clone(memory_format=pack).view(torch.bfloat16)
    return c_kv, k_pe.to(dtype)


def _encode(c_kv: Tensor, k_pe: Tensor, fp8: torch.dtype, kv_format: str, eps: float) -> Tensor:
    """The bytes [T, W] of rows of an 8-bit cache."""
    layout, name = KV_FORMATS[kv_format], FP8_NAMES[fp8]
    if layout.tile:
        codes, scales = per_token_group_quant_fp8.reference(c_kv, layout.tile, name, "row_f32", eps)
        latent = [codes, scales.to(torch.float32)]
    else:
        latent = [to_fp8(wide(c_kv), FP8_KINDS[name])]
    rope = to_fp8(wide(k_pe), FP8_KINDS[name]) if layout.rope_bytes == 1 else k_pe.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in [*latent, rope]], -1)


def _write(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """``cache[slot] = value`` for the slots that exist."""
    pages, page_size = cache.shape[:2]
    if slots.shape[0] == 0 or pages * page_size == 0:
        return
    valid = _valid(slots, cache)
    # A row to skip repeats the first row to write, so that every write is one somebody asked for; with none to
    # write, all rewrite what one slot holds already.
    first = valid.to(torch.int32).argmax()
    row = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), first)
    page, offset = _locate(slots[row], cache)
    cache.index_put_((page, offset), torch.where(valid.any(), values[row], cache[page[:1], offset[:1]]))


def _read(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [N, D] of slots, and where [N, 1] there is no such slot, so that the row means nothing."""
    pages, page_size, width = cache.shape
    skipped = ~_valid(slots, cache)[:, None]
    if pages * page_size == 0:
        return cache.new_zeros(slots.shape[0], width), skipped
    return cache[_locate(slots, cache)], skipped


def _valid(slots: Tensor, cache: Tensor) -> Tensor:
    return (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])


def _locate(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Page and row of each slot, clamped into the cache. Two indices, since a slice of a pool has no flat view."""
    pages, page_size = cache.shape[:2]
    slot = slots.to(torch.int64).clamp(0, pages * page_size - 1)
    return slot // page_size, slot % page_size
