"""Grouped matrix multiplications: rows of many experts, each times its own expert's weight, in one call.

*Contiguous*: the rows lie sorted by expert in one matrix, and ``m_indices`` says whose each is, as `ep_scatter` gives
them. *Masked*: every expert has a matrix with room for M rows, of which the device knows how many are filled.

Both read one weight layout: what ``prepare`` of one gave, the other takes, if both kernels declare that layout; a
layout's name means the same for both, so that prefill and decode share one copy of the experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..check import FLOAT, FP8
from ..contracts import Contracts
from ..formats import BLOCK as BLOCK  # in the declared shapes
from ..formats import SCALE_LAYOUTS, expand_block_scales
from ..numerics import narrow, wide
from ..op import PLAIN, op
from ._fp8 import BLOCK_ERROR, matmul_blocks
from ._moe import take

_GATHERED = 2**24  # elements of weights that a reference gathers at a time

_CONTIGUOUS = {
    "C1_empties": "M = 0 gives zero rows, with E = 0 as well.",
    "C7_sentinels": "A negative m_indices marks a padding row. An id ≥ E, or two experts in one run of ``alignment`` "
    "rows, is the caller's error, and gives unspecified rows in that run.",
    "C8_unwritten_rows": "Rows of the result whose m_indices is negative hold anything, NaN included, and nothing may "
    "read them; kernels leave them unwritten or compute them along. The reference writes zeros. Padding rows of x may "
    "hold anything too, and reach no other row.",
    "C13_ids": "m_indices is int32.",
}
_MASKED = {
    "C1_empties": "M = 0 and E = 0 (a rank without experts) give no rows; so does masked_m = 0, element by element.",
    "C7_sentinels": "None: 0 ≤ masked_m ≤ M is the caller's duty. The reference takes what is outside as 0 or M.",
    "C8_unwritten_rows": "Rows of the result from masked_m[e] on hold anything, NaN included, and nothing may read "
    "them. The reference writes zeros. Those rows of x may hold anything too, and reach no other row.",
    "C13_ids": "masked_m is int32.",
}
_FP8 = {
    "C3_strides": "x and weight have any strides; those of x_scale are exactly what x_scale_layout says.",
    "C5_fp8_kind": "x and weight are of one kind, e4m3fn or e4m3fnuz, whichever the device multiplies.",
    "C6_fp8_cast": "No cast to fp8: x and weight arrive as codes.",
    "C9_rounding": "Each block of 128 along K is summed by itself, then scaled and added in float32; rounded once, to "
    "out_dtype.",
}
_RUNS = {"alignment > 0 and M % alignment == 0": "runs of alignment rows tile x"}
_HINT = {"expected_m >= 0": "a number of rows to expect"}
_FORMATS = {
    "out_dtype in FLOAT": "the result is bfloat16, float16, float32 or float64",
    "x_scale_layout in SCALE_LAYOUTS": f"the layout is one of {', '.join(SCALE_LAYOUTS)}",
    "x_scale.dtype is SCALE_LAYOUTS[x_scale_layout].dtype": "x_scale has its layout's dtype",
    "x_scale.shape[-1] == SCALE_LAYOUTS[x_scale_layout].columns(ceil_div(K, BLOCK))": (
        "x_scale holds one scale for each row and 128 columns of x"
    ),
    "SCALE_LAYOUTS[x_scale_layout].matches(x_scale)": "x_scale has its layout's strides",
}
_FP8_DTYPES = {"x": FP8, "x_scale": (torch.float32, torch.int32), "weight": "x", "weight_scale": torch.float32}


def prepare_grouped_linear(weight: Tensor) -> list[Tensor]:
    """The plain layout, for contiguous and masked alike: weight [E, N, K] as it is."""
    return [weight]


def prepare_fp8_grouped_linear(weight: Tensor, weight_scale: Tensor) -> list[Tensor]:
    """The plain layout, for contiguous and masked alike: codes and scales as they are."""
    return [weight, weight_scale]


def _contiguous(x: Tensor, weight: Tensor, m_indices: Tensor, alignment: int) -> Tensor:
    experts, valid = _runs(m_indices, alignment)
    return _products(_blocks(x, alignment), weight, experts, valid).flatten(0, 1)


def _masked(x: Tensor, weight: Tensor, masked_m: Tensor) -> Tensor:
    return _products(x, weight, *_filled(masked_m, x.shape[1]))


def _fp8_contiguous(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, m_indices: Tensor, alignment: int, stored: str
) -> Tensor:
    scales = wide(SCALE_LAYOUTS[stored].unpack(x_scale, weight_scale.shape[2]))
    blocks = _blocks(x, alignment), _blocks(scales, alignment)
    return _fp8_products(*blocks, weight, weight_scale, *_runs(m_indices, alignment)).flatten(0, 1)


def _fp8_masked(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, masked_m: Tensor, stored: str
) -> Tensor:
    scales = wide(SCALE_LAYOUTS[stored].unpack(x_scale, weight_scale.shape[2]))
    return _fp8_products(x, scales, weight, weight_scale, *_filled(masked_m, x.shape[1]))


def _fp8_contiguous_terms(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    m_indices: Tensor,
    alignment: int,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = PLAIN,
) -> Tensor:
    x, weight, weight_scale = wide(x).abs(), wide(weight).abs(), weight_scale.abs()
    return _fp8_contiguous(x, x_scale, weight, weight_scale, m_indices, alignment, x_scale_layout)


def _fp8_masked_terms(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = PLAIN,
) -> Tensor:
    x, weight, weight_scale = wide(x).abs(), wide(weight).abs(), weight_scale.abs()
    return _fp8_masked(x, x_scale, weight, weight_scale, masked_m, x_scale_layout)


def _blocks(x: Tensor, alignment: int) -> Tensor:
    return x.reshape(x.shape[0] // alignment, alignment, *x.shape[1:])


def _runs(m_indices: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """Of each run of ``alignment`` rows its expert [runs], negative where all is padding, and its valid rows."""
    runs = _blocks(m_indices, alignment)
    return runs.amax(1).to(torch.int64), runs >= 0


def _filled(masked_m: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The experts [E], and which of their rows [E, rows] are in use."""
    experts = torch.arange(masked_m.shape[0], device=masked_m.device)
    return experts, torch.arange(rows, device=masked_m.device) < masked_m[:, None]


