"""The two rounding verbs that every reference is written with."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the type that references compute in: float32, or float64 where a float64 oracle evaluates them."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def narrow(y: Tensor, like: Tensor) -> Tensor:
    """``y`` rounded once to the dtype of ``like``, and contiguous whatever the inputs' strides."""
    return y.to(like.dtype).contiguous()
