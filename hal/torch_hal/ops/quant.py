"""Quantisation of activations."""

from __future__ import annotations

from torch import Tensor

from ..check import FLOAT
from ..contracts import Contracts
from ..formats import FP8_KINDS, SCALE_LAYOUTS, ceil_to_ue8m0, to_fp8
from ..numerics import wide
from ..op import op


@op(
    shapes={"x": "... K"},
    dtypes={"x": FLOAT},
    where={
        "group_size > 0": "a group has at least one element",
        "K % group_size == 0": "groups tile the last dimension",
        "fp8 in FP8_KINDS": f"the kind is one of {', '.join(FP8_KINDS)}",
        "scale_layout in SCALE_LAYOUTS": f"the layout is one of {', '.join(SCALE_LAYOUTS)}",
        "scale_layout == 'row_f32' or x.dim() >= 2": "column-major scales need rows",
        "eps >= 1e-30": "a group of zeros gets a scale that is a normal float32",
    },
    flops="3 * x.numel()",
    contracts=Contracts(
        C3_strides="x has any strides; the codes are contiguous, the scales lie as scale_layout says.",
        C5_fp8_kind="`fp8` names the kind; the largest value maps to its quant_max: 448 on e4m3fn, 224 on e4m3fnuz.",
        C6_fp8_cast="Clamped to ±quant_max before the cast; to nearest, ties to even. On fnuz −0 never appears.",
        C8_unwritten_rows="Every code and scale is written, and the layout's padding rows and bytes are zero.",
        C9_rounding="amax and scale in float32; x / scale is a true float32 division, rounded once to a code.",
    ),
)
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, fp8: str = "e4m3fn", scale_layout: str = "row_f32", eps: float = 1e-10
) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation with one scale for each ``group_size`` consecutive elements of a row (DeepSeek-V3, 2024).

    scale = max(amax, eps) / quant_max;  code = cast(clamp(x / scale, ±quant_max));  x ≈ code · scale

    x: [..., K] bf16/f16/f32, any strides, K a multiple of group_size. Returns (codes [..., K] of kind ``fp8``,
    contiguous; scales: logically [..., K / group_size], stored as ``scale_layout`` names, see `SCALE_LAYOUTS`).
    ``mn_ue8m0`` rounds the scale up to a power of two before it divides, so that codes and stored scale agree.
    eps bounds amax from below: a group of zeros has scale eps / quant_max (rounded up for UE8M0) and codes 0.
    A group that holds inf or NaN has unspecified codes and scale; the other groups are right.
    """
    kind, layout = FP8_KINDS[fp8], SCALE_LAYOUTS[scale_layout]
    groups = wide(x).reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    amax = groups.abs().amax(-1).clamp(min=eps)
    # A tensor as the divisor: by a Python number, torch multiplies with the reciprocal on some devices.
    scale = amax / amax.new_full((), kind.quant_max)
    if layout.power_of_two:
        scale = ceil_to_ue8m0(scale)
    scaled = (groups / scale.unsqueeze(-1)).flatten(-2)
    return to_fp8(scaled.contiguous(), kind), layout.pack(scale)
