"""The paged 8-bit latent cache: which bytes are written, and what they mean when they are read back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bounds import assert_traces, same_bits
from cache_formula import DTYPE, FORMATS, ROW_BYTES, cache_of, meaning_by_loop, row_by_loop
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS
from torch_hal.kv_formats import KV_FORMATS
from torch_hal.ops.kv_cache import mla_kv_gather_fp8, mla_kv_store_fp8

WIDTHS = [(512, 64), (128, 3)]  # kv_lora_rank, rope dim: DeepSeek's, and one that no wider type aligns with

each_format = pytest.mark.parametrize("kv_format", FORMATS)
each_kind = pytest.mark.parametrize("kind", FP8_KINDS)


def tokens(count: int, rank: int, rope: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Slices of one wide projection, values from far below to far above what codes can hold, zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 5 + rank + rope, generator=generator) * torch.logspace(-4, 3, 5 + rank + rope)
    if count:
        x[0, 5 : 5 + 128] = 0
        x[-1, 9], x[-1, 10], x[-1, -1] = 0.0, -0.0, -1e-6
    x = x.to(dtype)
    return x[:, 5 : 5 + rank], x[:, 5 + rank :]


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def test_the_table_has_the_formats_that_kernels_have() -> None:
    assert set(KV_FORMATS) == set(FORMATS) and all(name == entry.name for name, entry in KV_FORMATS.items())
    assert KV_FORMATS["flat"].row_bytes(512, 64) == 576
    assert KV_FORMATS["ds_mla"].row_bytes(512, 64) == 656
    for entry in KV_FORMATS.values():
        for rank, rope in [*WIDTHS, (256, 0)]:
            width = entry.row_bytes(rank, rope)
            assert width == ROW_BYTES[entry.name](rank, rope)
            assert entry.rope_dim(width, rank) == rope and entry.fits(width, rank)
    assert not KV_FORMATS["ds_mla"].fits(656, 500) and not KV_FORMATS["ds_mla"].fits(655, 512)
    assert not KV_FORMATS["flat"].fits(576, 577) and not KV_FORMATS["flat"].fits(576, 0)


@each_format
@each_kind
@pytest.mark.parametrize(("rank", "rope"), WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_writes_the_rows_bytes_and_no_others(
    kv_format: str, kind: str, rank: int, rope: int, dtype: torch.dtype
) -> None:
    cache = cache_of(3, 2, ROW_BYTES[kv_format](rank, rope), kind)
    pool = cache._base
    assert pool is not None
    c_kv, k_pe = tokens(5, rank, rope, dtype)
    slots = [4, -1, 1, 6, 3]
    expected = torch.full_like(as_bytes(cache), 0xFF)
    for i, slot in enumerate(slots):
        if 0 <= slot < 6:
            row = row_by_loop(c_kv[i], k_pe[i], kv_format, kind)
            expected[slot // 2, slot % 2] = torch.tensor(row, dtype=torch.uint8)
    mla_kv_store_fp8(cache, torch.tensor(slots), c_kv, k_pe, kv_format)
    assert torch.equal(as_bytes(cache), expected)
    assert bool((pool[:, ::2].view(torch.uint8) == 0xFF).all())  # the pool's other layers


@each_format
@each_kind
@pytest.mark.parametrize(("rank", "rope"), WIDTHS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_gather_returns_what_the_bytes_mean(
    kv_format: str, kind: str, rank: int, rope: int, out_dtype: torch.dtype
) -> None:
    cache = cache_of(3, 2, ROW_BYTES[kv_format](rank, rope), kind)
    c_kv, k_pe = tokens(4, rank, rope)
    mla_kv_store_fp8(cache, torch.tensor([5, 0, 2, 3]), c_kv, k_pe, kv_format)
    asked = [3, -1, 5, 6, 5, -(2**31), 0]
    got_c, got_pe = mla_kv_gather_fp8(cache, torch.tensor(asked, dtype=torch.int32), rank, kv_format, out_dtype)
    assert (got_c.shape, got_pe.shape) == ((7, rank), (7, rope))
    for i, slot in enumerate(asked):
        want = torch.zeros(rank + rope)
        if 0 <= slot < 6:
            want = torch.tensor(meaning_by_loop(as_bytes(cache)[slot // 2, slot % 2].tolist(), rank, kv_format, kind))
        want = want.to(out_dtype)  # exact, then float32, then this
        assert same_bits(got_c[i], want[:rank]) and same_bits(got_pe[i], want[rank:])


@each_kind
def test_what_comes_back_is_near_what_was_stored(kind: str) -> None:
    """Half a unit in the last place of a code: 2⁻⁴ of a value, or 2⁻⁴ of the smallest normal code."""
    generator = torch.Generator().manual_seed(1)
    c_kv, k_pe = torch.randn(8, 512, generator=generator), torch.randn(8, 64, generator=generator)
    smallest = {"e4m3fn": 2.0**-6, "e4m3fnuz": 2.0**-7}[kind]
    for kv_format in FORMATS:
        cache = cache_of(2, 4, ROW_BYTES[kv_format](512, 64), kind)
        mla_kv_store_fp8(cache, torch.arange(8), c_kv, k_pe, kv_format)
        got_c, got_pe = mla_kv_gather_fp8(cache, torch.arange(8), 512, kv_format, torch.float32)
        amax = c_kv.view(8, 4, 128).abs().amax(-1).repeat_interleave(128, -1)
        unit = torch.ones_like(c_kv) if kv_format == "flat" else amax / FP8_KINDS[kind].quant_max
        assert bool(((got_c - c_kv).abs() <= 1.001 / 16 * c_kv.abs().maximum(smallest * unit)).all())
        limit = k_pe.abs().clamp(min=smallest) / 16 if kv_format == "flat" else k_pe.abs() / 256
        assert bool(((got_pe - k_pe).abs() <= limit).all())


@each_format
@each_kind
def test_a_token_of_zeros_comes_back_as_zeros(kv_format: str, kind: str) -> None:
    """Upstream's quantiser of the 656-byte row has no eps: 0 / 0 there makes the tile NaN."""
    cache = cache_of(1, 2, ROW_BYTES[kv_format](512, 64), kind)
    zeros = torch.zeros(2, 576, dtype=torch.bfloat16)
    zeros[1, 128:] = 3.0  # one tile of zeros beside others
    mla_kv_store_fp8(cache, torch.tensor([0, 1]), zeros[:, :512], zeros[:, 512:], kv_format)
    got_c, got_pe = mla_kv_gather_fp8(cache, torch.tensor([0, 1]), 512, kv_format, torch.float32)
    assert not got_c[0].any() and not got_pe[0].any() and not got_c[1, :128].any()
    assert bool((got_c[1, 128:] == 3).all()) and bool((got_pe[1] == 3).all())
    if kv_format == "ds_mla":
        scales = as_bytes(cache)[0, 0, 512:528].clone().view(torch.float32)
        assert scales.tolist() == pytest.approx([1e-10 / FP8_KINDS[kind].quant_max] * 4)


