"""Second oracles of 8-bit quantisation: one group after the other, in float64.

Scales are the logical ones, whatever layout they are stored in: `SCALES` says which result they are. Groups and rows
that a contract lets hold anything have scale 0 and codes 0, in the oracles' results and in canonical ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .activation_norm import gated, normed, silu
from .convert import FP8_FORMATS, Array, Canonical, Codes, Oracle, encode, encode_number, unpack_scales

BLOCK = 128
NAN_BYTES: Mapping[str, tuple[int, ...]] = {"e4m3fn": (0x7F, 0xFF), "e4m3fnuz": (0x80,)}

# Op -> which of its results are scales that argument ``scale_layout`` packs, and that the oracle gives unpacked.
SCALES: dict[str, int] = {
    "per_token_group_quant_fp8": 1,
    "silu_and_mul_quant_fp8": 1,
    "masked_silu_and_mul_quant_fp8": 1,
    "rms_norm_quant_fp8": 1,
    "fused_add_rms_norm_quant_fp8": 1,
}


def power_of_two_above(scale: float) -> float:
    """The least power of two that is not below a scale held in float32, among 2⁻¹²⁶ … 2¹²⁷."""
    held = float(np.float32(scale))
    exponent = -126
    while exponent < 127 and 2.0**exponent < held:
        exponent += 1
    return 2.0**exponent


def rounded(quotients: Array, kind: str) -> Codes:
    """The code nearest to what a quotient or product is in float32, which is what the contracts round."""
    with np.errstate(over="ignore"):  # ∞ saturates
        return encode(quotients.astype(np.float32), kind)


def quantised(group: Array, kind: str, eps: float, ue8m0: bool) -> tuple[Array, float]:
    """The bytes and the scale of values that share one, in their type: the largest maps to the format's maximum."""
    if not np.isfinite(group).all():
        return np.zeros(group.shape, np.uint8), 0.0
    amax = group.dtype.type(max([eps, *(abs(float(value)) for value in group.reshape(-1))]))
    scale = float(amax / group.dtype.type(FP8_FORMATS[kind].quant_max))
    if ue8m0:
        scale = power_of_two_above(scale)
    return rounded(group / scale, kind).bits, scale


