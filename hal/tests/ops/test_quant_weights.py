from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits
from fp8_codec import decode, encode
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, expand_block_scales
from torch_hal.ops.linear import fp8_block_linear
from torch_hal.ops.quant_weights import block_dequant_fp8, block_quant_fp8, block_requant_ue8m0_fp8, convert_kind_fp8

kinds = pytest.mark.parametrize("kind", FP8_KINDS)
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values_of(codes: Tensor, kind: str) -> Tensor:
    """float64 values by the tests' own codec."""
    table = torch.tensor([decode(code, kind) for code in range(256)], dtype=torch.float64)
    return table[codes.contiguous().view(torch.uint8).long()]


def random_codes(*shape: int, kind: str = "e4m3fn", seed: int = 0) -> Tensor:
    """Every finite code that quantisation makes."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
    sign = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) * 0x80
    sign[magnitude == 0] = 0
    return (magnitude | sign).view(FP8_KINDS[kind].dtype)


def distinct(*shape: int) -> Tensor:
    return (1 + torch.arange(math.prod(shape), dtype=torch.float32) / 64).reshape(shape)


def tiles(rows: int, columns: int) -> list[tuple[int, int, slice, slice]]:
    """(block row, block column, rows, columns) of each block."""
    along = [[slice(i, min(i + 128, n)) for i in range(0, n, 128)] for n in (rows, columns)]
    return [(i, j, r, c) for (i, r), (j, c) in itertools.product(enumerate(along[0]), enumerate(along[1]))]


def quantise(weight: Tensor, kind: str, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """The definition, block by block and number by number in float32: code bytes and scales."""
    rows, columns = weight.shape
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    for i, j, r, c in tiles(rows, columns):
        block = weight[r, c].float().numpy()
        scale = np.float32(max(np.abs(block).max(), np.float32(1e-10))) / np.float32(FP8_KINDS[kind].quant_max)
        if ue8m0:
            mantissa, exponent = math.frexp(scale)
            scale = np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
        scales[i, j] = float(scale)
        flat = [encode(float(v / scale), kind) for v in block.flatten()]
        codes[r, c] = torch.tensor(flat, dtype=torch.uint8).reshape(block.shape)
    return codes, scales


@kinds
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise_with_partial_blocks(kind: str, ue8m0: bool, dtype: torch.dtype) -> None:
    weight = (normal(192, 300) * torch.logspace(-3, 3, 300)).to(dtype)[:, :140]
    weight[:128, 128:] = 0
    q, scale = block_quant_fp8(weight, kind, ue8m0=ue8m0)
    codes, scales = quantise(weight, kind, ue8m0)
    assert q.dtype == FP8_KINDS[kind].dtype and q.is_contiguous() and scale.dtype == torch.float32
    assert torch.equal(q.view(torch.uint8), codes) and torch.equal(scale, scales)
    assert not q.view(torch.uint8)[:128, 128:].any() and scale[0, 1].isfinite() and scale[0, 1] > 0


@pytest.mark.parametrize(("rows", "columns"), [(576, 128), (128, 704), (10944, 8), (8, 10944), (1, 1), (127, 129)])
def test_ragged_last_blocks_have_scales_of_their_own(rows: int, columns: int) -> None:
    """kv_a's 576 rows, 1408 halved, V2-Lite's 10944: each block the only one of its magnitude."""
    magnitude = distinct(-(-rows // 128), -(-columns // 128))
    weight = magnitude.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    q, scale = block_quant_fp8(weight)
    torch.testing.assert_close(scale, magnitude / 448, rtol=1e-6, atol=0)
    assert (q.view(torch.uint8) == 0x7E).all()
    torch.testing.assert_close(block_dequant_fp8(q, scale, torch.float32), weight, rtol=1e-6, atol=0)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise_multiplies_each_block_by_its_scale(kind: str, dtype: torch.dtype) -> None:
    q, scale = random_codes(200, 320, kind=kind)[:, :300], distinct(2, 3).flip(1)
    exact = values_of(q, kind)
    for i, j, r, c in tiles(200, 300):
        exact[r, c] *= scale[i, j].item()
    y = block_dequant_fp8(q, scale, dtype)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, exact, exact.abs())


def test_nan_codes_and_nan_scales_stay_where_they_are() -> None:
    q, scale = random_codes(200, 200), distinct(2, 2)
    q.view(torch.uint8)[3, 5], q.view(torch.uint8)[7, 150] = 0x7F, 0xFF
    scale[1, 0] = math.nan
    nan = torch.zeros(200, 200, dtype=torch.bool)
    nan[3, 5] = nan[7, 150] = nan[128:, :128] = True
    assert torch.equal(block_dequant_fp8(q, scale, torch.bfloat16).isnan(), nan)
    assert torch.equal(block_requant_ue8m0_fp8(q, scale)[0].float().isnan(), nan)


def test_inf_and_nan_harm_their_own_block_alone() -> None:
    weight = normal(256, 256)
    clean = block_quant_fp8(weight)
    weight[3, 5], weight[200, 200] = math.nan, math.inf
    q, scale = block_quant_fp8(weight)
    for i, j, r, c in tiles(256, 256):
        if i != j:
            assert same_bits(q[r, c], clean[0][r, c]) and scale[i, j] == clean[1][i, j]


def test_experts_are_matrices_of_their_own() -> None:
    weight = normal(3, 192, 160) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    q, scale = block_quant_fp8(weight)
    assert q.shape == (3, 192, 160) and scale.shape == (3, 2, 2)
    whole = block_dequant_fp8(q, scale, torch.float32), *block_requant_ue8m0_fp8(q, scale)
    for e in range(3):
        q_e, scale_e = block_quant_fp8(weight[e])
        assert same_bits(q[e], q_e) and same_bits(scale[e], scale_e)
        alone = block_dequant_fp8(q_e, scale_e, torch.float32), *block_requant_ue8m0_fp8(q_e, scale_e)
        assert all(same_bits(a[e], b) for a, b in zip(whole, alone, strict=True))


# Scales that are powers of two.


@kinds
def test_requantised_codes_are_the_nearest_to_the_same_value(kind: str) -> None:
    q, scale = random_codes(200, 300, kind=kind), distinct(2, 3) / 1000
    codes, scales = block_requant_ue8m0_fp8(q, scale)
    assert codes.dtype == q.dtype and codes.is_contiguous() and scales.dtype == torch.float32
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all() and (scales >= scale).all() and (scales < 2 * scale).all()
    for i, j, r, c in tiles(200, 300):
        ratio = (scale[i, j] / scales[i, j]).item()
        shrunk = (np.float32(v) * np.float32(ratio) for v in values_of(q[r, c], kind).flatten().tolist())
        assert codes.view(torch.uint8)[r, c].flatten().tolist() == [encode(float(v), kind) for v in shrunk]


@kinds
def test_requantising_powers_of_two_changes_nothing(kind: str) -> None:
    """As V3.1's checkpoints are, and what was requantised once: bit for bit, −0 included."""
    q, scale = random_codes(200, 300, kind=kind), 2.0 ** torch.arange(-3.0, 3.0).reshape(2, 3)
    q.view(torch.uint8)[0, 0] = 0x80 if kind == "e4m3fn" else 0
    once = block_requant_ue8m0_fp8(q, scale)
    assert same_bits(once[0], q) and same_bits(once[1], scale)
    rounded = block_requant_ue8m0_fp8(q, distinct(2, 3))
    assert all(same_bits(a, b) for a, b in zip(block_requant_ue8m0_fp8(*rounded), rounded, strict=True))


