"""The paged caches: copies into slots and out of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import Dim, Shape, Spec, core, deepseek, full
from ..verdict import bitwise

INDEX = {"int32": torch.int32, "int64": torch.int64}


def strangers(total: int, dtype: torch.dtype) -> Tensor:
    """Numbers that are no slot: counted from the end, clamped, wrapped around or cut to 32 bits they would be one."""
    info = torch.iinfo(dtype)
    wide = [2**32 + 1, -(2**32) + 1] if info.bits == 64 else []
    return torch.tensor([-1, total, -total, total + 1, info.max, info.min, *wide], dtype=dtype)


def named_slots(draw: Draw, count: int, total: int, index: str) -> Tensor:
    """Distinct slots in no order, the first and the last among them.

    Where some are strangers, nobody names the slots that those could be taken for, at both ends.
    """
    outside = strangers(total, INDEX[index])
    outside = outside[draw.permutation(count) % len(outside)]
    if draw.regime == "all_skipped":
        outside[:1] = total  # what a kernel may write in place of all of them is the first
    if total == 0 or draw.regime == "all_skipped":
        return outside
    if draw.regime == "b32_sentinels":
        slots = total // 4 + draw.permutation(total // 2)[:count]
        return torch.where(draw.permutation(count) % 3 == 0, outside, slots.to(outside.dtype))
    slots = torch.cat([torch.tensor([total - 1, 0]), draw.permutation(total - 2) + 1])[:count]
    slots = slots[draw.permutation(len(slots))]
    if draw.regime == "repeated":
        slots[1::3] = slots[0]
    return slots.to(outside.dtype)


def specials(draw: Draw, x: Tensor) -> Tensor:
    """``x``; in regime "specials" with values among it that arithmetic would not hand on as they are."""
    if draw.regime != "specials":
        return x
    info = torch.finfo(x.dtype)
    tiny = info.smallest_normal * info.eps
    values = [torch.inf, -torch.inf, -0.0, tiny, -tiny, info.max, info.smallest_normal]
    odd = torch.tensor(values, dtype=torch.float64).to(x.dtype)
    flat = x.flatten()
    flat[::3] = odd[draw.permutation(len(flat[::3])) % len(odd)]
    return flat.view_as(x)


def token_rows(draw: Draw, slots: Tensor, *shape: int) -> Tensor:
    """One row a token; tokens of one slot bring equal rows, since any of them may win."""
    x = specials(draw, draw.values(slots.shape[0], *shape))
    if draw.regime == "repeated":
        x[1::3] = x[:1]
    return x


def _before(draw: Draw, pages: int, page_size: int, *row: int) -> Tensor:
    """What a cache held before: numbers, and inf in every fifth slot, which no arithmetic with it would leave there.

    No NaN, here or in `specials`: of its many patterns a kernel that computes in a wider type may give back another.
    """
    cache = draw.normal(pages, page_size, *row)
    cache.view(pages * page_size, *row)[::5] = torch.inf
    return cache


def mha_kv_store(
    draw: Draw, T: int, pages: int, page: int, H: int, Dk: int, Dv: int, index: str = "int64"
) -> dict[str, Any]:
    slots = named_slots(draw, T, pages * page, index)
    return {
        "k_cache": _before(draw, pages, page, H, Dk),
        "v_cache": _before(draw, pages, page, H, Dv),
        "slots": slots,
        "k": token_rows(draw, slots, H, Dk),
        "v": token_rows(draw, slots, H, Dv),
    }


def mla_kv_store(draw: Draw, T: int, pages: int, page: int, L: int, R: int, index: str = "int64") -> dict[str, Any]:
    slots = named_slots(draw, T, pages * page, index)
    return {
        "cache": _before(draw, pages, page, L + R),
        "slots": slots,
        "c_kv": token_rows(draw, slots, L),
        "k_pe": token_rows(draw, slots, R),
    }


def read_slots(draw: Draw, count: int, total: int, index: str) -> Tensor:
    """Slots to read: in no order, half of them twice."""
    slots = named_slots(draw, count - count // 3, total, index)
    again = slots[draw.permutation(len(slots))[: count // 3]]
    return torch.cat([slots, again])[draw.permutation(count)]


def hide_others(cache: Tensor, slots: Tensor, value: float) -> Tensor:
    """``cache`` with ``value`` in every slot that is not to be read."""
    total = cache.shape[0] * cache.shape[1]
    unread = torch.ones(total, dtype=torch.bool)
    unread[slots[(slots >= 0) & (slots < total)].long()] = False
    cache.view(total, *cache.shape[2:])[unread] = value
    return cache


def mla_kv_gather(draw: Draw, N: int, pages: int, page: int, L: int, R: int, index: str = "int64") -> dict[str, Any]:
    slots = read_slots(draw, N, pages * page, index)
    cache = specials(draw, draw.values(pages, page, L + R))
    return {"cache": hide_others(cache, slots, torch.nan), "slots": slots, "kv_lora_rank": L}


def mla_shapes(tokens: str, many: dict[str, Dim], **extra: Dim) -> tuple[Shape, ...]:
    """Shapes of an op on MLA's cache, whose number of tokens is called so; ``many``: how the largest differs."""
    row: dict[str, Dim] = {"L": 512, "R": 64, **extra}
    few: dict[str, Dim] = {tokens: 17, "pages": 2, "page": 64, **row}
    return (
        core("unit", None, **few),
        core("unit", None, **few, index="int32"),
        core("b32_sentinels", None, **few, index="int32"),
        core("unit", None, **few | {tokens: 1}),
        core("b24_empty", None, **few | {tokens: 0}),
        core("b24_empty", None, **few | {tokens: 5, "pages": 0}),
        core("unit", None, **few | {tokens: 40, "pages": 40, "page": 1}),
        deepseek("unit", None, **few | {tokens: 128}),  # a prefill that fills its pages
        deepseek("unit", ("bfloat16",), **few | {tokens: 333, "pages": 7}),
        full("unit", ("bfloat16",), **few | {tokens: 65537, "pages": 1025} | many),
    )


