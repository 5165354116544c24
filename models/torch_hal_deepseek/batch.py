"""What one step of the model needs to know beside token ids: computed once, read by every layer.

Built on the host from sequences' lengths and pages; nothing here reads a device tensor back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hal import OpSet

from .cache import KVCache, Sequence, check_distinct

PREFIX_CHUNK = 8192  # cached tokens that are expanded to full keys and values at a time


@dataclass(frozen=True)
class PrefixChunk:
    """A stretch of what is cached before the new tokens. cu_k: [B + 1] int32, each sequence's part of ``slots``."""

    slots: Tensor
    cu_k: Tensor
    max_k: int


@dataclass(frozen=True)
class Prefill:
    """New tokens of several sequences, packed one after the other: cu_q[b] ≤ i < cu_q[b + 1] are sequence b's."""

    positions: Tensor  # [T]
    slots: Tensor  # [T] where they go in the cache
    cu_q: Tensor  # [B + 1] int32
    max_q: int
    last: Tensor  # [B] row of each sequence's last token
    prefix: tuple[PrefixChunk, ...]
    capacity: int  # see `plan_prefill`


@dataclass(frozen=True)
class Decode:
    """The ``queries`` newest tokens of each sequence, row b·queries + i is sequence b's i-th."""

    positions: Tensor  # [B·S]
    slots: Tensor  # [B·S]
    page_table: Tensor  # [B, pages of the longest] int32
    seq_lens: Tensor  # [B] int32, new tokens included
    queries: int
    plan: Tensor
    plan_layout: str
    capacity: int  # see `plan_prefill`


def plan_prefill(
    cache: KVCache,
    sequences: ListLike[Sequence],
    counts: ListLike[int],
    prefix_chunk: int = PREFIX_CHUNK,
    capacity: int | None = None,
) -> Prefill:
    """A step in which sequence b, with what it has cached, gets counts[b] new tokens, for which room is reserved.

    capacity: where ranks have tokens of their own (`Parallel.own_tokens`), a number that all agree on, at least as
    large as any rank's tokens in this step, such as `DeepSeek.agree_capacity` finds; None: this rank's, if all have
    equally many.
    """
    check_distinct(sequences)
    device = cache.pool.device
    cu_q = [0, *itertools.accumulate(counts)]
    spans = [(s, s.length, s.length + n) for s, n in zip(sequences, counts, strict=True)]
    return Prefill(
        positions=_cat([torch.arange(begin, end) for _, begin, end in spans]).to(device),
        slots=_cat([cache.slots(*span) for span in spans]).to(device),
        cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device),
        max_q=max(counts, default=0),
        last=(torch.tensor(cu_q[1:], dtype=torch.int64) - 1).to(device),
        prefix=tuple(_prefix_chunks(cache, sequences, prefix_chunk)),
        capacity=_capacity(cu_q[-1], capacity),
    )


def _prefix_chunks(cache: KVCache, sequences: ListLike[Sequence], size: int) -> list[PrefixChunk]:
    """All cached prefixes end to end, cut every ``size`` tokens; a sequence outside a chunk has no keys in it."""
    slots = _cat([cache.slots(s, 0, s.length) for s in sequences])
    cu = torch.tensor([0, *itertools.accumulate(s.length for s in sequences)], dtype=torch.int32)
    chunks = []
    for begin in range(0, slots.shape[0], size):
        cu_k = cu.clamp(begin, begin + size) - begin
        part = slots[begin : begin + size].to(cache.pool.device)
        chunks.append(PrefixChunk(part, cu_k.to(cache.pool.device), int(cu_k.diff().max())))
    return chunks


def plan_decode(
    ops: OpSet,
    cache: KVCache,
    sequences: ListLike[Sequence],
    queries: int,
    num_heads: int,
    capacity: int | None = None,
) -> Decode:
    """A step in which every sequence gets ``queries`` new tokens, for which room is reserved.

    num_heads: this rank's, `DeepSeek.heads`; capacity: as in `plan_prefill`.
    """
    check_distinct(sequences)
    device = cache.pool.device
    lens = [s.length + queries for s in sequences]
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    page_table = torch.zeros(len(lens), max((len(s.pages) for s in sequences), default=0), dtype=torch.int32)
    for row, sequence in zip(page_table, sequences, strict=True):
        row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
    (plan,), layout = ops.mla_decode.plan(seq_lens, lens, num_heads, queries, cache.page_size)
    return Decode(
        positions=_cat([torch.arange(n - queries, n) for n in lens]).to(device),
        slots=_cat([cache.slots(s, n - queries, n) for s, n in zip(sequences, lens, strict=True)]).to(device),
        page_table=page_table.to(device),
        seq_lens=seq_lens,
        queries=queries,
        plan=plan,
        plan_layout=layout,
        capacity=_capacity(queries * len(lens), capacity),
    )


def _capacity(tokens: int, capacity: int | None) -> int:
    if capacity is not None and capacity < tokens:
        raise ValueError(f"capacity: expected a number ≥ {tokens}, the tokens of this rank, got {capacity}")
    return tokens if capacity is None else capacity


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