def test_requantised_scales_survive_packing_where_exact_ones_would_be_cut_off() -> None:
    q, scale = random_codes(200, 640), distinct(2, 5) / 1000
    layout = SCALE_LAYOUTS["mn_ue8m0"]
    _, scales = block_requant_ue8m0_fp8(q, scale)
    packed = layout.pack(expand_block_scales(scales, 200))
    assert packed.shape == (200, 2) and torch.equal(layout.unpack(packed, 5), expand_block_scales(scales, 200))
    assert layout.unpack(layout.pack(expand_block_scales(scale, 200)), 5).isnan().any()


def test_requantising_a_zero_scale_gives_zeros() -> None:
    q, scale = block_requant_ue8m0_fp8(random_codes(4, 4), torch.zeros(1, 1))
    assert not q.float().any() and scale.item() == 2.0**-126


# e4m3fn and e4m3fnuz.


def test_every_fn_byte_keeps_its_value_as_fnuz() -> None:
    """Behaviour 29. NaN stays NaN (reinterpreted, 0x7F would be 240), and −0 becomes 0 (0x80 would be NaN)."""
    scale = distinct(2, 2)
    q, doubled = convert_kind_fp8(EVERY_BYTE.view(torch.float8_e4m3fn), scale, "e4m3fnuz")
    assert q.dtype == torch.float8_e4m3fnuz and torch.equal(doubled, 2 * scale)
    before, after = values_of(EVERY_BYTE, "e4m3fn"), 2 * values_of(q, "e4m3fnuz")
    assert torch.equal(before.isnan(), after.isnan()) and torch.equal(before.nan_to_num(), after.nan_to_num())
    changed = {0x80: 0x00, 0x7F: 0x80, 0xFF: 0x80}
    assert q.view(torch.uint8).tolist() == [changed.get(code, code) for code in range(256)]


