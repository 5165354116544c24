"""Wrong caches of 16 bits and more, and wrong slots of any cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import Mutant, edit, kernel
from .decode import packed

BASES: Mapping[str, str] = {
    "mha_kv_store": "core/T17-pages3-page16-H2-Dk192-Dv128/bfloat16",
    "mla_kv_store": "core/T17-pages2-page64-L512-R64/bfloat16",
    "mla_kv_store_fp8": "core/T17-pages2-page64-L512-R64-ds_mla/bfloat16",
    "mla_kv_gather": "core/N17-pages2-page64-L512-R64/bfloat16",
    "mla_kv_gather_fp8": "core/N17-pages2-page64-L512-R64-ds_mla/bfloat16",
}
STORES = ("mha_kv_store", "mla_kv_store", "mla_kv_store_fp8")
SMALL_PAGES: Mapping[str, str] = {
    "mha_kv_store": "core/T17-pages33-page1-H3-Dk64-Dv64/bfloat16",
    "mla_kv_store": "core/T9-pages5-page4-L24-R8/bfloat16",
    "mla_kv_store_fp8": "core/T11-pages5-page4-L256-R16-ds_mla/bfloat16",
    "mla_kv_gather": "core/N9-pages5-page4-L24-R8/bfloat16",
    "mla_kv_gather_fp8": "core/N11-pages5-page4-L256-R16-ds_mla/bfloat16",
}
# Which check finds another row in place of one, and none; that of the other ops is "copy".
OTHER_ROWS = {"mla_kv_store_fp8": "slots", "mla_kv_gather_fp8": "nonfinite"}
NO_ROW = {"mla_kv_store_fp8": "scales", "mla_kv_gather_fp8": "bound"}
VALID = "return (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])"
SLOT = "slot = slots.to(torch.int64).clamp"
PLACE = "return slot // page_size, slot % page_size"
SWAPPED = "return slot % page_size % pages, slot // page_size % page_size"
BY_16 = "return (slot // 16).clamp(max=pages - 1), (slot % 16).clamp(max=page_size - 1)"
NO_NEW_ROW = "torch.where(valid.any(), values[row], cache[page[:1], offset[:1]])"
Op = Callable[..., Any]


def slots(op: str) -> tuple[Mutant, ...]:
    """Wrong rows for slots, and wrong ideas of which slots there are."""
    check, missing = OTHER_ROWS.get(op, "copy"), NO_ROW.get(op, "copy")
    unit, sentinels = (f"{BASES[op]}/contiguous/{regime}/0" for regime in ("unit", "b32_sentinels"))

    def wrong(name: str, why: str, old: str, new: str, case: str, check: str = check) -> Mutant:
        return edit(op, name, why, old, new, case, check, module="kv_cache")

    return (
        wrong("next_slot", "takes the slot after", SLOT, "slot = (slots.to(torch.int64) + 1).clamp", unit),
        wrong("page_and_row_swapped", "takes the row for the page", PLACE, SWAPPED, unit),
        wrong(
            "first_page", "takes a slot for a row of the first page", PLACE, "return 0 * slot, slot % page_size", unit
        ),
        wrong("pages_of_16", "takes a page to have 16 rows", PLACE, BY_16, f"{SMALL_PAGES[op]}/contiguous/unit/0"),
        wrong("no_slot_zero", "keeps slot 0 for padding", VALID, VALID.replace(">= 0", "> 0"), unit, missing),
        wrong("no_last_slot", "takes the last slot for none", VALID, VALID.replace("1])", "1] - 1)"), unit, missing),
        wrong(
            "negative_wraps",
            "counts negative slots from the end",
            VALID,
            VALID.replace("(slots >= 0) & ", ""),
            sentinels,
        ),
        wrong("beyond_is_clamped", "takes what lies beyond for the last slot", VALID, "return slots >= 0", sentinels),
        kernel(op, "cut_to_32_bits", "reads slots as int32", sentinels, check)(cut_to_32_bits),
        kernel(op, "wraps_around", "takes slots modulo their number", sentinels, check)(wraps_around),
        kernel(op, "skipped_is_zero", "takes slot 0 for all that are none", sentinels, check)(skipped_is_zero),
    )


def _with_slots(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> list[Any]:
    """The arguments with other slots: the only tensor of int32 or int64."""
    return [change(x) if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) else x for x in args]


def cut_to_32_bits(op: Op, *args: Any) -> Any:
    return op(*_with_slots(args, lambda slots: slots.int()))


def wraps_around(op: Op, *args: Any) -> Any:
    return op(*_with_slots(args, lambda slots: slots % args[0][..., 0].flatten(0, 1).shape[0]))


def skipped_is_zero(op: Op, *args: Any) -> Any:
    total = args[0].shape[0] * args[0].shape[1]
    return op(*_with_slots(args, lambda slots: slots.masked_fill((slots < 0) | (slots >= total), 0)))


def writing(op: str) -> tuple[Mutant, ...]:
    """What else goes wrong with writing."""
    unit = f"{BASES[op]}/contiguous/unit/0"
    return (
        edit(
            op,
            "first_of_none",
            "writes a token where all are to be skipped",
            NO_NEW_ROW,
            "values[row]",
            f"{BASES[op]}/contiguous/all_skipped/0",
            OTHER_ROWS.get(op, "copy"),
            module="kv_cache",
        ),
        kernel(op, "one_row_further", "writes past the cache's last row", unit, "canary")(one_row_further),
        kernel(op, "packed_cache", "takes the cache for contiguous", f"{BASES[op]}/rows/b25_strides/0", "canary")(
            packed_cache
        ),
        kernel(
            op,
            "tokens_left_out",
            "writes whole tiles of 16 tokens",
            unit,
            NO_ROW.get(op, "copy"),
        )(tokens_left_out),
        kernel(op, "clears_its_input", "leaves nothing of what it stored", unit, "mutation")(clears_its_input),
    )


def one_row_further(op: Op, cache: Tensor, *rest: Any) -> None:
    op(cache, *rest)
    cache.as_strided((1,), (1,), cache.storage_offset() + cache.numel()).view(torch.uint8).zero_()


def packed_cache(op: Op, cache: Tensor, *rest: Any) -> Any:
    return op(packed(cache), *rest)


def tokens_left_out(op: Op, *args: Any) -> None:
    op(*(x[:16] if isinstance(x, Tensor) and len(x) == 17 else x for x in args))


def clears_its_input(op: Op, *args: Any) -> None:
    op(*args)
    next(x for x in reversed(args) if isinstance(x, Tensor)).zero_()


MUTANTS = (
    *(mutant for op in BASES for mutant in slots(op)),
    *(mutant for op in STORES for mutant in writing(op)),
)
MHA, MLA, GATHER = (f"{BASES[op]}/contiguous" for op in ("mha_kv_store", "mla_kv_store", "mla_kv_gather"))
KEYS, VALUES, LATENT = "_write(k_cache, slots, k)", "_write(v_cache, slots, v)", "torch.cat([c_kv, k_pe], -1))"
GATHERED = "return c_kv.masked_fill(skipped, 0), k_pe.masked_fill(skipped, 0)\n"
PARTS = (
    edit(
        "mha_kv_store",
        "values_are_keys",
        "writes keys into both caches",
        VALUES,
        "_write(v_cache, slots, k[..., : v.shape[-1]])",
        f"{MHA}/unit/0",
        "copy",
    ),
    edit("mha_kv_store", "no_values", "writes keys alone", VALUES, "", f"{MHA}/unit/0", "copy"),
    edit(
        "mha_kv_store",
        "first_head",
        "writes the first head's keys for all",
        KEYS,
        "_write(k_cache, slots, k[:, :1].expand_as(k))",
        f"{MHA}/unit/0",
        "copy",
    ),
    edit(
        "mha_kv_store",
        "adds",
        "adds to what the cache holds",
        "cache.index_put_((page, offset), ",
        "cache.index_put_((page, offset), accumulate=True, values=",
        f"{MHA}/unit/0",
        "copy",
    ),
    edit(
        "mha_kv_store",
        "through_float16",
        "converts on the way",
        KEYS,
        "_write(k_cache, slots, k.half().to(k.dtype))",
        f"{MHA}/specials/0",
        "copy",
    ),
    edit(
        "mla_kv_store",
        "rope_left_out",
        "leaves out the rotated part",
        LATENT,
        "torch.cat([c_kv, 0 * k_pe], -1))",
        f"{MLA}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_store",
        "rope_first",
        "writes the rotated part first",
        LATENT,
        "torch.cat([k_pe, c_kv], -1))",
        f"{MLA}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_store",
        "adds_to_zeros",
        "adds to zeros, whose sign is lost",
        LATENT,
        "torch.cat([c_kv, k_pe], -1) + 0.0)",
        f"{MLA}/specials/0",
        "copy",
    ),
    edit(
        "mla_kv_store",
        "masks_by_multiplying",
        "clears rows to write by multiplying by 0",
        NO_NEW_ROW,
        "torch.where(valid.any(), values[row], cache[page[:1], offset[:1]]) + 0 * cache[page, offset]",
        f"{MLA}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "stale_rows",
        "gives what lies there for slots to skip",
        GATHERED,
        "return c_kv.contiguous(), k_pe.contiguous()\n",
        f"{GATHER}/b32_sentinels/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "masks_by_multiplying",
        "multiplies what is to be skipped by 0",
        GATHERED,
        "return c_kv * ~skipped, k_pe * ~skipped\n",
        f"{GATHER}/b32_sentinels/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "views_of_rows",
        "gives two views of one tensor",
        GATHERED,
        "rows = rows.masked_fill(skipped, 0)\n    return rows[:, :kv_lora_rank], rows[:, kv_lora_rank:]\n",
        f"{GATHER}/unit/0",
        "strides",
    ),
    edit(
        "mla_kv_gather",
        "rope_first",
        "takes the row's beginning for the rotated part",
        "rows[:, :kv_lora_rank], rows[:, kv_lora_rank:]",
        "rows[:, -kv_lora_rank:], rows[:, :-kv_lora_rank]",
        f"{GATHER}/unit/0",
        "copy",
    ),
    edit(
        "mla_kv_gather",
        "adds_to_zeros",
        "adds to zeros, whose sign is lost",
        GATHERED,
        GATHERED.replace(", 0)", ", 0) + 0.0"),
        f"{GATHER}/specials/0",
        "copy",
    ),
    kernel(
        "mla_kv_gather",
        "packed_cache",
        "takes the cache for contiguous",
        f"{BASES['mla_kv_gather']}/rows/b25_strides/0",
        "copy",
    )(packed_cache),
)


@kernel(
    "mha_kv_store", "packed_keys", "takes keys for contiguous", f"{BASES['mha_kv_store']}/rows/b25_strides/0", "copy"
)
def packed_keys(store: Op, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    store(k_cache, v_cache, slots, packed(k), v)


@kernel(
    "mla_kv_store",
    "packed_latents",
    "takes latents for contiguous",
    f"{BASES['mla_kv_store']}/rows/b25_strides/0",
    "copy",
)
def packed_latents(store: Op, cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    store(cache, slots, packed(c_kv), k_pe)
