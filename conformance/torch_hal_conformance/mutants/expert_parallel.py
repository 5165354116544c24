"""Wrong exchanges between the ranks that hold experts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import edit, kernel
from .collectives import DEVICES, Reference, own_rank

PAIR, FOUR = "core/ranks2-M17-D64-E4-K3", "core/ranks4-M17-D64-E4-K3"
COUNTS, COUNTS4 = "core/ranks2-M17-E4-K3", "core/ranks4-M17-E4-K3"
UNIT = f"{PAIR}/float32/contiguous/unit/0"
UNIT4 = f"{FOUR}/bfloat16/contiguous/unit/0"
DEAD = "bfloat16/contiguous/dead_rank/0"


@kernel(
    "ep_counts",
    "received_is_sent",
    "takes for granted that as many come as go",
    f"{COUNTS4}/int64/contiguous/unit/0",
    "copy",
)
def received_is_sent(reference: Reference, ids: Tensor, experts: list[int], group: str) -> Tensor:
    sent: Tensor = reference(ids, experts, group)[0]
    return torch.stack([sent, sent])


@kernel("ep_counts", "counts_in_int64", "int64 instead of int32", f"{COUNTS}/int64/contiguous/unit/0", "dtype")
def counts_in_int64(reference: Reference, ids: Tensor, experts: list[int], group: str) -> Tensor:
    return reference(ids, experts, group).long()  # type: ignore[no-any-return]


@kernel(
    "ep_counts",
    "clamps_ids",
    "an id that names no expert goes to the first or the last",
    f"{COUNTS}/int64/contiguous/sentinels/0",
    "copy",
)
def clamps_ids(reference: Reference, ids: Tensor, experts: list[int], group: str) -> Tensor:
    return reference(ids.clamp(0, sum(experts) - 1), experts, group)  # type: ignore[no-any-return]


@kernel(
    "ep_counts",
    "even_experts",
    "every rank is taken to hold as many experts as the first",
    f"{COUNTS4}-uneven-uneven/int64/contiguous/unit/0",
    "copy",
)
def even_experts(reference: Reference, ids: Tensor, experts: list[int], group: str) -> Tensor:
    return reference(ids, [experts[0]] * len(experts), group)  # type: ignore[no-any-return]


@kernel(
    "ep_counts",
    "ignores_the_dead",
    "counts what it can when the others cannot be reached",
    f"{COUNTS}/int64/contiguous/dead_rank/0",
    "fault",
    traits=DEVICES,
)
def ignores_the_dead(reference: Reference, ids: Tensor, experts: list[int], group: str) -> Tensor:
    try:
        return reference(ids, experts, group)  # type: ignore[no-any-return]
    except RuntimeError:
        return torch.zeros(2, len(experts), dtype=torch.int32)


@kernel(
    "ep_dispatch",
    "clamps_ids",
    "an id that names no expert goes to the first or the last",
    f"{PAIR}/bfloat16/contiguous/sentinels/0",
    "copy",
)
def clamps_sent_ids(
    reference: Reference,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: list[int],
    send: list[int],
    recv: list[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference(x, ids.clamp(0, sum(experts) - 1), weights, experts, send, recv, group)  # type: ignore[no-any-return]


@kernel("ep_dispatch", "global_ids", "received ids are not counted from the rank's first expert", UNIT, "copy")
def global_ids(
    reference: Reference,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: list[int],
    send: list[int],
    recv: list[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, local, kept = reference(x, ids, weights, experts, send, recv, group)
    return rows, torch.where(local < 0, -1, local + sum(experts[: own_rank(group)])), kept


@kernel(
    "ep_dispatch", "unwritten_padding", "padding rows are left as they were allocated", UNIT, "copy", traits=frozenset()
)
def unwritten_padding(
    reference: Reference,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: list[int],
    send: list[int],
    recv: list[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, local, kept = reference(x, ids, weights, experts, send, recv, group)
    return torch.where((local >= 0).any(-1, keepdim=True), rows, torch.empty_like(rows)), local, kept


@kernel("ep_combine", "means", "divided by the number of ranks", UNIT)
def means(
    reference: Reference, y: Tensor, ids: Tensor, experts: list[int], send: list[int], recv: list[int], group: str
) -> Tensor:
    return reference(y, ids, experts, send, recv, group) / len(experts)  # type: ignore[no-any-return]


_SENT = "weights[token].masked_fill(ids < 0, 0)"
EDITS = (
    edit(
        "ep_counts",
        "counts_assignments",
        "an assignment counts, not a token",
        ".any(-1).sum(dtype",
        ".sum(dtype",
        f"{COUNTS}/int64/contiguous/unit/0",
        "copy",
    ),
    edit(
        "ep_dispatch", "foreign_weights", "weights of others' experts come along", _SENT, "weights[token]", UNIT, "copy"
    ),
    edit(
        "ep_dispatch",
        "through_bfloat16",
        "x travels as bfloat16",
        "torch.cat(sent_x)",
        "torch.cat(sent_x).to(torch.bfloat16).to(x.dtype)",
        UNIT,
        "copy",
    ),
    edit(
        "ep_dispatch",
        "first_token_lost",
        "a run begins with the second token that belongs there",
        "row = wanted.cumsum(0) - 1",
        "row = wanted.cumsum(0) - 2\n    row = torch.where(row < 0, size, row)",
        UNIT,
        "copy",
    ),
    edit(
        "ep_dispatch",
        "keeps_the_last",
        "a run too small drops the first tokens instead of the last",
        "row = wanted.cumsum(0) - 1",
        "row = wanted.cumsum(0) - 1 - (wanted.sum() - size).clamp(min=0)\n    row = torch.where(row < 0, size, row)",
        f"{PAIR}-small/bfloat16/contiguous/unit/0",
        "copy",
    ),
    edit(
        "ep_combine",
        "sums_in_bfloat16",
        "added in bfloat16 whatever y is",
        "total = total + wide(_with_row(run, 0)[_rows(local_ids, size)])",
        "total = (total + wide(_with_row(run, 0)[_rows(local_ids, size)])).to(torch.bfloat16).float()",
        UNIT4,
    ),
    edit(
        "ep_combine",
        "sums_in_its_type",
        "partial sums overflow float16",
        "total = total + wide(_with_row(run, 0)[_rows(local_ids, size)])",
        "total = wide(narrow(total + wide(_with_row(run, 0)[_rows(local_ids, size)]), y))",
        "core/ranks4-M17-D64-E4-K8/float16/contiguous/overflow/0",
        "nonfinite",
    ),
    edit(
        "ep_combine",
        "next_row",
        "each token gets the row after its own",
        "_with_row(run, 0)[_rows(local_ids, size)]",
        "_with_row(run, 0)[(_rows(local_ids, size) + 1).clamp(max=size)]",
        f"{PAIR}-exact/bfloat16/contiguous/unit/0",
    ),
    edit(
        "ep_combine",
        "adds_padding",
        "tokens that a rank had not get its padding",
        "torch.where(wanted & (row < size), row, size)",
        "torch.where(wanted & (row < size), row, size - 1)",
        UNIT,
        "nonfinite",
    ),
    edit(
        "ep_combine",
        "first_rank_only",
        "the other ranks' rows are forgotten",
        "total = total + wide(",
        "total = total if run is not runs[0] else total + wide(",
        UNIT,
    ),
)
