"""Quantisation with sgl_kernel."""

from __future__ import annotations

import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch
from torch import Tensor

from .alignment import check_aligned

_group_quant = torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2.default
_LARGEST = 448.0


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows, groups = x.numel() // max(width, 1), width // group_size
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if scale_layout == "mn_f32_tma":  # column-major, each column padded to a multiple of four with zeros
        storage = x.new_empty((groups, -(-rows // 4) * 4), dtype=torch.float32)
        if rows % 4:
            storage[:, rows:] = 0
        scale = storage.t()[:rows]
    else:
        scale = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    if x.numel():
        check_aligned(x=x)
        codes, scales = q.view(rows, width), scale if scale.dim() == 2 else scale.view(rows, groups)
        with torch.cuda.device(x.device):  # the library launches on the current device
            _group_quant(x.view(rows, width), codes, scales, group_size, eps, -_LARGEST, _LARGEST, False, False, None)
    return q, scale
