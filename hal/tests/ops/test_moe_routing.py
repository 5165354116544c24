"""Routing against formulas in plain Python: order, ties, groups, negative biases, weights, errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_hal.errors import ArgumentError
from torch_hal.ops.moe_routing import biased_grouped_topk, grouped_topk, topk_softmax

Routed = tuple[list[list[float]], list[list[int]]]


def softmax(row: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [power / math.fsum(powers) for power in powers]


def sigmoid(row: Sequence[float]) -> list[float]:
    return [1 / (1 + math.exp(-value)) for value in row]


def best(scores: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def in_kept_groups(
    choice: Sequence[float], groups: int, kept: int, score: Callable[[Sequence[float]], float], masked: float
) -> list[float]:
    size = len(choice) // groups
    keep = best([score(choice[g * size : (g + 1) * size]) for g in range(groups)], kept)
    return [value if i // size in keep else masked for i, value in enumerate(choice)]


def weigh(scores: Sequence[float], ids: Sequence[int], renormalize: bool, scale: float) -> list[float]:
    total = math.fsum(scores[i] for i in ids) if renormalize else 1.0
    return [scores[i] / total * scale for i in ids]


def python_routing(op_name: str, logits: Tensor, **arguments: Any) -> Routed:
    weights, ids = [], []
    top_k, renormalize = arguments["top_k"], arguments["renormalize"]
    for row in logits.tolist():
        if op_name == "topk_softmax":
            scores = choice = softmax(row)
        elif op_name == "grouped_topk":
            scores = softmax(row)
            choice = in_kept_groups(scores, arguments["num_groups"], arguments["topk_groups"], max, masked=0.0)
        else:
            scores = sigmoid(row)
            choice = in_kept_groups(
                [s + b for s, b in zip(scores, arguments["bias"].tolist(), strict=True)],
                arguments["num_groups"],
                arguments["topk_groups"],
                lambda group: math.fsum(sorted(group)[-2:]),
                masked=-math.inf,
            )
        ids.append(best(choice, top_k))
        weights.append(weigh(scores, ids[-1], renormalize, arguments.get("scale", 1.0)))
    return weights, ids


def assert_routes(result: tuple[Tensor, Tensor], expected: Routed) -> None:
    weights, ids = result
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert weights.is_contiguous() and ids.is_contiguous()
    assert ids.tolist() == expected[1]
    torch.testing.assert_close(weights, torch.tensor(expected[0], dtype=torch.float32), rtol=2e-6, atol=0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20260131)


GROUPED = {"top_k": 6, "num_groups": 8, "topk_groups": 3}


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("experts", [7, 64])
def test_topk_softmax_is_the_formula(generator: torch.Generator, experts: int, renormalize: bool) -> None:
    logits = torch.randn(9, experts, generator=generator) * 3
    result = topk_softmax(logits, 6, renormalize)
    assert_routes(result, python_routing("topk_softmax", logits, top_k=6, renormalize=renormalize))


@pytest.mark.parametrize("renormalize, scale", [(False, 16.0), (True, 2.5)])
def test_grouped_topk_is_the_formula(generator: torch.Generator, renormalize: bool, scale: float) -> None:
    logits = torch.randn(9, 160, generator=generator) * 3
    arguments = {**GROUPED, "renormalize": renormalize, "scale": scale}
    assert_routes(grouped_topk(logits, **arguments), python_routing("grouped_topk", logits, **arguments))


@pytest.mark.parametrize("shift", [0.0, -5.0], ids=["mixed bias", "negative biased scores"])
@pytest.mark.parametrize("renormalize, scale", [(False, 1.0), (True, 2.5)])
def test_biased_grouped_topk_is_the_formula(
    generator: torch.Generator, renormalize: bool, scale: float, shift: float
) -> None:
    logits = torch.randn(9, 256, generator=generator)
    bias = torch.randn(256, generator=generator) + shift
    arguments = {"top_k": 8, "num_groups": 8, "topk_groups": 4, "renormalize": renormalize, "scale": scale}
    result = biased_grouped_topk(logits, bias, **arguments)
    assert_routes(result, python_routing("biased_grouped_topk", logits, bias=bias, **arguments))
    if renormalize:
        torch.testing.assert_close(result[0].sum(-1), torch.full((9,), scale))


@pytest.mark.parametrize("op_name", ["topk_softmax", "grouped_topk", "biased_grouped_topk"])
def test_ties_go_to_the_lowest_id(generator: torch.Generator, op_name: str) -> None:
    logits = torch.randint(-1, 2, (50, 40), generator=generator).to(torch.bfloat16)  # three values: ties everywhere
    arguments: dict[str, Any] = {"top_k": 6, "renormalize": True}
    if op_name != "topk_softmax":
        arguments |= {"num_groups": 8, "topk_groups": 3, "scale": 1.0}
    if op_name == "biased_grouped_topk":
        arguments["bias"] = torch.zeros(40)
    op = {"topk_softmax": topk_softmax, "grouped_topk": grouped_topk, "biased_grouped_topk": biased_grouped_topk}
    assert_routes(op[op_name](logits, **arguments), python_routing(op_name, logits, **arguments))
    equal = op[op_name](torch.zeros(2, 40), **arguments)[1]
    assert equal.tolist() == [list(range(6))] * 2


def test_dropped_groups_lose_to_negative_scores() -> None:
    """Masking with 0.0 instead of -inf would pick expert 0, of a dropped group (transformers#45440)."""
    logits = torch.zeros(1, 8)
    bias = torch.tensor([-9.0, -9.0, -2.0, -2.5, -9.0, -9.0, -9.0, -9.0])
    weights, ids = biased_grouped_topk(logits, bias, 2, 4, 1, renormalize=False, scale=1.0)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[0.5, 0.5]]  # of the sigmoid alone


