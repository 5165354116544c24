"""Grouped matrix products against a product for each row, with garbage wherever the contract allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits
from fp8_codec import decode
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, to_fp8
from torch_hal.ops import (
    fp8_block_linear,
    fp8_grouped_linear_contiguous,
    fp8_grouped_linear_masked,
    grouped_linear_contiguous,
    grouped_linear_masked,
)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Runs of one expert each: uneven, with padding, unused, out of order and come back to; expert 1 has none.
RUNS = {
    1: [0, 3, -1, 2, 2, 0, -1, 3],
    4: [2, 2, 2, 2, 0, 0, 0, -1, -1, -1, -1, -1, 3, -1, -1, -1, 0, 0, -1, -1],
    128: [3] * 128 + [0] * 100 + [-1] * 28 + [-1] * 128 + [2] + [-1] * 127,
}


def contiguous(alignment: int, dtype: torch.dtype = torch.float32, n: int = 6, k: int = 40) -> dict[str, Any]:
    m_indices = int32(RUNS[alignment])
    x = normal(len(m_indices), 2 * k, dtype=dtype)[:, ::2]
    x[m_indices < 0] = torch.nan
    weight = normal(4, n, k, dtype=dtype, seed=1)
    weight[1] = torch.nan
    return {"x": x, "weight": weight, "m_indices": m_indices, "alignment": alignment}


def masked(dtype: torch.dtype = torch.float32, n: int = 6, k: int = 40) -> dict[str, Any]:
    masked_m = int32([3, 0, 5, 1])
    x = normal(4, 5, 2 * k, dtype=dtype)[..., ::2]
    for e, m in enumerate(masked_m.tolist()):
        x[e, m:] = torch.nan
    weight = normal(4, n, k, dtype=dtype, seed=1)
    weight[1] = torch.nan
    return {"x": x, "weight": weight, "masked_m": masked_m, "expected_m": 2}


def valid_rows(call: dict[str, Any]) -> list[tuple[tuple[int, ...], int]]:
    """(index of a row, its expert) for every row with one."""
    if "m_indices" in call:
        return [((m,), e) for m, e in enumerate(call["m_indices"].tolist()) if e >= 0]
    return [((e, m), e) for e, count in enumerate(call["masked_m"].tolist()) for m in range(count)]


def assert_rows(y: Tensor, call: dict[str, Any], x: Tensor, weight: Tensor) -> None:
    """Every valid row is its product in float64, all others are zero."""
    written = torch.zeros(y.shape[:-1], dtype=torch.bool)
    for row, expert in valid_rows(call):
        a, w = x[row].double(), weight[expert].double()
        assert_within(y[row], w @ a, w.abs() @ a.abs(), length=x.shape[-1])
        written[row] = True
    assert written.any() and not y[~written].any()
    assert y.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alignment", RUNS)
def test_contiguous_is_a_product_for_each_row(alignment: int, dtype: torch.dtype) -> None:
    call = contiguous(alignment, dtype)
    y = grouped_linear_contiguous(**call)
    assert y.dtype == dtype and y.shape == (len(RUNS[alignment]), 6)
    assert_rows(y, call, call["x"], call["weight"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_is_a_product_for_each_row_in_use(dtype: torch.dtype) -> None:
    call = masked(dtype)
    y = grouped_linear_masked(**call)
    assert y.dtype == dtype and y.shape == (4, 5, 6)
    assert_rows(y, call, call["x"], call["weight"])


def test_results_do_not_depend_on_what_is_promised_or_guessed() -> None:
    call = contiguous(4)
    y = grouped_linear_contiguous(**call)
    for alignment in (1, 2):
        torch.testing.assert_close(grouped_linear_contiguous(**{**call, "alignment": alignment}), y)
    call = masked()
    for expected_m in (0, 5, 10**9):
        assert torch.equal(grouped_linear_masked(**{**call, "expected_m": expected_m}), grouped_linear_masked(**call))


def test_masked_counts_out_of_range_stay_within_the_rows() -> None:
    call = {**masked(), "x": normal(4, 5, 40), "weight": normal(4, 6, 40, seed=1)}
    y = grouped_linear_masked(**{**call, "masked_m": int32([-3, 6, 2**31 - 1, 0])})
    assert not y[[0, 3]].any() and (y[1:3] != 0).all()


def test_many_blocks_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [(grouped_linear_contiguous, contiguous(1)), (grouped_linear_masked, masked())]
    whole = [op(**call) for op, call in calls]
    for budget in (0, 500):  # one block, and two
        monkeypatch.setattr("torch_hal.ops.grouped_gemm._GATHERED", budget)
        for (op, call), y in zip(calls, whole, strict=True):
            torch.testing.assert_close(op(**call), y)


def test_contiguous_and_masked_share_their_weights() -> None:
    """One prepared copy of the experts serves both: what the plain layout is, is said once."""
    weight, scale = normal(2, 3, 4), normal(2, 1, 1)
    assert grouped_linear_contiguous.prepare is grouped_linear_masked.prepare is not None
    assert fp8_grouped_linear_contiguous.prepare is fp8_grouped_linear_masked.prepare is not None
    assert grouped_linear_masked.prepare(weight)[0] is weight
    assert [a is b for a, b in zip(fp8_grouped_linear_masked.prepare(weight, scale), (weight, scale), strict=True)]


@pytest.mark.parametrize("experts, rows", [(4, 0), (0, 0), (0, 8)])
def test_without_rows_or_experts(experts: int, rows: int) -> None:
    weight, padding = normal(experts, 6, 40), torch.full((rows,), -1, dtype=torch.int32)
    y = grouped_linear_contiguous(normal(rows, 40), weight, padding, 4)
    assert y.shape == (rows, 6) and not y.any()
    none = torch.zeros(experts, dtype=torch.int32)
    assert grouped_linear_masked(normal(experts, rows, 40), weight, none, 1).shape == (experts, rows, 6)
    codes, scale = to_fp8(normal(experts, 6, 128), FP8_KINDS["e4m3fn"]), torch.ones(experts, 1, 1)
    x = to_fp8(normal(experts, rows, 128), FP8_KINDS["e4m3fn"])
    y = fp8_grouped_linear_masked(x, torch.ones(experts, rows, 1), codes, scale, none, 1, torch.bfloat16)
    assert y.shape == (experts, rows, 6) and y.dtype == torch.bfloat16
    x = to_fp8(normal(rows, 128), FP8_KINDS["e4m3fn"])
    y = fp8_grouped_linear_contiguous(x, torch.ones(rows, 1), codes, scale, padding, 4, torch.bfloat16)
    assert y.shape == (rows, 6) and not y.any()


# fp8: N = 200 and K = 320 both end in a partial block.


def decoded(x: Tensor, kind: str) -> Tensor:
    """float64 values by the tests' own codec."""
    table = torch.tensor([decode(code, kind) for code in range(256)], dtype=torch.float64)
    return table[x.contiguous().view(torch.uint8).long()]


