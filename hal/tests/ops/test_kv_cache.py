"""The paged caches: what is written, what is left alone, what is read back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hal.errors import ArgumentError
from torch_hal.ops.kv_cache import mha_kv_store, mla_kv_gather, mla_kv_store

L, R = 512, 64


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def poisoned_cache(pages: int, page_size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """One layer of a pool, hence strided, and NaN throughout."""
    return torch.full((pages, 3, page_size, L + R), torch.nan, dtype=dtype)[:, 1]


def projection(tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """c_kv and k_pe as the model has them: slices of one wide projection."""
    x = torch.randn(tokens, 128 + L + R, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x[:, 128 : 128 + L], x[:, 128 + L :]


def stored_by_loop(cache: Tensor, slots: list[int], c_kv: Tensor, k_pe: Tensor) -> Tensor:
    expected = cache.clone()
    for i, slot in enumerate(slots):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            expected[slot // cache.shape[1], slot % cache.shape[1], :L] = c_kv[i]
            expected[slot // cache.shape[1], slot % cache.shape[1], L:] = k_pe[i]
    return expected


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "slots",
    [
        [7, 0, 14, 3, 8],
        [-1, 5, -7, 2, 14],
        [15, 1, 1000, 2**31 - 1, 14],
        [-1, -1, 15, -1, 16],  # nothing to write
        [4, -1, -1, -1, -1],
        [-1, -1, -1, -1, 0],
    ],
)
def test_store_writes_the_named_slots_and_no_other(slots: list[int], dtype: torch.dtype, index: torch.dtype) -> None:
    cache = poisoned_cache(5, 3, dtype)
    pool = cache._base
    assert pool is not None
    before = pool.clone()
    c_kv, k_pe = projection(5, dtype)
    expected = stored_by_loop(cache, slots, c_kv, k_pe)
    mla_kv_store(cache, torch.tensor(slots, dtype=index), c_kv, k_pe)
    assert same_bits(cache, expected)
    assert same_bits(pool[:, ::2], before[:, ::2])  # the pool's other layers


def test_int64_slots_do_not_wrap() -> None:
    cache = poisoned_cache(2, 2)
    before = cache.clone()
    mla_kv_store(cache, torch.tensor([2**32, 2**32 + 1, -(2**32)]), *projection(3))
    assert same_bits(cache, before)


def test_store_copies_nan_and_minus_zero_bit_for_bit() -> None:
    cache = torch.zeros(1, 2, L + R, dtype=torch.bfloat16)
    c_kv, k_pe = torch.full((1, L), -0.0, dtype=torch.bfloat16), torch.full((1, R), torch.nan, dtype=torch.bfloat16)
    mla_kv_store(cache, torch.tensor([1]), c_kv, k_pe)
    assert same_bits(cache[0, 1], torch.cat([c_kv, k_pe], -1)[0])
    assert same_bits(cache[0, 0], torch.zeros(L + R, dtype=torch.bfloat16))


def test_of_two_rows_for_one_slot_either_wins() -> None:
    cache = poisoned_cache(2, 2)
    c_kv, k_pe = projection(4)
    mla_kv_store(cache, torch.tensor([3, -1, 3, 0]), c_kv, k_pe)
    rows = torch.cat([c_kv, k_pe], -1)
    assert bool(((cache[1, 1] == rows[0]) | (cache[1, 1] == rows[2])).all())
    assert same_bits(cache[0, 0], rows[3])
    assert bool(cache[0, 1].isnan().all()) and bool(cache[1, 0].isnan().all())


@pytest.mark.parametrize(("pages", "tokens"), [(3, 0), (0, 4), (0, 0)])
def test_empties(pages: int, tokens: int) -> None:
    cache = poisoned_cache(pages, 4)
    before = cache.clone()
    slots = torch.arange(tokens)
    mla_kv_store(cache, slots, *projection(tokens))
    assert same_bits(cache, before)
    c_kv, k_pe = mla_kv_gather(cache, slots, L)
    assert (c_kv.shape, k_pe.shape) == ((tokens, L), (tokens, R))
    assert c_kv.dtype == k_pe.dtype == cache.dtype
    assert not c_kv.any() and not k_pe.any()


def test_gather_returns_what_was_stored_and_zeros_for_what_is_no_slot() -> None:
    cache = poisoned_cache(4, 4)
    c_kv, k_pe = projection(6)
    slots = torch.tensor([9, 2, 15, 0, 7, 4])
    mla_kv_store(cache, slots, c_kv, k_pe)
    for index in (torch.int32, torch.int64):
        asked = torch.tensor([4, -1, 15, 16, 9, 9, -100], dtype=index)
        got_c, got_pe = mla_kv_gather(cache, asked, L)
        for i, slot in enumerate(asked.tolist()):
            row = (slots == slot).nonzero().flatten().tolist()
            assert same_bits(got_c[i], c_kv[row[0]] if row else torch.zeros(L, dtype=cache.dtype))
            assert same_bits(got_pe[i], k_pe[row[0]] if row else torch.zeros(R, dtype=cache.dtype))


def test_gather_results_are_fresh_tensors() -> None:
    cache = torch.ones(1, 4, L + R)
    c_kv, k_pe = mla_kv_gather(cache, torch.arange(4), L)
    assert len({x.untyped_storage().data_ptr() for x in (cache, c_kv, k_pe)}) == 3


def test_offsets_past_two_to_the_31() -> None:
    pages, page_size = 2**31 // (64 * (L + R)) + 2, 64
    cache = torch.empty(pages, page_size, L + R, dtype=torch.bfloat16)  # only touched pages take memory
    last = pages * page_size - 1
    assert cache.numel() > 2**31
    c_kv, k_pe = projection(2)
    slots = torch.tensor([last, 0], dtype=torch.int32)
    mla_kv_store(cache, slots, c_kv, k_pe)
    got_c, got_pe = mla_kv_gather(cache, slots, L)
    assert same_bits(got_c, c_kv) and same_bits(got_pe, k_pe)
    assert same_bits(cache[-1, -1, :L], c_kv[0])


HEADS, KEY, VALUE = 3, 8, 6


def mha_call(slots: list[int], pages: int = 5, page_size: int = 3) -> dict[str, Tensor]:
    """Poisoned caches of one layer of a pool; keys and values as slices of one projection."""
    kv = torch.randn(len(slots), HEADS, KEY + VALUE, generator=torch.Generator().manual_seed(0)).bfloat16()
    pool = torch.full((pages, 2, page_size, HEADS, KEY + VALUE), torch.nan, dtype=torch.bfloat16)
    return {
        "k_cache": pool[:, 1, ..., :KEY],
        "v_cache": pool[:, 1, ..., KEY:],
        "slots": torch.tensor(slots, dtype=torch.int64),
        "k": kv[..., :KEY],
        "v": kv[..., KEY:],
    }


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [[7, 0, 14, 3], [-1, 5, -7, 15], [2**31 - 1, -1, 15, -1], [-1, -1, -1, 0], []])
def test_mha_store_writes_the_named_slots_and_no_other(slots: list[int], index: torch.dtype) -> None:
    call = mha_call(slots)
    call["slots"] = call["slots"].to(index)
    pool, expected = call["k_cache"]._base, mha_call(slots)
    assert pool is not None
    for i, slot in enumerate(slots):
        if 0 <= slot < 15:
            expected["k_cache"][slot // 3, slot % 3] = call["k"][i]
            expected["v_cache"][slot // 3, slot % 3] = call["v"][i]
    mha_kv_store(**call)
    assert same_bits(call["k_cache"], expected["k_cache"]) and same_bits(call["v_cache"], expected["v_cache"])
    assert bool(pool[:, 0].isnan().all())  # the pool's other layer


def test_mha_store_without_pages_and_in_a_whole_graph() -> None:
    mha_kv_store(**mha_call([0, 1], pages=0))
    call, eager = mha_call([6, -1, 3]), mha_call([6, -1, 3])
    torch.compile(mha_kv_store.reference, fullgraph=True, backend="eager")(**call)
    mha_kv_store(**eager)
    assert same_bits(call["k_cache"], eager["k_cache"]) and same_bits(call["v_cache"], eager["v_cache"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v_cache": torch.zeros(4, 3, 3, 6).bfloat16()}, ["'v_cache'", "pages = 5", "(4, 3, 3, 6)"]),
        ({"v_cache": torch.zeros(5, 3, 3, 6)}, ["'v_cache'", "torch.bfloat16", "torch.float32"]),
        ({"k": torch.zeros(4, 2, 8).bfloat16()}, ["'k'", "H = 3", "(4, 2, 8)"]),
        ({"v": torch.zeros(4, 3, 8).bfloat16()}, ["'v'", "Dv = 6", "(4, 3, 8)"]),
        ({"slots": torch.zeros(5, dtype=torch.int64)}, ["'k'", "T = 5", "(4, 3, 8)"]),
    ],
)
def test_mha_store_errors_name_argument_expected_and_got(change: dict[str, Tensor], words: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        mha_kv_store(**{**mha_call([0, 1, 2, 3]), **change})
    assert all(word in str(error.value) for word in ["mha_kv_store", "expected", "got", *words]), str(error.value)


def test_schema_declares_the_write() -> None:
    assert mha_kv_store.schema == ("(Tensor(a0!) k_cache, Tensor(a1!) v_cache, Tensor slots, Tensor k, Tensor v) -> ()")
    assert mla_kv_store.schema == "(Tensor(a0!) cache, Tensor slots, Tensor c_kv, Tensor k_pe) -> ()"
    assert mla_kv_gather.schema == "(Tensor cache, Tensor slots, SymInt kv_lora_rank) -> (Tensor, Tensor)"


def test_compiles_whole_and_agrees() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def store_and_gather(cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        mla_kv_store.reference(cache, slots, c_kv, k_pe)
        return mla_kv_gather.reference(cache, slots, L)

    cache, eager = poisoned_cache(2, 4), poisoned_cache(2, 4)
    slots, (c_kv, k_pe) = torch.tensor([6, -1, 3]), projection(3)
    got_c, got_pe = store_and_gather(cache, slots, c_kv, k_pe)
    mla_kv_store(eager, slots, c_kv, k_pe)
    want_c, want_pe = mla_kv_gather(eager, slots, L)
    assert same_bits(cache, eager) and same_bits(got_c, want_c) and same_bits(got_pe, want_pe)


def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        cache, slots = torch.empty(3, 4, L + R, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int64)
        mla_kv_store(cache, slots, torch.empty(5, L, dtype=cache.dtype), torch.empty(5, R, dtype=cache.dtype))
        c_kv, k_pe = mla_kv_gather(cache, slots, L)
    assert (c_kv.shape, k_pe.shape, c_kv.dtype) == ((5, L), (5, R), torch.bfloat16)


STORE: dict[str, Any] = {
    "cache": torch.zeros(2, 4, L + R),
    "slots": torch.zeros(3, dtype=torch.int64),
    "c_kv": torch.zeros(3, L),
    "k_pe": torch.zeros(3, R),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache": torch.zeros(8, L + R)}, ["'cache'", "rank 3", "(8, 576)"]),
        ({"cache": torch.zeros(2, 4, L)}, ["'cache'", "L + R = 576", "(2, 4, 512)"]),
        ({"cache": torch.zeros(2, 4, L + R).to(torch.float8_e4m3fn)}, ["'cache'", "bfloat16", "float8_e4m3fn"]),
        ({"slots": torch.zeros(3)}, ["'slots'", "torch.int32 or torch.int64", "torch.float32"]),
        ({"slots": torch.zeros(3, 1, dtype=torch.int64)}, ["'slots'", "rank 1", "(3, 1)"]),
        ({"c_kv": torch.zeros(4, L)}, ["'c_kv'", "T = 3", "(4, 512)"]),
        ({"c_kv": torch.zeros(3, L, dtype=torch.float16)}, ["'c_kv'", "torch.float32", "torch.float16"]),
        ({"k_pe": torch.zeros(3, 1, R)}, ["'k_pe'", "rank 2", "(3, 1, 64)"]),
        ({"k_pe": None}, ["'k_pe'", "a tensor", "NoneType"]),
    ],
)
def test_store_errors_name_argument_expected_and_got(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        mla_kv_store(**{**STORE, **change})
    message = str(error.value).replace("L+R", "L + R")
    assert all(word in message for word in ["mla_kv_store", "expected", "got", *words]), message


@pytest.mark.parametrize("rank", [0, -1, L + R + 1])
def test_gather_refuses_a_latent_rank_that_is_not_part_of_the_row(rank: int) -> None:
    with pytest.raises(ArgumentError, match=f"mla_kv_gather: argument 'kv_lora_rank': expected .* got .*{rank}"):
        mla_kv_gather(STORE["cache"], STORE["slots"], rank)
