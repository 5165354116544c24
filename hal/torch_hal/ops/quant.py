"""Quantisation of activations: one scale for a group, a row, or the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import FLOAT
from ..contracts import Contracts
from ..formats import FP8_KINDS, SCALE_LAYOUTS, Fp8Kind, ScaleLayout, ceil_to_ue8m0, to_fp8
from ..numerics import wide
from ..op import op

KIND_RULE = {"fp8 in FP8_KINDS": f"the kind is one of {', '.join(FP8_KINDS)}"}
EPS_RULE = {"eps >= 1e-30": "a group of zeros gets a scale that is a normal float32"}
GROUP_RULES = {
    "group_size > 0": "a group has at least one element",
    **KIND_RULE,
    "scale_layout in SCALE_LAYOUTS": f"the layout is one of {', '.join(SCALE_LAYOUTS)}",
}

# Positions that all quantising ops share.
QUANTISING = {
    "C3_strides": "Inputs have any strides; codes are contiguous, and scales lie as scale_layout says, if it is given.",
    "C5_fp8_kind": "`fp8` names the kind; the largest value maps to its quant_max: 448 on e4m3fn, 224 on e4m3fnuz.",
    "C6_fp8_cast": "Clamped to ±quant_max before the cast; to nearest, ties to even. On fnuz −0 never appears.",
    "C8_unwritten_rows": "Every code and scale is written, and the layout's padding rows and bytes are zero.",
    "C9_rounding": "amax and scale in float32; x / scale is a true float32 division, rounded once to a code.",
}


@op(
    shapes={"x": "... K"},
    dtypes={"x": FLOAT},
    where={
        **GROUP_RULES,
        "K % group_size == 0": "groups tile the last dimension",
        "SCALE_LAYOUTS[scale_layout].major == 'k' or x.dim() >= 2": "column-major scales need rows",
        **EPS_RULE,
    },
    flops="3 * x.numel()",
    contracts=Contracts(**QUANTISING),
)
def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation with one scale for each ``group_size`` consecutive elements of a row (DeepSeek-V3, 2024).

    scale = max(amax, eps) / quant_max;  code = cast(clamp(x / scale, ±quant_max));  x ≈ code · scale

    x: [..., K] bf16/f16/f32, any strides, K a multiple of group_size. Returns (codes [..., K] of kind ``fp8``,
    contiguous; scales: logically [..., K / group_size], stored as ``scale_layout`` names, see `SCALE_LAYOUTS`).
    ``ue8m0`` rounds the scale up to a power of two before it divides, so that codes and stored scale agree: what
    DeepSeek-V3.1's ``scale_fmt`` asks for, in any layout. ``mn_ue8m0`` stores nothing else, and always rounds.
    eps bounds amax from below: a group of zeros has scale eps / quant_max (rounded up for UE8M0) and codes 0.
    A group that holds inf or NaN has unspecified codes and scale; the other groups are right.
    """
    return quantise_groups(wide(x), group_size, FP8_KINDS[fp8], SCALE_LAYOUTS[scale_layout], eps, ue8m0)


@op(
    shapes={"x": "... K"},
    dtypes={"x": FLOAT},
    where={"K >= 1": "a row has at least one element", **KIND_RULE, **EPS_RULE},
    flops="3 * x.numel()",
    contracts=Contracts(**QUANTISING),
)
def per_token_quant_fp8(x: Tensor, fp8: str = "e4m3fn", eps: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation with one scale for each row: `per_token_group_quant_fp8` with a row as its group.

    x: [..., K] bf16/f16/f32, any strides. Returns (codes [..., K] of kind ``fp8``, scales [..., 1] float32), both
    contiguous, x ≈ code · scale. A row of zeros has scale eps / quant_max and codes 0, not scale 0 or NaN.
    """
    return quantise_groups(wide(x), x.shape[-1], FP8_KINDS[fp8], SCALE_LAYOUTS["row_f32"], eps, False)


@op(
    shapes={"x": "..."},
    dtypes={"x": FLOAT},
    where={**KIND_RULE, **EPS_RULE},
    flops="3 * x.numel()",
    contracts=Contracts(
        **{**QUANTISING, "C8_unwritten_rows": "Every code is written, and the scale: nobody has to clear it before."},
        C1_empties="Without elements there are no codes, and the scale is that of zeros.",
        C10_determinism="Equal inputs give bitwise equal results. Every row depends on every other, padding included.",
    ),
)
def per_tensor_quant_fp8(x: Tensor, fp8: str = "e4m3fn", eps: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation with one scale for the whole tensor.

    x: any shape, bf16/f16/f32, any strides. Returns (codes of x's shape and kind ``fp8``, scale [1] float32), both
    contiguous, x ≈ code · scale. All zeros give scale eps / quant_max and codes 0.
    An inf or NaN anywhere leaves every code and the scale unspecified.
    """
    kind, x = FP8_KINDS[fp8], wide(x)
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    scale = group_scale(amax, kind, eps, False)
    return to_fp8((x / scale).contiguous(), kind), scale.reshape(1)


@op(
    shapes={"x": "...", "scale": "1"},
    dtypes={"x": FLOAT, "scale": torch.float32},
    where=KIND_RULE,
    flops="2 * x.numel()",
    contracts=Contracts(
        **{**QUANTISING, "C9_rounding": "x / scale is a true float32 division, rounded once to a code."},
    ),
)
def static_quant_fp8(x: Tensor, scale: Tensor, fp8: str = "e4m3fn") -> Tensor:
    """Quantisation with a scale that was calibrated before, a checkpoint's ``input_scale``, for the whole tensor.

    x: any shape, bf16/f16/f32, any strides; scale: [1] float32, positive and finite. Returns codes of x's shape and
    kind ``fp8``, contiguous: x ≈ code · scale as far as it reaches. What lies beyond saturates, ±inf too; NaN stays.
    """
    return to_fp8((wide(x) / scale.reshape(())).contiguous(), FP8_KINDS[fp8])


def group_scale(amax: Tensor, kind: Fp8Kind, eps: float, power_of_two: bool) -> Tensor:
    """The scale that maps ``amax`` to the kind's quant_max, or the next power of two."""
    amax = amax.clamp(min=eps)
    # A tensor as the divisor: by a Python number, torch multiplies with the reciprocal on some devices.
    scale = amax / amax.new_full((), kind.quant_max)
    return ceil_to_ue8m0(scale) if power_of_two else scale


def quantise_groups(
    x: Tensor, group_size: int, kind: Fp8Kind, layout: ScaleLayout, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """Codes and stored scales of `wide` x [..., K], quantised in groups along the last dimension."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    scale = group_scale(groups.abs().amax(-1), kind, eps, ue8m0 or layout.power_of_two)
    scaled = (groups / scale.unsqueeze(-1)).flatten(-2)
    return to_fp8(scaled.contiguous(), kind), layout.pack(scale)
