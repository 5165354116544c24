"""Activations of gated MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import FLOAT
from ..numerics import narrow, wide
from ..op import op


@op(
    shapes={"x": "... W"},
    dtypes={"x": FLOAT},
    where={"W % 2 == 0": "the last dimension holds gate and up, so it is even"},
    flops="5 * x.numel() // 2",
    terms=lambda x: _gated(wide(x)).abs(),
)
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's elementwise half (Shazeer, 2020): ``silu(gate) · up``, silu(a) = a / (1 + e⁻ᵃ).

    x: [..., 2·d] bf16/f16/f32, any strides: the gate is the first half of the last dimension, up the second.
    Returns [..., d], x's dtype. The product is float32 and rounded once; ``F.silu(gate) * up`` in x's dtype rounds
    twice and differs by a unit in the last place. A gate of −inf gives NaN, as in torch; NaN stays in its element.
    """
    return narrow(_gated(wide(x)), x)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
