"""Sampling: filters against plain Python, the generator against SplitMix64 in integers, draws against chi-square."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_hal.errors import ArgumentError
from torch_hal.ops import sampling
from torch_hal.ops.sampling import min_p_renorm, sample, top_k_renorm, top_p_renorm, uniform

WORD = (1 << 64) - 1


def splitmix64(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        yield z ^ (z >> 31)


def python_uniform(seed: int, offset: int) -> float:
    start = next(splitmix64(seed & WORD))
    skipped = start + offset * 0x9E3779B97F4A7C15
    return (next(splitmix64(skipped & WORD)) >> 11) / (1 << 53)


def python_filter(row: Sequence[float], keep: Callable[[float, Sequence[float]], bool]) -> list[float]:
    kept = [p if keep(p, row) else 0.0 for p in row]
    return [p / math.fsum(kept) for p in kept]


def rows(count: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)


def assert_rows(got: Tensor, expected: list[list[float]]) -> None:
    assert got.dtype == torch.float32
    assert ((got > 0) == (torch.tensor(expected) > 0)).all()
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=2e-6, atol=0)


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_top_k_renorm_is_the_formula() -> None:
    probs, top_k = rows(5, 37), i32(1, 3, 10, 36, 37)
    expected = [
        python_filter(row, lambda p, row, k=k: p >= sorted(row)[-k])  # type: ignore[misc]
        for row, k in zip(probs.tolist(), top_k.tolist(), strict=True)
    ]
    assert_rows(top_k_renorm(probs, top_k), expected)


def test_top_p_renorm_is_the_formula() -> None:
    probs, top_p = rows(6, 37), f32(0.05, 0.3, 0.5, 0.9, 0.99, 0.999999)
    expected = [
        python_filter(row, lambda p, row, top=top: math.fsum(q for q in row if q > p) <= top)  # type: ignore[misc]
        for row, top in zip(probs.tolist(), top_p.tolist(), strict=True)
    ]
    assert_rows(top_p_renorm(probs, top_p), expected)


def test_min_p_renorm_is_the_formula() -> None:
    probs, min_p = rows(4, 37), f32(0.01, 0.1, 0.5, 0.9)
    expected = [
        python_filter(row, lambda p, row, m=m: p >= m * max(row))  # type: ignore[misc]
        for row, m in zip(probs.tolist(), min_p.tolist(), strict=True)
    ]
    assert_rows(min_p_renorm(probs, min_p), expected)


def test_ties_at_the_bound_are_kept() -> None:
    probs = f32(0.125, 0.5, 0.125, 0.25).unsqueeze(0)
    everything = probs[0].tolist()
    assert top_k_renorm(probs, i32(3))[0].tolist() == everything
    assert top_p_renorm(probs, f32(0.75))[0].tolist() == everything  # those above 0.125 sum to 0.75: still kept
    assert min_p_renorm(probs, f32(0.25))[0].tolist() == everything
    two = [0.0, pytest.approx(2 / 3), 0.0, pytest.approx(1 / 3)]
    assert top_k_renorm(probs, i32(2))[0].tolist() == two
    assert top_p_renorm(probs, f32(0.74))[0].tolist() == two
    assert min_p_renorm(probs, f32(0.26))[0].tolist() == two


FILTERS: list[tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = [
    (top_k_renorm, i32(0, -1, 8, 1000), i32(1, 1, 1, 1)),
    (top_p_renorm, f32(1.0, 1.5, 2.0, math.inf), f32(0.0, -1.0, 1e-9, 0.0)),
    (min_p_renorm, f32(0.0, -1.0, -0.0, -math.inf), f32(1.0, 1.0, 2.0, math.inf)),
]


@pytest.mark.parametrize("renorm, identity, greedy", FILTERS)
def test_identities_are_exact_and_extremes_are_greedy(
    renorm: Callable[[Tensor, Tensor], Tensor], identity: Tensor, greedy: Tensor
) -> None:
    probs = rows(4, 8) * 0.999  # not normalised: an identity does not touch it
    same = renorm(probs, identity)
    assert torch.equal(same, probs) and same.data_ptr() != probs.data_ptr()
    assert torch.equal(renorm(probs, greedy), torch.nn.functional.one_hot(probs.argmax(-1), 8).to(torch.float32))


@pytest.mark.parametrize(
    "renorm, parameter", [(top_k_renorm, i32(2)), (top_p_renorm, f32(0.5)), (min_p_renorm, f32(0.5))]
)
def test_rows_of_zeros_and_nan(renorm: Callable[[Tensor, Tensor], Tensor], parameter: Tensor) -> None:
    probs = torch.stack([torch.zeros(4), f32(0.5, math.nan, 0.25, 0.25), f32(0.5, 0.25, 0.125, 0.125)])
    got = renorm(probs, parameter.expand(3))
    assert torch.equal(got[0], torch.zeros(4))
    assert got[1].isnan().all()
    assert got[2].isfinite().all()


def test_splitmix64_known_outputs() -> None:
    stream = splitmix64(1234567)
    assert [next(stream) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_is_splitmix64() -> None:
    edges = [0, 1, -1, 42, 2**31, -(2**63), 2**63 - 1, 1234567]
    pairs = [(seed, offset) for seed in edges for offset in edges]
    seeds, offsets = torch.tensor(pairs).T
    got = uniform(seeds, offsets)
    assert got.dtype == torch.float64
    assert got.tolist() == [python_uniform(seed, offset) for seed, offset in pairs]
    assert got.min() >= 0 and got.max() < 1


def chi_square(ids: Tensor, probs: Tensor) -> float:
    observed = ids.to(torch.int64).bincount(minlength=probs.numel()).to(torch.float64)
    expected = probs.to(torch.float64) * ids.numel()
    return ((observed - expected).square() / expected).sum().item()


@pytest.mark.parametrize("axis", ["offsets of one seed", "first draws of many seeds", "both"])
def test_draws_follow_the_distribution(axis: str) -> None:
    probs = f32(0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005)
    draws = torch.arange(20_000)
    seeds = torch.full_like(draws, 7) if axis == "offsets of one seed" else draws
    offsets = torch.zeros_like(draws) if axis == "first draws of many seeds" else draws
    ids = sample(probs.expand(20_000, -1), seeds, offsets)
    assert ids.dtype == torch.int32
    assert chi_square(ids, probs) < 27.88  # 99.9 % of chi-square with 9 degrees of freedom


def test_consecutive_draws_are_independent() -> None:
    draws = torch.arange(20_000)
    ids = sample(f32(0.25, 0.25, 0.25, 0.25).expand(20_000, -1), torch.full_like(draws, 3), draws).to(torch.int64)
    assert chi_square(ids[:-1] * 4 + ids[1:], torch.full((16,), 1 / 16)) < 37.70  # 15 degrees of freedom


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_support_is_exact(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seeds, offsets: torch.full(seeds.shape, u, dtype=torch.float64))
    probs = torch.zeros(4, 100)
    probs[0, 40:60] = 0.05
    probs[1, 99] = 1.0
    probs[2, [3, 50]] = 1e-45  # the smallest float32
    probs[3, 10:90:2] = rows(1, 40, seed=3)[0]
    ids = sample(probs, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)).tolist()
    assert all(probs[row, i] > 0 for row, i in enumerate(ids))
    if u != 0.5:
        support = [probs[row].nonzero().flatten().tolist() for row in range(4)]
        assert ids == [s[0] if u == 0 else s[-1] for s in support]


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    probs = rows(64, 50)
    seeds, offsets = torch.arange(64) * 31, torch.arange(64)
    expected = []
    for row, seed, offset in zip(probs.tolist(), seeds.tolist(), offsets.tolist(), strict=True):
        bound, token = python_uniform(seed, offset) * math.fsum(row), 0
        while math.fsum(row[: token + 1]) <= bound:
            token += 1
        expected.append(token)
    assert sample(probs, seeds, offsets).tolist() == expected


def test_a_row_does_not_depend_on_the_others() -> None:
    probs, seeds, offsets = rows(16, 33), torch.arange(16), torch.arange(16) * 5
    together = sample(probs, seeds, offsets)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(probs[order], seeds[order], offsets[order]), together[order])
    alone = [sample(probs[i : i + 1], seeds[i : i + 1], offsets[i : i + 1]) for i in range(16)]
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(sample(probs, seeds, offsets), together)
    assert not torch.equal(sample(probs, seeds, offsets + 1), together)
    assert not torch.equal(sample(probs, seeds + 1, offsets), together)


def test_rows_without_a_distribution_give_an_id_in_range() -> None:
    nan, inf = math.nan, math.inf
    probs = torch.tensor(
        [[0, 0, 0, 0], [nan] * 4, [0.5, nan, 0.25, 0], [0.5, inf, 0, 0], [0.5, 0.5, 0, nan]], dtype=torch.float32
    )
    ids = sample(probs, torch.arange(5), torch.arange(5))
    assert ids.tolist() == [0, 0, 2, 1, 1]


def test_filters_in_the_models_order_leave_only_what_all_keep() -> None:
    probs = rows(200, 64)
    filtered = top_k_renorm(probs, torch.full((200,), 20, dtype=torch.int32))
    filtered = top_p_renorm(filtered, torch.full((200,), 0.9))
    filtered = min_p_renorm(filtered, torch.full((200,), 0.05))
    torch.testing.assert_close(filtered.sum(-1), torch.ones(200))
    ids = sample(filtered, torch.arange(200), torch.zeros(200, dtype=torch.int64)).to(torch.int64)
    assert (filtered.gather(-1, ids.unsqueeze(-1)) > 0).all()
    assert ((filtered > 0).sum(-1) <= 20).all()


def test_any_strides() -> None:
    probs, parameter = rows(5, 32), f32(0.3, 0.5, 0.7, 0.9, 0.95)
    for strided in (probs.T.contiguous().T, torch.stack([probs, probs], -1)[..., 0]):
        assert not strided.is_contiguous()
        torch.testing.assert_close(top_k_renorm(strided, i32(1, 2, 3, 4, 5)), top_k_renorm(probs, i32(1, 2, 3, 4, 5)))
        torch.testing.assert_close(top_p_renorm(strided, parameter), top_p_renorm(probs, parameter))
        torch.testing.assert_close(min_p_renorm(strided, parameter), min_p_renorm(probs, parameter))
        assert torch.equal(
            sample(strided, torch.arange(5), torch.arange(5)), sample(probs, torch.arange(5), torch.arange(5))
        )


def _calls(count: int) -> list[tuple[Callable[..., Tensor], tuple[Any, ...], torch.Size, torch.dtype]]:
    probs, numbers, parameter = rows(count, 8), torch.arange(count), torch.full((count,), 0.5)
    row_major = probs.shape
    return [
        (top_k_renorm.reference, (probs, numbers.to(torch.int32)), row_major, torch.float32),
        (top_p_renorm.reference, (probs, parameter), row_major, torch.float32),
        (min_p_renorm.reference, (probs, parameter), row_major, torch.float32),
        (sample.reference, (probs, numbers, numbers), row_major[:1], torch.int32),
    ]


def test_zero_rows() -> None:
    for reference, arguments, shape, dtype in _calls(0):
        got = reference(*arguments)
        assert got.shape == shape and got.dtype == dtype


def test_fake_tensors_give_shapes_and_dtypes() -> None:
    mode = FakeTensorMode()
    for reference, arguments, shape, dtype in _calls(3):
        with mode:
            got = reference(*(mode.from_tensor(a) for a in arguments))
        assert got.shape == shape and got.dtype == dtype


def test_references_compile_whole() -> None:
    for reference, arguments, _, _ in _calls(5):
        compiled = torch.compile(reference, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*arguments), reference(*arguments))


PROBS, SEEDS = torch.ones(2, 4) / 4, torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: top_k_renorm(PROBS, SEEDS), r"top_k_renorm.*'top_k'.*expected torch.int32, got torch.int64"),
        (
            lambda: top_k_renorm(PROBS.to(torch.bfloat16), i32(1, 1)),
            r"top_k_renorm.*'probs'.*float32.*got torch.bfloat16",
        ),
        (lambda: top_k_renorm(PROBS, i32(1)), r"top_k_renorm.*'top_k'.*B = 2.*got shape \(1,\)"),
        (lambda: top_p_renorm(PROBS, i32(1, 1)), r"top_p_renorm.*'top_p'.*float32.*got torch.int32"),
        (lambda: min_p_renorm(PROBS[0], f32(0.5)), r"min_p_renorm.*'probs'.*rank 2.*got shape \(4,\)"),
        (lambda: sample(PROBS, SEEDS.to(torch.int32), SEEDS), r"sample.*'seeds'.*int64, got torch.int32"),
        (lambda: sample(PROBS, SEEDS, SEEDS[:1]), r"sample.*'offsets'.*B = 2.*got shape \(1,\)"),
        (lambda: sample(PROBS[:, :0], SEEDS, SEEDS), r"sample.*not empty.*got V=0"),
    ],
)
def test_errors_name_op_argument_expected_and_got(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
