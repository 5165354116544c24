from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits

from torch_hal.errors import ArgumentError
from torch_hal.ops.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul

GELU = {
    "gelu_and_mul": lambda a: a / 2 * math.erfc(-a / math.sqrt(2)),
    "gelu_tanh_and_mul": lambda a: a / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
}
gelus = pytest.mark.parametrize("op", [gelu_and_mul, gelu_tanh_and_mul], ids=GELU)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


def exact_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1] // 2
    rows = [
        [row[i] / (1 + math.exp(-row[i])) * row[width + i] for i in range(width)]
        for row in x.double().reshape(-1, 2 * width).tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(*x.shape[:-1], width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_formula_gate_first(dtype: torch.dtype) -> None:
    x = normal(3, 5, 96, dtype=dtype)
    y, exact = silu_and_mul(x), exact_silu_and_mul(x)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, exact, exact.abs())


def test_one_rounding() -> None:
    x = torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16)
    assert exact_silu_and_mul(x).item() == pytest.approx(0.73677, abs=1e-6)
    assert silu_and_mul(x).item() == 0.73828125  # silu rounded to 0.73046875 first, it would be 0.734375


def test_extremes() -> None:
    x = torch.tensor([[200.0, -200.0, 0.0, float("nan"), 2.0, 3.0, 4.0, 5.0]])
    y = silu_and_mul(x)
    assert y[0, :3].tolist() == [400.0, 0.0, 0.0]
    assert y[0, 3].isnan()


@pytest.mark.parametrize("shape", [(0, 8), (8,), (2, 0, 8), (3, 0)])
def test_any_leading_shape_and_empties(shape: tuple[int, ...]) -> None:
    y = silu_and_mul(normal(*shape, dtype=torch.bfloat16))
    assert y.shape == (*shape[:-1], shape[-1] // 2) and y.dtype == torch.bfloat16


def test_strides() -> None:
    x = normal(4, 576)[:, :512]
    assert same_bits(silu_and_mul(x), silu_and_mul(x.contiguous()))
    columns = normal(64, 6).T
    y = silu_and_mul(columns)
    assert y.is_contiguous() and same_bits(y, silu_and_mul(columns.contiguous()))


def test_errors_name_argument_expected_and_got() -> None:
    with pytest.raises(ArgumentError, match=r"silu_and_mul: .*expected .*even \(W % 2 == 0\), got W=7"):
        silu_and_mul(normal(2, 7))
    with pytest.raises(ArgumentError, match=r"'x': expected .*, got torch.int64"):
        silu_and_mul(torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"'x': expected rank 1 \[..., W\], got shape \(\)"):
        silu_and_mul(torch.tensor(1.0))


def test_traces() -> None:
    assert_traces(silu_and_mul, normal(4, 576, dtype=torch.bfloat16)[:, :512])
    assert_traces(silu_and_mul, normal(64, 6).T)


# GELU, exact and by tanh.


@gelus
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_formula_gate_first(op: Any, dtype: torch.dtype) -> None:
    x = normal(3, 5, 96, dtype=dtype)
    x[0, 0, :8] = torch.linspace(-6, 6, 8).to(dtype)  # both tails
    y = op(x)
    gate, up = x[..., :48].double(), x[..., 48:].double()
    gelu = torch.tensor([GELU[op.name](a) for a in gate.flatten().tolist()], dtype=torch.float64).view_as(gate)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, gelu * up, gate.abs() * up.abs())


def test_the_two_gelus_are_two_functions() -> None:
    x = torch.stack([torch.linspace(-5, 5, 10001), torch.ones(10001)], -1)
    difference = (gelu_and_mul(x) - gelu_tanh_and_mul(x)).abs().max().item()
    assert difference == pytest.approx(4.73e-4, abs=2e-6)


@gelus
def test_gelu_one_rounding(op: Any) -> None:
    x = torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16)
    assert op(x).item() == 0.84765625  # gelu(1) ≈ 0.8413 rounded to 0.83984375 first, it would be 0.84375


@gelus
def test_gelu_extremes(op: Any) -> None:
    y = op(torch.tensor([[200.0, -200.0, 0.0, math.nan, -math.inf, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, math.inf]]))
    assert y[0, :3].tolist() == [400.0, 0.0, 0.0]
    assert y[0, 3:5].isnan().all() and y[0, 5] == math.inf


@gelus
def test_gelu_shapes_strides_and_traces(op: Any) -> None:
    for shape in ((0, 8), (8,), (2, 0, 8), (3, 0)):
        assert op(normal(*shape, dtype=torch.bfloat16)).shape == (*shape[:-1], shape[-1] // 2)
    x = normal(4, 576)[:, :512]
    assert same_bits(op(x), op(x.contiguous()))
    assert same_bits(op(normal(64, 6).T), op(normal(64, 6).T.contiguous()))
    assert_traces(op, x.bfloat16())
    with pytest.raises(ArgumentError, match=rf"{op.name}: .*expected .*even \(W % 2 == 0\), got W=7"):
        op(normal(2, 7))
