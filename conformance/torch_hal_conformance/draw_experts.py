"""Where tokens go: ids of experts, the runs of rows that they are sorted into, and what nobody reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .draw import Draw

INDEX = {"int32": torch.int32, "int64": torch.int64}
ID_REGIMES = ("b32_sentinels", "one_expert", "nobody", "repeats")


def strangers(experts: int, dtype: torch.dtype) -> Tensor:
    """Numbers that are no expert's: counted from the end, wrapped around or cut to 32 bits some would be one."""
    info = torch.iinfo(dtype)
    wide = [2**32, -(2**32)] if info.bits == 64 else []
    return torch.tensor([-1, experts, -experts, experts + 1, -2, info.max, info.min, *wide], dtype=dtype)


def expert_ids(draw: Draw, tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> Tensor:
    """ids [tokens, top_k], a token's all different if they can be; some are -1, one token's are all -1.

    Nobody asks for the last but one of three or more experts.
    """
    if experts == 0 or draw.regime == "nobody":
        return torch.full((tokens, top_k), -1, dtype=dtype)
    order = draw.uniform(0, 1, tokens, max(experts, top_k))
    if draw.regime == "repeats":
        order[:, experts // 2 :] += 1
    if experts >= 3:
        order[:, experts - 2] = math.inf
    ids = order.argsort(-1)[:, :top_k].to(dtype) % experts
    if draw.regime == "repeats":
        ids[::2, 1:] = ids[::2, :1]
    if draw.regime == "one_expert":
        ids[:, 0], ids[:, 1:] = draw.integers(0, experts, 1), -1
    outside = strangers(experts, dtype)[: None if draw.regime == "b32_sentinels" else 1]
    ids = torch.where(
        draw.uniform(0, 1, tokens, top_k) < 0.2, outside[draw.integers(0, len(outside), tokens, top_k)], ids
    )
    if tokens > 2:
        ids[2] = -1
    return ids


def hide_strangers(values: Tensor, ids: Tensor, experts: int, value: float = math.nan) -> Tensor:
    """``values`` like ids, NaN beside what is no expert's id."""
    return values.masked_fill((ids < 0) | (ids >= experts), value)


def hide_unchosen(weight: Tensor, ids: Tensor) -> Tensor:
    """``weight`` [E, …] with NaN for the experts whom nobody asks for."""
    chosen = torch.isin(torch.arange(weight.shape[0]), ids.flatten())
    raw, nan = (weight.view(torch.uint8), _nan_byte(weight)) if weight.element_size() == 1 else (weight, math.nan)
    raw[~chosen] = nan
    return weight


def _nan_byte(codes: Tensor) -> int:
    return 0x80 if codes.dtype == torch.float8_e4m3fnuz else 0x7F


def runs(draw: Draw, experts: int, count: int, alignment: int) -> Tensor:
    """m_indices [count · alignment]: full, partly filled and unused runs of alignment rows, by expert.

    Ascending as they come from sorted tokens, in no order in regime "unsorted"; not every expert has one.
    """
    owners = draw.integers(0, max(experts, 1), count)
    owners = owners.sort().values
    if draw.regime == "unsorted":
        owners[0], owners[1:2] = max(experts - 1, 0), 0
    filled = draw.integers(1, alignment + 1, count)
    filled[::3] = alignment
    if count >= 3:
        filled[-1] = 0
        filled[1] = 1
    if draw.regime == "unsorted" and count >= 4:
        filled[2] = 0
    if draw.regime == "nobody":
        filled[:] = 0
    padding = torch.full((count, alignment), -1, dtype=torch.int32)
    if draw.regime == "b32_sentinels":
        padding = -torch.tensor([1, 2, 128, 2**31], dtype=torch.int64)[draw.integers(0, 4, count, alignment)].int()
    return torch.where(torch.arange(alignment) < filled[:, None], owners[:, None], padding).flatten()


def fills(draw: Draw, experts: int, rows: int) -> Tensor:
    """masked_m [experts]: none, one, some and all rows in use."""
    found = draw.integers(0, rows + 1, experts)
    special: Sequence[int] = (rows // 2, 0, rows, min(1, rows))
    found[: len(special)] = torch.tensor(special, dtype=torch.int32)[:experts]
    if draw.regime == "nobody":
        found[:] = 0
    if draw.regime == "full":
        found[:] = rows
    return found