def in_groups(x: Array, group_size: int, kind: str, eps: float, ue8m0: bool) -> tuple[Codes, Array]:
    """Codes of x [..., K], and scales [..., K / group_size]."""
    bits = np.zeros(x.shape, np.uint8)
    scales = np.zeros((*x.shape[:-1], x.shape[-1] // group_size))
    for position in np.ndindex(scales.shape):
        *row, group = position
        columns = (*row, slice(group * group_size, (group + 1) * group_size))
        bits[columns], scales[position] = quantised(x[columns], kind, eps, ue8m0)
    return Codes(bits, kind), scales


def per_token_group_quant_fp8(
    x: Array,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> list[Any]:
    return [*in_groups(x, group_size, fp8, eps, ue8m0 or scale_layout == "mn_ue8m0")]


def per_token_quant_fp8(x: Array, fp8: str = "e4m3fn", eps: float = 1e-10) -> list[Any]:
    """One scale a row [..., 1]."""
    return [*in_groups(x, x.shape[-1], fp8, eps, ue8m0=False)]


def per_tensor_quant_fp8(x: Array, fp8: str = "e4m3fn", eps: float = 1e-10) -> list[Any]:
    bits, scale = quantised(x, fp8, eps, ue8m0=False)
    return [Codes(bits, fp8), np.array([scale])]


def static_quant_fp8(x: Array, scale: Array, fp8: str = "e4m3fn") -> list[Any]:
    return [rounded(x / scale[0], fp8)]


def silu_and_mul_quant_fp8(x: Array, group_size: int, **options: Any) -> list[Any]:
    return per_token_group_quant_fp8(gated(silu, x), group_size, **options)


def masked_silu_and_mul_quant_fp8(x: Array, masked_m: Array, group_size: int, **options: Any) -> list[Any]:
    """Expert e has masked_m[e] rows; those after hold anything."""
    read = x.copy()
    for expert, rows in enumerate(masked_m):
        read[expert, max(int(rows), 0) :] = math.nan
    return silu_and_mul_quant_fp8(read, group_size, **options)


def rms_norm_quant_fp8(
    x: Array, weight: Array, eps: float, group_size: int, quant_eps: float = 1e-10, **options: Any
) -> list[Any]:
    """An inf or NaN leaves its whole row open."""
    y = normed(x, weight, eps)
    for row in np.ndindex(x.shape[:-1]):
        if not np.isfinite(x[row]).all():
            y[row] = math.nan
    return per_token_group_quant_fp8(y, group_size, eps=quant_eps, **options)


def fused_add_rms_norm_quant_fp8(
    x: Array, residual: Array, weight: Array, eps: float, group_size: int, **options: Any
) -> list[Any]:
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        total = x + residual
    return [*rms_norm_quant_fp8(total, weight, eps, group_size, **options), total]


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Each 128×128 block of matrices [..., N, K], smaller at the edges: where its scale is, and where its elements."""
    *leading, n, k = shape
    for position in np.ndindex(*leading, -(-n // BLOCK), -(-k // BLOCK)):
        *matrix, i, j = position
        yield (
            position,
            (*matrix, slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)),
        )


def block_quant_fp8(weight: Array, fp8: str = "e4m3fn", eps: float = 1e-10, ue8m0: bool = False) -> list[Any]:
    *leading, n, k = weight.shape
    bits = np.zeros(weight.shape, np.uint8)
    scales = np.zeros((*leading, -(-n // BLOCK), -(-k // BLOCK)))
    for position, elements in blocks(weight.shape):
        bits[elements], scales[position] = quantised(weight[elements], fp8, eps, ue8m0)
    return [Codes(bits, fp8), scales]


def block_dequant_fp8(weight: Codes, weight_scale: Array, out_dtype: str) -> list[Any]:
    values = weight.decode()
    for position, elements in blocks(values.shape):
        values[elements] *= weight_scale[position]
    return [values]


def block_requant_ue8m0_fp8(weight: Codes, weight_scale: Array) -> list[Any]:
    """The same values, code · scale, as codes of scales that are powers of two."""
    values = weight.decode()
    scales = np.zeros(weight_scale.shape)
    for position, elements in blocks(values.shape):
        scale = float(weight_scale[position])
        scales[position] = math.nan if math.isnan(scale) else power_of_two_above(scale)
        values[elements] *= scale / scales[position]
    return [rounded(values, weight.kind), scales]


def convert_kind_fp8(codes: Codes, scale: Array, fp8: str) -> list[Any]:
    """A byte means twice as much in e4m3fn as in e4m3fnuz: the value stays when the scale changes by that."""
    if fp8 == codes.kind:
        return [Codes(codes.bits.copy(), fp8), scale.copy()]
    factor = 2.0 if fp8 == "e4m3fnuz" else 0.5
    return [encode(codes.decode() / factor, fp8), scale * factor]


def _one_nan(codes: Codes) -> Codes:
    """Codes with one byte for NaN."""
    bits = codes.bits.copy()
    bits[np.isin(bits, NAN_BYTES[codes.kind])] = encode_number(math.nan, codes.kind)
    return Codes(bits, codes.kind)


def _cleared(results: list[Any], expected: Array) -> list[Any]:
    """The results with codes 0 and scale 0 in each group whose expected scale is 0, which says that it is open."""
    codes, scales, *rest = results
    bits, scales, is_open = codes.bits.copy(), scales.copy(), expected == 0
    if scales.shape != expected.shape or is_open.shape[:-1] != bits.shape[:-1]:
        return results  # the comparison will say so
    scales[is_open] = 0
    bits[np.repeat(is_open, bits.shape[-1] // max(is_open.shape[-1], 1), axis=-1)] = 0
    return [Codes(bits, codes.kind), scales, *rest]


def _canonical_groups(op: str) -> Canonical:
    def canonical(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
        expected = ORACLES[op](**arguments)[1]
        if op in SCALES:
            layout = arguments.get("scale_layout", "row_f32")
            results = [results[0], unpack_scales(results[1], layout, expected.shape[-1]), *results[2:]]
        return _cleared(results, expected)

    return canonical


def _canonical_tensor(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    codes, scale = results
    is_open = not np.isfinite(arguments["x"]).all()
    return [Codes(np.zeros_like(codes.bits), codes.kind), np.zeros_like(scale)] if is_open else results


def _canonical_blocks(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    codes, scales = results
    bits, scales = codes.bits.copy(), scales.copy()
    for position, elements in blocks(arguments["weight"].shape):
        if not np.isfinite(arguments["weight"][elements]).all():
            bits[elements], scales[position] = 0, 0
    return [Codes(bits, codes.kind), scales]


def _canonical_requant(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """A block whose scale was NaN may have any codes and scale that mean NaN."""
    codes, scales = _one_nan(results[0]), results[1].copy()
    for position, elements in blocks(codes.bits.shape):
        meaning = codes.decode()[elements] * scales[position]
        if math.isnan(arguments["weight_scale"][position]) and np.isnan(meaning).all():
            codes.bits[elements], scales[position] = encode_number(math.nan, codes.kind), math.nan
    return [codes, scales]


def _canonical_codes(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    return [_one_nan(results[0]), *results[1:]]


ORACLES: dict[str, Oracle] = {
    "per_token_group_quant_fp8": per_token_group_quant_fp8,
    "per_token_quant_fp8": per_token_quant_fp8,
    "per_tensor_quant_fp8": per_tensor_quant_fp8,
    "static_quant_fp8": static_quant_fp8,
    "silu_and_mul_quant_fp8": silu_and_mul_quant_fp8,
    "masked_silu_and_mul_quant_fp8": masked_silu_and_mul_quant_fp8,
    "rms_norm_quant_fp8": rms_norm_quant_fp8,
    "fused_add_rms_norm_quant_fp8": fused_add_rms_norm_quant_fp8,
    "block_quant_fp8": block_quant_fp8,
    "block_dequant_fp8": block_dequant_fp8,
    "block_requant_ue8m0_fp8": block_requant_ue8m0_fp8,
    "convert_kind_fp8": convert_kind_fp8,
}
CANONICAL: dict[str, Canonical] = {
    **{op: _canonical_groups(op) for op in (*SCALES, "per_token_quant_fp8")},
    "per_tensor_quant_fp8": _canonical_tensor,
    "static_quant_fp8": _canonical_codes,
    "block_quant_fp8": _canonical_blocks,
    "block_requant_ue8m0_fp8": _canonical_requant,
}