def test_every_fnuz_byte_keeps_its_value_as_fn() -> None:
    scale = distinct(3)
    q, halved = convert_kind_fp8(EVERY_BYTE.view(torch.float8_e4m3fnuz), scale, "e4m3fn")
    assert q.dtype == torch.float8_e4m3fn and torch.equal(halved, scale / 2)
    before, after = 2 * values_of(EVERY_BYTE, "e4m3fnuz"), values_of(q, "e4m3fn")
    assert before[0x7F] == 480 and before[0xFF] == -480  # beyond fn's 448: the nearest
    assert torch.equal(before.isnan(), after.isnan())
    assert torch.equal(before.nan_to_num().clamp(-448, 448), after.nan_to_num())
    changed = {0x80: 0x7F, 0x7F: 0x7E, 0xFF: 0xFE}
    assert q.view(torch.uint8).tolist() == [changed.get(code, code) for code in range(256)]


@kinds
def test_there_and_back_is_the_same_weight(kind: str) -> None:
    (other,) = set(FP8_KINDS) - {kind}
    q, scale = random_codes(130, 260, kind=kind)[:, ::2], distinct(2, 2)
    there = convert_kind_fp8(q, scale, other)
    back = convert_kind_fp8(*there, kind)
    assert there[0].is_contiguous() and same_bits(back[0], q) and same_bits(back[1], scale)
    same = convert_kind_fp8(q, scale, kind)
    assert same_bits(same[0], q) and same_bits(same[1], scale) and same[0].data_ptr() != q.data_ptr()
    both = [block_dequant_fp8(*pair, torch.float32) for pair in ((q, scale), there)]
    assert torch.equal(*both)


def test_products_on_fnuz_hardware_are_those_of_the_checkpoint() -> None:
    """Behaviour 29 through a GEMM, with the byte that is −0 in one kind and NaN in the other."""
    x, weight = random_codes(3, 256), random_codes(130, 256, seed=1)
    weight.view(torch.uint8)[:, 0] = 0x80
    x_scale, weight_scale = distinct(3, 2), distinct(2, 2)
    expected = fp8_block_linear(x, x_scale, weight, weight_scale, torch.float32)
    (x, x_scale), (weight, weight_scale) = (
        convert_kind_fp8(codes, scale, "e4m3fnuz") for codes, scale in ((x, x_scale), (weight, weight_scale))
    )
    assert torch.equal(fp8_block_linear(x, x_scale, weight, weight_scale, torch.float32), expected)