def test_a_group_scores_its_two_best_not_its_best() -> None:
    bias = torch.tensor([0.9, 0.0, 0.6, 0.5])
    ids = biased_grouped_topk(torch.zeros(1, 4), bias, 1, 2, 1, renormalize=False, scale=1.0)[1]
    assert ids.tolist() == [[2]]
    logits = torch.tensor([[2.0, -4.0, 1.9, 1.8]])
    assert grouped_topk(logits, 1, 2, 1, renormalize=False, scale=1.0)[1].tolist() == [[0]]


def test_bfloat16_logits_are_computed_in_float32(generator: torch.Generator) -> None:
    logits = torch.randn(9, 64, generator=generator, dtype=torch.bfloat16)
    bias = torch.randn(64, generator=generator)
    for half, full in (
        (topk_softmax(logits, 6, True), topk_softmax(logits.to(torch.float32), 6, True)),
        (
            biased_grouped_topk(logits, bias, 6, 8, 3, True, 2.5),
            biased_grouped_topk(logits.to(torch.float32), bias, 6, 8, 3, True, 2.5),
        ),
    ):
        assert torch.equal(half[0], full[0]) and torch.equal(half[1], full[1])


def test_weights_that_all_underflow_stay_finite() -> None:
    weights, ids = biased_grouped_topk(torch.full((1, 8), -200.0), torch.zeros(8), 2, 2, 1, True, 2.5)
    assert weights.tolist() == [[0.0, 0.0]]
    assert ids.tolist() == [[0, 1]]


def test_nan_stays_in_its_row_and_ids_stay_valid() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 3] = torch.nan
    for weights, ids in (
        topk_softmax(logits, 4, True),
        grouped_topk(logits, 4, 4, 2, True, 1.0),
        biased_grouped_topk(logits, torch.zeros(8), 4, 4, 2, True, 1.0),
    ):
        assert weights[1].isnan().any()
        assert weights[[0, 2]].isfinite().all()
        assert ids[[0, 2]].tolist() == [[0, 1, 2, 3]] * 2
        assert len(set(ids[1].tolist())) == 4 and set(ids[1].tolist()) <= set(range(8))


