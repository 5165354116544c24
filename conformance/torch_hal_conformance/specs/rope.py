"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_hal.ops.rope import YarnScaling, rope_cos_sin_cache

from ..draw import Draw
from ..spec import Spec, core, deepseek, full
from ..verdicts_rope import rotated

YARN = YarnScaling(factor=40, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)  # DeepSeek-V3's


def rope(
    draw: Draw, T: int, H: int, Hk: int, D: int, R: int, P: int, ids: str = "int64",
    interleaved: bool = True, table: str = "random",
) -> dict[str, Any]:  # fmt: skip
    if draw.regime.startswith("b35"):
        R //= 2
    q, k = draw.values(T, H, D), draw.values(T, Hk, D)
    if draw.regime == "nonfinite":
        q[1, 0, 3] = k[2, 0, 0] = math.nan
    positions = draw.integers(0, P, T, dtype=getattr(torch, ids))
    if T > 2:
        positions[0], positions[1], positions[2] = P - 1, 0, P - 1
    if draw.regime == "same_position":
        positions[:] = P // 2
    cache = rope_cos_sin_cache(P, R, 10000.0, yarn=YARN) if table == "yarn" else draw.normal(P, R, dtype=torch.float32)
    return {
        "q": q,
        "k": k,
        "positions": positions,
        "cos_sin_cache": _only(positions, cache),
        "interleaved": interleaved and not draw.regime.endswith("halves"),
    }


def _only(positions: Tensor, cache: Tensor) -> Tensor:
    """The cache with NaN in each row that no token asks for."""
    asked = torch.zeros(cache.shape[0], 1, dtype=torch.bool)
    asked[positions.long()] = True
    return torch.where(asked, cache, torch.nan)


BF16 = ("bfloat16",)

SHAPES = (
    core(T=17, H=4, Hk=1, D=64, R=64, P=50),
    core(T=17, H=4, Hk=1, D=64, R=64, P=50, interleaved=False),
    core(T=17, H=4, Hk=1, D=64, R=64, P=50, ids="int32"),
    core(T=17, H=4, Hk=1, D=64, R=64, P=50, ids="int32", interleaved=False),
    core(T=17, H=3, Hk=3, D=128, R=64, P=50, dtypes=BF16),
    core(T=17, H=3, Hk=5, D=100, R=36, P=50, interleaved=False, dtypes=BF16),
    core(T=300, H=1, Hk=1, D=4, R=2, P=5),
    core(T=1, H=4, Hk=1, D=64, R=64, P=50),
    core(T=33, H=2, Hk=1, D=64, R=64, P=4096, table="yarn"),
    core(T=4, H=16, Hk=1, D=64, R=64, P=70000, dtypes=BF16),  # positions beyond 16 bits
    core(regime="b24_empty", T=0, H=4, Hk=1, D=64, R=64, P=50),
    deepseek(T=17, H=16, Hk=1, D=64, R=64, P=4096, table="yarn"),  # V2-Lite
    deepseek(T=5, H=128, Hk=1, D=64, R=64, P=4096, table="yarn"),  # V2, V3
    deepseek(T=5, H=128, Hk=1, D=64, R=64, P=163840, table="yarn", dtypes=BF16),  # as far as they reach
    deepseek(T=5, H=64, Hk=1, D=128, R=64, P=4096, table="yarn", interleaved=False),  # V3.2's indexer
    full(T=65537, H=1, Hk=1, D=16, R=16, P=65537, dtypes=BF16),
)
REGIMES = ("shifted", "halves", "b35_partial_rotary", "b35_partial_rotary_halves", "same_position", "nonfinite")

SPECS = (Spec("rope", rope, SHAPES, regimes=REGIMES, rows=("q", "k", "positions"), verdict=rotated),)
