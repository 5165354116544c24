"""How the attention references run: blocks of bounded memory, lengths left on the device, nothing read past them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..numerics import narrow, wide

BLOCK_ROWS = 256  # queries that the reference of mha_varlen takes at a time: scores then weigh what keys and values do
BLOCK_ELEMENTS = 1 << 26  # of a temporary of the reference of mla_decode, which takes fewer sequences at a time beyond

# (q [G, n, D], k [G, m, D], v [G, m, Dv], limits [G or 1, n], scale) -> ([G, n, Dv], [G, n]), all wide
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _softmax(q: Tensor, k: Tensor, limits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Probabilities [G, n, m] and lse [G, n] of each query over its first ``limits`` keys; without keys 0 and -inf."""
    hidden = torch.arange(k.shape[1], device=k.device) >= limits[..., None]
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).masked_fill(lse.isneginf()[..., None], 0), lse


def attend(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse of each query over its first ``limits`` keys."""
    p, lse = _softmax(q, k, limits, scale)
    return p @ v, lse


def attend_terms(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Absolute terms of out and lse: of the weighted sum, and what errors of the scores become behind a softmax.

    out: Σ p·|v| + Σ p·|v - out|·δ + |lse·out|; lse: Σ p·δ + |lse| + 1; δ = |scale|·Σ|q·k|, the terms of a score itself.
    |lse·out| is what a kernel loses that attends to keys in pieces and joins them by exp(lse_i - lse).
    """
    p, lse = _softmax(q, k, limits, scale)
    p_delta = (p * (q.abs() @ k.abs().mT) * abs(scale)).masked_fill(p == 0, 0)  # NaN in a query without keys stays out
    out = p @ v
    spread = torch.zeros_like(out)
    for i in range(q.shape[1]):  # a query at a time, since |v - out| has all four dimensions
        spread[:, i] = (p_delta[:, i, :, None] * (v - out[:, i, None]).abs()).sum(1)
    joined = (lse.masked_fill(lse.isinf(), 0)[..., None] * out).abs()
    return p @ v.abs() + spread + joined, p_delta.sum(-1) + lse.abs() + 1


def attend_intermediate(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2-norm of the products that probabilities enter, for kernels that round them, beside lse."""
    p, lse = _softmax(q, k, limits, scale)
    return (p.square() @ v.square()).sqrt(), lse


def attend_intermediate_rows(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_intermediate` for kernels that round rows besides: as values, and as keys, whose scores they move."""
    p, _ = _softmax(q, k, limits, scale)
    p_delta = (p * (q.square() @ k.square().mT).sqrt() * abs(scale)).masked_fill(p == 0, 0)
    out = p @ v
    moved = torch.zeros_like(out)
    for i in range(q.shape[1]):
        moved[:, i] = (p_delta[:, i, :, None] * (v - out[:, i, None])).square().sum(1)
    return (2 * p.square() @ v.square() + moved).sqrt(), p_delta.square().sum(-1).sqrt()


def exact_lse(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Intermediates of results of which lse has none."""
    return out, torch.zeros_like(lse)


def finite_terms(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of results in which an lse of -inf is exact."""
    return out, lse.masked_fill(lse.isinf(), 0)


def varlen(
    attend: Attend,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """``attend`` over packed sequences, in blocks of queries of one sequence against that sequence's own keys.

    How many blocks there can be follows from shapes alone, so lengths stay on the device; what surplus blocks
    compute is dropped. For one sequence there are no surplus blocks.
    """
    q, k, v, cu_q, cu_k = tensors
    (total_q, heads, _), (total_k, _, value_dim), sequences = q.shape, v.shape, cu_q.shape[0] - 1
    window = min(max_k, total_k)
    # One row more than asked for: it takes what is not kept. Rows that no sequence owns stay empty.
    out, lse = q.new_zeros(total_q + 1, heads, value_dim), wide(q).new_full((total_q + 1, heads), -torch.inf)
    if min(total_q, window, sequences) == 0:
        return out[:total_q], lse[:total_q]
    size = max(1, min(max_q, BLOCK_ROWS))
    blocks = (total_q + sequences * (size - 1)) // size
    rows, limits, first_key, num_keys = _blocks(cu_q.to(torch.int64), cu_k.to(torch.int64), blocks, size, causal)
    key = torch.arange(window, device=q.device)
    parts = []
    for i in range(blocks):
        index, absent = (first_key[i] + key).clamp(max=total_k - 1), (key >= num_keys[i])[:, None, None]
        k_i, v_i = (wide(x[index].masked_fill(absent, 0)).transpose(0, 1) for x in (k, v))
        q_i = wide(q[rows[i].clamp(max=total_q - 1)]).transpose(0, 1)
        out_i, lse_i = attend(q_i, k_i, v_i, limits[i, None], scale)
        parts.append((narrow(out_i, q).transpose(0, 1), lse_i.transpose(0, 1)))
    target = rows.flatten().clamp(max=total_q)
    outs, lses = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.index_copy(0, target, outs)[:total_q], lse.index_copy(0, target, lses)[:total_q]


def _blocks(cu_q: Tensor, cu_k: Tensor, blocks: int, size: int, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per block: its queries' rows in the pack [blocks, size], far beyond the pack where it has none; how many of
    their sequence's keys they see [blocks, size]; that sequence's first key [blocks] and number of keys [blocks].
    """
    len_q, len_k = cu_q.diff(), cu_k.diff()
    counts = (len_q + size - 1) // size
    ends = counts.cumsum(0)
    block = torch.arange(blocks, device=cu_q.device)
    sequence = torch.searchsorted(ends, block, right=True).clamp(max=len_q.shape[0] - 1)
    first = (block - (ends - counts)[sequence]) * size
    place = first[:, None] + torch.arange(size, device=cu_q.device)  # of a query in its sequence
    rows = (cu_q[sequence, None] + place).masked_fill(place >= len_q[sequence, None], torch.iinfo(torch.int64).max)
    num_keys = len_k[sequence]
    limits = num_keys[:, None].expand_as(place)
    if causal:  # the last query sees every key
        limits = torch.minimum(limits, (len_k - len_q)[sequence, None] + place + 1)
    return rows, limits, cu_k[sequence], num_keys


def paged(
    attend: Attend,
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    read: Callable[[Tensor], Tensor] = wide,
) -> tuple[Tensor, Tensor]:
    """``attend`` of q [B, s, H, L + R] over each sequence's pages, as many sequences at a time as memory allows.

    ``read`` gives what rows of the cache [n, m, W] mean, wide [n, m, L + R].
    """
    (batch, queries, heads, width), (pages, page_size, _) = q.shape, cache.shape
    keys = page_table.shape[1] * page_size
    if min(batch, queries, heads, keys, pages) == 0:
        return q.new_zeros(batch, queries, heads, value_dim), wide(q).new_full((batch, queries, heads), -torch.inf)
    table, lens = page_table.to(torch.int64).clamp(0, pages - 1), seq_lens.to(torch.int64)
    limits = lens[:, None] - queries + 1 + torch.arange(queries, device=q.device)
    limits = limits[:, :, None].expand(-1, -1, heads).flatten(1)
    absent = torch.arange(keys, device=q.device) >= lens[:, None]
    step = max(1, BLOCK_ELEMENTS // (keys * (width + queries * heads)))
    parts = []
    for i in range(0, batch, step):
        some = slice(i, i + step)
        kv = read(cache[table[some]].flatten(1, 2)).masked_fill(absent[some, :, None], 0)
        out, lse = attend(wide(q[some]).flatten(1, 2), kv, kv[..., :value_dim], limits[some], scale)
        parts.append((narrow(out, q), lse))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.view(batch, queries, heads, value_dim), lse.view(batch, queries, heads)
