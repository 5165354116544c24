from __future__ import annotations

import math

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits

from torch_hal.errors import ArgumentError
from torch_hal.ops.activation import silu_and_mul


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
