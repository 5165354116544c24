"""Experts spread over the ranks of a process group: tokens go to the ranks that hold their experts, sums come back.

Rank r holds the ``experts_per_rank[r]`` experts that follow those of the ranks before it; it may hold none. A token
goes once to every rank that holds one of its experts. What one rank sends to another, in the order of its tokens, is a
run of rows whose length both know on their host: ``send_rows[r]`` to rank r, ``recv_rows[r]`` from it, rank a's
``send_rows[b]`` being rank b's ``recv_rows[a]``. Any sizes no smaller than the counts will do, the rest is padding:

- Capacities: all ranks agree on a number no smaller than any rank's tokens and take it for every run. Nothing waits
  for the device, so that a graph can be captured.
- Exact sizes: each rank reads `ep_counts` on its host, once a layer. No padding is sent.

Which row a token has follows from ``topk_ids`` and the sizes alone: `ep_combine` needs no handle from `ep_dispatch`,
any kernel's combine fits any kernel's dispatch, and a second dispatch (of fp8 codes' scales, say) has the same rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import FLOAT, INDEX
from ..contracts import Contracts
from ..errors import ArgumentError
from ..numerics import narrow, wide
from ..op import op
from ._moe import is_expert
from .collectives import all_to_all, group_size

_EMPTY = "Ranks without tokens, experts or received rows take part all the same."
_STRIDES = "Any strides: rows are packed to be sent."
_SENTINELS = "An id that is -1 or otherwise names no expert is nobody's: a token without any other is sent nowhere."
_CAPTURE = "No host sync: sizes are the host's. Capturable where the group's backend is (NCCL, RCCL, MCCL; not gloo)."
_SIZES = {
    "min([0, *experts_per_rank]) >= 0": "no number of experts is negative",
    "min([0, *send_rows, *recv_rows]) >= 0": "no size is negative",
}


@op(
    shapes={"topk_ids": "T K"},
    dtypes={"topk_ids": INDEX},
    where={"min([0, *experts_per_rank]) >= 0": "no number of experts is negative"},
    rounds=0,
    accumulates=None,
    contracts=Contracts(
        C1_empties=_EMPTY,
        C3_strides=_STRIDES,
        C7_sentinels=_SENTINELS,
        C9_rounding="Counts are exact.",
        C10_determinism="Exact.",
        C11_capture="No host sync by the op. To use the counts as sizes, the host must read them, which waits for the "
        "device and for the other ranks, once a layer: that is inherent in exact sizes, and cannot be captured.",
        C13_ids="topk_ids are int32 or int64; counts are int32.",
    ),
)
def ep_counts(topk_ids: Tensor, experts_per_rank: list[int], group: str) -> Tensor:
    """How many tokens go from this rank to each, and come to it from each: exact sizes for a dispatch.

    topk_ids: [T, K] int32/int64, global ids; T may differ between ranks; experts_per_rank: how many each rank holds;
    group: a process group's name. Returns int32 [2, ranks]: ``send_rows, recv_rows = ep_counts(...).tolist()``.
    ArgumentError if experts_per_rank does not name every rank, or the group is unknown.
    """
    _check_lists("ep_counts", group, experts_per_rank=experts_per_rank)
    sent = [(ids >= 0).any(-1).sum(dtype=torch.int32) for ids in _local_ids(topk_ids, experts_per_rank)]
    ones = [1] * len(sent)
    return torch.stack([torch.stack(sent), all_to_all.reference(torch.stack(sent), ones, ones, group)])


@op(
    shapes={"x": "T D", "topk_ids": "T K", "topk_weights": "T K"},
    dtypes={"topk_ids": INDEX, "topk_weights": torch.float32},
    where=_SIZES,
    rounds=0,
    accumulates=None,
    contracts=Contracts(
        C1_empties=_EMPTY,
        C3_strides=_STRIDES,
        C5_fp8_kind="Any: x's bytes are moved as they are; scales take a dispatch of their own.",
        C7_sentinels=f"{_SENTINELS} A received id is -1, with weight 0, where the expert is another rank's.",
        C8_unwritten_rows="Padding is written: x 0, ids -1, weights 0. A size below the count drops the run's last "
        "tokens, here and in `ep_combine` alike.",
        C9_rounding="None: bits are moved, of any dtype.",
        C10_determinism="Exact; rows come in the order of their ranks, and of the tokens there.",
        C11_capture=_CAPTURE,
        C13_ids="topk_ids are int32 or int64, global; received ids are int32, local.",
    ),
)
def ep_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts_per_rank: list[int],
    send_rows: list[int],
    recv_rows: list[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token, once, to every rank that holds one of its experts.

    x: [T, D] of any dtype, which is equal on all ranks, as D and K are; T may differ; topk_ids: [T, K] int32/int64,
    global ids; topk_weights: [T, K] float32; experts_per_rank, send_rows, recv_rows: a number for each rank, see above;
    group: a process group's name. Returns, N being sum(recv_rows), x [N, D]; ids int32 [N, K], local to this rank and
    -1 where another holds the expert; weights float32 [N, K], 0 there: what `fused_experts` takes.
    ArgumentError if a list does not name every rank, or the group is unknown; sizes that two ranks disagree on are
    undefined, and may hang. Semantics: DeepEP's dispatch, each source rank's rows padded to a known size.
    """
    _check_lists("ep_dispatch", group, experts_per_rank=experts_per_rank, send_rows=send_rows, recv_rows=recv_rows)
    top_k, sent_x, sent_routing = topk_ids.shape[1], [], []
    tokens = _with_row(_moved(x), 0)  # the row past the tokens is what padding sends
    weights = _with_row(topk_weights, 0)
    for local_ids, size in zip(_local_ids(topk_ids, experts_per_rank), send_rows, strict=True):
        token = _tokens(_rows(local_ids, size), size)
        ids = _with_row(local_ids, -1)[token].to(torch.int32)
        sent_x.append(tokens[token])
        sent_routing.append(torch.cat([ids, weights[token].masked_fill(ids < 0, 0).view(torch.int32)], -1))
    received = all_to_all.reference(torch.cat(sent_x), recv_rows, send_rows, group).view(x.dtype)
    routing = all_to_all.reference(torch.cat(sent_routing), recv_rows, send_rows, group)
    return received, routing[:, :top_k].contiguous(), routing[:, top_k:].contiguous().view(torch.float32)


