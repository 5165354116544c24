"""Expert computation against a loop over tokens and experts: every shape of load, sentinels, rounding points."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_hal.errors import ArgumentError
from torch_hal.ops.moe_experts import fused_experts, moe_sum_reduce, shared_expert_add

Experts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make(
    tokens: int, experts: int, top_k: int, hidden: int = 24, inter: int = 10, dtype: torch.dtype = torch.float32
) -> Experts:
    g = torch.Generator().manual_seed(tokens * 1000 + experts * 10 + top_k)
    x = torch.randn(tokens, hidden, generator=g)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=g) / math.sqrt(hidden)
    w2 = torch.randn(experts, hidden, inter, generator=g) / math.sqrt(inter)
    weights = torch.rand(tokens, top_k, generator=g)
    ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].to(torch.int32)
    return x.to(dtype), w13.to(dtype), w2.to(dtype), weights, ids


def loop(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The formula, an assignment at a time, in float64 without any rounding."""
    x, w13, w2, weights = (tensor.to(torch.float64) for tensor in (x, w13, w2, weights))
    out = torch.zeros_like(x)
    inter = w2.shape[2]
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if 0 <= e < w13.shape[0]:
                gate, up = w13[e, :inter] @ x[t], w13[e, inter:] @ x[t]
                out[t] += weights[t, k] * (w2[e] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


LOADS = [(1, 8, 2), (3, 16, 4), (5, 3, 2), (17, 4, 3), (40, 6, 2), (9, 1, 1), (64, 2, 1)]


@pytest.mark.parametrize("tokens, experts, top_k", LOADS)
def test_fused_experts_is_the_formula(tokens: int, experts: int, top_k: int) -> None:
    arguments = make(tokens, experts, top_k)
    got = fused_experts(*arguments)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.to(torch.float64), loop(*arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens, experts, top_k", [(1, 8, 2), (17, 4, 3)])
def test_fused_experts_bfloat16_within_its_two_roundings(tokens: int, experts: int, top_k: int) -> None:
    arguments = make(tokens, experts, top_k, dtype=torch.bfloat16)
    got, exact = fused_experts(*arguments), loop(*arguments)
    assert got.dtype == torch.bfloat16
    assert fused_experts.terms is not None
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    bound = half_ulp * (fused_experts.terms(*arguments) + exact.abs()) * 1.01 + 1e-6
    assert ((got - exact).abs() <= bound).all()


def test_double_inputs_are_computed_in_double() -> None:
    x, w13, w2, weights, ids = make(5, 3, 2, dtype=torch.float64)
    got = fused_experts(x, w13, w2, weights, ids)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, loop(x, w13, w2, weights, ids), rtol=1e-12, atol=1e-14)


def test_every_spread_of_the_load() -> None:
    """All to one expert, to the last, half to one, to none: blocks are enough and every row is its own."""
    x, w13, w2, weights, _ = make(23, 5, 2)
    for ids in (
        torch.zeros(23, 2),
        torch.full((23, 2), 4),
        torch.stack([torch.full((23,), 3), torch.arange(23) % 5], 1),
        torch.full((23, 2), -1),
        torch.stack([torch.arange(23) % 7 - 1, torch.full((23,), 5)], 1),
    ):
        arguments = (x, w13, w2, weights, ids.to(torch.int32))
        torch.testing.assert_close(fused_experts(*arguments).to(torch.float64), loop(*arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [2, 19])
def test_ids_out_of_range_contribute_exactly_nothing(tokens: int, id_dtype: torch.dtype) -> None:
    x, w13, w2, weights, ids = make(tokens, 4, 3)
    ids = ids.to(id_dtype)
    for outside in (-1, 4, 1000, torch.iinfo(id_dtype).min, torch.iinfo(id_dtype).max):
        ids[:, 1] = outside
        weights[:, 1] = torch.nan
        ids[1] = outside
        got = fused_experts(x, w13, w2, weights, ids)
        assert torch.equal(got[1], torch.zeros_like(got[1]))
        assert got.isfinite().all()
        torch.testing.assert_close(got.to(torch.float64), loop(x, w13, w2, weights, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("tokens", [2, 19])
def test_poison_stays_with_its_token_and_its_expert(tokens: int, poison: float) -> None:
    x, w13, w2, weights, ids = make(tokens, 4, 2)
    ids[ids == 3] = 2  # nobody but token 0 asks for expert 3
    clean = fused_experts(x, w13, w2, weights, ids)
    x, w13 = x.clone(), w13.clone()
    x[0], w13[3], ids[0, 0] = poison, poison, 3
    got = fused_experts(x, w13, w2, weights, ids)
    assert not got[0].isfinite().any()
    torch.testing.assert_close(got[1:], clean[1:])


def _gate_64(up: list[float], w2: list[list[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Experts on x = [1] whose activation is exactly 64 · up: silu(64) is 64 in float32."""
    experts, inter = len(w2), len(w2[0])
    w13 = torch.empty(experts, 2 * inter, 1)
    w13[:, :inter] = 64.0
    w13[:, inter:, 0] = torch.tensor(up).view(experts, inter)
    return w13.to(dtype), torch.tensor(w2).unsqueeze(1).to(dtype)


def test_the_activation_is_rounded_once_between_the_gemms() -> None:
    dtype, one = torch.bfloat16, torch.ones(1, 1, dtype=torch.bfloat16)
    gate, up = torch.tensor(1.0), torch.tensor(1.5)
    activation = torch.nn.functional.silu(gate) * up
    rounded = activation.to(dtype).to(torch.float32)
    assert activation != rounded
    w13, w2 = _gate_64([1.5, rounded.item() / 64], [[1.0], [-1.0]], dtype)
    w13[0, 0] = gate
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    assert fused_experts(one, w13, w2, torch.ones(1, 2), ids).item() == 0.0


def test_expert_outputs_stay_in_float32_until_the_last_rounding() -> None:
    dtype, one = torch.bfloat16, torch.ones(1, 1, dtype=torch.bfloat16)
    w13, w2 = _gate_64([1 / 64, 1 / 64, 1 / 64, 0.0], [[1.0, 2.0**-10], [-1.0, 0.0]], dtype)
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    assert fused_experts(one, w13, w2, torch.ones(1, 2), ids).item() == 2.0**-10


def test_a_rank_without_experts_gives_zeros() -> None:
    x, w13, w2, weights, ids = make(3, 4, 2)
    assert torch.equal(fused_experts(x, w13[:0], w2[:0], weights, torch.full_like(ids, -1)), torch.zeros_like(x))


def test_repeated_ids_count_twice() -> None:
    x, w13, w2, _, _ = make(3, 4, 1)
    once = fused_experts(x, w13, w2, torch.ones(3, 1), torch.full((3, 1), 2))
    twice = fused_experts(x, w13, w2, torch.full((3, 2), 0.5), torch.full((3, 2), 2))
    torch.testing.assert_close(once, twice)


def test_fused_experts_any_strides() -> None:
    x, w13, w2, weights, ids = make(7, 4, 2)
    expected = fused_experts(x, w13, w2, weights, ids)
    strided = (
        torch.cat([x, x], -1)[:, :24],
        w13.mT.contiguous().mT,
        torch.stack([w2, w2], -1)[..., 0],
        weights.T.contiguous().T,
        ids.repeat_interleave(2, -1)[:, ::2],
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    torch.testing.assert_close(fused_experts(*strided), expected)


def test_inputs_are_not_modified() -> None:
    arguments = make(7, 4, 2)
    before = [tensor.clone() for tensor in arguments]
    fused_experts(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_prepare_keeps_the_plain_layout() -> None:
    _, w13, w2, _, _ = make(1, 4, 2)
    assert fused_experts.prepare is not None
    prepared = fused_experts.prepare(w13, w2)
    assert prepared[0] is w13 and prepared[1] is w2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [7, 24])
def test_moe_sum_reduce_sums_in_float32_and_rounds_once(dtype: torch.dtype, hidden: int) -> None:
    x = torch.randn(5, 8, hidden, generator=torch.Generator().manual_seed(1)).mul(64).round().div(64).to(dtype)
    expected = x.to(torch.float64).sum(1).mul(0.25).to(dtype)  # sums of multiples of 2⁻⁶ are exact
    got = moe_sum_reduce(x, 0.25)
    assert got.dtype == dtype and torch.equal(got, expected)
    assert torch.equal(moe_sum_reduce(x.transpose(0, 1).contiguous().transpose(0, 1), 0.25), expected)


def test_moe_sum_reduce_of_one_applies_the_scale() -> None:
    """One expert a token took a path of its own upstream, and lost the scale (sglang#40187)."""
    x = torch.arange(12.0).view(3, 1, 4)
    assert torch.equal(moe_sum_reduce(x, 2.5), x[:, 0] * 2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_expert_add_rounds_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    routed, shared = (torch.randn(4, 9, generator=g).to(dtype) for _ in range(2))
    expected = (routed.to(torch.float64) + 0.5 * shared.to(torch.float64)).to(dtype)
    got = shared_expert_add(routed, shared, 0.5)
    assert got.dtype == dtype and torch.equal(got, expected)
    strided = torch.stack([routed, shared], -1)
    assert torch.equal(shared_expert_add(strided[..., 0], strided[..., 1], 0.5), expected)


def _calls(tokens: int, dtype: torch.dtype) -> list[tuple[Callable[..., Tensor], tuple[object, ...]]]:
    x, w13, w2, weights, ids = make(max(tokens, 1), 4, 2, dtype=dtype)
    x, weights, ids = x[:tokens], weights[:tokens], ids[:tokens]
    return [
        (fused_experts.reference, (x, w13, w2, weights, ids)),
        (moe_sum_reduce.reference, (x.view(tokens, 3, 8), 2.5)),
        (shared_expert_add.reference, (x, x, 0.4)),
    ]


def test_zero_rows() -> None:
    for reference, arguments in _calls(0, torch.bfloat16):
        got = reference(*arguments)
        assert got.shape[0] == 0 and got.dim() == 2 and got.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 9])
def test_fake_tensors_give_shapes_and_dtypes(tokens: int) -> None:
    mode = FakeTensorMode()
    for reference, arguments in _calls(tokens, torch.bfloat16):
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        with mode:
            got = reference(*fakes)
        expected = reference(*arguments)
        assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.parametrize("tokens", [1, 9])
def test_references_compile_whole(tokens: int) -> None:
    for reference, arguments in _calls(tokens, torch.float32):
        compiled = torch.compile(reference, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*arguments), reference(*arguments))


X, W13, W2, WEIGHTS, IDS = make(3, 4, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: fused_experts(X, W13[:, :-2], W2, WEIGHTS, IDS),
            r"fused_experts.*'w13'.*2\*I = 20.*got shape \(4, 18",
        ),
        (lambda: fused_experts(X, W13, W2[:3], WEIGHTS, IDS), r"fused_experts.*'w2'.*E = 4.*got shape \(3, 24, 10\)"),
        (
            lambda: fused_experts(X, W13.to(torch.bfloat16), W2, WEIGHTS, IDS),
            r"fused_experts.*'w13'.*expected torch.float32, got torch.bfloat16",
        ),
        (
            lambda: fused_experts(X, W13, W2, WEIGHTS.to(torch.bfloat16), IDS),
            r"fused_experts.*'topk_weights'.*float32.*got torch.bfloat16",
        ),
        (
            lambda: fused_experts(X, W13, W2, WEIGHTS, IDS.to(torch.int16)),
            r"fused_experts.*'topk_ids'.*int32 or torch.int64, got torch.int16",
        ),
        (lambda: fused_experts(X, W13, W2, WEIGHTS, IDS[:2]), r"fused_experts.*'topk_ids'.*T = 3.*got shape \(2, 2\)"),
        (lambda: fused_experts(X, W13, W2, WEIGHTS[:, :0], IDS[:, :0]), r"fused_experts.*place for one.*K=0"),
        (lambda: moe_sum_reduce(X, 1.0), r"moe_sum_reduce.*'x'.*rank 3.*got shape \(3, 24\)"),
        (lambda: shared_expert_add(X, X[:2], 1.0), r"shared_expert_add.*'shared'.*T = 3.*got shape \(2, 24\)"),
    ],
)
def test_errors_name_op_argument_expected_and_got(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
