"""What the references of FP8 block-scaled products share: quantised activations, and sums by blocks of 128."""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import ceil_div
from ..formats import BLOCK, FP8_KINDS, SCALE_LAYOUTS
from .quant import quantise_groups

# What a block of 128 products may lose of its absolute terms. Hopper's fp8 tensor cores keep 14 bits of a sum; DeepGEMM
# on an H200 lost up to 2⁻¹⁴·⁸ of them.
BLOCK_ERROR = 2.0**-14
_EPS = 1e-10  # what per_token_group_quant_fp8 bounds amax with, unless told otherwise
FP8_NAMES = {kind.dtype: name for name, kind in FP8_KINDS.items()}


def quantise_blocks(x: Tensor, fp8: torch.dtype, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Codes [..., K] and scales [..., ⌈K/128⌉] of `wide` x [..., K]; the last group may be partial."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, ceil_div(width, BLOCK) * BLOCK - width))
    codes, scales = quantise_groups(padded, BLOCK, FP8_KINDS[FP8_NAMES[fp8]], SCALE_LAYOUTS["row_f32"], _EPS, ue8m0)
    return codes[..., :width], scales


def matmul_blocks(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """``x · weightᵀ`` of codes x [..., M, K] and weight [..., N, K], each with a scale for a row's every 128 columns.

    Scales are [..., M or N, ⌈K/128⌉]. Each 128 along K are summed by themselves, then scaled and added. Codes are
    exact in any wider type: they take the scales', which an oracle makes float64.
    """
    dtype = weight_scales.dtype
    total = weight_scales.new_zeros(*x.shape[:-1], weight.shape[-2])
    for b in range(weight_scales.shape[-1]):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        partial = x[..., block].to(dtype) @ weight[..., block].to(dtype).mT
        total = total + partial * x_scales[..., b, None] * weight_scales[..., None, :, b]
    return total
