"""Activations of gated MLPs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, silu

from ..check import FLOAT
from ..numerics import narrow, wide
from ..op import op


@op(
    shapes={"x": "... W"},
    dtypes={"x": FLOAT},
    where={"W % 2 == 0": "the last dimension holds gate and up, so it is even"},
    flops="5 * x.numel() // 2",
    # Kernels reckon e⁻ᵃ as 2^(−a·log₂e), whose rounded exponent is as far off as a gate is below 0.
    terms=lambda x: gated(wide(x), lambda gate: silu(gate).abs() * (1 + gate.clamp(max=0).abs())).abs(),
)
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's elementwise half (Shazeer, 2020): ``silu(gate) · up``, silu(a) = a / (1 + e⁻ᵃ).

    x: [..., 2·d] bf16/f16/f32, any strides: the gate is the first half of the last dimension, up the second.
    Returns [..., d], x's dtype. The product is float32 and rounded once; ``F.silu(gate) * up`` in x's dtype rounds
    twice and differs by a unit in the last place. A gate of −inf gives NaN, as in torch; NaN stays in its element.
    """
    return narrow(gated(wide(x), silu), x)


@op(
    shapes={"x": "... W"},
    dtypes={"x": FLOAT},
    where={"W % 2 == 0": "the last dimension holds gate and up, so it is even"},
    flops="10 * x.numel() // 2",
    # erf is close to −1 for a gate far below 0, so that 1 + erf cancels; and it may be a polynomial that is 1.5e-7 off
    # (Abramowitz and Stegun, 7.1.26): torch's errors on a CPU are about as large.
    terms=lambda x: 2 * gated(wide(x), abs).abs(),
)
def gelu_and_mul(x: Tensor) -> Tensor:
    """GEGLU's elementwise half (Shazeer, 2020): ``gelu(gate) · up``, gelu(a) = a/2 · (1 + erf(a/√2)), exact.

    x: [..., 2·d] bf16/f16/f32, any strides: the gate is the first half of the last dimension, up the second.
    Returns [..., d], x's dtype: float32, rounded once. A gate of −inf gives NaN; NaN stays in its element.
    """
    return narrow(gated(wide(x), gelu), x)


@op(
    shapes={"x": "... W"},
    dtypes={"x": FLOAT},
    where={"W % 2 == 0": "the last dimension holds gate and up, so it is even"},
    flops="12 * x.numel() // 2",
    terms=lambda x: gated(wide(x), abs).abs(),
)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """`gelu_and_mul` with GELU's tanh approximation: a/2 · (1 + tanh(√(2/π) · (a + 0.044715·a³))).

    Another function, not another way to compute it: the two GELUs are up to 4.73e-4 apart.
    x: [..., 2·d] bf16/f16/f32, any strides, gate first. Returns [..., d], x's dtype: float32, rounded once.
    A gate of −inf gives NaN; NaN stays in its element.
    """
    return narrow(gated(wide(x), _gelu_tanh), x)


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The activated first half of the last dimension times the second."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")