def in_fp8(call: dict[str, Any], kind: str = "e4m3fn", stored: str = "row_f32") -> dict[str, Any]:
    """The call with fp8 operands, and scales that are powers of two, which every layout can store."""
    rows, blocks, kind_ = call["x"].shape[:-1], -(-call["x"].shape[-1] // 128), FP8_KINDS[kind]
    experts, n, _ = call["weight"].shape
    count = rows.numel() * blocks
    scales = 2.0 ** torch.arange(count, dtype=torch.float32).remainder(7).sub(3).view(*rows, blocks)
    grid = (experts, -(-n // 128), blocks)
    weight_scale = (1 + torch.arange(grid[0] * grid[1] * grid[2], dtype=torch.float32) / 64).view(grid) / 2**9
    return {
        **call,
        "x": to_fp8(call["x"] * 50, kind_),
        "x_scale": SCALE_LAYOUTS[stored].pack(scales),
        "weight": to_fp8(call["weight"] * 50, kind_),
        "weight_scale": weight_scale,
        "out_dtype": torch.float32,
        "x_scale_layout": stored,
    }


def scaled(call: dict[str, Any], kind: str) -> tuple[Tensor, Tensor]:
    """The operands' values in float64, scales looked up element by element."""
    n, k = torch.arange(call["weight"].shape[1]) // 128, torch.arange(call["x"].shape[-1]) // 128
    scales = SCALE_LAYOUTS[call["x_scale_layout"]].unpack(call["x_scale"], len(call["weight_scale"][0, 0]))
    x = decoded(call["x"], kind) * scales.double()[..., k]
    return x, decoded(call["weight"], kind) * call["weight_scale"].double()[:, n][..., k]


FP8_CALLS = {
    "contiguous": (fp8_grouped_linear_contiguous, lambda: contiguous(4, n=200, k=320)),
    "masked": (fp8_grouped_linear_masked, lambda: masked(n=200, k=320)),
}
both = pytest.mark.parametrize("form", FP8_CALLS)


@both
@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_a_product_for_each_row(form: str, kind: str, dtype: torch.dtype) -> None:
    op, make = FP8_CALLS[form]
    call = {**in_fp8(make(), kind), "out_dtype": dtype}
    y = op(**call)
    assert y.dtype == dtype
    assert_rows(y, call, *scaled(call, kind))


@both
@pytest.mark.parametrize("stored", SCALE_LAYOUTS)
def test_every_scale_layout_gives_the_same(form: str, stored: str) -> None:
    op, make = FP8_CALLS[form]
    assert same_bits(op(**in_fp8(make(), stored=stored)), op(**in_fp8(make())))


@both
def test_each_expert_is_a_block_linear(form: str) -> None:
    """The same sums as the ungrouped op's: one expert, all of its rows, the same bits."""
    op, make = FP8_CALLS[form]
    call = in_fp8(make())
    y = op(**call)
    for expert in (0, 2, 3):
        rows = [row for row, e in valid_rows(call) if e == expert]
        x, scale = (torch.stack([call[name][row] for row in rows]) for name in ("x", "x_scale"))
        plain = fp8_block_linear(x, scale, call["weight"][expert], call["weight_scale"][expert], torch.float32)
        torch.testing.assert_close(torch.stack([y[row] for row in rows]), plain, rtol=1e-5, atol=1e-3)


@both
def test_fp8_oracle_in_float64(form: str) -> None:
    op, make = FP8_CALLS[form]
    call = in_fp8(make())
    scales = {name: call[name].double() for name in ("x_scale", "weight_scale")}
    y = op.reference(**{**call, **scales, "out_dtype": torch.float64})
    x, weight = scaled(call, "e4m3fn")
    for row, expert in valid_rows(call):
        torch.testing.assert_close(y[row], weight[expert] @ x[row], rtol=1e-12, atol=1e-9)


def test_measure_counts_what_is_expected() -> None:
    """Weights of as many experts as can have rows, and as many rows as the caller expects."""
    one_run = grouped_linear_contiguous.measure(normal(4, 40), normal(16, 6, 40), int32([1, 1, 1, -1]), 4)
    assert one_run == {"bytes": 4 * (6 * 40 + 4 * 40 + 4 * 6 + 4), "flops": 2 * 4 * 6 * 40, "reduces": 40}
    assert grouped_linear_masked.measure(**masked())["flops"] == 2 * 4 * 2 * 6 * 40


def test_traces() -> None:
    assert_traces(grouped_linear_contiguous, **contiguous(4, torch.bfloat16))
    assert_traces(grouped_linear_masked, **masked(torch.bfloat16))
    for op, make in FP8_CALLS.values():
        assert_traces(op, **in_fp8(make(), stored="mn_f32_tma"))


def changed(op: Callable[..., Tensor], call: dict[str, Any], **change: Any) -> Callable[[], Tensor]:
    return lambda: op(**{**call, **change})


C, M = contiguous(4), masked()
C8, M8 = in_fp8(contiguous(4, n=200, k=320)), in_fp8(masked(n=200, k=320))
CONTIGUOUS, MASKED = fp8_grouped_linear_contiguous, fp8_grouped_linear_masked


@pytest.mark.parametrize(
    "call, message",
    [
        (changed(grouped_linear_contiguous, C, alignment=3), r"runs of alignment rows tile x.*got M=20, alignment=3"),
        (changed(grouped_linear_contiguous, C, alignment=0), r"grouped_linear_contiguous.*'alignment'.*alignment=0"),
        (changed(grouped_linear_contiguous, C, m_indices=C["m_indices"].long()), r"'m_indices': expected torch.int32"),
        (changed(grouped_linear_contiguous, C, m_indices=C["m_indices"][:-4]), r"'m_indices'.*M = 20.*got shape \(16,"),
        (changed(grouped_linear_contiguous, C, weight=C["weight"][..., 1:]), r"'weight'.*K = 40.*got shape \(4, 6, 39"),
        (changed(grouped_linear_contiguous, C, weight=C["weight"].half()), r"'weight': expected torch.float32, got"),
        (changed(grouped_linear_masked, M, expected_m=-1), r"grouped_linear_masked.*'expected_m'.*got expected_m=-1"),
        (changed(grouped_linear_masked, M, masked_m=M["masked_m"][:3]), r"'masked_m'.*E = 4.*got shape \(3,\)"),
        (changed(grouped_linear_masked, M, x=M["x"][0]), r"'x': expected rank 3 \[E, M, K\], got shape \(5, 40\)"),
        (changed(CONTIGUOUS, C8, x_scale_layout="mn_f32_tma"), r"fp8_grouped_linear_contiguous.*its layout's strides"),
        (changed(CONTIGUOUS, C8, x_scale=C8["x_scale"][:, :2]), r"one scale for each row and 128 columns"),
        (changed(CONTIGUOUS, C8, weight_scale=C8["weight_scale"][:, :1]), r"ceil_div\(N,BLOCK\) = 2.*shape \(4, 1, 3"),
        (changed(CONTIGUOUS, C8, out_dtype=torch.float8_e4m3fn), r"the result is bfloat16.*got out_dtype="),
        (changed(MASKED, M8, x_scale_layout="row"), r"fp8_grouped_linear_masked.*the layout is one of row_f32.*'row'"),
        (changed(MASKED, M8, x_scale_layout="mn_ue8m0"), r"x_scale has its layout's dtype.*got.*torch.float32"),
        (
            changed(MASKED, M8, weight=to_fp8(normal(4, 200, 320), FP8_KINDS["e4m3fnuz"])),
            r"'weight': expected .*e4m3fn,",
        ),
        (
            changed(MASKED, M8, x=M8["x"].to(torch.bfloat16)),
            r"'x': expected torch.float8_e4m3fn or .*got torch.bfloat16",
        ),
    ],
)
def test_errors_name_op_argument_expected_and_got(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
