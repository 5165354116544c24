"""FP8 experts a second time, from their definition: assignment by assignment, in float64, codes by the tests' codec.

What the activation's codes are cannot be told where a value lies within rounding errors of the middle between two: such
a code may come out as its neighbour. The formula says by how much that could move each result.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from fp8_codec import decode, encode
from torch import Tensor

QUANT_MAX = {"e4m3fn": 448, "e4m3fnuz": 224}
MARGIN = 0.001  # what float32 sums may move an activation by, where the largest of its group is quant_max


def block_scale(amax: float, kind: str, ue8m0: bool) -> float:
    scale = np.float32(max(np.float32(amax), np.float32(1e-10))) / np.float32(QUANT_MAX[kind])
    if ue8m0:
        mantissa, exponent = math.frexp(scale)
        scale = np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
    return float(scale)


def quantised(row: Tensor, kind: str, ue8m0: bool, margin: float = 0.0) -> tuple[Tensor, Tensor]:
    """What a row's codes and scales stand for, in float64, and how far apart that is at both ends of the margin."""
    values, apart = torch.empty_like(row), torch.empty_like(row)
    for first in range(0, len(row), 128):
        group = row[first : first + 128].tolist()
        scale = block_scale(max(abs(v) for v in group), kind, ue8m0)
        for i, value in enumerate(group, first):
            x = float(np.float32(value) / np.float32(scale))
            low, middle, high = (decode(encode(x + d, kind), kind) for d in (-margin, 0.0, margin))
            values[i], apart[i] = middle * scale, (high - low) * scale
    return values, apart


def dequantised(codes: Tensor, scale: Tensor, kind: str) -> Tensor:
    table = torch.tensor([decode(code, kind) for code in range(256)], dtype=torch.float64)
    rows, columns = (torch.arange(n) // 128 for n in codes.shape)
    return table[codes.contiguous().view(torch.uint8).long()] * scale.double()[rows][:, columns]


def experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """(results, how far off they may be before their own rounding), float64 [T, D]"""
    kind = "e4m3fn" if w13.dtype == torch.float8_e4m3fn else "e4m3fnuz"
    inter, blocks = w2.shape[2], w13_scale.shape[1] // 2
    out, slack = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for t, k in np.ndindex(*topk_ids.shape):
        e, weight = int(topk_ids[t, k]), topk_weights[t, k].double()
        if not 0 <= e < len(w13):
            continue
        row, _ = quantised(x[t].double(), kind, ue8m0)
        gate = dequantised(w13[e, :inter], w13_scale[e, :blocks], kind) @ row
        up = dequantised(w13[e, inter:], w13_scale[e, blocks:], kind) @ row
        activated, apart = quantised(gate / (1 + torch.exp(-gate)) * up, kind, ue8m0, MARGIN)
        down = dequantised(w2[e], w2_scale[e], kind)
        out[t] += weight * (down @ activated)
        slack[t] += weight.abs() * (down.abs() @ (apart + 1e-5 * activated.abs()))
    return out, slack
