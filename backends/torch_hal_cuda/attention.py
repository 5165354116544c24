"""MLA decode with FlashMLA, as sgl_kernel ships it."""

from __future__ import annotations

import math

import sgl_kernel.flash_mla  # noqa: F401  (registers torch.ops.sgl_kernel)
import torch
from torch import Tensor

from .alignment import check_aligned

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
    with torch.cuda.device(seq_lens.device):
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
    check_aligned(cache=cache, plan=plan)
    schedule, splits = plan[: -batch - 1].view(-1, _SCHEDULE), plan[-batch - 1 :]
    q = _joined(q_nope, q_pe)
    out, lse, _, _ = _decode(q, cache.unsqueeze(2), latent, seq_lens, page_table, scale, True, schedule, splits)
    # FlashMLA: [B, H, s], and +inf where nothing was attended to.
    lse = torch.nan_to_num(lse.transpose(1, 2), nan=math.nan, posinf=-math.inf, neginf=-math.inf)
    return out, lse.contiguous()


def _joined(q_nope: Tensor, q_pe: Tensor) -> Tensor:
    """Queries as the rows that the kernel reads: a view where the parts are neighbours in memory, else a copy."""
    *_, latent = q_nope.shape
    neighbours = (
        q_pe.data_ptr() == q_nope.data_ptr() + latent * q_nope.element_size()
        and q_nope.stride() == q_pe.stride()
        and q_nope.stride(-2) >= latent + q_pe.shape[-1]
        and q_nope.stride(-1) == 1
        and all(step % 8 == 0 for step in q_nope.stride()[:-1])
        and q_nope.data_ptr() % 16 == 0
    )
    if neighbours:
        return q_nope.as_strided((*q_nope.shape[:-1], latent + q_pe.shape[-1]), q_nope.stride())
    return torch.cat([q_nope, q_pe], -1)