@op(
    shapes={"y": "N D", "topk_ids": "T K"},
    free=("N", "T"),
    dtypes={"y": FLOAT, "topk_ids": INDEX},
    where={**_SIZES, "sum(recv_rows) == N": "recv_rows sum to y's rows"},
    reduces="len(experts_per_rank)",
    contracts=Contracts(
        C1_empties=_EMPTY,
        C3_strides=_STRIDES,
        C7_sentinels=f"{_SENTINELS} It gets zeros.",
        C8_unwritten_rows="Every token is written: with zeros if no rank had it. Padding rows of y may hold anything.",
        C9_rounding="Ranks' rows are added in float32, in the order of ranks, and rounded once; what computed y has "
        "rounded each of them before.",
        C10_determinism="The order of the sum is fixed: equal inputs give equal bits.",
        C11_capture=_CAPTURE,
        C13_ids="topk_ids are int32 or int64, global, those of the dispatch.",
    ),
)
def ep_combine(
    y: Tensor, topk_ids: Tensor, experts_per_rank: list[int], send_rows: list[int], recv_rows: list[int], group: str
) -> Tensor:
    """Bring what ranks made of dispatched tokens back to them, and add it up: an unweighted sum over ranks.

    y: [N, D] bf16/f16/f32, a row for each that `ep_dispatch` received, as `fused_experts` gives them, weighted;
    topk_ids, experts_per_rank, send_rows, recv_rows, group: those of the dispatch. Returns [T, D] of y's dtype.
    ArgumentError if a list does not name every rank, or the group is unknown. Semantics: DeepEP's combine.
    """
    _check_lists("ep_combine", group, experts_per_rank=experts_per_rank, send_rows=send_rows, recv_rows=recv_rows)
    runs = torch.split(all_to_all.reference(y, send_rows, recv_rows, group), send_rows)
    total = wide(y.new_zeros(topk_ids.shape[0], y.shape[1]))
    for local_ids, run, size in zip(_local_ids(topk_ids, experts_per_rank), runs, send_rows, strict=True):
        total = total + wide(_with_row(run, 0)[_rows(local_ids, size)])
    return narrow(total, y)


def _check_lists(op_name: str, group: str, **lists: list[int]) -> None:
    """ArgumentError unless each list has a number for each rank of the group."""
    size = group_size(group, op_name)
    for name, numbers in lists.items():
        if len(numbers) != size:
            raise ArgumentError(
                f"{op_name}: argument '{name}': expected {size} numbers, one for each rank of group '{group}', "
                f"got {numbers}; list every rank, zeros included"
            )


def _local_ids(topk_ids: Tensor, experts_per_rank: list[int]) -> list[Tensor]:
    """For each rank, the ids [T, K] int64 as it counts its own experts, -1 where the expert is another's."""
    first, result = 0, []
    for experts in experts_per_rank:
        ids = topk_ids.to(torch.int64) - first
        result.append(torch.where(is_expert(ids, experts), ids, -1))
        first += experts
    return result


def _rows(local_ids: Tensor, size: int) -> Tensor:
    """The row [T] that each token has in the run to a rank, ``size`` where it is not sent."""
    wanted = (local_ids >= 0).any(-1)
    row = wanted.cumsum(0) - 1
    return torch.where(wanted & (row < size), row, size)


def _tokens(rows: Tensor, size: int) -> Tensor:
    """The token in each row [size] of a run, T where the row is padding."""
    count = rows.shape[0]
    return rows.new_full((size + 1,), count).scatter(0, rows, torch.arange(count, device=rows.device))[:size]


def _with_row(x: Tensor, value: int) -> Tensor:
    """``x`` and, past its rows, one more that holds ``value``."""
    return torch.cat([x, x.new_full((1, x.shape[1]), value)])


def _moved(x: Tensor) -> Tensor:
    """``x`` as bytes if it is of an 8-bit type: not every device indexes and concatenates 8-bit floats."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