def test_eps_bounds_amax_from_below() -> None:
    cache, x = cache_of(1, 1, 656, "e4m3fn"), torch.full((1, 576), 1e-5)
    mla_kv_store_fp8(cache, torch.tensor([0]), x[:, :512], x[:, 512:], "ds_mla", eps=1e-4)
    scales = as_bytes(cache)[0, 0, 512:528].clone().view(torch.float32)
    assert scales.tolist() == pytest.approx([1e-4 / 448] * 4)
    assert as_bytes(cache)[0, 0, :512].unique().numel() == 1 and cache[0, 0, 0].float() == 44


@each_kind
def test_casts_clamp_and_nan_stays(kind: str) -> None:
    """A bare cast gives NaN beyond the largest code on some versions; a negative underflow is NaN on some fnuz ones."""
    cache = cache_of(1, 1, 12, kind, byte=0)
    values = [1e4, -1e4, math.inf, -math.inf, math.nan, -1e-9, 1e-9, FP8_KINDS[kind].quant_max]
    x = torch.tensor([[*values, 1.0, -1e-9, math.nan, -math.inf]])
    mla_kv_store_fp8(cache, torch.tensor([0]), x[:, :8], x[:, 8:], "flat")
    c_kv, k_pe = (y[0].tolist() for y in mla_kv_gather_fp8(cache, torch.tensor([0]), 8, "flat", torch.float32))
    top = FP8_KINDS[kind].quant_max
    assert c_kv[:4] == [top, -top, top, -top] and math.isnan(c_kv[4]) and c_kv[5:] == [0.0, 0.0, top]
    assert k_pe[:2] == [1.0, 0.0] and math.isnan(k_pe[2]) and k_pe[3] == -top


