"""Packed attention, and what joins pieces of attention, against the formula; and what no result may depend on."""

from __future__ import annotations

import math

import pytest
import torch
from attention_formula import DTYPES, L, R, Result, assert_result, mha_by_loop, normal, offsets, pack
from torch import Tensor

from torch_hal.ops import _attention
from torch_hal.ops.attention import concat_mla_absorb_q, concat_mla_k, merge_state, mha_varlen

LENS = [
    ([5], [5]),
    ([1], [9]),
    ([3, 1, 6], [3, 4, 6]),
    ([2, 0, 4, 1], [7, 3, 4, 0]),  # no queries, no keys
    ([0, 0, 3, 0], [0, 2, 5, 0]),
    ([6, 2], [2, 5]),  # fewer keys than queries: the first ones see none, causally
    ([0, 0], [4, 1]),
    ([4, 3], [0, 0]),
]


@pytest.mark.parametrize("rows", [1, 2, 4, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lens_q", "lens_k"), LENS)
def test_mha_is_the_formula_at_any_block_size(
    lens_q: list[int], lens_k: list[int], causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attention, "BLOCK_ROWS", rows)
    call = pack(lens_q, lens_k)
    got = mha_varlen(**call, causal=causal)
    want = mha_by_loop(call["q"], call["k"], call["v"], lens_q, lens_k, 0.31, causal)
    assert_result(got, want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mha_rounds_once(dtype: torch.dtype) -> None:
    lens_q, lens_k = [3, 2], [9, 2]
    call = pack(lens_q, lens_k, dtype)
    want = mha_by_loop(call["q"], call["k"], call["v"], lens_q, lens_k, 0.31, True)
    assert_result(mha_varlen(**call, causal=True), want, dtype)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("causal", [True, False])
def test_mha_sequences_do_not_see_each_other_nor_the_padding(causal: bool, poison: float) -> None:
    """Whatever the other sequences and the padded tail hold, a sequence's result keeps its bits."""
    lens_q, lens_k = [3, 2, 4], [4, 5, 4]
    call = pack(lens_q, lens_k)
    for name in ("q", "k", "v"):
        call[name] = torch.cat([call[name], torch.full_like(call[name][:3], poison)])
    clean = mha_varlen(**call, causal=causal)
    assert bool(clean[0][:9].isfinite().all()) and bool(clean[1][:9].isfinite().all())
    assert not clean[0][9:].any() and bool(clean[1][9:].isneginf().all())
    for sick in range(3):
        hurt = dict(call)
        for name, cu in (("q", call["cu_q"]), ("k", call["cu_k"]), ("v", call["cu_k"])):
            hurt[name] = call[name].clone()
            hurt[name][cu[sick] : cu[sick + 1]] = poison
        out, lse = mha_varlen(**hurt, causal=causal)
        for b in {0, 1, 2} - {sick}:
            rows = slice(int(call["cu_q"][b]), int(call["cu_q"][b + 1]))
            assert torch.equal(out[rows], clean[0][rows]) and torch.equal(lse[rows], clean[1][rows])
        assert not out[9:].any() and bool(lse[9:].isneginf().all())


@pytest.mark.parametrize("lens", [[], [0], [0, 0]])
def test_mha_without_tokens(lens: list[int]) -> None:
    out, lse = mha_varlen(**pack(lens, lens, torch.bfloat16), causal=True)
    assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_mha_without_sequences_owns_no_row() -> None:
    call = {**pack([2], [2]), "cu_q": offsets([]), "cu_k": offsets([])}
    out, lse = mha_varlen(**call, causal=False)
    assert not out.any() and bool(lse.isneginf().all())


def test_mha_bounds_may_be_loose() -> None:
    """A captured graph passes the longest lengths it was made for."""
    call = pack([3, 1], [5, 2])
    tight = mha_varlen(**call, causal=True)
    loose = mha_varlen(**{**call, "max_q": 1000, "max_k": 1000}, causal=True)
    assert_result(loose, (tight[0].double(), tight[1].double()), torch.float32)


def test_mha_of_large_scores_does_not_overflow() -> None:
    call = pack([2], [6])
    call["scale"] = 1e4
    out, lse = mha_varlen(**call, causal=False)
    want = mha_by_loop(call["q"], call["k"], call["v"], [2], [6], 1e4, False)
    torch.testing.assert_close(out.double(), want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("prefixes", [[8, 3], [5, 0], [12, 1]])
def test_a_prefix_in_chunks_merged_by_lse_is_one_attention(prefixes: list[int]) -> None:
    """Chunked prefill: new tokens see themselves causally and the cached prefix, a chunk at a time, wholly."""
    new, chunk, heads = [4, 2], 4, 2
    totals = [p + n for p, n in zip(prefixes, new, strict=True)]
    call = pack(new, totals, torch.float64)
    whole = mha_varlen(**call, causal=True)
    starts = call["cu_k"].tolist()

    def part(ranges: list[tuple[int, int]], causal: bool) -> Result:
        rows = torch.cat([torch.arange(starts[b] + i, starts[b] + j) for b, (i, j) in enumerate(ranges)])
        lens = [j - i for i, j in ranges]
        sub = {**call, "k": call["k"][rows], "v": call["v"][rows], "cu_k": offsets(lens), "max_k": max(lens)}
        return mha_varlen(**sub, causal=causal)

    out, lse = part([(p, t) for p, t in zip(prefixes, totals, strict=True)], True)
    for begin in range(0, max(prefixes), chunk):
        ranges = [(min(begin, p), min(begin + chunk, p)) for p in prefixes]
        out, lse = merge_state(out, lse, *part(ranges, False))
    assert out.shape == (6, heads, 16)
    assert_result((out, lse), whole, torch.float64)


def merge_by_loop(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Result:
    out, lse = torch.zeros_like(out_a, dtype=torch.float64), torch.full_like(lse_a, -torch.inf, dtype=torch.float64)
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            sides = [(float(s[t, h]), o[t, h].double()) for s, o in ((lse_a, out_a), (lse_b, out_b))]
            sides = [side for side in sides if math.isfinite(side[0])]
            if sides:
                top = max(s for s, _ in sides)
                total = sum(math.exp(s - top) for s, _ in sides)
                out[t, h] = torch.stack([o * math.exp(s - top) / total for s, o in sides]).sum(0)
                lse[t, h] = top + math.log(total)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_the_formula_with_either_or_both_sides_empty(dtype: torch.dtype) -> None:
    levels = [-torch.inf, torch.inf, 0.0, -3.5, 80.0, -1000.0, 1e30]
    pairs = torch.tensor([[a, b] for a in levels for b in levels])
    lse_a, lse_b = (
        pairs.to(torch.float64 if dtype == torch.float64 else torch.float32)[:, None].expand(-1, 2, -1).unbind(-1)
    )
    out_a, out_b = (normal(len(pairs), 2, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    out_a[lse_a.isinf()] = torch.nan  # what an empty side holds is nobody's business
    out_b[lse_b.isinf()] = torch.inf
    got = merge_state(out_a, lse_a, out_b, lse_b)
    assert_result(got, merge_by_loop(out_a, lse_a, out_b, lse_b), dtype)
    one = lse_a.isfinite() & lse_b.isinf()
    assert torch.equal(got[0][one], out_a[one]) and torch.equal(got[1][one], lse_a[one])


def test_merge_is_symmetric_and_takes_no_rows() -> None:
    a, b = (normal(3, 2, 8, seed=0), normal(3, 2, seed=1)), (normal(3, 2, 8, seed=2), normal(3, 2, seed=3))
    assert all(torch.equal(x, y) for x, y in zip(merge_state(*a, *b), merge_state(*b, *a), strict=True))
    out, lse = merge_state(a[0][:0], a[1][:0], b[0][:0], b[1][:0])
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 3])
def test_concats_are_copies(dtype: torch.dtype, tokens: int) -> None:
    k_nope = normal(tokens, 2, 40, dtype=dtype)[..., :24]
    k_pe = normal(tokens, 1, L + R, dtype=dtype, seed=1)[..., L:]
    k = concat_mla_k(k_nope, k_pe)
    assert k.shape == (tokens, 2, 24 + R) and k.dtype == dtype
    for t in range(tokens):
        for h in range(2):
            assert torch.equal(k[t, h], torch.cat([k_nope[t, h], k_pe[t, 0]]))

    for shape in [(tokens,), (tokens, 2)]:
        q_nope, q_pe = normal(*shape, 3, L + R, dtype=dtype).split([L, R], -1)
        q = concat_mla_absorb_q(q_nope, q_pe)
        assert torch.equal(q[..., :L], q_nope) and torch.equal(q[..., L:], q_pe) and q.is_contiguous()
