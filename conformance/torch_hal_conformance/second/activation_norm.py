"""Second oracles of the gated activations and of the norms: the formulas, row after row, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .convert import Array, Oracle


def silu(a: Array) -> Array:
    """a / (1 + e⁻ᵃ)."""
    with np.errstate(over="ignore", invalid="ignore"):  # e⁻ᵃ = ∞ gives −0, and a = −∞ gives NaN
        activated: Array = a / (1.0 + np.exp(-a))
    return activated


def gelu(a: Array) -> Array:
    """a · Φ(a), Φ the normal distribution: (1 + erf(a/√2)) / 2 = erfc(−a/√2) / 2."""
    phi = np.array([math.erfc(-value / math.sqrt(2.0)) / 2.0 for value in a.reshape(-1)]).reshape(a.shape)
    with np.errstate(invalid="ignore"):
        activated: Array = a * phi
    return activated


def gelu_tanh(a: Array) -> Array:
    """a/2 · (1 + tanh(√(2/π) · (a + 0.044715·a³)))."""
    with np.errstate(over="ignore", invalid="ignore"):
        inner = math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3)
        activated: Array = a / 2.0 * (1.0 + np.tanh(inner))
    return activated


def gated(activation: Callable[[Array], Array], x: Array) -> Array:
    """activation(first half of the last dimension) · second half."""
    d = x.shape[-1] // 2
    with np.errstate(invalid="ignore", over="ignore"):
        product: Array = activation(x[..., :d]) * x[..., d:]
    return product


def normed(x: Array, weight: Array, eps: float) -> Array:
    """Each row over the root of its mean square, times weight."""
    y = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        mean_square = sum(float(value) * float(value) for value in x[row]) / max(x.shape[-1], 1)
        with np.errstate(invalid="ignore", divide="ignore"):  # ∞/∞ and 0/0 are NaN
            y[row] = x[row] / np.sqrt(mean_square + eps) * weight
    return y


def silu_and_mul(x: Array) -> list[Array]:
    return [gated(silu, x)]


def gelu_and_mul(x: Array) -> list[Array]:
    return [gated(gelu, x)]


def gelu_tanh_and_mul(x: Array) -> list[Array]:
    return [gated(gelu_tanh, x)]


def rms_norm(x: Array, weight: Array, eps: float) -> list[Array]:
    return [normed(x, weight, eps)]


def fused_add_rms_norm(x: Array, residual: Array, weight: Array, eps: float) -> list[Array]:
    """(norm of the sum, sum); of the op in place, what x and residual become."""
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        total = x + residual
    return [normed(total, weight, eps), total]


ORACLES: dict[str, Oracle] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_add_rms_norm_": fused_add_rms_norm,
}
