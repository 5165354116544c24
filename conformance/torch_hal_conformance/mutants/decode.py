"""Wrong attention over pages, in 16 bits or in 8. What is wrong with its softmax is in `softmax`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import Mutant, edit, kernel

TABLE = "table, lens = page_table.to(torch.int64).clamp(0, pages - 1), "
LIMITS = "limits = lens[:, None] - queries + 1 + torch.arange(queries, device=q.device)\n"
ABSENT = "absent = torch.arange(keys, device=q.device) >= lens[:, None]"
ATTEND = "attend(wide(q[some]).flatten(1, 2), kv, kv[..., :value_dim],"
READ = "read(cache[table[some]].flatten(1, 2))"
ROW_OF_64 = "(table[some][:, torch.arange(keys) // 64] * page_size + torch.arange(keys) % 64)"
Results = tuple[Tensor, Tensor]
Attention = Callable[..., Results]


@dataclass(frozen=True)
class Cases:
    """Ids of one op's cases, but for their last parts."""

    base: str
    two: str  # new tokens a sequence
    small: str  # pages, and dims

    @classmethod
    def of(cls, rank: int, kv_format: str = "") -> Cases:
        few, end = f"core/few-H16-s{{}}-L512-R64-page64{kv_format}", "/bfloat16"
        return cls(few.format(1) + end, few.format(2) + end, f"core/mixed-H3-s3-L{rank}-R16-page4{kv_format}" + end)


CASES: Mapping[str, Cases] = {"mla_decode": Cases.of(32), "mla_decode_fp8": Cases.of(256, "-ds_mla")}


def paging(op: str) -> tuple[Mutant, ...]:
    """Wrong pages, rows, lengths and heads."""
    cases = CASES[op]
    unit, recent = f"{cases.base}/contiguous/unit/0", f"{cases.base}/contiguous/recent/0"
    two = f"{cases.two}/contiguous/recent/0"

    def wrong(name: str, why: str, old: str, new: str, case: str, check: str = "bound") -> Mutant:
        return edit(op, name, why, old, new, case, check, module="_attention")

    def told(name: str, why: str, table: str, check: str = "nonfinite") -> Mutant:
        return wrong(name, why, TABLE, TABLE.replace("page_table.to(torch.int64)", table), unit, check)

    return (
        wrong("mask_one_short", "a query does not see its own key", LIMITS, LIMITS.replace(" + 1", ""), two),
        wrong("mask_one_long", "a query sees the key after its own", LIMITS, LIMITS.replace("1", "2"), two),
        wrong("all_see_all", "all new tokens see all keys", LIMITS, LIMITS.replace("- queries + 1 +", "+ 0 *"), two),
        wrong("first_sees_most", "takes the new tokens backwards", LIMITS, LIMITS[:-1] + ".flip(0)\n", two),
        wrong(
            "new_not_counted", "takes lengths for those before the new", LIMITS, LIMITS.replace("- queries", ""), two
        ),
        wrong(
            "partial_page_left_out",
            "reads full pages alone",
            LIMITS,
            f"lens = torch.where(lens > page_size, lens // page_size * page_size, lens)\n    {LIMITS}",
            recent,
        ),
        wrong(
            "longest_for_all",
            "reads as much of all",
            LIMITS,
            f"lens = lens * 0 + lens.amax()\n    {LIMITS}",
            unit,
            "nonfinite",
        ),
        wrong("reads_past_the_end", "reads whole pages", ABSENT, f"{ABSENT} + page_size", unit, "nonfinite"),
        told(
            "page_table_ignored", "takes pages as they lie", "torch.arange(page_table.numel()).view(page_table.shape)"
        ),
        told(
            "first_page_twice",
            "reads the first page for all",
            "page_table[:, :1].expand_as(page_table).long()",
            "bound",
        ),
        told("next_page", "reads the page after the one that is named", "page_table.to(torch.int64).add(1)"),
        told("pages_backwards", "takes pages from the last to the first", "page_table.to(torch.int64).flip(1)"),
        wrong(
            "table_of_the_first",
            "reads the first sequence's pages for all",
            TABLE,
            TABLE.replace("page_table", "page_table[:1].expand_as(page_table)"),
            recent,
        ),
        wrong(
            "pages_of_64",
            "takes a page to have 64 rows",
            READ,
            f"read(cache.flatten(0, 1)[{ROW_OF_64}.clamp(max=pages * page_size - 1)])",
            f"{cases.small}/contiguous/recent/0",
        ),
        wrong(
            "first_head",
            "reads the first head's query for all",
            ATTEND,
            ATTEND.replace("q[some]", "q[some][:, :, :1].expand_as(q[some])"),
            unit,
        ),
        wrong(
            "values_from_the_end",
            "takes a row's last elements for values",
            ATTEND,
            ATTEND.replace("kv[..., :value_dim]", "kv[..., -value_dim:]"),
            unit,
        ),
        kernel(op, "last_page_alone", "reads the last page alone", recent)(last_page_alone),
        kernel(op, "rope_left_out", "scores without the rotated part", unit)(rope_left_out),
        kernel(
            op,
            "padding_unwritten",
            "does not write what has no keys",
            f"{cases.base}/contiguous/b31_padding/0",
            "nonfinite",
        )(padding_unwritten),
        kernel(op, "lse_of_heads_first", "gives the lse as [batch, heads, queries]", unit, "shape")(lse_of_heads_first),
        kernel(op, "lse_as_a_view", "gives the lse as a view of [batch, heads, queries]", two, "strides")(
            lse_as_a_view
        ),
        kernel(op, "lse_in_another_order", "fills the lse as [batch, heads, queries]", two, "nonfinite")(
            lse_in_another_order
        ),
        kernel(op, "packed_cache", "takes the cache for contiguous", f"{cases.base}/rows/b25_strides/0", "nonfinite")(
            packed_cache
        ),
        kernel(op, "packed_queries", "takes queries for contiguous", f"{cases.base}/rows/b25_strides/0", "nonfinite")(
            packed_queries
        ),
    )


