"""Quantised linear layers with DeepGEMM."""

from __future__ import annotations

import deep_gemm
import torch
from torch import Tensor

from .alignment import check_aligned


def fp8_block_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = "plain",
) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel():
        check_aligned(x=x, x_scale=x_scale, weight=weight)
        with torch.cuda.device(x.device):  # the library launches on the current device
            deep_gemm.fp8_gemm_nt((x, x_scale), (weight, weight_scale), out)
    return out


def prepare_fp8_block_linear(weight: Tensor, weight_scale: Tensor) -> list[Tensor]:
    """Dense storage, which the kernel's bulk copies need and slices of a fused checkpoint tensor may lack.

    Hopper reads weights and scales as checkpoints hold them, so the layout stays plain and other kernels may read it.
    """
    return [weight.contiguous(), weight_scale.contiguous()]