# All of them.


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    pair = {"weight": random_codes(200, 300), "weight_scale": distinct(2, 3)}
    return {
        "quant": (block_quant_fp8, {"weight": normal(200, 300)}),
        "dequant": (block_dequant_fp8, {**pair, "out_dtype": torch.bfloat16}),
        "requant": (block_requant_ue8m0_fp8, pair),
        "convert": (convert_kind_fp8, {"codes": pair["weight"], "scale": pair["weight_scale"], "fp8": "e4m3fnuz"}),
    }


@pytest.mark.parametrize("case", calls())
def test_traces_any_strides_and_inputs_survive(case: str) -> None:
    op, call = calls()[case]
    copies = {k: v.clone() for k, v in call.items() if isinstance(v, Tensor)}
    columnwise = {k: v.T.contiguous().T if isinstance(v, Tensor) else v for k, v in call.items()}
    results, turned = tree_leaves(op(**call)), tree_leaves(op(**columnwise))
    assert all(same_bits(a, b) and b.is_contiguous() for a, b in zip(results, turned, strict=True))
    assert all(same_bits(call[k], v) for k, v in copies.items())
    assert_traces(op, **call)


@pytest.mark.parametrize("shape", [(0, 256), (128, 0), (0, 128, 128), (2, 0, 0)])
def test_empties(shape: tuple[int, ...]) -> None:
    q, scale = block_quant_fp8(normal(*shape))
    assert q.shape == shape and scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert block_dequant_fp8(q, scale, torch.bfloat16).shape == shape
    assert block_requant_ue8m0_fp8(q, scale)[0].shape == convert_kind_fp8(q, scale, "e4m3fnuz")[0].shape == shape


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("quant", {"weight": normal(8)}, r"'weight': expected rank 2 \[..., N, K\], got shape \(8,\)"),
        ("quant", {"weight": random_codes(8, 8)}, r"'weight': expected .*float64, got torch.float8_e4m3fn"),
        ("quant", {"fp8": "e4m3"}, r"'fp8': expected the kind is one of e4m3fn, e4m3fnuz .*got fp8='e4m3'"),
        ("quant", {"eps": 0.0}, r"'eps': expected a group of zeros .*got eps=0.0"),
        ("dequant", {"weight_scale": distinct(3, 2)}, r"'weight_scale': expected .*ceil_div\(N,BLOCK\) = 2.*\(3, 2\)"),
        ("dequant", {"weight_scale": distinct(2, 2)}, r"'weight_scale': expected .*ceil_div\(K,BLOCK\) = 3.*\(2, 2\)"),
        (
            "dequant",
            {"weight_scale": distinct(2, 3).bfloat16()},
            r"'weight_scale': expected torch.float32, got .*bfloat16",
        ),
        ("dequant", {"weight": normal(200, 300)}, r"'weight': expected torch.float8_e4m3fn or .*got torch.float32"),
        ("dequant", {"out_dtype": torch.float8_e4m3fn}, r"'out_dtype': expected the result is bfloat16.*got out_dtype"),
        ("requant", {"weight_scale": distinct(4, 2, 3)}, r"weight and weight_scale have the same leading dims"),
        ("convert", {"scale": torch.ones(2, dtype=torch.int32)}, r"'scale': expected torch.float32, got torch.int32"),
        ("convert", {"fp8": "fnuz"}, r"'fp8': expected the kind is one of .*got fp8='fnuz'"),
        ("convert", {"codes": normal(2, 2)}, r"'codes': expected torch.float8_e4m3fn or .*got torch.float32"),
    ],
)
def test_errors_name_argument_expected_and_got(case: str, change: dict[str, Any], message: str) -> None:
    op, call = calls()[case]
    with pytest.raises(ArgumentError, match=f"{op.name}: argument .*{message}"):
        op(**{**call, **change})
