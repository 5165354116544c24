"""Rotary position embedding, with YaRN's tables and DeepSeek's softmax scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..check import FLOAT, INDEX
from ..contracts import Contracts
from ..numerics import narrow, wide
from ..op import op


@op(
    shapes={"q": "T H D", "k": "T Hk D", "positions": "T", "cos_sin_cache": "P R"},
    dtypes={"q": FLOAT, "k": "q", "positions": INDEX, "cos_sin_cache": torch.float32},
    where={
        "R % 2 == 0": "the cache holds R/2 cosines and R/2 sines a position",
        "R <= D": "the rotated part is at most the head",
    },
    reduces="2",
    flops="3 * T * (H + Hk) * R",
    traffic="2 * (q.numel() + k.numel()) * q.element_size() + T * (4 * R + positions.element_size())",
    terms=lambda q, k, positions, cos_sin_cache, interleaved: tuple(
        _rotate(wide(x).abs(), *_cos_sin(positions, cos_sin_cache), interleaved, absolute=True) for x in (q, k)
    ),
    contracts=Contracts(
        C7_sentinels="None: positions lie in [0, P); others are undefined behaviour (the reference raises on the CPU).",
        C13_ids="positions may be int32 or int64.",
    ),
)
def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of the first R dims of each head (Su et al., 2021); the rest is copied bit for bit.

    q: [T, H, D], k: [T, Hk, D], D ≥ R, bf16/f16/f32, any strides; positions: [T] int32/int64 in [0, P);
    cos_sin_cache: [P, R] float32, a row = R/2 cosines, then R/2 sines (`rope_cos_sin_cache`).
    Returns (q', k') of the same shapes and dtype, (a, b) → (a·cos − b·sin, b·cos + a·sin) in float32, rounded once.
    interleaved (GPT-J, DeepSeek's attention): pair i is dims (2i, 2i+1), and stays there: transformers moves the
    result to half-split order instead, with equal q·k but other cache contents. Not interleaved (NeoX, DeepSeek-V3.2's
    indexer): dims (i, i + R/2). MLA passes the 64-wide slice of its heads, whose rope part stands last.
    """
    cos, sin = _cos_sin(positions, cos_sin_cache)
    q_out, k_out = (_rotate(wide(x), cos, sin, interleaved) for x in (q, k))
    return narrow(q_out, q), narrow(k_out, k)


def _cos_sin(positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Each [T, 1, R/2], to broadcast over heads."""
    cos, sin = wide(cos_sin_cache.index_select(0, positions)).unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, absolute: bool = False) -> Tensor:
    """The rotation of x [T, H, D]; with ``absolute``, each output's sum of absolute terms (x being absolute)."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated.reshape(*rotated.shape[:-1], half, 2).unbind(-1)
    else:
        a, b = rotated.chunk(2, dim=-1)
    if absolute:
        parts = (a * cos.abs() + b * sin.abs(), b * cos.abs() + a * sin.abs())
    else:
        parts = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((joined, rest), dim=-1)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's context extension (Peng et al., 2023), fields as in DeepSeek's ``rope_scaling``.

    ``attention_factor`` replaces the ratio of the two mscales as the multiplier of cosines and sines.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    @property
    def cos_sin_multiplier(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature: 0.1 · mscale · ln(factor) + 1, and 1 where nothing is extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def mla_softmax_scale(qk_head_dim: int, yarn: YarnScaling | None = None) -> float:
    """The softmax scale of MLA: qk_head_dim^-½, under YaRN times the square of its ``mscale_all_dim`` temperature."""
    scale: float = qk_head_dim**-0.5
    return scale if yarn is None else scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def rope_inv_freq(rotary_dim: int, theta: float, yarn: YarnScaling | None = None) -> Tensor:
    """Radians a position for each of the R/2 pairs, [R/2] float32: theta^(−2i/R), blended as YaRN does.

    Pairs that turn more than beta_fast times within the original context keep their frequency, those that turn less
    than beta_slow times are slowed by the factor, and a linear ramp joins the two.
    """
    # float32 throughout, as in the released code: these are the phases that checkpoints were trained with.
    inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if yarn is None:
        return inv_freq
    low, high = _yarn_ramp(rotary_dim, theta, yarn)
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp)


def _yarn_ramp(rotary_dim: int, theta: float, yarn: YarnScaling) -> tuple[float, float]:
    """The pairs between which the ramp runs: those that turn beta_fast and beta_slow times in the original context."""

    def pair(turns: float) -> float:
        return rotary_dim * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), rotary_dim - 1)
    return low, high + 0.001 if low == high else high  # a step, without dividing by zero


def rope_cos_sin_cache(
    max_positions: int,
    rotary_dim: int,
    theta: float,
    *,
    yarn: YarnScaling | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table that `rope` reads: [max_positions, rotary_dim] float32, a row = [cos | sin] of one position.

    Under YaRN, ``max_positions`` is the extended length (original · factor), and the values carry its multiplier.
    Always computed on the CPU, so that every device holds the same bits.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, rope_inv_freq(rotary_dim, theta, yarn))
    multiplier = 1.0 if yarn is None else yarn.cos_sin_multiplier
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * multiplier).to(device)
