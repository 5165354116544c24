from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from bounds import DTYPES, assert_traces, same_bits
from fp8_codec import decode, encode
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS
from torch_hal.ops.quant import (
    per_tensor_quant_fp8,
    per_token_group_quant_fp8,
    per_token_quant_fp8,
    static_quant_fp8,
)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantise(x: Tensor, group: int, kind: str, ue8m0: bool, eps: float = 1e-10) -> tuple[Tensor, Tensor]:
    """The definition for x [M, K], number by number in float32: code bytes and scales."""
    quant_max = np.float32(448 if kind == "e4m3fn" else 224)
    codes, scales = [], []
    for row in x.float().numpy():
        for values in row.reshape(-1, group):
            scale = np.float32(max(np.abs(values).max(), np.float32(eps))) / quant_max
            if ue8m0:
                mantissa, exponent = math.frexp(scale)
                scale = np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
            scales.append(float(scale))
            codes.append([encode(float(v / scale), kind) for v in values])
    return (
        torch.tensor(codes, dtype=torch.uint8).reshape(x.shape),
        torch.tensor(scales).reshape(x.shape[0], x.shape[1] // group),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("name", SCALE_LAYOUTS)
def test_codes_and_scales_on_a_strided_slice(dtype: torch.dtype, kind: str, name: str) -> None:
    layout = SCALE_LAYOUTS[name]
    x = (normal(5, 576) * torch.logspace(-3, 3, 576)).to(dtype)[:, :512]
    x[1, :128], x[2, 128:256], x[3, 0] = 0, -0.0, -1e-7
    q, scale = per_token_group_quant_fp8(x, 64, kind, name)
    codes, scales = quantise(x, 64, kind, layout.power_of_two)
    assert q.dtype == FP8_KINDS[kind].dtype and q.is_contiguous()
    assert torch.equal(q.view(torch.uint8), codes)
    assert scale.dtype == layout.dtype and scale.shape == (5, layout.columns(8)) and layout.matches(scale)
    assert torch.equal(layout.unpack(scale, 8), scales)


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("name", SCALE_LAYOUTS)
def test_zero_groups_have_finite_scales_and_zero_codes(kind: str, name: str) -> None:
    x = normal(2, 256)
    x[0, :128] = 0
    q, scale = per_token_group_quant_fp8(x, 128, kind, name)
    scales = SCALE_LAYOUTS[name].unpack(scale, 2)
    assert not q.view(torch.uint8)[0, :128].any()
    assert scales.isfinite().all() and (scales > 0).all()
    expected = 1e-10 / FP8_KINDS[kind].quant_max
    if name == "mn_ue8m0":  # bounded first, rounded then: a power of two for zeros as well
        expected = 2.0 ** math.ceil(math.log2(expected))
    assert scales[0, 0].item() == pytest.approx(expected)


def test_eps_bounds_amax_from_below() -> None:
    x = torch.full((1, 128), 1e-5)
    q, scale = per_token_group_quant_fp8(x, 128, eps=1e-4)
    assert scale.item() == pytest.approx(1e-4 / 448)
    assert q.float()[0, 0] == 44  # 44.8 rounds down; without eps it would be 448


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fnuz_has_no_negative_zero_and_fn_keeps_it(kind: str) -> None:
    x = torch.full((1, 128), -1e-6)
    x[0, 0], x[0, 1] = 1.0, -0.0
    q, _ = per_token_group_quant_fp8(x, 128, kind)
    assert set(q.view(torch.uint8)[0, 1:].tolist()) == {0x80 if kind == "e4m3fn" else 0x00}
    assert not q.float().isnan().any()


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_the_largest_value_has_the_largest_code(kind: str) -> None:
    """Whatever rounding does to the scale: 1000 amaxes, among them the type's extremes."""
    x = torch.logspace(-30, 38, 1000)[:, None] * torch.tensor([1.0, -1.0])
    q, _ = per_token_group_quant_fp8(x, 2, kind, eps=1e-30)
    assert q.float().tolist() == [[FP8_KINDS[kind].quant_max, -FP8_KINDS[kind].quant_max]] * 1000


def test_divides_by_the_scale_instead_of_multiplying_by_its_reciprocal() -> None:
    x = torch.tensor([[448 * 7.0, 175.0]])  # 175 / 7 = 25, half-way; 175 · (1/7) is above it
    assert per_token_group_quant_fp8(x, 2)[0].float().tolist() == [[448.0, 24.0]]


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
def test_ue8m0_quantises_with_the_scale_that_it_stores(name: str) -> None:
    x = normal(4, 512)
    q, scale = per_token_group_quant_fp8(x, 128, scale_layout=name, ue8m0=True)
    scales = SCALE_LAYOUTS[name].unpack(scale, 4)
    codes, expected = quantise(x, 128, "e4m3fn", ue8m0=True)
    assert torch.equal(q.view(torch.uint8), codes) and torch.equal(scales, expected)
    restored = (q.float().reshape(4, 4, 128) * scales[..., None]).flatten(1)
    assert ((restored - x).abs() <= x.abs() / 16 + scales.repeat_interleave(128, 1) * 2**-10).all()
    exact = x.reshape(4, 4, 128).abs().amax(-1) / 448
    assert (scales >= exact).all() and (scales < 2 * exact).all()


def test_ue8m0_padding_is_zero() -> None:
    _, scale = per_token_group_quant_fp8(normal(5, 5 * 128), 128, scale_layout="mn_ue8m0")
    assert scale.stride() == (1, 8)
    assert not scale.as_strided((2, 8), (8, 1))[:, 5:].any()  # rows 5, 6 and 7 of each column
    assert not (scale[:, 1] >> 8 & 0xFFFFFF).any()  # the second word holds one scale


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (2, 0, 256), (2, 3, 256)])
def test_empties_and_leading_dims(name: str, shape: tuple[int, ...]) -> None:
    layout, x = SCALE_LAYOUTS[name], normal(*shape)
    q, scale = per_token_group_quant_fp8(x, 128, scale_layout=name)
    assert q.shape == shape and scale.shape == (*shape[:-1], layout.columns(shape[-1] // 128))
    assert scale.dtype == layout.dtype and layout.matches(scale)
    for i in range(shape[0] if x.dim() == 3 else 0):
        q_i, scale_i = per_token_group_quant_fp8(x[i], 128, scale_layout=name)
        assert same_bits(q[i], q_i) and torch.equal(scale[i], scale_i)


def test_a_vector_is_one_row() -> None:
    x = normal(256)
    q, scale = per_token_group_quant_fp8(x, 128)
    assert q.shape == (256,) and scale.shape == (2,)
    assert same_bits(q, per_token_group_quant_fp8(x[None], 128)[0][0])


def test_strided_last_dim_and_inputs_survive() -> None:
    x = normal(256, 6).T
    copy = x.clone()
    q, scale = per_token_group_quant_fp8(x, 128)
    assert q.is_contiguous() and scale.is_contiguous() and same_bits(x, copy)
    expected = per_token_group_quant_fp8(x.contiguous(), 128)
    assert same_bits(q, expected[0]) and same_bits(scale, expected[1])


def test_inf_and_nan_harm_their_own_group_alone() -> None:
    x = normal(2, 256)
    x[0, 3], x[1, 200] = math.inf, math.nan
    q, scale = per_token_group_quant_fp8(x, 128)
    clean, clean_scale = per_token_group_quant_fp8(normal(2, 256), 128)
    assert same_bits(q[0, 128:], clean[0, 128:]) and same_bits(q[1, :128], clean[1, :128])
    assert scale[0, 1] == clean_scale[0, 1] and scale[1, 0] == clean_scale[1, 0]


def test_codes_decode_to_x() -> None:
    x = normal(3, 128)
    q, scale = per_token_group_quant_fp8(x, 128)
    values = torch.tensor([[decode(c, "e4m3fn") for c in row] for row in q.view(torch.uint8).tolist()])
    assert ((values * scale - x).abs() <= x.abs() / 16 + scale * 2**-10).all()


# One scale a row, one for all, and one from outside.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_scale_for_each_token(dtype: torch.dtype, kind: str) -> None:
    x = (normal(4, 576) * torch.logspace(-3, 3, 4)[:, None]).to(dtype)[:, :510]
    x[1] = 0
    q, scale = per_token_quant_fp8(x, kind)
    codes, scales = quantise(x, 510, kind, ue8m0=False)
    assert q.dtype == FP8_KINDS[kind].dtype and q.is_contiguous() and scale.dtype == torch.float32
    assert torch.equal(q.view(torch.uint8), codes) and torch.equal(scale, scales)
    assert scale[1].item() == pytest.approx(1e-10 / FP8_KINDS[kind].quant_max) and not q[1].float().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_one_scale_for_the_tensor(dtype: torch.dtype, kind: str) -> None:
    x = normal(3, 4, 48, dtype=dtype)[..., :32]
    q, scale = per_tensor_quant_fp8(x, kind)
    codes, scales = quantise(x.reshape(1, -1), x.numel(), kind, ue8m0=False)
    assert q.dtype == FP8_KINDS[kind].dtype and q.shape == x.shape and q.is_contiguous()
    assert torch.equal(q.view(torch.uint8).flatten(), codes[0])
    assert scale.shape == (1,) and scale.dtype == torch.float32 and scale.item() == scales.item()
    assert same_bits(static_quant_fp8(x, scale, kind), q)  # its own scale, given back


@pytest.mark.parametrize("shape", [(0, 32), (2, 0), (2, 3), ()])
def test_one_scale_of_nothing_or_of_zeros_is_finite(shape: tuple[int, ...]) -> None:
    q, scale = per_tensor_quant_fp8(torch.zeros(shape))
    assert q.shape == shape and not q.float().any()
    assert scale.tolist() == [pytest.approx(1e-10 / 448)]


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_static_scale_saturates(kind: str) -> None:
    largest = FP8_KINDS[kind].quant_max
    x = torch.tensor([[1.0, -1.0, 4000.0, -4000.0, math.inf, -math.inf, 0.25 * largest, math.nan]])
    q = static_quant_fp8(x, torch.tensor([0.25]), kind)
    expected = [4.0, -4.0, largest, -largest, largest, -largest, largest]
    assert q.float()[0, :-1].tolist() == expected and q.float()[0, -1].isnan()
    assert q.view(torch.uint8)[0].tolist() == [encode(v / 0.25, kind) for v in x[0].tolist()]


def test_the_static_scale_divides() -> None:
    scale = torch.tensor([7.0])
    assert static_quant_fp8(torch.tensor([[175.0]]), scale).item() == 24  # 25 is half-way; 175 · (1/7) is above it


def test_row_and_tensor_scales_any_strides_empties_and_traces() -> None:
    x = normal(64, 6).T
    assert same_bits(per_token_quant_fp8(x)[0], per_token_quant_fp8(x.contiguous())[0])
    assert same_bits(per_tensor_quant_fp8(x)[0], per_tensor_quant_fp8(x.contiguous())[0])
    assert [t.shape for t in per_token_quant_fp8(normal(0, 8))] == [(0, 8), (0, 1)]
    assert [t.shape for t in per_token_quant_fp8(normal(8))] == [(8,), (1,)]
    assert_traces(per_token_quant_fp8, x, "e4m3fnuz")
    assert_traces(per_tensor_quant_fp8, x, "e4m3fnuz")
    assert_traces(static_quant_fp8, x, torch.ones(1), "e4m3fnuz")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: per_token_quant_fp8(normal(2, 0)), r"per_token_quant_fp8: .*a row has at least one element .*got K=0"),
        (lambda: per_token_quant_fp8(normal(2, 8), "fp8"), r"per_token_quant_fp8: argument 'fp8'.*got fp8='fp8'"),
        (lambda: per_tensor_quant_fp8(normal(2, 8), eps=0.0), r"per_tensor_quant_fp8: argument 'eps'.*got eps=0.0"),
        (lambda: per_tensor_quant_fp8(normal(2, 8).int()), r"per_tensor_quant_fp8: argument 'x'.*got torch.int32"),
        (lambda: static_quant_fp8(normal(2, 8), normal(2)), r"static_quant_fp8: argument 'scale'.*got shape \(2,\)"),
        (
            lambda: static_quant_fp8(normal(2, 8), torch.ones(1).half()),
            r"static_quant_fp8: argument 'scale': expected torch.float32, got torch.float16",
        ),
    ],
)
def test_scale_errors_name_argument_expected_and_got(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 96}, r"groups tile the last dimension \(K % group_size == 0\), got K=256, group_size=96"),
        ({"group_size": 0}, r"a group has at least one element .*got group_size=0"),
        ({"fp8": "e5m2"}, r"'fp8': expected the kind is one of e4m3fn, e4m3fnuz .*got fp8='e5m2'"),
        ({"scale_layout": "col"}, r"'scale_layout': expected the layout is one of row_f32.*got scale_layout='col'"),
        ({"scale_layout": "mn_f32_tma", "x": normal(256)}, r"column-major scales need rows .*\(256,\)"),
        ({"eps": 0.0}, r"a group of zeros gets a scale .*got eps=0.0"),
        ({"x": torch.zeros(2, 256, dtype=torch.int8)}, r"'x': expected .*got torch.int8"),
    ],
)
def test_errors_name_argument_expected_and_got(change: dict[str, object], message: str) -> None:
    call = {"x": normal(2, 256), "group_size": 128, **change}
    with pytest.raises(ArgumentError, match=f"per_token_group_quant_fp8: argument .*{message}"):
        per_token_group_quant_fp8(**call)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
def test_traces(name: str) -> None:
    x = normal(5, 576, dtype=torch.bfloat16)[:, :512]
    assert_traces(per_token_group_quant_fp8, x, 128, "e4m3fnuz", name)
    assert_traces(per_token_group_quant_fp8, x, 128, "e4m3fn", name, ue8m0=True)
