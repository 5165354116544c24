"""The paged latent cache of multi-head latent attention (MLA): one row a token, ``[c_kv | k_pe]``, shared by all heads.

Slot ``n`` is row ``n % page_size`` of page ``n // page_size``. Which slots a sequence owns is the engine's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import FLOAT, INDEX
from ..contracts import Contracts
from ..op import op


@op(
    shapes={"cache": "pages page_size L+R", "slots": "T", "c_kv": "T L", "k_pe": "T R"},
    dtypes={"cache": FLOAT, "slots": INDEX, "c_kv": "cache", "k_pe": "cache"},
    mutates=("cache",),
    free=("T", "pages"),
    traffic="2 * T * (L + R) * cache.element_size() + T * slots.element_size()",
    fake=lambda *_, **__: None,
    contracts=Contracts(
        C1_empties="T = 0 and a cache without pages leave the cache as it is, without a kernel launch.",
        C3_strides="Outer strides are free: c_kv and k_pe are slices of one projection, cache one layer of a pool.",
        C4_mutation="Writes cache, which must not overlap c_kv or k_pe; returns nothing.",
        C7_sentinels="A slot that is negative or ≥ pages·page_size is skipped; slot 0 is a slot like any other.",
        C8_unwritten_rows="Slots that are not named keep their bits, NaN included.",
        C9_rounding="A copy: bitwise.",
        C10_determinism="A slot named twice gets, element by element, one of its rows; which is undefined.",
        C11_capture="No host sync and O(T): the padding of a captured batch takes slot -1.",
        C13_ids="slots are int32 or int64.",
    ),
)
def mla_kv_store(cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """Write one token a row into the paged MLA cache: ``cache[slot] = [c_kv | k_pe]``.

    cache: [pages, page_size, L + R] bf16/f16/f32, written in place (an 8-bit cache is another op's business);
    slots: [T] int32/int64, skipped where negative or ≥ pages·page_size;
    c_kv: [T, L] the normed latent, L = kv_lora_rank; k_pe: [T, R] the rotated key part; both of cache's dtype.
    Named slots should differ: of several rows for one slot, any may win, element by element.
    Semantics: vLLM's concat_and_cache_mla with its skipped negative slots.
    """
    pages, page_size, _ = cache.shape
    tokens = slots.shape[0]
    if tokens == 0 or pages * page_size == 0:
        return
    valid = _valid(slots, cache)
    # A row to skip repeats the first row to write, so that every write is one somebody asked for; with none to
    # write, all rewrite what one slot holds already.
    first = valid.to(torch.int32).argmax()
    row = torch.where(valid, torch.arange(tokens, device=slots.device), first)
    page, offset = _locate(slots[row], cache)
    values = torch.cat([c_kv, k_pe], -1)[row]
    cache.index_put_((page, offset), torch.where(valid.any(), values, cache[page[:1], offset[:1]]))


@op(
    shapes={"cache": "pages page_size D", "slots": "N"},
    dtypes={"cache": FLOAT, "slots": INDEX},
    where={"0 < kv_lora_rank <= D": "kv_lora_rank is a part of the cache's row"},
    free=("N", "pages"),
    traffic="2 * N * D * cache.element_size() + N * slots.element_size()",
    contracts=Contracts(
        C1_empties="N = 0 gives zero rows; a cache without pages gives zeros, for every slot is out of range.",
        C3_strides="Outer strides are free: cache may be one layer of a pool.",
        C7_sentinels="A slot that is negative or ≥ pages·page_size gives a row of zeros.",
        C9_rounding="A copy: bitwise.",
        C13_ids="slots are int32 or int64.",
    ),
)
def mla_kv_gather(cache: Tensor, slots: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Read tokens back from the paged MLA cache, e.g. a cached prefix that is to be expanded to full keys and values.

    cache: [pages, page_size, L + R]; slots: [N] int32/int64, in any order and repeated at will; kv_lora_rank: L.
    Returns (c_kv [N, L], k_pe [N, R]), cache's dtype, separate tensors; zeros where a slot is out of range,
    whatever the cache holds.
    """
    pages, page_size, width = cache.shape
    if pages * page_size == 0:
        count = slots.shape[0]
        return cache.new_zeros(count, kv_lora_rank), cache.new_zeros(count, width - kv_lora_rank)
    skipped = ~_valid(slots, cache)[:, None]
    index = _locate(slots, cache)
    c_kv, k_pe = cache[..., :kv_lora_rank], cache[..., kv_lora_rank:]
    return c_kv[index].masked_fill(skipped, 0), k_pe[index].masked_fill(skipped, 0)


def _valid(slots: Tensor, cache: Tensor) -> Tensor:
    return (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])


def _locate(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Page and row of each slot, clamped into the cache. Two indices, since a slice of a pool has no flat view."""
    pages, page_size, _ = cache.shape
    slot = slots.to(torch.int64).clamp(0, pages * page_size - 1)
    return slot // page_size, slot % page_size
