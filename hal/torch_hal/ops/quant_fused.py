"""Activations and norms that end in FP8 codes: what a GEMM reads next is written once, and in its format."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..check import FLOAT
from ..contracts import Contracts
from ..formats import FP8_KINDS, SCALE_LAYOUTS
from ..numerics import narrow, wide
from ..op import op
from .activation import gated
from .norm import normalise
from .quant import EPS_RULE, GROUP_RULES, QUANTISING, quantise_groups

_QUANT_EPS_RULE = {rule.replace("eps", "quant_eps"): meaning for rule, meaning in EPS_RULE.items()}
_NEEDS_ROWS = {"SCALE_LAYOUTS[scale_layout].major == 'k' or x.dim() >= 2": "column-major scales need rows"}
_ONE_ROUNDING = (
    "Float32 up to the codes, without a rounding to x's dtype in between: against the two ops one after the other, a "
    "code near a tie may be its neighbour."
)
_FUSED = {**QUANTISING, "C9_rounding": _ONE_ROUNDING}


@op(
    shapes={"x": "... W"},
    dtypes={"x": FLOAT},
    where={
        **GROUP_RULES,
        "W % (2 * group_size) == 0": "the last dimension holds gate and up, each tiled by groups",
        **_NEEDS_ROWS,
        **EPS_RULE,
    },
    flops="4 * x.numel()",
    contracts=Contracts(**_FUSED),
)
def silu_and_mul_quant_fp8(
    x: Tensor,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """`silu_and_mul`, then `per_token_group_quant_fp8`: between the two GEMMs of an FP8 MLP or of its experts.

    x: [..., 2·d] bf16/f16/f32, any strides, gate first, d a multiple of group_size. Returns (codes [..., d] of kind
    ``fp8``, contiguous; scales: logically [..., d / group_size], stored as ``scale_layout`` names). ``eps`` and
    ``ue8m0`` as in `per_token_group_quant_fp8`. A row's result depends on that row alone: rows that nobody reads, as
    between the experts of a contiguous grouped GEMM, may hold anything.
    """
    y = gated(wide(x), silu)
    return quantise_groups(y, group_size, FP8_KINDS[fp8], SCALE_LAYOUTS[scale_layout], eps, ue8m0)


@op(
    shapes={"x": "E M W", "masked_m": "E"},
    dtypes={"x": FLOAT, "masked_m": torch.int32},
    where={
        **GROUP_RULES,
        "W % (2 * group_size) == 0": "the last dimension holds gate and up, each tiled by groups",
        **EPS_RULE,
    },
    flops="4 * x.numel()",
    contracts=Contracts(
        **{
            **_FUSED,
            "C8_unwritten_rows": "Rows from masked_m[e] on, and their scales, hold anything: kernels leave them "
            "unwritten. The reference writes what rows of zeros give. Padding that the layout adds is zero.",
        },
        C7_sentinels="None: 0 ≤ masked_m ≤ M is the caller's duty. The reference takes what is outside as 0 or M.",
        C13_ids="masked_m is int32.",
    ),
)
def masked_silu_and_mul_quant_fp8(
    x: Tensor,
    masked_m: Tensor,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """`silu_and_mul_quant_fp8` of the first masked_m[e] rows of each expert: between two masked grouped GEMMs.

    x: [E, M, 2·d] bf16/f16/f32, any strides, gate first; what lies beyond masked_m is not read, and may be NaN;
    masked_m: [E] int32, 0 for an expert without tokens. Returns (codes [E, M, d] of kind ``fp8``, contiguous; scales:
    logically [E, M, d / group_size], each expert's stored as ``scale_layout`` names, padding included).
    """
    valid = torch.arange(x.shape[1], device=x.device) < masked_m.unsqueeze(-1)
    y = torch.where(valid.unsqueeze(-1), gated(wide(x), silu), 0.0)
    return quantise_groups(y, group_size, FP8_KINDS[fp8], SCALE_LAYOUTS[scale_layout], eps, ue8m0)


@op(
    shapes={"x": "... D", "weight": "D"},
    dtypes={"x": FLOAT, "weight": ("x", torch.float32)},
    where={**GROUP_RULES, "D % group_size == 0": "groups tile the last dimension", **_NEEDS_ROWS, **_QUANT_EPS_RULE},
    reduces="D",
    flops="7 * x.numel()",
    contracts=Contracts(**_FUSED),
)
def rms_norm_quant_fp8(
    x: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    quant_eps: float = 1e-10,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, then `per_token_group_quant_fp8`.

    x: [..., D] bf16/f16/f32, any strides, such as the latent slice of a fused projection; weight: [D], x's dtype or
    float32; eps: added to the mean square; quant_eps: bounds a group's amax from below. Returns (codes [..., D] of
    kind ``fp8``, contiguous; scales: logically [..., D / group_size], stored as ``scale_layout`` names).
    An inf or NaN leaves its whole row unspecified.
    """
    y = normalise(wide(x).contiguous(), weight, eps)
    return quantise_groups(y, group_size, FP8_KINDS[fp8], SCALE_LAYOUTS[scale_layout], quant_eps, ue8m0)


@op(
    shapes={"x": "... D", "residual": "... D", "weight": "D"},
    dtypes={"x": FLOAT, "residual": "x", "weight": ("x", torch.float32)},
    where={
        "x.shape == residual.shape": "x and residual have one shape",
        **GROUP_RULES,
        "D % group_size == 0": "groups tile the last dimension",
        **_NEEDS_ROWS,
        **_QUANT_EPS_RULE,
    },
    reduces="D",
    flops="8 * x.numel()",
    contracts=Contracts(
        **{**_FUSED, "C9_rounding": _ONE_ROUNDING + " The norm reads the float32 sum; the sum is rounded once."}
    ),
)
def fused_add_rms_norm_quant_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    quant_eps: float = 1e-10,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``s = x + residual``, then `rms_norm_quant_fp8` of s: a residual stream whose next reader is an FP8 GEMM.

    x, residual: [..., D], one shape and dtype, any strides; the rest as in `rms_norm_quant_fp8`.
    Returns (codes, scales, s): s in x's shape and dtype. The norm itself is not returned: where something reads it
    unquantised too, as a router does, `fused_add_rms_norm` and `per_token_group_quant_fp8` move as many bytes.
    """
    s = wide(x) + wide(residual)
    y = normalise(s.contiguous(), weight, eps)
    q, scale = quantise_groups(y, group_size, FP8_KINDS[fp8], SCALE_LAYOUTS[scale_layout], quant_eps, ue8m0)
    return q, scale, narrow(s, x)