def _products(x: Tensor, weight: Tensor, experts: Tensor, valid: Tensor) -> Tensor:
    """x [B, R, K] times the weights of experts [B]."""

    def multiply(blocks: slice, chosen: Tensor) -> Tensor:
        return torch.bmm(wide(x[blocks]), wide(take(weight, chosen)).mT)

    return _by_block(multiply, wide(x[:0, :0, :0]), weight, experts, valid)


def _fp8_products(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scale: Tensor, experts: Tensor, valid: Tensor
) -> Tensor:
    def multiply(blocks: slice, chosen: Tensor) -> Tensor:
        scales = expand_block_scales(wide(weight_scale[chosen]), weight.shape[1])
        return matmul_blocks(x[blocks], x_scales[blocks], take(weight, chosen), scales)

    return _by_block(multiply, x_scales, weight, experts, valid)


def _by_block(
    multiply: Callable[[slice, Tensor], Tensor], like: Tensor, weight: Tensor, experts: Tensor, valid: Tensor
) -> Tensor:
    """The products [B, R, N], a few blocks at a time for the sake of the weights they gather; zero where not valid."""
    num_experts, columns, _ = weight.shape
    num_blocks = experts.shape[0]
    if num_blocks == 0 or num_experts == 0:
        return like.new_zeros(*valid.shape, columns)
    experts = experts.clamp(0, num_experts - 1)
    step = max(1, _GATHERED // max(1, weight[0].numel()))
    parts = [multiply(slice(i, i + step), experts[i : i + step]) for i in range(0, num_blocks, step)]
    return torch.where(valid.unsqueeze(-1), torch.cat(parts), 0.0)


@op(
    shapes={"x": "M K", "weight": "E N K", "m_indices": "M"},
    dtypes={"x": FLOAT, "weight": "x", "m_indices": torch.int32},
    where=_RUNS,
    reduces="K",
    flops="2 * M * N * K",
    traffic="(min(E, M // alignment) * N * K + M * (K + N)) * x.element_size() + 4 * M",
    terms=lambda x, weight, m_indices, alignment, layout=PLAIN: _contiguous(
        wide(x).abs(), wide(weight).abs(), m_indices, alignment
    ),
    prepare=prepare_grouped_linear,
    contracts=Contracts(**_CONTIGUOUS),
)
def grouped_linear_contiguous(
    x: Tensor, weight: Tensor, m_indices: Tensor, alignment: int, layout: str = PLAIN
) -> Tensor:
    """``x[m] · weight[m_indices[m]]ᵀ``: rows of one matrix, each with its own expert's weight.

    x: [M, K] bf16/f16/f32; weight: [E, N, K], x's dtype, or as ``prepare`` gave it with ``layout``; m_indices: [M]
    int32. alignment: a promise about m_indices, and a divisor of M: each run of ``alignment`` rows, from the first
    row on, is of one expert, and its padding (-1) comes last. 1 promises nothing. A kernel that takes tiles of 128
    rows refuses an alignment that 128 does not divide. Returns [M, N], x's dtype: summed in float32, rounded once.
    """
    return narrow(_contiguous(x, weight, m_indices, alignment), x)


@op(
    shapes={"x": "E M K", "weight": "E N K", "masked_m": "E"},
    dtypes={"x": FLOAT, "weight": "x", "masked_m": torch.int32},
    where=_HINT,
    reduces="K",
    flops="2 * E * min(expected_m, M) * N * K",
    traffic="E * (N * K + min(expected_m, M) * (K + N)) * x.element_size() + 4 * E",
    terms=lambda x, weight, masked_m, expected_m, layout=PLAIN: _masked(wide(x).abs(), wide(weight).abs(), masked_m),
    prepare=prepare_grouped_linear,
    contracts=Contracts(**_MASKED),
)
def grouped_linear_masked(x: Tensor, weight: Tensor, masked_m: Tensor, expected_m: int, layout: str = PLAIN) -> Tensor:
    """``x[e, :masked_m[e]] · weight[e]ᵀ`` for each expert: as many rows as the device says, as a captured graph needs.

    x: [E, M, K] bf16/f16/f32; weight: [E, N, K], x's dtype, or as ``prepare`` gave it with ``layout``; masked_m: [E]
    int32, rows in use, from the first on. expected_m: the caller's guess of an expert's rows, from which a kernel may
    choose its tiles; no result depends on it. Returns [E, M, N], x's dtype: summed in float32, rounded once.
    """
    return narrow(_masked(x, weight, masked_m), x)


@op(
    shapes={
        "x": "M K",
        "x_scale": "M _",
        "weight": "E N K",
        "weight_scale": "E ceil_div(N,BLOCK) ceil_div(K,BLOCK)",
        "m_indices": "M",
    },
    dtypes={**_FP8_DTYPES, "m_indices": torch.int32},
    where={**_RUNS, **_FORMATS},
    reduces="K",
    flops="2 * M * N * K",
    traffic="min(E, M // alignment) * N * K + M * (K + 4 * x_scale.shape[1] + N * out_dtype.itemsize + 4)",
    terms=_fp8_contiguous_terms,
    block_error=BLOCK_ERROR,
    prepare=prepare_fp8_grouped_linear,
    contracts=Contracts(**_CONTIGUOUS, **_FP8),
)
def fp8_grouped_linear_contiguous(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    m_indices: Tensor,
    alignment: int,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = PLAIN,
) -> Tensor:
    """`grouped_linear_contiguous` of fp8 codes, with scales as in `fp8_block_linear`.

    x: [M, K] and weight: [E, N, K], one fp8 kind; x_scale: the scales [M, ⌈K/128⌉], stored as ``x_scale_layout``
    names (`SCALE_LAYOUTS`); weight_scale: [E, ⌈N/128⌉, ⌈K/128⌉] float32, which multiplies; or weight and weight_scale
    as ``prepare`` gave them with ``layout``; m_indices: [M] int32; alignment: as in `grouped_linear_contiguous`.
    N and K may end in a partial block. Returns [M, N] out_dtype.
    """
    return _fp8_contiguous(x, x_scale, weight, weight_scale, m_indices, alignment, x_scale_layout).to(out_dtype)


@op(
    shapes={
        "x": "E M K",
        "x_scale": "E M _",
        "weight": "E N K",
        "weight_scale": "E ceil_div(N,BLOCK) ceil_div(K,BLOCK)",
        "masked_m": "E",
    },
    dtypes={**_FP8_DTYPES, "masked_m": torch.int32},
    where={**_HINT, **_FORMATS},
    reduces="K",
    flops="2 * E * min(expected_m, M) * N * K",
    traffic="E * (N * K + min(expected_m, M) * (K + 4 * x_scale.shape[2] + N * out_dtype.itemsize) + 4)",
    terms=_fp8_masked_terms,
    block_error=BLOCK_ERROR,
    prepare=prepare_fp8_grouped_linear,
    contracts=Contracts(**_MASKED, **_FP8),
)
def fp8_grouped_linear_masked(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = PLAIN,
) -> Tensor:
    """`grouped_linear_masked` of fp8 codes, with scales as in `fp8_block_linear`.

    x: [E, M, K] and weight: [E, N, K], one fp8 kind; x_scale: the scales [E, M, ⌈K/128⌉], each expert's stored as
    ``x_scale_layout`` names (padding included: M rounded up is each expert's); weight_scale: [E, ⌈N/128⌉, ⌈K/128⌉]
    float32; or weight and weight_scale as ``prepare`` gave them with ``layout``; masked_m: [E] int32; expected_m: as
    in `grouped_linear_masked`. N and K may end in a partial block. Returns [E, M, N] out_dtype.
    """
    return _fp8_masked(x, x_scale, weight, weight_scale, masked_m, x_scale_layout).to(out_dtype)