def last_page_alone(
    attention: Attention, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, lens: Tensor, *rest: Any
) -> Results:
    last = (lens - 1).clamp(min=0) // cache.shape[1]
    return attention(q, q_pe, cache, table.gather(1, last[:, None].long()), lens - last * cache.shape[1], *rest)


def rope_left_out(attention: Attention, q_nope: Tensor, q_pe: Tensor, *rest: Any) -> Results:
    return attention(q_nope, torch.zeros_like(q_pe), *rest)


def padding_unwritten(
    attention: Attention, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, lens: Tensor, *rest: Any
) -> Results:
    results = attention(q, q_pe, cache, table, lens, *rest)
    out, lse = (torch.empty_like(x) for x in results)
    out[lens > 0], lse[lens > 0] = results[0][lens > 0], results[1][lens > 0]
    return out, lse


def lse_of_heads_first(attention: Attention, *args: Any) -> Results:
    out, lse = attention(*args)
    return out, lse.mT.contiguous()


def lse_as_a_view(attention: Attention, *args: Any) -> Results:
    out, lse = attention(*args)
    return out, lse.mT.contiguous().mT


def lse_in_another_order(attention: Attention, *args: Any) -> Results:
    out, lse = attention(*args)
    return out, lse.mT.contiguous().view(lse.shape)


def packed(x: Tensor) -> Tensor:
    """What a kernel reads that takes ``x`` for contiguous."""
    return x.as_strided(x.shape, torch.empty_like(x, memory_format=torch.contiguous_format).stride())


def packed_cache(attention: Attention, q: Tensor, q_pe: Tensor, cache: Tensor, *rest: Any) -> Results:
    return attention(q, q_pe, packed(cache), *rest)


def packed_queries(attention: Attention, q: Tensor, q_pe: Tensor, *rest: Any) -> Results:
    return attention(packed(q), packed(q_pe), *rest)


PAGED = tuple(mutant for op in CASES for mutant in paging(op))


@kernel(
    "mla_decode",
    "no_float32",
    "starts nothing for float32",
    "core/few-H16-s1-L512-R64-page64/float32/contiguous/unit/0",
    "nonfinite",
)
def no_float32(attention: Attention, q: Tensor, *rest: Any) -> Results:
    out, lse = attention(q, *rest)
    return (torch.empty_like(out), torch.empty_like(lse)) if q.dtype == torch.float32 else (out, lse)


FP8 = CASES["mla_decode_fp8"]


def misread(
    name: str, why: str, old: str, new: str, case: str = f"{FP8.base}/contiguous/unit/0", check: str = "bound"
) -> Mutant:
    """A mutant of 8-bit attention that takes a row for another one."""
    return edit("mla_decode_fp8", name, why, old, new, case, check, module="kv_cache")


SCALES = ".view(torch.float32).to(dtype)[..., None]"
SLICES = "rows[..., :kv_lora_rank], rows[..., kv_lora_rank:end], rows[..., end:]"
ROWS = "torch.cat(decode_rows(rows, cache.dtype, rank, kv_format, wide(q).dtype), -1)"
JOINED = "q, rank = torch.cat([q_nope, q_pe], -1)"
MISREAD = (
    misread(
        "next_tile",
        "a tile takes its neighbour's scale",
        SCALES,
        ".view(torch.float32).to(dtype).roll(1, -1)[..., None]",
        f"{FP8.small}/contiguous/b27_scales/0",
    ),
    misread("first_tile", "all tiles take the first one's scale", SCALES, f"{SCALES}[..., :1, :]"),
    misread("no_tile_scale", "forgets the scales", SCALES, f"{SCALES} ** 0"),
    misread("divides", "divides by the scales", SCALES, f"{SCALES} ** -1"),
    misread(
        "fn_for_fnuz",
        "reads fnuz codes as fn",
        "codes.view(fp8)",
        "codes.view(torch.float8_e4m3fn)",
        f"{FP8.base}/contiguous/b29_fnuz/0",
    ),
    misread(
        "rope_in_fp8",
        "rounds the rotated part to 8 bits",
        "c_kv, k_pe.to(dtype)",
        "c_kv, k_pe.to(torch.float8_e4m3fn).to(dtype)",
    ),
    misread(
        "scales_last",
        "looks for the scales behind the rotated part",
        SLICES,
        "rows[..., :kv_lora_rank], rows[..., kv_lora_rank - end :], rows[..., kv_lora_rank : kv_lora_rank - end]",
        check="nonfinite",
    ),
    edit(
        "mla_decode_fp8",
        "rows_in_bf16",
        "rounds what codes and scales mean to bfloat16",
        ROWS,
        f"{ROWS}.bfloat16().to(wide(q).dtype)",
        f"{FP8.base}/contiguous/recent/0",
    ),
    edit(
        "mla_decode_fp8",
        "queries_in_fp8",
        "rounds queries to 8 bits",
        JOINED,
        f"{JOINED}.to(torch.float8_e4m3fn).to(q_pe.dtype)",
        f"{FP8.base}/contiguous/unit/0",
    ),
)