def test_a_tile_that_holds_nan_spoils_no_other() -> None:
    cache = cache_of(1, 2, 656, "e4m3fn")
    x = torch.randn(2, 576, generator=torch.Generator().manual_seed(2))
    clean = x.clone()
    x[0, 130], x[1, 511] = math.nan, math.inf
    slots = torch.tensor([1, 0])
    mla_kv_store_fp8(cache, slots, x[:, :512], x[:, 512:], "ds_mla")
    got, got_pe = mla_kv_gather_fp8(cache, slots, 512, "ds_mla", torch.float32)
    mla_kv_store_fp8(cache, slots, clean[:, :512], clean[:, 512:], "ds_mla")
    want, want_pe = mla_kv_gather_fp8(cache, slots, 512, "ds_mla", torch.float32)
    assert same_bits(got_pe, want_pe)
    assert same_bits(got[0, :128], want[0, :128]) and same_bits(got[0, 256:], want[0, 256:])
    assert same_bits(got[1, :384], want[1, :384])


@each_format
def test_no_slot_named_and_nothing_to_name(kv_format: str) -> None:
    width = ROW_BYTES[kv_format](512, 64)
    for pages, count in [(2, 3), (2, 0), (0, 3), (0, 0)]:
        cache = cache_of(pages, 4, width, "e4m3fn")
        slots = torch.tensor([-1, 8, 2**30][:count], dtype=torch.int32)
        mla_kv_store_fp8(cache, slots, *tokens(count, 512, 64), kv_format)
        assert bool((as_bytes(cache) == 0xFF).all())
        c_kv, k_pe = mla_kv_gather_fp8(cache, slots, 512, kv_format, torch.bfloat16)
        assert (c_kv.shape, k_pe.shape, c_kv.dtype) == ((count, 512), (count, 64), torch.bfloat16)
        assert not c_kv.any() and not k_pe.any()


def test_offsets_past_two_to_the_31() -> None:
    pages, page_size = 2**31 // (64 * 656) + 2, 64
    cache = torch.empty(pages, page_size, 656, dtype=torch.float8_e4m3fn)  # only touched pages take memory
    c_kv, k_pe = (x.clone() for x in tokens(2, 512, 64))
    slots = torch.tensor([pages * page_size - 1, 0])
    mla_kv_store_fp8(cache, slots, c_kv, k_pe, "ds_mla")
    assert cache.numel() > 2**31
    assert as_bytes(cache[-1, -1]).tolist() == row_by_loop(c_kv[0], k_pe[0], "ds_mla", "e4m3fn")
    far, _ = mla_kv_gather_fp8(cache, slots.flip(0), 512, "ds_mla", torch.float32)
    near, _ = mla_kv_gather_fp8(cache[[0, -1]][:, [0, -1]], torch.tensor([0, 3]), 512, "ds_mla", torch.float32)
    assert same_bits(far, near)


@each_format
def test_compiles_whole_and_agrees(kv_format: str) -> None:
    caches = [cache_of(2, 4, ROW_BYTES[kv_format](128, 3), "e4m3fn") for _ in range(2)]
    slots, (c_kv, k_pe) = torch.tensor([6, -1, 3]), tokens(3, 128, 3)
    torch._dynamo.reset()
    store = torch.compile(mla_kv_store_fp8.reference, fullgraph=True, backend="aot_eager")
    store(caches[0], slots, c_kv, k_pe, kv_format)
    mla_kv_store_fp8(caches[1], slots, c_kv, k_pe, kv_format)
    assert torch.equal(*map(as_bytes, caches))
    assert_traces(mla_kv_gather_fp8, caches[0], slots, 128, kv_format, torch.bfloat16)


