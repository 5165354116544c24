from __future__ import annotations

import math

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits

from torch_hal.errors import ArgumentError
from torch_hal.ops.norm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula in Python floats, row by row."""
    result = []
    for row in rows.double().tolist():
        scale = 1 / math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        result.append([v * scale * w for v, w in zip(row, weight.double().tolist(), strict=True)])
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_formula_on_a_strided_slice(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x = normal(5, 576, dtype=dtype)[:, :512]
    weight = normal(512, dtype=weight_dtype or dtype, seed=1)
    y = rms_norm(x, weight, 1e-6)
    exact = exact_norm(x, weight, 1e-6)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, exact, exact.abs(), length=512)


def test_eps_decides_for_tiny_rows() -> None:
    x, weight = normal(3, 64) * 1e-4, torch.ones(64)
    exact = exact_norm(x, weight, 1e-6)
    assert_within(rms_norm(x, weight, 1e-6), exact, exact.abs(), length=64)
    assert exact.abs().max() < 0.5  # with a tenth of this eps the rows would have norm 1


def test_zero_rows_nan_and_inf_stay_where_they_are() -> None:
    x = normal(4, 32)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    y = rms_norm(x, torch.ones(32), 1e-6)
    assert torch.equal(y[0], torch.zeros(32))
    assert y[1].isnan().all()
    assert y[2, 5].isnan() and y[2].isnan().sum() == 1
    assert torch.equal(y[3], rms_norm(x[3:], torch.ones(32), 1e-6)[0])


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (2, 3, 4, 64)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    y, s = fused_add_rms_norm(x, x, torch.ones(64), 1e-6)
    assert y.shape == s.shape == rms_norm(x, torch.ones(64), 1e-6).shape == shape


def test_strided_last_dim_is_right_and_the_result_contiguous() -> None:
    x, weight = normal(64, 6).T, normal(64, seed=1)
    y, exact = rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6)
    assert y.is_contiguous()
    assert_within(y, exact, exact.abs(), length=64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_formula(dtype: torch.dtype) -> None:
    x, residual = normal(4, 576, dtype=dtype)[:, :512], normal(4, 512, dtype=dtype, seed=2)
    weight = normal(512, dtype=dtype, seed=1)
    before = x.clone(), residual.clone()
    y, s = fused_add_rms_norm(x, residual, weight, 1e-6)
    total = x.double() + residual.double()
    exact = exact_norm(total, weight, 1e-6)
    assert_within(s, total, x.double().abs() + residual.double().abs())
    assert_within(y, exact, exact.abs(), length=512)
    assert same_bits(x, before[0]) and same_bits(residual, before[1])


def test_fused_add_norms_the_unrounded_sum() -> None:
    x = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16)  # the sum 257 rounds to 256 in bfloat16
    y, s = fused_add_rms_norm(x, residual, torch.full((2,), 1.5, dtype=torch.bfloat16), 0.0)
    assert s.tolist() == [[256.0, 255.0]]
    assert y[0, 0] == 1.5078125  # from the rounded sum it would be 1.5


def test_twin_writes_in_place() -> None:
    x, residual = normal(4, 576, dtype=torch.bfloat16)[:, :512], normal(4, 512, dtype=torch.bfloat16, seed=2)
    weight = normal(512, dtype=torch.bfloat16, seed=1)
    y, s = fused_add_rms_norm(x, residual, weight, 1e-6)
    outside = x._base[:, 512:].clone()  # type: ignore[index]
    assert fused_add_rms_norm_(x, residual, weight, 1e-6) is None
    assert same_bits(x, y) and same_bits(residual, s)
    assert same_bits(x._base[:, 512:], outside)  # type: ignore[index]
    empty = x[:0]
    fused_add_rms_norm_(empty, residual[:0], weight, 1e-6)


def test_errors_name_argument_expected_and_got() -> None:
    x, weight = normal(3, 64), normal(64)
    with pytest.raises(ArgumentError, match=r"rms_norm: argument 'weight': expected \[D\] with D = 64.*got shape \(32"):
        rms_norm(x, weight[:32], 1e-6)
    with pytest.raises(ArgumentError, match=r"'weight': expected torch.bfloat16 or torch.float32, got torch.float16"):
        rms_norm(x.bfloat16(), weight.half(), 1e-6)
    with pytest.raises(ArgumentError, match=r"'x': expected .*float64, got torch.int32"):
        rms_norm(x.int(), weight, 1e-6)
    with pytest.raises(ArgumentError, match=r"'weight': expected rank 1 \[D\], got shape \(1, 64\)"):
        rms_norm(x, weight[None], 1e-6)
    with pytest.raises(ArgumentError, match=r"'residual, x': expected x and residual have one shape"):
        fused_add_rms_norm(x, x[:1], weight, 1e-6)


def test_traces() -> None:
    x, weight = normal(4, 576, dtype=torch.bfloat16)[:, :512], normal(512, dtype=torch.bfloat16, seed=1)
    assert_traces(rms_norm, x, weight, 1e-6)
    assert_traces(fused_add_rms_norm, x, x, weight, 1e-6)
    assert_traces(rms_norm, x.T.contiguous().T, weight, 1e-6)
