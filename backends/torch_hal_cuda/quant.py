"""Quantisation with sgl_kernel."""

from __future__ import annotations

import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch
from torch import Tensor

_group_quant = torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2.default
_LARGEST = 448.0


def per_token_group_quant_fp8(
    x: Tensor, group_size: int, fp8: str = "e4m3fn", scale_layout: str = "row_f32", eps: float = 1e-10
) -> tuple[Tensor, Tensor]:
    rows, width = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    q = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    if scale_layout == "mn_f32_tma":  # column-major, rows padded to a multiple of four
        scale = x.new_empty((width // group_size, -(-rows // 4) * 4), dtype=torch.float32).t()[:rows]
    else:
        scale = x.new_empty((rows, width // group_size), dtype=torch.float32)
    if x.numel():
        _group_quant(x.view(rows, width), q, scale, group_size, eps, -_LARGEST, _LARGEST, False, False, None)
    return q.view(x.shape), scale.view(*x.shape[:-1], scale.shape[-1]) if x.dim() != 2 else scale