def test_schemas_declare_the_write() -> None:
    assert mla_kv_store_fp8.schema == (
        "(Tensor(a0!) cache, Tensor slots, Tensor c_kv, Tensor k_pe, str kv_format, float eps=1e-10) -> ()"
    )
    assert mla_kv_gather_fp8.schema == (
        "(Tensor cache, Tensor slots, SymInt kv_lora_rank, str kv_format, ScalarType out_dtype) -> (Tensor, Tensor)"
    )


def test_measures_count_what_moves() -> None:
    call = {"cache": cache_of(9, 4, 656, "e4m3fn"), "slots": torch.arange(3), "kv_format": "ds_mla"}
    c_kv, k_pe = tokens(3, 512, 64, torch.bfloat16)
    assert mla_kv_store_fp8.measure(**call, c_kv=c_kv, k_pe=k_pe)["bytes"] == 3 * (656 + 2 * 576 + 8)
    gathered = mla_kv_gather_fp8.measure(**call, kv_lora_rank=512, out_dtype=torch.float32)
    assert gathered["bytes"] == 3 * (656 + 4 * 576 + 8)


STORE: dict[str, Any] = {
    "cache": torch.zeros(2, 4, 656, dtype=DTYPE["e4m3fn"]),
    "slots": torch.zeros(3, dtype=torch.int64),
    "c_kv": torch.zeros(3, 512),
    "k_pe": torch.zeros(3, 64),
    "kv_format": "ds_mla",
}
GATHER: dict[str, Any] = {
    **{name: STORE[name] for name in ("cache", "slots", "kv_format")},
    "kv_lora_rank": 512,
    "out_dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("op", "call", "change", "words"),
    [
        (mla_kv_store_fp8, STORE, {"cache": torch.zeros(2, 4, 656)}, ["'cache'", "float8_e4m3fn", "float32"]),
        (mla_kv_store_fp8, STORE, {"cache": STORE["cache"].flatten(0, 1)}, ["'cache'", "rank 3", "(8, 656)"]),
        (mla_kv_store_fp8, STORE, {"kv_format": "fp8"}, ["'kv_format'", "flat, ds_mla", "'fp8'"]),
        (mla_kv_store_fp8, STORE, {"kv_format": "flat"}, ["the format's bytes for L and R", "W=656", "'flat'"]),
        (mla_kv_store_fp8, STORE, {"c_kv": torch.zeros(3, 500)}, ["tiles divide the latent", "L=500"]),
        (mla_kv_store_fp8, STORE, {"k_pe": torch.zeros(3, 60)}, ["the format's bytes for L and R", "R=60"]),
        (mla_kv_store_fp8, STORE, {"k_pe": torch.zeros(3, 64).half()}, ["'k_pe'", "torch.float32", "torch.float16"]),
        (mla_kv_store_fp8, STORE, {"slots": torch.zeros(4, dtype=torch.int64)}, ["'c_kv'", "T = 4", "(3, 512)"]),
        (mla_kv_store_fp8, STORE, {"eps": 0.0}, ["'eps'", "a tile of zeros", "eps=0.0"]),
        (mla_kv_gather_fp8, GATHER, {"kv_format": "row"}, ["'kv_format'", "flat, ds_mla", "'row'"]),
        (mla_kv_gather_fp8, GATHER, {"kv_lora_rank": 640}, ["kv_lora_rank a part", "kv_lora_rank=640", "W=656"]),
        (mla_kv_gather_fp8, GATHER, {"kv_lora_rank": 0}, ["kv_lora_rank a part", "kv_lora_rank=0"]),
        (mla_kv_gather_fp8, GATHER, {"out_dtype": torch.int8}, ["'out_dtype'", "bf16/f16/f32", "torch.int8"]),
        (mla_kv_gather_fp8, GATHER, {"slots": torch.zeros(3)}, ["'slots'", "torch.int64", "torch.float32"]),
    ],
)
def test_errors_name_argument_expected_and_got(
    op: Any, call: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ArgumentError) as error:
        op(**{**call, **change})
    assert all(word in str(error.value) for word in [op.name, "expected", "got", *words]), str(error.value)
