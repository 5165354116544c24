"""Second oracles of the experts themselves, in float64 and on FP8 blocks, and of the sums that bring them together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .convert import FP8_FORMATS, Array, Codes, Oracle, encode
from .grouped import row_times, row_times_blocks
from .routing import sigmoid

BLOCK = 128
EPS = 1e-10  # below it a group's largest value counts as this much


def silu_and_mul(hidden: Array) -> Array:
    """silu(gate) ⊙ up of gate and up, one after the other; silu(x) = x · σ(x)."""
    inter = len(hidden) // 2
    out = np.zeros(inter)
    for i in range(inter):
        gate, up = float(hidden[i]), float(hidden[inter + i])
        out[i] = gate * sigmoid(gate) * up
    return out


def _weighted(
    x: Array, topk_weights: Array, topk_ids: Array, experts: int, run: Callable[[Array, int], Array]
) -> Array:
    """Σ_k weight_k · run(x[t], expert), over the ids that name an expert."""
    out = np.zeros(x.shape)
    for token in range(len(x)):
        for k in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, k])
            if 0 <= expert < experts:
                out[token] += topk_weights[token, k] * run(x[token], expert)
    return out


def fused_experts(
    x: Array, w13: Array, w2: Array, topk_weights: Array, topk_ids: Array, layout: str = "plain"
) -> list[Array]:
    """Σ_k weight_k · W2 · (silu(W1 x) ⊙ W3 x) with the experts that the ids name."""

    def run(row: Array, expert: int) -> Array:
        return row_times(silu_and_mul(row_times(row, w13[expert])), w2[expert])

    return [_weighted(x, topk_weights, topk_ids, len(w13), run)]


def quantise(row: Array, kind: str, ue8m0: bool) -> tuple[Codes, Array]:
    """Codes and scales of a row in groups of 128, the last one maybe shorter: scale = max(amax, eps) / quant_max.

    With ``ue8m0`` the scale is the least power of two that is not below it, and divides as such. All in the row's type.
    """
    scales, quotients = [], [row[:0]]
    for start in range(0, len(row), BLOCK):
        group = row[start : start + BLOCK]
        amax = max(np.max(np.abs(group)), row.dtype.type(EPS))
        scale = amax / row.dtype.type(FP8_FORMATS[kind].quant_max)
        if ue8m0:
            power = row.dtype.type(2.0**-126)
            while power < scale:
                power = power * 2
            scale = power
        scales.append(float(scale))
        quotients.append(group / scale)
    return encode(np.concatenate(quotients), kind), np.array(scales)


def fused_experts_fp8_block(
    x: Array,
    w13: Codes,
    w13_scale: Array,
    w2: Codes,
    w2_scale: Array,
    topk_weights: Array,
    topk_ids: Array,
    ue8m0: bool = False,
    layout: str = "plain",
) -> list[Array]:
    """`fused_experts` on codes: x, and then the activation, become codes before they are multiplied.

    Which codes and scales x has is exact: what float32 arithmetic gives. No arithmetic gives the activation exactly;
    its codes and scales are those of its float64 value. The gate's rows of w13 and up's have blocks of their own, each
    counted from its first row.
    """
    inter = w2.bits.shape[2]
    half = -(-inter // BLOCK)
    weights13, weights2 = w13.decode(), w2.decode()

    def run(row: Array, expert: int) -> Array:
        codes, scales = quantise(row.astype(np.float32), w13.kind, ue8m0)
        gate = row_times_blocks(codes.decode(), scales, weights13[expert, :inter], w13_scale[expert, :half])
        up = row_times_blocks(codes.decode(), scales, weights13[expert, inter:], w13_scale[expert, half:])
        codes, scales = quantise(silu_and_mul(np.concatenate([gate, up])), w2.kind, ue8m0)
        return row_times_blocks(codes.decode(), scales, weights2[expert], w2_scale[expert])

    return [_weighted(x, topk_weights, topk_ids, len(weights13), run)]


def moe_sum_reduce(x: Array, scale: float) -> list[Array]:
    """scale · Σ_k x[t, k]."""
    out = np.zeros((x.shape[0], x.shape[2]))
    for token in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[token] += x[token, k]
        out[token] *= scale
    return [out]


def shared_expert_add(routed: Array, shared: Array, alpha: float) -> list[Array]:
    """routed + alpha · shared."""
    out = np.zeros(routed.shape)
    for position in np.ndindex(routed.shape):
        out[position] = routed[position] + alpha * shared[position]
    return [out]


ORACLES: dict[str, Oracle] = {
    "fused_experts": fused_experts,
    "fused_experts_fp8_block": fused_experts_fp8_block,
    "moe_sum_reduce": moe_sum_reduce,
    "shared_expert_add": shared_expert_add,
}
