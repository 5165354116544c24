"""Expert parallelism over real gloo: what four processes got, beside a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from bounds import same_bits
from expert_parallel_ranks import CASES, HIDDEN, MOVED, PAIR, SIZES, SUMMED, WORLD, Case, worker
from torch import Generator

from torch_hal.errors import ArgumentError
from torch_hal.ops.expert_parallel import ep_combine, ep_counts, ep_dispatch
from torch_hal.ops.moe_experts import fused_experts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    mp.spawn(worker, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


def wanted(case: Case, source: int, target: int) -> list[tuple[int, list[int]]]:
    """The source's tokens that have an expert on the target, with ids as it counts them."""
    first, experts, result = sum(case.experts[:target]), case.experts[target], []
    for token, ids in enumerate(case.routing(source)[0].tolist()):
        local = [i - first if first <= i < first + experts else -1 for i in ids]
        if any(i >= 0 for i in local):
            result.append((token, local))
    return result


each_case = pytest.mark.parametrize("name", CASES)
each_size = pytest.mark.parametrize("how", SIZES)


@each_case
def test_counts_are_tokens_not_assignments(ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    size = len(case.experts)
    for rank in range(size):
        sent = [len(wanted(case, rank, other)) for other in range(size)]
        come = [len(wanted(case, other, rank)) for other in range(size)]
        counts = ranks[rank][f"{name}, exact"]["counts"]
        assert counts.dtype == torch.int32 and counts.tolist() == [sent, come]


@each_case
@each_size
def test_dispatch_sends_each_token_once_to_each_rank_with_one_of_its_experts(
    ranks: list[dict[str, Any]], name: str, how: str
) -> None:
    case = CASES[name]
    for rank in range(len(case.experts)):
        xs, ids, weights = ([], [], [])
        for source in range(len(case.experts)):
            tokens = wanted(case, source, rank)
            x, (_, w) = case.x(source).tolist(), case.routing(source)
            for token, local in tokens:
                xs.append(x[token])
                ids.append(local)
                weights.append([a if i >= 0 else 0.0 for i, a in zip(local, w[token].tolist(), strict=True)])
            padding = case.capacity - len(tokens) if how == "capacity" else 0
            xs += [[0.0] * HIDDEN] * padding
            ids += [[-1] * case.top_k] * padding
            weights += [[0.0] * case.top_k] * padding
        got_x, got_ids, got_weights = ranks[rank][f"{name}, {how}"]["received"]
        assert (got_x.dtype, got_ids.dtype, got_weights.dtype) == (torch.float64, torch.int32, torch.float32)
        assert got_x.shape == (len(xs), HIDDEN) and got_ids.shape == got_weights.shape == (len(xs), case.top_k)
        assert (got_x.tolist(), got_ids.tolist(), got_weights.tolist()) == (xs, ids, weights)


@each_case
@each_size
def test_a_layer_of_spread_experts_is_the_layer(ranks: list[dict[str, Any]], name: str, how: str) -> None:
    """Padding was NaN when combined; tokens without any expert get zeros."""
    case = CASES[name]
    for rank in range(len(case.experts)):
        ids, weights = case.routing(rank)
        combined = ranks[rank][f"{name}, {how}"]["combined"]
        whole = fused_experts(case.x(rank), *case.weights(), weights.double(), ids)
        torch.testing.assert_close(combined, whole, rtol=1e-12, atol=1e-12)
        assert not combined[3::4].any()


@each_case
def test_capacities_give_the_rows_of_exact_sizes_and_padding(ranks: list[dict[str, Any]], name: str) -> None:
    for results in ranks[: len(CASES[name].experts)]:
        exact, padded = (results[f"{name}, {how}"]["received"] for how in SIZES)
        kept = (padded[1] >= 0).any(-1)
        assert all(same_bits(a, b[kept]) for a, b in zip(exact, padded, strict=True))


def runs(case: Case, rank: int) -> list[list[int]]:
    """The tokens in each run that a rank of the pair gets."""
    return [[token for token, _ in wanted(case, source, rank)] for source in range(PAIR)]


@pytest.mark.parametrize("dtype", MOVED)
def test_any_dtype_is_moved_bit_for_bit(ranks: list[dict[str, Any]], dtype: torch.dtype) -> None:
    case = CASES["even"]
    for rank in range(PAIR):
        got = ranks[rank][f"moved {dtype}"].split(case.capacity)
        for source, tokens in enumerate(runs(case, rank)):
            x = (10 * case.x(source, torch.float32)).to(dtype)
            assert same_bits(got[source][: len(tokens)], torch.stack([x[token] for token in tokens]))
            assert not got[source][len(tokens) :].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", SUMMED)
def test_combine_adds_in_float32_in_the_order_of_ranks_and_rounds_once(
    ranks: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    case = CASES["even"]
    for rank in range(PAIR):
        total = torch.zeros(case.tokens[rank], HIDDEN)
        for other in range(PAIR):
            y = torch.randn(2 * case.capacity, HIDDEN, generator=Generator().manual_seed(other)).to(dtype)
            for row, (token, _) in enumerate(wanted(case, rank, other)):
                total[token] += y[rank * case.capacity + row].float()
        assert same_bits(ranks[rank][f"summed {dtype}"], total.to(dtype))


def test_a_size_below_the_count_drops_the_last_tokens(ranks: list[dict[str, Any]]) -> None:
    case = CASES["even"]
    for rank in range(PAIR):
        x, ids, _, combined = ranks[rank]["too small"]
        firsts = [wanted(case, source, rank)[0] for source in range(PAIR)]
        assert x.tolist() == [case.x(source)[token].tolist() for source, (token, _) in enumerate(firsts)]
        assert ids.tolist() == [local for _, local in firsts]
        kept = [wanted(case, rank, other)[0][0] for other in range(PAIR)]
        times = torch.tensor([[kept.count(token)] for token in range(case.tokens[rank])])
        assert torch.equal(combined, case.x(rank) * times)
        assert max(len(wanted(case, rank, other)) for other in range(PAIR)) > 1


def test_whole_graphs_fakes_no_host_sync_and_untouched_inputs(ranks: list[dict[str, Any]]) -> None:
    rows = 2 * CASES["even"].capacity
    assert all(results["compiled"] == [True] * 5 and results["unchanged"] for results in ranks[:PAIR])
    assert ranks[0]["fake"] == [
        ((2, 2), torch.int32),
        ((rows, 8), torch.bfloat16),
        ((rows, 3), torch.int32),
        ((rows, 3), torch.float32),
        ((5, 8), torch.bfloat16),
    ]


def test_errors_name_op_argument_expected_and_got(ranks: list[dict[str, Any]]) -> None:
    for results in ranks[:PAIR]:
        assert "ep_counts: argument 'experts_per_rank': expected 2 numbers" in results["three ranks"]
        assert "got [1, 2, 3]" in results["three ranks"]
        assert "ep_dispatch: argument 'send_rows': expected 2 numbers" in results["one size"]
        assert "ep_combine: argument 'group'" in results["unknown group"]
        assert "got 'nobody'" in results["unknown group"]


X, IDS, WEIGHTS = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ep_counts(IDS, [1], "ep"), r"ep_counts: argument 'group'.*known: none.*got 'ep'"),
        (lambda: ep_counts(IDS.float(), [1], "ep"), r"ep_counts: argument 'topk_ids'.*int64, got torch.float32"),
        (lambda: ep_counts(IDS, [2, -1], "ep"), r"ep_counts.*'experts_per_rank'.*negative.*\[2, -1\]"),
        (lambda: ep_dispatch(X[:2], IDS, WEIGHTS, [1], [3], [3], "ep"), r"ep_dispatch.*'topk_ids'.*T = 2.*\(3, 2\)"),
        (lambda: ep_dispatch(X, IDS, WEIGHTS.half(), [1], [3], [3], "ep"), r"'topk_weights'.*float32, got .*float16"),
        (lambda: ep_dispatch(X, IDS, WEIGHTS, [1], [-3], [3], "ep"), r"ep_dispatch.*send_rows.*negative.*\[-3\]"),
        (lambda: ep_combine(X, IDS, [1], [3], [4], "ep"), r"ep_combine.*recv_rows.*sum to y's rows.*N=3.*\[4\]"),
        (lambda: ep_combine(X.int(), IDS, [1], [3], [3], "ep"), r"ep_combine: argument 'y'.*got torch.int32"),
    ],
)
def test_errors_before_any_group_exists(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_schemas() -> None:
    lists = "SymInt[] experts_per_rank, SymInt[] send_rows, SymInt[] recv_rows, str group"
    assert ep_counts.schema == "(Tensor topk_ids, SymInt[] experts_per_rank, str group) -> Tensor"
    assert (
        ep_dispatch.schema == f"(Tensor x, Tensor topk_ids, Tensor topk_weights, {lists}) -> (Tensor, Tensor, Tensor)"
    )
    assert ep_combine.schema == f"(Tensor y, Tensor topk_ids, {lists}) -> Tensor"
