"""Normalisation with sgl_kernel."""

from __future__ import annotations

import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch
from torch import Tensor

from .alignment import check_aligned

# The op itself, not `sgl_kernel.fused_add_rmsnorm`: where flashinfer is installed that function runs flashinfer's
# kernel instead, compiled at the first call, and a selection must name the kernel that runs.
_fused_add_rmsnorm = torch.ops.sgl_kernel.fused_add_rmsnorm.default


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    if x.numel() == 0:  # an empty launch would fail, and its error surface in some later call
        return
    check_aligned(x=x, residual=residual, weight=weight)
    hidden = x.shape[-1]
    with torch.cuda.device(x.device):  # the library launches on the current device
        _fused_add_rmsnorm(x.view(-1, hidden), residual.view(-1, hidden), weight, eps, True)
