"""What engines build on: the paged cache, steps and their plans, and which ops run where."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import relative_error, small, token_ids
from torch import Tensor

import torch_hal as hal
import torch_hal_deepseek as deepseek
from torch_hal_deepseek.cache import PAGE_SIZE

# --- the cache ---


@pytest.fixture
def cache() -> deepseek.KVCache:
    config = deepseek.parse_config(small("V3"))
    return deepseek.KVCache(config, 8, page_size=4, dtype=torch.float32, device="cpu")


def test_pools_are_latents_and_rotary_keys(cache: deepseek.KVCache) -> None:
    assert cache.pool.shape == (3, 8, 4, 32 + 8)
    assert not cache.pool.any()
    assert PAGE_SIZE == 64


def test_pages_are_owned_by_one_sequence(cache: deepseek.KVCache) -> None:
    a, b = deepseek.Sequence(), deepseek.Sequence()
    cache.reserve(a, 5)
    cache.reserve(b, 8)
    assert (len(a.pages), len(b.pages), cache.free_pages) == (2, 2, 4)
    assert not set(a.pages) & set(b.pages)
    a.length = 5
    cache.reserve(a, 3)  # fits the second page
    assert len(a.pages) == 2
    cache.reserve(a, 4)
    assert len(a.pages) == 3
    cache.release(a)
    assert (a.pages, a.length, cache.free_pages) == ([], 0, 6)


def test_a_full_cache_says_so_and_changes_nothing(cache: deepseek.KVCache) -> None:
    a = deepseek.Sequence()
    cache.reserve(a, 20)
    b = deepseek.Sequence()
    with pytest.raises(deepseek.CacheFull, match="13 more tokens need 4 pages of 4, 3 are free"):
        cache.reserve(b, 13)
    assert (b.pages, cache.free_pages) == ([], 3)


def test_several_get_room_or_none_does(cache: deepseek.KVCache) -> None:
    a, b = deepseek.Sequence(), deepseek.Sequence()
    with pytest.raises(deepseek.CacheFull, match="33 more tokens need 9 pages of 4, 8 are free"):
        cache.reserve_all([a, b], [16, 17])
    assert (a.pages, b.pages, cache.free_pages) == ([], [], 8)
    cache.reserve_all([a, b], [16, 16])
    assert (len(a.pages), len(b.pages), cache.free_pages) == (4, 4, 0)


def test_a_sequence_belongs_to_its_cache(model: deepseek.DeepSeek, cache: deepseek.KVCache) -> None:
    mine, other, sequence = model.new_cache(64), model.new_cache(64), deepseek.Sequence()
    model.prefill([[1, 2, 3]], [sequence], mine)
    for use in (
        lambda: other.release(sequence),
        lambda: other.reserve(sequence, 1),
        lambda: model.prefill([[4]], [sequence], other),
        lambda: model.decode(torch.tensor([[4]]), [sequence], other),
        lambda: deepseek.plan_prefill(other, [sequence], [1]),
        lambda: deepseek.plan_decode(model.ops, other, [sequence], 1, 4),
    ):
        with pytest.raises(ValueError, match="belongs to another KVCache"):
            use()
    assert (len(sequence.pages), sequence.length, other.free_pages) == (1, 3, 1)
    mine.release(sequence)
    mine.release(sequence)  # harmless
    assert mine.free_pages == 1
    other.reserve(sequence, 1)  # empty, it may go anywhere
    other.release(sequence)
    with pytest.raises(ValueError, match="pages that this KVCache did not give it"):
        cache.release(deepseek.Sequence(pages=[1], length=2))
    with pytest.raises(ValueError, match="pages that this KVCache did not give it"):
        cache.reserve(deepseek.Sequence(pages=[1], length=2), 9)
    assert cache.free_pages == 8


def test_a_sequence_comes_once_in_a_step(model: deepseek.DeepSeek) -> None:
    cache, a, b = model.new_cache(64, 4), deepseek.Sequence(), deepseek.Sequence()
    model.prefill([[1, 2, 3]], [a], cache)
    for use in (
        lambda: model.prefill([[4], [5], [6]], [a, b, a], cache),
        lambda: model.decode(torch.tensor([[4], [5], [6]]), [a, b, a], cache),
        lambda: deepseek.plan_prefill(cache, [a, b, a], [1, 1, 1]),
        lambda: deepseek.plan_decode(model.ops, cache, [a, b, a], 1, 4),
        lambda: cache.reserve_all([a, b, a], [1, 1, 1]),
    ):
        with pytest.raises(ValueError, match="sequences: 0 and 2 are the same Sequence"):
            use()
    assert (a.length, len(a.pages), b.pages, cache.free_pages) == (3, 1, [], 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size: expected an integer ≥ 1, got 0"),
        ({"page_size": 2.0}, "page_size: expected an integer ≥ 1, got 2.0"),
        ({"pages": -1}, "pages: expected an integer ≥ 0, got -1"),
        ({"layers": 0}, "layers: expected an integer ≥ 1, got 0"),
    ],
)
def test_bad_caches(cache: deepseek.KVCache, change: dict[str, Any], message: str) -> None:
    config = deepseek.parse_config(small("V3"))
    with pytest.raises(ValueError, match=message):
        deepseek.KVCache(config, **{"pages": 2, "dtype": torch.float32, "device": "cpu", **change})
    with pytest.raises(ValueError, match="tokens: expected an integer ≥ 0, got -5"):
        cache.reserve(deepseek.Sequence(), -5)


def test_slots_follow_the_page_table(cache: deepseek.KVCache) -> None:
    sequence = deepseek.Sequence(pages=[6, 1, 3], length=10)
    assert cache.slots(sequence, 0, 10).tolist() == [24, 25, 26, 27, 4, 5, 6, 7, 12, 13]
    assert cache.slots(sequence, 3, 5).tolist() == [27, 4]
    assert cache.slots(sequence, 5, 5).tolist() == []


# --- steps ---


def test_prefill_plan(cache: deepseek.KVCache) -> None:
    a, b = deepseek.Sequence(pages=[2, 0], length=5), deepseek.Sequence(pages=[1, 3], length=3)
    plan = deepseek.plan_prefill(cache, [a, b], [1, 4], prefix_chunk=3)
    assert plan.positions.tolist() == [5, 3, 4, 5, 6]
    assert plan.slots.tolist() == [1, 7, 12, 13, 14]
    assert (plan.cu_q.tolist(), plan.cu_q.dtype, plan.max_q) == ([0, 1, 5], torch.int32, 4)
    assert plan.last.tolist() == [0, 4]
    chunks = [(c.slots.tolist(), c.cu_k.tolist(), c.max_k) for c in plan.prefix]
    assert chunks == [([8, 9, 10], [0, 3, 3], 3), ([11, 0, 4], [0, 2, 3], 2), ([5, 6], [0, 0, 2], 2)]


def test_decode_plan(cache: deepseek.KVCache) -> None:
    a, b = deepseek.Sequence(pages=[2, 0], length=5), deepseek.Sequence(pages=[1], length=2)
    plan = deepseek.plan_decode(hal.bind("cpu"), cache, [a, b], queries=2, num_heads=4)
    assert plan.positions.tolist() == [5, 6, 2, 3]
    assert plan.slots.tolist() == [1, 2, 6, 7]
    assert plan.page_table.tolist() == [[2, 0], [1, 0]]
    assert (plan.seq_lens.tolist(), plan.seq_lens.dtype) == ([7, 4], torch.int32)


def test_empties(model: deepseek.DeepSeek) -> None:
    assert model.logits([]).shape == (0, 101)
    cache = model.new_cache(10)
    assert model.prefill([], [], cache).shape == (0, 101)
    assert model.decode(torch.empty(0, 1, dtype=torch.int64), [], cache).shape == (0, 1, 101)
    with pytest.raises(ValueError, match="a prompt is empty"):
        model.prefill([[]], [deepseek.Sequence()], cache)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 101], r"0 ≤ id < 101 \(vocab_size\), got 3 to 101"),
        ([-1], "got -1 to -1"),
        ([0.5], "expected integers"),
        ([[1, 2]], r"expected integers \[T\], got torch.int64 \[1, 2\]"),
        ([True], "expected integers"),
        ([1j], "expected integers"),
    ],
)
def test_bad_token_ids(model: deepseek.DeepSeek, ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.logits(ids)
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor(ids), 1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 2]), r"expected a tensor of integers \[B, S\] with S ≥ 1, got torch.int64 \[2\]"),
        (torch.tensor([[1.5], [2]]), r"S ≥ 1, got torch.float32 \[2, 1\]"),
        (torch.tensor([[1], [2]], dtype=torch.uint64), "got torch.uint64"),
        (torch.tensor([[1], [2]], dtype=torch.complex64), "got torch.complex64"),
        (torch.tensor([[True], [False]]), "got torch.bool"),
        (torch.empty(2, 0, dtype=torch.int64), r"got torch.int64 \[2, 0\]"),
        ([[1], [2]], r"got \[\[1\], \[2\]\]"),
        (torch.tensor([[1]]), "decode: expected a sequence for each row of ids, got 2 and 1"),
        (torch.tensor([[1], [101]]), r"0 ≤ id < 101 \(vocab_size\), got 1 to 101"),
    ],
)
def test_bad_decodes_change_nothing(model: deepseek.DeepSeek, ids: Any, message: str) -> None:
    cache, sequences = model.new_cache(64, 4), [deepseek.Sequence(), deepseek.Sequence()]
    model.prefill([[1] * 64, [2] * 64], sequences, cache)
    with pytest.raises(ValueError, match=message):
        model.decode(ids, sequences, cache)
    assert ([s.length for s in sequences], cache.free_pages) == ([64, 64], 2)


def test_a_step_has_a_sequence_for_each_prompt(model: deepseek.DeepSeek) -> None:
    cache = model.new_cache(64, 2)
    with pytest.raises(ValueError, match="prefill: expected a sequence for each prompt, got 1 and 2"):
        model.prefill([[1, 2, 3]], [deepseek.Sequence(), deepseek.Sequence()], cache)
    with pytest.raises(ValueError, match="token ids: expected integers"):
        model.prefill([torch.tensor([1], dtype=torch.uint64)], [deepseek.Sequence()], cache)
    assert cache.free_pages == 2


def test_a_full_cache_stops_a_step_for_all(model: deepseek.DeepSeek) -> None:
    cache, sequences = model.new_cache(64, 3), [deepseek.Sequence(), deepseek.Sequence()]
    model.prefill([[1] * 64, [2] * 64], sequences, cache)
    with pytest.raises(deepseek.CacheFull, match="2 more tokens need 2 pages of 64, 1 are free"):
        model.decode(torch.tensor([[1], [2]]), sequences, cache)
    assert ([len(s.pages) for s in sequences], cache.free_pages) == ([1, 1], 1)
    model.decode(torch.tensor([[1]]), sequences[:1], cache)


def test_ids_may_be_of_any_integer_type(model: deepseek.DeepSeek) -> None:
    ids = token_ids(5)
    for same in (ids.tolist(), tuple(ids.tolist()), ids.to(torch.int32), ids.to(torch.uint8)):
        assert torch.equal(model.logits(same), model.logits(ids))


def test_positions_run_out(model: deepseek.DeepSeek) -> None:
    assert model.config.max_positions == 256
    with pytest.raises(ValueError, match=r"0 \+ 257 tokens exceed the model's 256 positions"):
        model.logits(token_ids(257))
    cache, sequence = model.new_cache(256), deepseek.Sequence()
    model.prefill([token_ids(255)], [sequence], cache)
    model.decode(torch.tensor([[1]]), [sequence], cache)
    with pytest.raises(ValueError, match=r"256 \+ 1 tokens exceed"):
        model.decode(torch.tensor([[1]]), [sequence], cache)


def test_yarn_stretches_positions() -> None:
    assert deepseek.parse_config(small("V3", max_position_embeddings=20)).max_positions == 64
    assert deepseek.parse_config(small("V3", max_position_embeddings=20, rope_scaling=None)).max_positions == 20


def test_garbage_in_free_pages_reaches_no_result(model: deepseek.DeepSeek) -> None:
    ids = token_ids(70)
    expected = model.logits(ids)
    cache, sequence = model.new_cache(100, sequences=2), deepseek.Sequence()
    cache.pool.fill_(torch.nan)
    got = model.prefill([ids[:65]], [sequence], cache)
    assert relative_error(got[0], expected[64]) < 1e-5
    for i in range(65, 70):
        got = model.decode(ids[None, i : i + 1], [sequence], cache)[0]
        assert relative_error(got[0], expected[i]) < 1e-5


def test_a_released_sequences_pages_serve_another(model: deepseek.DeepSeek) -> None:
    cache, first, second = model.new_cache(64), deepseek.Sequence(), deepseek.Sequence()
    model.prefill([token_ids(60, seed=1)], [first], cache)
    with pytest.raises(deepseek.CacheFull):
        model.prefill([token_ids(9)], [second], cache)
    cache.release(first)
    got = model.prefill([token_ids(9)], [second], cache)
    assert relative_error(got[0], model.logits(token_ids(9))[-1]) < 1e-5


def test_float64_tells_the_paths_apart_by_rounding_only(v3_path: Path) -> None:
    model = deepseek.load(v3_path, dtype=torch.float64)
    ids = token_ids(40)
    expected = model.logits(ids)
    cache, sequence = model.new_cache(40), deepseek.Sequence()
    model.prefill([ids[:20]], [sequence], cache)
    chunked = model.prefill([ids[20:30]], [sequence], cache)
    decoded = model.decode(ids[None, 30:], [sequence], cache)[0]
    assert relative_error(torch.cat([chunked, decoded]), expected[29:]) < 2e-7  # logits are float32


# --- ops ---


@pytest.fixture
def traced(v3_path: Path) -> deepseek.DeepSeek:
    return deepseek.load(v3_path, policy=hal.Policy(trace=True))


def ops_called(model: deepseek.DeepSeek) -> collections.Counter[str]:
    trace = model.ops.trace
    assert trace is not None
    counted = collections.Counter(op for op, _, _ in trace.calls)
    trace.calls.clear()
    return counted


def test_prefill_expands_and_decode_absorbs(traced: deepseek.DeepSeek) -> None:
    ops_called(traced)
    cache, sequence = traced.new_cache(20), deepseek.Sequence()
    traced.prefill([token_ids(10)], [sequence], cache)
    prefill = ops_called(traced)
    traced.prefill([token_ids(3)], [sequence], cache)
    chunked = ops_called(traced)
    traced.decode(torch.tensor([[1]]), [sequence], cache)
    decode = ops_called(traced)
    layers = 3
    assert (prefill["mha_varlen"], prefill["mla_kv_gather"], prefill["merge_state"]) == (layers, 0, 0)
    assert (chunked["mha_varlen"], chunked["mla_kv_gather"], chunked["merge_state"]) == (2 * layers, layers, layers)
    assert prefill["mla_decode"] == chunked["mla_decode"] == 0
    assert (decode["mla_decode"], decode["absorbed_bmm"], decode["mha_varlen"]) == (layers, 2 * layers, 0)
    for step in (prefill, chunked, decode):
        assert step["mla_kv_store"] == step["rope"] == layers
        assert (step["biased_grouped_topk"], step["fused_experts"], step["shared_expert_add"]) == (2, 2, 2)
        assert (step["fused_add_rms_norm_"], step["rms_norm"]) == (2 * layers, 1 + 2 * layers)


def test_decode_plans_once_a_step(model: deepseek.DeepSeek, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    original = model.ops.mla_decode.plan

    def record(*args: Any) -> hal.Prepared:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(model.ops.mla_decode, "plan", record)
    cache, sequences = model.new_cache(20, 2), [deepseek.Sequence(), deepseek.Sequence()]
    model.prefill([token_ids(7), token_ids(3)], sequences, cache)
    model.decode(torch.tensor([[1], [2]]), sequences, cache)
    ((seq_lens, host_lens, heads, queries, page_size),) = calls
    assert (seq_lens.tolist(), host_lens, heads, queries, page_size) == ([8, 4], [8, 4], 4, 1, 64)


class Relaid:
    """A plugin whose kernels read weights only in their own layout: transposed, or with experts in reverse order."""

    @staticmethod
    def prepare_linear(weight: Tensor) -> list[Tensor]:
        return [weight.T.contiguous()]

    @staticmethod
    def linear(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
        assert layout == "relaid"
        return x @ weight

    @staticmethod
    def prepare_experts(w13: Tensor, w2: Tensor) -> list[Tensor]:
        return [w13.flip(0), w2.flip(0)]

    @staticmethod
    def experts(
        x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = "plain"
    ) -> Tensor:
        assert layout == "relaid"
        return hal.ops.fused_experts.reference(x, w13, w2, topk_weights, w13.shape[0] - 1 - topk_ids)

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterator[hal.Kernel]:
        kept: dict[str, Any] = {"layout": "relaid", "reads": frozenset()}
        yield hal.Kernel("linear", "relaid", run=self.linear, prepare=self.prepare_linear, **kept)
        yield hal.Kernel("fused_experts", "relaid", run=self.experts, prepare=self.prepare_experts, **kept)


def test_weights_are_prepared_for_the_kernels_that_read_them(v3_path: Path, model: deepseek.DeepSeek) -> None:
    hal.register(Relaid(), "relaid")
    try:
        relaid = deepseek.load(v3_path)
    finally:
        hal.unregister("relaid")
    assert relaid.ops.linear.kernel.name == relaid.ops.fused_experts.kernel.name == "relaid"
    assert torch.equal(relaid.head.weight, model.head.weight.T)
    assert relative_error(relaid.logits(token_ids(20)), model.logits(token_ids(20))) < 1e-5
    assert list(relaid.generate(token_ids(5), 5)) == list(model.generate(token_ids(5), 5))


@pytest.mark.parametrize("step", ["prefill", "chunked", "decode"])
def test_a_step_is_one_graph(model: deepseek.DeepSeek, step: str) -> None:
    """Nothing in a step reads a device tensor back: it compiles whole, and so can be captured."""
    cache, sequence, ids = model.new_cache(20), deepseek.Sequence(), token_ids(10)
    if step != "prefill":
        model.prefill([ids], [sequence], cache)
    if step == "decode":
        ids = ids[:1]
        cache.reserve(sequence, 1)
        batch: Any = deepseek.plan_decode(model.ops, cache, [sequence], 1, 4)
    else:
        cache.reserve(sequence, len(ids))
        batch = deepseek.plan_prefill(cache, [sequence], [len(ids)])
    expected = model.forward(ids, batch, cache)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert relative_error(compiled(ids, batch, cache), expected) < 1e-5