def test_any_strides(generator: torch.Generator) -> None:
    wide_logits = torch.randn(5, 32, generator=generator)
    transposed = torch.randn(16, 5, generator=generator).T
    bias = torch.randn(32, generator=generator)[::2]
    for logits in (wide_logits[:, ::2], wide_logits[:, 16:], transposed):
        dense = logits.contiguous()
        for got, expected in (
            (topk_softmax(logits, 3, True), topk_softmax(dense, 3, True)),
            (grouped_topk(logits, 3, 4, 2, True, 2.0), grouped_topk(dense, 3, 4, 2, True, 2.0)),
            (
                biased_grouped_topk(logits, bias, 3, 4, 2, True, 2.0),
                biased_grouped_topk(dense, bias.contiguous(), 3, 4, 2, True, 2.0),
            ),
        ):
            assert torch.equal(got[1], expected[1])
            torch.testing.assert_close(got[0], expected[0])


def _calls(logits: Tensor) -> list[tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Any, ...]]]:
    bias = torch.linspace(-1, 1, 16)
    return [
        (topk_softmax.reference, (logits, 4, True)),
        (grouped_topk.reference, (logits, 4, 4, 2, False, 16.0)),
        (biased_grouped_topk.reference, (logits, bias, 4, 4, 2, True, 2.5)),
    ]


def test_zero_rows() -> None:
    for reference, arguments in _calls(torch.empty(0, 16, dtype=torch.bfloat16)):
        weights, ids = reference(*arguments)
        assert weights.shape == ids.shape == (0, 4)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int32


def test_fake_tensors_give_shapes_and_dtypes() -> None:
    with FakeTensorMode():
        for reference, arguments in _calls(torch.empty(5, 16, dtype=torch.bfloat16)):
            weights, ids = reference(*arguments)
            assert weights.shape == ids.shape == (5, 4)
            assert weights.dtype == torch.float32 and ids.dtype == torch.int32


def test_references_compile_whole(generator: torch.Generator) -> None:
    for reference, arguments in _calls(torch.randn(5, 16, generator=generator)):
        compiled = torch.compile(reference, fullgraph=True, backend="eager")
        for got, expected in zip(compiled(*arguments), reference(*arguments), strict=True):
            assert torch.equal(got, expected)


def test_double_logits_are_computed_in_double(generator: torch.Generator) -> None:
    logits = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    for reference, arguments in _calls(logits):
        assert reference(*arguments)[0].dtype == torch.float64


LOGITS, BIAS = torch.zeros(2, 16), torch.zeros(16)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: topk_softmax(LOGITS.to(torch.int32), 2, True), r"topk_softmax.*'logits'.*float32.*got torch.int32"),
        (lambda: topk_softmax(LOGITS[0], 2, True), r"topk_softmax.*'logits'.*rank 2.*got shape \(16,\)"),
        (lambda: topk_softmax(LOGITS, 0, True), r"topk_softmax.*'top_k'.*between 1.*top_k=0"),
        (lambda: topk_softmax(LOGITS, 17, True), r"topk_softmax.*'top_k'.*got E=16, top_k=17"),
        (lambda: grouped_topk(LOGITS, 2, 3, 1, True, 1.0), r"grouped_topk.*'num_groups'.*divides.*num_groups=3"),
        (lambda: grouped_topk(LOGITS, 2, 0, 1, True, 1.0), r"grouped_topk.*'num_groups'.*got .*num_groups=0"),
        (lambda: grouped_topk(LOGITS, 2, 4, 5, True, 1.0), r"grouped_topk.*'num_groups, topk_groups'.*topk_groups=5"),
        (lambda: grouped_topk(LOGITS, 9, 4, 2, True, 1.0), r"grouped_topk.*top_k.*kept groups.*top_k=9"),
        (
            lambda: biased_grouped_topk(LOGITS, BIAS.to(torch.bfloat16), 2, 4, 2, True, 1.0),
            r"biased_grouped_topk.*'bias'.*float32.*got torch.bfloat16",
        ),
        (
            lambda: biased_grouped_topk(LOGITS, BIAS[:8], 2, 4, 2, True, 1.0),
            r"biased_grouped_topk.*'bias'.*E = 16.*got shape \(8,\)",
        ),
        (
            lambda: biased_grouped_topk(LOGITS, BIAS, 2, 16, 8, True, 1.0),
            r"biased_grouped_topk.*two experts.*num_groups=16",
        ),
    ],
)
def test_errors_name_op_argument_expected_and_got(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
