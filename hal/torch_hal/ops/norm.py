"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import FLOAT
from ..contracts import Contracts
from ..numerics import narrow, wide
from ..op import op


@op(
    shapes={"x": "... D", "weight": "D"},
    dtypes={"x": FLOAT, "weight": ("x", torch.float32)},
    reduces="D",
    flops="4 * x.numel()",
    terms=lambda x, weight, eps: normalise(wide(x), weight, eps).abs(),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich, 2019).

    x: [..., D] bf16/f16/f32, any strides; weight: [D], x's dtype or float32; eps: added to the mean square.
    Returns x's shape and dtype: x / sqrt(mean(x²) + eps) · weight, in float32, rounded once.
    All-zero rows give zeros when eps > 0; an inf in a row gives NaN there; NaN propagates within its row.
    """
    return narrow(normalise(wide(x), weight, eps), x)


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of `wide` x, unrounded."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * wide(weight)


def _add_terms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = wide(x), wide(residual)
    return normalise(x + residual, weight, eps).abs(), x.abs() + residual.abs()


_TWO_ROUNDINGS = "The sum stays in float32 for the norm; norm and sum are rounded once each."


@op(
    shapes={"x": "... D", "residual": "... D", "weight": "D"},
    dtypes={"x": FLOAT, "residual": "x", "weight": ("x", torch.float32)},
    where={"x.shape == residual.shape": "x and residual have one shape"},
    reduces="D",
    flops="5 * x.numel()",
    terms=_add_terms,
    contracts=Contracts(C9_rounding=_TWO_ROUNDINGS),
)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = x + residual``, then ``rms_norm(s)``: the residual stream's two steps in one pass.

    x, residual: [..., D], one shape and dtype, any strides; weight: [D], x's dtype or float32.
    Returns (norm, s), each x's shape and dtype. The norm reads the float32 sum, as FlashInfer and sgl_kernel do,
    not the rounded one (vLLM): the two differ by one unit in the last place.
    """
    s = wide(x) + wide(residual)
    return narrow(normalise(s, weight, eps), x), narrow(s, x)


def _apart(x: Tensor, residual: Tensor) -> bool:
    """Whether they begin at different places, where that is known: empty tensors and tracers' stand-ins lie nowhere."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return x is not residual
    try:
        place = x.data_ptr()
    except RuntimeError:  # under vmap
        return True
    return place == 0 or place != residual.data_ptr()


@op(
    shapes={"x": "... D", "residual": "... D", "weight": "D"},
    dtypes={"x": FLOAT, "residual": "x", "weight": ("x", torch.float32)},
    where={
        "x.shape == residual.shape": "x and residual have one shape",
        "_apart(x, residual)": "x and residual, which are both written, in different memory",
    },
    mutates=("x", "residual"),
    twin_of="fused_add_rms_norm",
    terms=_add_terms,
    reduces="D",
    flops="5 * x.numel()",
    contracts=Contracts(
        C4_mutation="Writes x and residual, which must not overlap; returns nothing.",
        C9_rounding=_TWO_ROUNDINGS,
    ),
)
def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In-place twin of `fused_add_rms_norm`: x becomes the norm, residual the sum. Any strides."""
    norm, s = fused_add_rms_norm.reference(x, residual, weight, eps)
    x.copy_(norm)
    residual.copy_(s)
