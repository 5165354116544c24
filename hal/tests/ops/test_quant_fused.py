from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bounds import DTYPES, UNIT_ROUNDOFF, assert_traces, same_bits
from fp8_codec import decode, encode
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS
from torch_hal.ops.norm import fused_add_rms_norm
from torch_hal.ops.quant_fused import (
    fused_add_rms_norm_quant_fp8,
    masked_silu_and_mul_quant_fp8,
    rms_norm_quant_fp8,
    silu_and_mul_quant_fp8,
)

layouts = pytest.mark.parametrize("name", SCALE_LAYOUTS)
kinds = pytest.mark.parametrize("kind", FP8_KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swiglu(row: list[float]) -> list[float]:
    gates, ups = row[: len(row) // 2], row[len(row) // 2 :]
    return [gate / (1 + math.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True)]


def rms_normed(row: list[float], weight: list[float], eps: float) -> list[float]:
    scale = 1 / math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
    return [v * scale * w for v, w in zip(row, weight, strict=True)]


def assert_quantised(
    q: Tensor, scale: Tensor, exact: list[list[float]], group: int, kind: str, name: str, ue8m0: bool = False
) -> None:
    """Codes [M, N] and stored scales are those of ``exact``, up to what float32 rounding may change.

    That is the scale's last bits, and a code only for its neighbour when the value lies next to the tie between them.
    """
    slack = 32 * UNIT_ROUNDOFF[torch.float32]
    rows, width = len(exact), len(exact[0])
    layout, largest = SCALE_LAYOUTS[name], FP8_KINDS[kind].quant_max
    assert q.dtype == FP8_KINDS[kind].dtype and q.shape == (rows, width) and q.is_contiguous()
    assert scale.dtype == layout.dtype and layout.matches(scale)
    scales = layout.unpack(scale, width // group).tolist()
    bytes_ = q.view(torch.uint8).tolist()
    for row, codes, row_scales in zip(exact, bytes_, scales, strict=True):
        for g, s in enumerate(row_scales):
            values = row[g * group : (g + 1) * group]
            wanted = max(max(map(abs, values)), 1e-10) / largest
            if ue8m0 or layout.power_of_two:
                wanted = 2.0 ** math.ceil(math.log2(wanted))
            assert s == pytest.approx(wanted, rel=slack)
            for value, code in zip(values, codes[g * group : (g + 1) * group], strict=True):
                assert code in {encode(value / s * (1 + e), kind) for e in (-slack, 0, slack)}


# SwiGLU.


@dtypes
@kinds
@layouts
def test_silu_and_mul_quant_formula(dtype: torch.dtype, kind: str, name: str) -> None:
    x = (normal(5, 640) * torch.logspace(-2, 1, 640)).to(dtype)[:, :512]
    x[1, 256:384] = 0  # up's first groups: products of zero
    q, scale = silu_and_mul_quant_fp8(x, 32, kind, name)
    assert_quantised(q, scale, [swiglu(row) for row in x.double().tolist()], 32, kind, name)
    assert not q.float()[1, :128].any() and SCALE_LAYOUTS[name].unpack(scale, 8)[1].isfinite().all()


def test_silu_and_mul_quant_rounds_scales_up_in_any_layout() -> None:
    x = normal(3, 512)
    q, scale = silu_and_mul_quant_fp8(x, 64, ue8m0=True)
    assert_quantised(q, scale, [swiglu(row) for row in x.double().tolist()], 64, "e4m3fn", "row_f32", ue8m0=True)
    assert torch.equal(scale.log2(), scale.log2().round())


def test_fusing_skips_the_rounding_in_between() -> None:
    x = torch.tensor([[4.0, 1.0, 4.0, 1.0078125]], dtype=torch.bfloat16)
    q, scale = silu_and_mul_quant_fp8(x, 2)
    # silu(4)·4 = 15.712224, of which bfloat16 makes 15.6875: the scale tells
    assert scale.item() == pytest.approx(15.7122214 / 448, rel=1e-6) and q.float()[0, 0] == 448


def test_silu_and_mul_quant_keeps_garbage_in_its_row() -> None:
    x = normal(4, 256)
    clean = silu_and_mul_quant_fp8(x, 128)
    x[1], x[3] = math.nan, math.inf
    q, scale = silu_and_mul_quant_fp8(x, 128)
    assert all(same_bits(a[[0, 2]], b[[0, 2]]) for a, b in zip(clean, (q, scale), strict=True))


@layouts
def test_masked_silu_and_mul_quant_is_that_of_each_experts_rows(name: str) -> None:
    """Distinct scales, six groups (more than one word along K), NaN where nothing is, and two experts without rows."""
    layout, counts = SCALE_LAYOUTS[name], [3, 0, 7, 1, 0]
    x = normal(5, 7, 2 * 384) * torch.logspace(-3, 3, 5)[:, None, None]
    for e, m in enumerate(counts):
        x[e, m:] = math.nan
    q, scale = masked_silu_and_mul_quant_fp8(x, torch.tensor(counts, dtype=torch.int32), 64, scale_layout=name)
    assert q.shape == (5, 7, 384) and scale.shape == (5, 7, layout.columns(6)) and layout.matches(scale)
    scales = layout.unpack(scale, 6)
    for e, m in enumerate(counts):
        q_e, scale_e = silu_and_mul_quant_fp8(x[e, :m], 64, scale_layout=name)
        assert same_bits(q[e, :m], q_e) and torch.equal(scales[e, :m], layout.unpack(scale_e, 6))
        assert layout.matches(scale[e])  # each expert's scales are padded by themselves
        assert not q[e, m:].float().any() and scales[e, m:].isfinite().all()


def test_masked_counts_beyond_the_room_and_empties() -> None:
    x = normal(2, 3, 256)
    everything = masked_silu_and_mul_quant_fp8(x, torch.tensor([3, 3], dtype=torch.int32), 128)
    assert same_bits(masked_silu_and_mul_quant_fp8(x, torch.tensor([4, 9], dtype=torch.int32), 128)[0], everything[0])
    assert not masked_silu_and_mul_quant_fp8(x, torch.tensor([-1, 0], dtype=torch.int32), 128)[0].float().any()
    for shape in ((0, 3, 256), (2, 0, 256), (2, 3, 0)):
        q, scale = masked_silu_and_mul_quant_fp8(normal(*shape), torch.ones(shape[0], dtype=torch.int32), 128)
        assert q.shape == (*shape[:2], shape[2] // 2) and scale.shape == (*shape[:2], shape[2] // 256)


# RMSNorm.


@dtypes
@kinds
@layouts
def test_rms_norm_quant_formula_on_a_strided_slice(dtype: torch.dtype, kind: str, name: str) -> None:
    x, weight = normal(5, 576, dtype=dtype)[:, :512], normal(512, dtype=dtype, seed=1)
    x[2] = 0
    q, scale = rms_norm_quant_fp8(x, weight, 1e-6, 64, kind, name)
    exact = [rms_normed(row, weight.double().tolist(), 1e-6) for row in x.double().tolist()]
    assert_quantised(q, scale, exact, 64, kind, name)
    assert not q.float()[2].any() and SCALE_LAYOUTS[name].unpack(scale, 8).isfinite().all()


@dtypes
@layouts
def test_add_norm_quant_formula(dtype: torch.dtype, name: str) -> None:
    x, residual = normal(5, 576, dtype=dtype)[:, :512], normal(5, 512, dtype=dtype, seed=2)
    weight, before = normal(512, seed=1), (x.clone(), residual.clone())
    q, scale, s = fused_add_rms_norm_quant_fp8(x, residual, weight, 1e-6, 128, scale_layout=name, ue8m0=True)
    total = x.double() + residual.double()
    exact = [rms_normed(row, weight.tolist(), 1e-6) for row in total.tolist()]
    assert_quantised(q, scale, exact, 128, "e4m3fn", name, ue8m0=True)
    assert same_bits(s, fused_add_rms_norm(x, residual, weight, 1e-6)[1])
    assert same_bits(x, before[0]) and same_bits(residual, before[1])


def test_add_norm_quant_norms_the_unrounded_sum() -> None:
    x = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16)  # the sum 257 rounds to 256 in bfloat16
    weight = torch.ones(2, dtype=torch.bfloat16)
    _, scale, s = fused_add_rms_norm_quant_fp8(x, residual, weight, 0.0, 2)
    assert s.tolist() == [[256.0, 255.0]]
    assert scale.item() == pytest.approx(257 / math.sqrt((257**2 + 255**2) / 2) / 448, rel=1e-6)


def test_the_two_epsilons_are_two() -> None:
    x, weight = torch.full((1, 128), 1e-3), torch.ones(128)
    _, scale = rms_norm_quant_fp8(x, weight, 1e-6, 128)
    assert scale.item() == pytest.approx(math.sqrt(0.5) / 448, rel=1e-6)  # 1e-3 / sqrt(1e-6 + 1e-6)
    q, scale = rms_norm_quant_fp8(x, weight, 1e-6, 128, quant_eps=1.0)
    assert scale.item() == pytest.approx(1 / 448)
    assert q.float()[0, 0] == decode(encode(448 * 0.5**0.5, "e4m3fn"), "e4m3fn")


# Both.


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, weight = normal(6, 512, dtype=torch.bfloat16), normal(512, dtype=torch.bfloat16, seed=1)
    return {
        "silu": (silu_and_mul_quant_fp8, (x, 64)),
        "masked": (masked_silu_and_mul_quant_fp8, (x.view(2, 3, 512), torch.tensor([1, 3], dtype=torch.int32), 64)),
        "norm": (rms_norm_quant_fp8, (x, weight, 1e-6, 64)),
        "add_norm": (fused_add_rms_norm_quant_fp8, (x, x.flip(0), weight, 1e-6, 64)),
    }


@layouts
@pytest.mark.parametrize("case", calls())
def test_traces(case: str, name: str) -> None:
    op, args = calls()[case]
    assert_traces(op, *args, scale_layout=name, fp8="e4m3fnuz")


@pytest.mark.parametrize("case", ["silu", "norm", "add_norm"])
def test_any_strides_any_leading_shape_and_empties(case: str) -> None:
    op, args = calls()[case]

    def run(change: Any) -> list[Tensor]:
        return list(op(*(change(a) if isinstance(a, Tensor) and a.dim() == 2 else a for a in args)))

    expected = run(lambda x: x)
    for change in (lambda x: x.T.contiguous().T, lambda x: x.repeat(1, 2)[:, :512]):
        assert all(same_bits(a, b) for a, b in zip(run(change), expected, strict=True))
    stacked = run(lambda x: x.view(2, 3, 512))
    assert all(same_bits(a.flatten(0, 1), b) for a, b in zip(stacked, expected, strict=True))
    if case != "add_norm":  # its second argument is the first turned over, another first row
        assert all(same_bits(a, b[0]) for a, b in zip(run(lambda x: x[0]), expected, strict=True))
    for a, b in zip(run(lambda x: x[:0]), expected, strict=True):
        assert a.shape == (0, *b.shape[1:]) and a.dtype == b.dtype


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("silu", {"group_size": 96}, r"gate and up, each tiled by groups .*got W=512, group_size=96"),
        ("silu", {"group_size": 512}, r"each tiled by groups .*got W=512, group_size=512"),
        ("silu", {"group_size": 0}, r"a group has at least one element .*got group_size=0"),
        ("silu", {"x": normal(512), "scale_layout": "mn_ue8m0"}, r"column-major scales need rows .*\(512,\)"),
        ("silu", {"eps": 0.0}, r"a group of zeros gets a scale .*got eps=0.0"),
        ("masked", {"fp8": "e5m2"}, r"'fp8': expected the kind is one of .*got fp8='e5m2'"),
        ("masked", {"masked_m": torch.ones(3, dtype=torch.int32)}, r"'masked_m': expected \[E\] with E = 2.*\(3,\)"),
        ("masked", {"masked_m": torch.ones(2)}, r"'masked_m': expected torch.int32, got torch.float32"),
        ("masked", {"x": normal(6, 512)}, r"'x': expected rank 3 \[E, M, W\], got shape \(6, 512\)"),
        ("norm", {"group_size": 100}, r"groups tile the last dimension .*got D=512, group_size=100"),
        ("norm", {"scale_layout": "col"}, r"'scale_layout': expected the layout is one of row_f32.*got .*'col'"),
        ("norm", {"quant_eps": 0.0}, r"'quant_eps': expected a group of zeros .*got quant_eps=0.0"),
        ("norm", {"weight": normal(512).half()}, r"'weight': expected torch.bfloat16 or torch.float32, got .*float16"),
        ("add_norm", {"residual": normal(1, 512).bfloat16()}, r"x and residual have one shape"),
        ("add_norm", {"residual": normal(6, 512)}, r"'residual': expected torch.bfloat16, got torch.float32"),
    ],
)
def test_errors_name_argument_expected_and_got(case: str, change: dict[str, Any], message: str) -> None:
    op, args = calls()[case]
    call = {**op.bind(*args), **change}
    with pytest.raises(ArgumentError, match=f"{op.name}: argument .*{message}"):
        op(**call)
