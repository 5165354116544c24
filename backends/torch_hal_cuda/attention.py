"""MLA decode with FlashMLA, as sgl_kernel ships it."""

from __future__ import annotations

import math

import sgl_kernel.flash_mla  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch
from torch import Tensor

LAYOUT = "flash_mla"  # a plan: the tile scheduler's rows, then for each sequence where its splits begin
_SCHEDULE = 8  # int32 numbers that FlashMLA's scheduler keeps for each partition of the multiprocessors

_plan = torch.ops.sgl_kernel.get_mla_decoding_metadata.default
_decode = torch.ops.sgl_kernel.dense_decode_fwd.default


def plan_mla_decode(
    seq_lens: Tensor, host_lens: list[int], num_heads: int, queries: int, page_size: int
) -> list[Tensor]:
    """One int32 tensor, made on the device from ``seq_lens``: nothing is read back, so it may be captured too."""
    batch = seq_lens.shape[0]
    if batch == 0 or num_heads == 0 or queries == 0:
        return [seq_lens.new_empty(0)]
    schedule, splits = _plan(seq_lens, queries * num_heads, 1, num_heads, False, None)
    return [torch.cat([schedule.view(-1), splits])]


def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Tensor | None = None,
    layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, latent = q_nope.shape
    if q_nope.numel() == 0 or page_table.shape[1] == 0 or cache.shape[0] == 0:
        lse = q_nope.new_full((batch, queries, heads), -math.inf, dtype=torch.float32)
        return torch.zeros_like(q_nope, memory_format=torch.contiguous_format), lse
    if plan is None or layout != LAYOUT:
        (plan,) = plan_mla_decode(seq_lens, [], heads, queries, cache.shape[1])
    schedule, splits = plan[: -batch - 1].view(-1, _SCHEDULE), plan[-batch - 1 :]
    q = torch.cat([q_nope, q_pe], -1)  # the kernel reads a query as one row, like the cache
    out, lse, _, _ = _decode(q, cache.unsqueeze(2), latent, seq_lens, page_table, scale, True, schedule, splits)
    # FlashMLA: [B, H, s], and +inf where nothing was attended to.
    lse = torch.nan_to_num(lse.transpose(1, 2), nan=math.nan, posinf=-math.inf, neginf=-math.inf)
    return out, lse.contiguous()