STORE_MHA = (
    core(T=17, pages=3, page=16, H=2, Dk=192, Dv=128),
    core(T=17, pages=3, page=16, H=2, Dk=192, Dv=128, index="int32"),
    core(regime="b32_sentinels", T=17, pages=3, page=16, H=2, Dk=192, Dv=128, index="int32"),
    core(T=1, pages=3, page=16, H=2, Dk=192, Dv=128),
    core(T=48, pages=3, page=16, H=2, Dk=192, Dv=128),  # every slot
    core(regime="b24_empty", T=0, pages=3, page=16, H=2, Dk=192, Dv=128),
    core(regime="b24_empty", T=5, pages=0, page=16, H=2, Dk=192, Dv=128),
    core(T=17, pages=33, page=1, H=3, Dk=64, Dv=64),
    deepseek(T=33, pages=2, page=64, H=16, Dk=192, Dv=128),  # V2-Lite, or V3 on eight ranks
    deepseek(T=5, pages=1, page=64, H=128, Dk=192, Dv=128),  # V2, V3
    full(T=65537, pages=1025, page=64, H=1, Dk=64, Dv=64, dtypes=("bfloat16",)),
)
SMALL_PAGES: dict[str, Dim] = {"pages": 5, "page": 4, "L": 24, "R": 8}
REGIMES = ("b32_sentinels", "all_skipped", "specials")

SPECS = (
    Spec("mha_kv_store", mha_kv_store, STORE_MHA, regimes=(*REGIMES, "repeated"), verdict=bitwise),
    Spec(
        "mla_kv_store",
        mla_kv_store,
        (*mla_shapes("T", {"L": 128}), core("unit", None, T=9, **SMALL_PAGES)),
        regimes=(*REGIMES, "repeated"),
        verdict=bitwise,
    ),
    Spec(
        "mla_kv_gather",
        mla_kv_gather,
        (*mla_shapes("N", {"L": 256}), core("unit", None, N=9, **SMALL_PAGES)),
        regimes=REGIMES,
        rows=("slots",),
        structural=frozenset({"all_skipped"}),
        verdict=bitwise,
    ),
)
