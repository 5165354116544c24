"""Collectives that are right and go another way than native torch, and ones that give zeros. A plugin.

``reordered`` adds in x's own type in the order of falling ranks, as libraries may, and moves rows by way of every rank;
``wide`` adds in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import torch_hal as hal
from torch_hal.op import Op, declared

from .mutants.collectives import DEVICES, gathered, other, own_rank
from .signature import like_op


def _added(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return functools.reduce(torch.add, [part.to(dtype) for part in parts])


def all_reduce_reordered(x: Tensor, group: str) -> Tensor:
    return _added(gathered(x, group)[::-1], x.dtype)


def all_reduce_wide(x: Tensor, group: str) -> Tensor:
    return _added(gathered(x, group), torch.float64).to(x.dtype)


def reduce_scatter_reordered(x: Tensor, group: str) -> Tensor:
    parts = gathered(x, group)[::-1]
    return _added([part.chunk(len(parts))[own_rank(group)] for part in parts], x.dtype)


def reduce_scatter_wide(x: Tensor, group: str) -> Tensor:
    parts = gathered(x, group)
    return _added([part.chunk(len(parts))[own_rank(group)] for part in parts], torch.float64).to(x.dtype)


def all_gather_reordered(x: Tensor, group: str) -> Tensor:
    size = len(gathered(torch.zeros(1), group))
    raw = _bytes(x)
    sent = torch.cat([raw] * size)
    return _like(other("all_to_all")(sent, [len(x)] * size, [len(x)] * size, group), x)


def all_to_all_reordered(x: Tensor, come: list[int], sent: list[int], group: str) -> Tensor:
    raw, rank = _bytes(x), own_rank(group)
    runs = []
    for source, (rows, sizes) in enumerate(
        zip(_everyones(raw, group), gathered(torch.tensor(sent), group), strict=True)
    ):
        start = int(sizes[:rank].sum())
        runs.append(rows[start : start + come[source]])
    return _like(torch.cat(runs), x)


def _everyones(x: Tensor, group: str) -> list[Tensor]:
    """Every rank's rows, which may be of different number."""
    counts = [int(n) for n in gathered(torch.tensor(len(x)), group)]
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: len(x)] = x
    return [rows[:n] for rows, n in zip(gathered(padded, group), counts, strict=True)]


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.dtype) if x.element_size() == 1 else rows


def _mine(ids: Tensor, experts: list[int], rank: int) -> Tensor:
    """Ids as ``rank`` counts its experts, -1 where the expert is another's."""
    local = ids.long() - sum(experts[:rank])
    return torch.where((local >= 0) & (local < experts[rank]), local, -1).int()


def ep_counts_reordered(ids: Tensor, experts: list[int], group: str) -> Tensor:
    rank, everyone = own_rank(group), _everyones(ids, group)
    sent = [int((_mine(ids, experts, target) >= 0).any(-1).sum()) for target in range(len(experts))]
    come = [int((_mine(others, experts, rank) >= 0).any(-1).sum()) for others in everyone]
    return torch.tensor([sent, come], dtype=torch.int32)


def ep_dispatch_reordered(
    x: Tensor, ids: Tensor, weights: Tensor, experts: list[int], send: list[int], recv: list[int], group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Every rank gets everything and keeps what is its."""
    rank, runs = own_rank(group), []
    everything = zip(*(_everyones(part, group) for part in (_bytes(x), ids, weights)), recv, strict=True)
    for rows, their_ids, their_weights, size in everything:
        local = _mine(their_ids, experts, rank)
        kept = torch.nonzero((local >= 0).any(-1)).flatten()[:size]
        padding = size - len(kept)
        runs.append(
            (
                torch.cat([rows[kept], rows.new_zeros(padding, rows.shape[1])]),
                torch.cat([local[kept], local.new_full((padding, ids.shape[1]), -1)]),
                torch.cat([their_weights[kept] * (local[kept] >= 0), their_weights.new_zeros(padding, ids.shape[1])]),
            )
        )
    received, local, kept_weights = (torch.cat(parts) for parts in zip(*runs, strict=True))
    return _like(received, x), local, kept_weights


def ep_combine_added(
    dtype: torch.dtype, y: Tensor, ids: Tensor, experts: list[int], send: list[int], recv: list[int], group: str
) -> Tensor:
    runs = other("all_to_all")(y, send, recv, group).split(send)
    total = torch.zeros(len(ids), y.shape[1], dtype=dtype)
    for target in reversed(range(len(experts))):
        tokens = torch.nonzero((_mine(ids, experts, target) >= 0).any(-1)).flatten()[: send[target]]
        total[tokens] += runs[target][: len(tokens)].to(dtype)
    return total.to(y.dtype)


def _zeros(op: Op[..., Any], *args: Any) -> Any:
    results = op.run_fake(*args)
    return tree_map_only(Tensor, lambda y: torch.zeros_like(y, device="cpu"), results)


KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "reordered": {
        "all_reduce": all_reduce_reordered,
        "all_gather": all_gather_reordered,
        "reduce_scatter": reduce_scatter_reordered,
        "all_to_all": all_to_all_reordered,
        "ep_counts": ep_counts_reordered,
        "ep_dispatch": ep_dispatch_reordered,
        "ep_combine": functools.partial(ep_combine_added, torch.float32),
    },
    "wide": {
        "all_reduce": all_reduce_wide,
        "reduce_scatter": reduce_scatter_wide,
        "ep_combine": functools.partial(ep_combine_added, torch.float64),
    },
}


@hal.hookimpl
def torch_hal_kernels() -> Iterator[hal.Kernel]:
    for name, kernels in KERNELS.items():
        for op, function in kernels.items():
            yield hal.Kernel(op, name, run=like_op(declared()[op], function), traits=DEVICES)
    for op in KERNELS["reordered"]:
        zeros = functools.partial(_zeros, declared()[op])
        yield hal.Kernel(op, "null", run=like_op(declared()[op], zeros), traits=DEVICES)
