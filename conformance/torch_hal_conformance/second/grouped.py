"""Second oracles of matrix products: dense, of the router, per head, of FP8 blocks, and grouped by expert.

Rows that a contract lets hold anything are zeros, in the oracles' results and in canonical ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .convert import Array, Canonical, Codes, Oracle, unpack_scales

BLOCK = 128


def row_times(row: Array, weight: Array) -> Array:
    """Σ_k row[k] · weight[n, k] for each n."""
    out = np.zeros(len(weight))
    for n in range(len(weight)):
        out[n] = np.sum(row * weight[n])
    return out


def row_times_blocks(row: Array, row_scale: Array, weight: Array, weight_scale: Array) -> Array:
    """Σ_b row_scale[b] · weight_scale[n // 128, b] · Σ_{k in block b} row[k] · weight[n, k] for each n, of numbers."""
    out = np.zeros(len(weight))
    for n in range(len(weight)):
        for block in range(len(row_scale)):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            product = np.sum(row[columns] * weight[n, columns])
            out[n] += row_scale[block] * weight_scale[n // BLOCK, block] * product
    return out


def linear(x: Array, weight: Array, layout: str = "plain") -> list[Array]:
    """x · weightᵀ."""
    out = np.zeros((*x.shape[:-1], len(weight)))
    for position in np.ndindex(x.shape[:-1]):
        out[position] = row_times(x[position], weight)
    return [out]


def router_gemm(x: Array, weight: Array) -> list[Array]:
    """x · weightᵀ, never rounded to the type of x."""
    return linear(x, weight)


def absorbed_bmm(x: Array, weight: Array) -> list[Array]:
    """out[t, h] = x[t, h] · weight[h]: a matrix [K, N] for each head."""
    tokens, heads, _ = x.shape
    out = np.zeros((tokens, heads, weight.shape[2]))
    for token in range(tokens):
        for head in range(heads):
            out[token, head] = row_times(x[token, head], weight[head].T)
    return [out]


def fp8_block_linear(
    x: Codes,
    x_scale: Array,
    weight: Codes,
    weight_scale: Array,
    out_dtype: str,
    x_scale_layout: str = "row_f32",
    layout: str = "plain",
) -> list[Array]:
    """x · weightᵀ of codes with a scale for every 1×128 of x and 128×128 of weight."""
    codes, weights = x.decode(), weight.decode()
    scales = unpack_scales(x_scale, x_scale_layout, -(-codes.shape[1] // BLOCK))
    out = np.zeros((len(codes), len(weights)))
    for m in range(len(codes)):
        out[m] = row_times_blocks(codes[m], scales[m], weights, weight_scale)
    return [out]


def _open_rows(m_indices: Array, experts: int, alignment: int) -> Array:
    """Rows that may hold anything: padding, and runs with an id ≥ E or with two experts, the caller's error."""
    opened = m_indices < 0
    for start in range(0, len(m_indices), alignment):
        run = m_indices[start : start + alignment]
        named = set(run[run >= 0].tolist())
        if len(named) > 1 or any(expert >= experts for expert in named):
            opened[start : start + alignment] = True
    return opened


def grouped_linear_contiguous(
    x: Array, weight: Array, m_indices: Array, alignment: int, layout: str = "plain"
) -> list[Array]:
    """x[m] · weight[m_indices[m]]ᵀ."""
    out = np.zeros((len(x), weight.shape[1]))
    opened = _open_rows(m_indices, len(weight), alignment)
    for m in range(len(x)):
        if not opened[m]:
            out[m] = row_times(x[m], weight[m_indices[m]])
    return [out]


def grouped_linear_masked(
    x: Array, weight: Array, masked_m: Array, expected_m: int, layout: str = "plain"
) -> list[Array]:
    """x[e, :masked_m[e]] · weight[e]ᵀ for each expert."""
    out = np.zeros((*x.shape[:2], weight.shape[1]))
    for expert in range(len(x)):
        for m in range(min(int(masked_m[expert]), x.shape[1])):
            out[expert, m] = row_times(x[expert, m], weight[expert])
    return [out]


def fp8_grouped_linear_contiguous(
    x: Codes,
    x_scale: Array,
    weight: Codes,
    weight_scale: Array,
    m_indices: Array,
    alignment: int,
    out_dtype: str,
    x_scale_layout: str = "row_f32",
    layout: str = "plain",
) -> list[Array]:
    """`grouped_linear_contiguous` of codes with scales."""
    codes, weights = x.decode(), weight.decode()
    scales = unpack_scales(x_scale, x_scale_layout, -(-codes.shape[1] // BLOCK))
    out = np.zeros((len(codes), weights.shape[1]))
    opened = _open_rows(m_indices, len(weights), alignment)
    for m in range(len(codes)):
        if not opened[m]:
            expert = m_indices[m]
            out[m] = row_times_blocks(codes[m], scales[m], weights[expert], weight_scale[expert])
    return [out]


def fp8_grouped_linear_masked(
    x: Codes,
    x_scale: Array,
    weight: Codes,
    weight_scale: Array,
    masked_m: Array,
    expected_m: int,
    out_dtype: str,
    x_scale_layout: str = "row_f32",
    layout: str = "plain",
) -> list[Array]:
    """`grouped_linear_masked` of codes with scales."""
    codes, weights = x.decode(), weight.decode()
    scales = unpack_scales(x_scale, x_scale_layout, -(-codes.shape[2] // BLOCK))
    out = np.zeros((*codes.shape[:2], weights.shape[1]))
    for e in range(len(codes)):
        for m in range(min(int(masked_m[e]), codes.shape[1])):
            out[e, m] = row_times_blocks(codes[e, m], scales[e, m], weights[e], weight_scale[e])
    return [out]


def canonical_contiguous(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Rows of padding, and of runs that are the caller's error, zero."""
    weight = arguments["weight"]
    experts = len(weight.bits if isinstance(weight, Codes) else weight)
    opened = _open_rows(arguments["m_indices"], experts, arguments["alignment"])
    return [np.where(opened[:, None], 0.0, results[0])]


def canonical_masked(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Rows from masked_m on zero."""
    rows = np.arange(results[0].shape[1])
    opened = rows[None, :] >= arguments["masked_m"][:, None]
    return [np.where(opened[:, :, None], 0.0, results[0])]


ORACLES: dict[str, Oracle] = {
    "linear": linear,
    "router_gemm": router_gemm,
    "absorbed_bmm": absorbed_bmm,
    "fp8_block_linear": fp8_block_linear,
    "grouped_linear_contiguous": grouped_linear_contiguous,
    "grouped_linear_masked": grouped_linear_masked,
    "fp8_grouped_linear_contiguous": fp8_grouped_linear_contiguous,
    "fp8_grouped_linear_masked": fp8_grouped_linear_masked,
}
CANONICAL: dict[str, Canonical] = {
    "grouped_linear_contiguous": canonical_contiguous,
    "grouped_linear_masked": canonical_masked,
    "fp8_grouped_linear_contiguous": canonical_contiguous,
    "fp8_grouped_linear_masked": canonical_masked,
}
