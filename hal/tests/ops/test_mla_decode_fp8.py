"""Decoding over an 8-bit latent cache is decoding over what its bytes mean; unused bytes mean NaN and never matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formula import DTYPES, L, R, assert_result, decode_by_loop, paged
from bounds import assert_traces
from cache_formula import FORMATS, ROW_BYTES, cache_of, meaning_by_loop
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS
from torch_hal.ops.attention import mla_decode, mla_decode_fp8
from torch_hal.ops.kv_cache import mla_kv_gather_fp8, mla_kv_store_fp8


def quantised(
    lens: list[int], queries: int, dtype: torch.dtype, kv_format: str, kind: str = "e4m3fn"
) -> dict[str, Any]:
    """The call over an 8-bit cache whose unused rows are NaN."""
    call = paged(lens, queries, dtype)
    rows = call["cache"].flatten(0, 1)
    pages, page_size, _ = call["cache"].shape
    cache = cache_of(pages, page_size, ROW_BYTES[kv_format](L, R), kind, byte=0xFF if kind == "e4m3fn" else 0x80)
    used = torch.where(rows.isnan().any(-1), -1, torch.arange(len(rows)))
    mla_kv_store_fp8(cache, used, rows[:, :L], rows[:, L:], kv_format)
    return {**call, "cache": cache, "kv_format": kv_format}


def meant(call: dict[str, Any], kind: str) -> dict[str, Any]:
    """The call over float64 rows of what the bytes mean, for `decode_by_loop`."""
    cache = call["cache"].contiguous().view(torch.uint8)
    rows = [meaning_by_loop(row, L, call["kv_format"], kind) for row in cache.flatten(0, 1).tolist()]
    return {**call, "cache": torch.tensor(rows, dtype=torch.float64).view(*cache.shape[:2], L + R)}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize(("lens", "queries"), [([7], 1), ([9, 1, 4], 2), ([0, 5, 2, 0], 3)])
def test_decode_is_the_formula_on_what_the_bytes_mean(kv_format: str, kind: str, lens: list[int], queries: int) -> None:
    call = quantised(lens, queries, torch.float32, kv_format, kind)
    assert_result(mla_decode_fp8(**call), decode_by_loop(meant(call, kind)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_rounds_once_whatever_the_queries_dtype(dtype: torch.dtype, kv_format: str) -> None:
    """Rows are not rounded to the queries' dtype on their way."""
    call = quantised([11, 6], 2, dtype, kv_format)
    assert_result(mla_decode_fp8(**call), decode_by_loop(meant(call, "e4m3fn")), dtype)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_agrees_with_gathering_first(kv_format: str) -> None:
    call = quantised([9, 0, 6], 2, torch.float32, kv_format)
    slots = torch.arange(call["cache"].shape[0] * call["cache"].shape[1])
    rows = torch.cat(mla_kv_gather_fp8(call["cache"], slots, L, kv_format, torch.float32), -1)
    floats = {**call, "cache": rows.view(*call["cache"].shape[:2], L + R)}
    del floats["kv_format"]
    for got, want in zip(mla_decode_fp8(**call), mla_decode(**floats), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_padding_is_zero_and_pages_of_nan_stay_alone(kv_format: str) -> None:
    """A captured batch's padding: seq_len 0, a table that points anywhere, a cache full of NaN."""
    call = quantised([6, 0, 0], 2, torch.bfloat16, kv_format)
    call["q_nope"][1:] = torch.nan
    out, lse = mla_decode_fp8(**call)
    assert not out[1:].any() and bool(lse[1:].isneginf().all())
    assert bool(out[0].isfinite().all()) and bool(out[0].any()) and bool(lse[0].isfinite().all())


@pytest.mark.parametrize(
    ("batch", "queries", "pages", "columns"), [(0, 1, 3, 2), (2, 0, 3, 2), (2, 1, 0, 2), (2, 1, 3, 0)]
)
def test_empties(batch: int, queries: int, pages: int, columns: int) -> None:
    q = torch.ones(batch, queries, 2, L + R, dtype=torch.bfloat16)
    table, lens = torch.zeros(batch, columns, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    out, lse = mla_decode_fp8(q[..., :L], q[..., L:], cache_of(pages, 4, 656, "e4m3fn"), table, lens, 1.0, "ds_mla")
    assert (out.shape, lse.shape) == ((batch, queries, 2, L), (batch, queries, 2))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert not out.any() and bool(lse.isneginf().all())


def test_traces_measures_and_plans() -> None:
    call = quantised([7, 0, 3], 2, torch.bfloat16, "ds_mla")
    assert_traces(mla_decode_fp8, **call)
    assert mla_decode_fp8.schema.replace("'", '"') == (
        "(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor page_table, Tensor seq_lens, float scale, str kv_format, "
        'Tensor? plan=None, str layout="plain") -> (Tensor, Tensor)'
    )
    keys = call["page_table"].numel() * 4
    measured = mla_decode_fp8.measure(**call)
    assert measured["bytes"] == keys * 656 + 3 * 2 * 2 * (2 * L + R) * 2 + 4 * 3 * (
        2 * 2 + call["page_table"].shape[1] + 1
    )
    assert measured["flops"] == 2 * 2 * 2 * keys * (2 * L + R)
    assert mla_decode_fp8.plan is mla_decode.plan
    plan = torch.empty(0, dtype=torch.int32)
    assert torch.equal(mla_decode_fp8(**call, plan=plan, layout="plain")[0], mla_decode_fp8(**call)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache": torch.zeros(3, 4, L + R)}, ["'cache'", "float8_e4m3fn", "float32"]),
        ({"cache": cache_of(3, 4, 576, "e4m3fn")}, ["the format's bytes for L and R", "W=576", "'ds_mla'"]),
        ({"kv_format": "flat"}, ["the format's bytes for L and R", "W=656", "'flat'"]),
        ({"kv_format": "fp8"}, ["'kv_format'", "flat, ds_mla", "'fp8'"]),
        ({"q_pe": torch.zeros(2, 1, 2, 60)}, ["the format's bytes for L and R", "R=60"]),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ["'seq_lens'", "B = 2", "(3,)"]),
        ({"page_table": torch.zeros(2, 2, dtype=torch.int64)}, ["'page_table'", "int32", "int64"]),
    ],
)
def test_errors_name_argument_expected_and_got(change: dict[str, Tensor], words: list[str]) -> None:
    call = quantised([3, 2], 1, torch.float32, "ds_mla")
    with pytest.raises(ArgumentError) as error:
        mla_decode_fp8(**{**call, **change})
    assert all(word in str(error.value) for word in ["mla_decode_fp8", "expected", "got", *words]), str(error.value)
