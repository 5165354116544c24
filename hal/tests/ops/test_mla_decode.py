"""Paged MLA decode against the formula, on shuffled pages with garbage wherever no token is."""

from __future__ import annotations

import pytest
import torch
from attention_formula import DTYPES, L, R, assert_result, decode_by_loop, normal, offsets, paged

from torch_hal.errors import ArgumentError
from torch_hal.ops import _attention
from torch_hal.ops.attention import concat_mla_absorb_q, concat_mla_k, mha_varlen, mla_decode, plan_mla_decode


@pytest.mark.parametrize("elements", [1, 2**26])
@pytest.mark.parametrize("queries", [1, 2, 3])
@pytest.mark.parametrize("lens", [[7], [9, 1, 4, 12], [0, 5, 2, 0]])
def test_decode_is_the_formula_on_shuffled_poisoned_pages(
    lens: list[int], queries: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attention, "BLOCK_ELEMENTS", elements)
    call = paged(lens, queries, torch.float32)
    assert_result(mla_decode(**call), decode_by_loop(call), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 8])
def test_decode_rounds_once(dtype: torch.dtype, page_size: int) -> None:
    call = paged([11, 6], 2, dtype, page_size)
    assert_result(mla_decode(**call), decode_by_loop(call), dtype)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_decode_of_padding_is_zero_and_stays_alone(poison: float) -> None:
    """A captured batch's padding: seq_len 0, a table that points anywhere, a cache full of garbage."""
    call = paged([6, 0, 0], 2, torch.bfloat16)
    call["cache"].masked_fill_(call["cache"].isnan(), poison)
    call["q_nope"][1:] = poison
    out, lse = mla_decode(**call)
    assert not out[1:].any() and bool(lse[1:].isneginf().all())
    alone = mla_decode(
        **{k: v[:1] if k in ("q_nope", "q_pe", "page_table", "seq_lens") else v for k, v in call.items()}
    )
    torch.testing.assert_close((out[:1], lse[:1]), alone, rtol=2**-8, atol=1e-6)
    assert bool(out[:1].isfinite().all())


def test_absorbed_decode_is_mha_on_expanded_keys_and_values() -> None:
    """q·(W_UK c) = (W_UKᵀ q)·c and Σ p (W_UV c) = W_UV Σ p c, for s = 2 new tokens a sequence."""
    lens, heads, nope, value = [5, 9], 3, 12, 10
    call = paged(lens, 2, torch.float64, heads=heads)
    w_uk, w_uv = (
        normal(heads, nope, L, dtype=torch.float64, seed=5),
        normal(heads, value, L, dtype=torch.float64, seed=6),
    )
    q_nope = normal(2, 2, heads, nope, dtype=torch.float64, seed=7)
    call["q_nope"], call["scale"] = torch.einsum("bshn,hnl->bshl", q_nope, w_uk), 0.01
    out, lse = mla_decode(**call)

    cache, table = call["cache"], call["page_table"]
    tokens = torch.cat([cache[table[b].clamp(0, len(cache) - 1).long()].flatten(0, 1)[:n] for b, n in enumerate(lens)])
    k = concat_mla_k(torch.einsum("tl,hnl->thn", tokens[:, :L], w_uk), tokens[:, None, L:])
    v = torch.einsum("tl,hvl->thv", tokens[:, :L], w_uv)
    q = concat_mla_absorb_q(q_nope, call["q_pe"]).flatten(0, 1)
    want = mha_varlen(q, k, v, offsets([2, 2]), offsets(lens), 2, max(lens), 0.01, True)
    got = torch.einsum("bshl,hvl->bshv", out, w_uv).flatten(0, 1)
    assert_result((got, lse.flatten(0, 1)), want, torch.float64)


@pytest.mark.parametrize(
    ("batch", "queries", "pages", "columns"), [(0, 1, 3, 2), (2, 0, 3, 2), (2, 1, 0, 2), (2, 1, 3, 0), (0, 0, 0, 0)]
)
def test_decode_empties(batch: int, queries: int, pages: int, columns: int) -> None:
    q = torch.ones(batch, queries, 2, L + R, dtype=torch.bfloat16)
    table, lens = torch.zeros(batch, columns, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    out, lse = mla_decode(q[..., :L], q[..., L:], torch.zeros(pages, 4, L + R, dtype=q.dtype), table, lens, 1.0)
    assert (out.shape, lse.shape) == ((batch, queries, 2, L), (batch, queries, 2))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert not out.any() and bool(lse.isneginf().all())


def test_decode_reads_pages_past_two_to_the_31() -> None:
    page_size = 64
    pages = 2**31 // (page_size * (L + R)) + 2
    cache = torch.empty(pages, page_size, L + R, dtype=torch.bfloat16)  # only touched pages take memory
    cache[-1] = normal(page_size, L + R, dtype=torch.bfloat16)
    call = paged([page_size], 1, torch.bfloat16, page_size)
    far = {**call, "cache": cache, "page_table": torch.tensor([[pages - 1]], dtype=torch.int32)}
    near = {**call, "cache": cache[-1:].clone(), "page_table": torch.zeros(1, 1, dtype=torch.int32)}
    got, want = mla_decode(**far), mla_decode(**near)
    assert cache.numel() > 2**31 and bool(want[0].any())
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_decode_plan_of_the_reference_is_empty_whatever_the_lengths() -> None:
    assert mla_decode.plan is plan_mla_decode
    plans = [plan_mla_decode(torch.tensor(lens, dtype=torch.int32), lens, 128, 1, 64) for lens in ([3, 9], [0, 700])]
    assert all(len(plan) == 1 and plan[0].dtype == torch.int32 and plan[0].shape == (0,) for plan in plans)
    call = paged([7, 2], 1, torch.float32)
    assert torch.equal(mla_decode(**call, plan=plans[0][0], layout="plain")[0], mla_decode(**call)[0])
    with pytest.raises(ArgumentError, match=r"mla_decode.* 'host_lens': expected 2 lengths.* got 3"):
        plan_mla_decode(torch.zeros(2, dtype=torch.int32), [1, 2, 3], 128, 1, 64)
