"""What each rank of a group should get, from every rank's arguments, in one process and without a process group.

Written from the contracts' formulas, in float64 where anything is added, with loops over ranks and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .oracle import Exact

Arguments = Sequence[dict[str, Any]]  # one call, as each rank makes it


@dataclass(frozen=True)
class Expected:
    """One rank's results: exact, and in the arguments' own types."""

    exact: Exact
    native: list[Any]


def expected(op: str, ranks: Arguments) -> list[Expected]:
    """Each rank's results."""
    return DEFINITIONS[op](ranks)


def _copies(*results: Tensor) -> Expected:
    """Results that are moved bit for bit, or counted."""
    return Expected(Exact(list(results), [], [None] * len(results), 1), list(results))


def _sum(parts: list[Tensor], narrow: bool) -> Expected:
    """One result, the sum of a part of each rank; ``narrow``: the sum may be rounded to its type at every addition."""
    wide = torch.stack([part.double() for part in parts])
    total, terms = wide.sum(0), wide.abs().sum(0)
    native = parts[0].float()
    for part in parts[1:]:
        native = native + part.float()
    middle = _partial_sums(wide, total) if narrow and len(parts) > 2 else None
    return Expected(Exact([total], [terms], [middle], len(parts)), [native.to(parts[0].dtype)])


def _partial_sums(wide: Tensor, total: Tensor) -> Tensor:
    """√2 times the 2-norm of the sums of 2, 3, … but not of all addends, in the mean over the orders of adding them.

    R takes the error of rounding x for u·x/√6, its mean over all x. Like addends have sums that are alike as well: if
    all lie at the start of a binade, it is √2 times that.
    """
    n, own = len(wide), wide.square().sum(0)
    mixed = total.square() - own
    squares = [own * (k / n) + mixed * (k * (k - 1) / (n * (n - 1))) for k in range(2, n)]
    result: Tensor = (2 * torch.stack(squares).sum(0)).clamp(min=0).sqrt()
    return result


def _all_reduce(ranks: Arguments) -> list[Expected]:
    return [_sum([rank["x"] for rank in ranks], narrow=True)] * len(ranks)


def _reduce_scatter(ranks: Arguments) -> list[Expected]:
    n = ranks[0]["x"].shape[0] // len(ranks)
    return [_sum([rank["x"][i * n : (i + 1) * n] for rank in ranks], narrow=True) for i in range(len(ranks))]


def _all_gather(ranks: Arguments) -> list[Expected]:
    return [_copies(_joined([rank["x"] for rank in ranks]))] * len(ranks)


def _all_to_all(ranks: Arguments) -> list[Expected]:
    results = []
    for target in range(len(ranks)):
        runs = []
        for rank in ranks:
            start = sum(rank["input_sizes"][:target])
            runs.append(rank["x"][start : start + rank["input_sizes"][target]])
        results.append(_copies(_joined(runs)))
    return results


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows of any type, one part after the other: by their bytes, as torch joins not every 8-bit float."""
    if parts[0].element_size() == 1:
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(parts).contiguous()


def _local(rank: dict[str, Any], target: int) -> list[tuple[int, list[int]]]:
    """A rank's tokens that have an expert on ``target``, in order, with their ids as that one counts its experts."""
    experts = rank["experts_per_rank"]
    first, result = sum(experts[:target]), []
    for token, ids in enumerate(rank["topk_ids"].tolist()):
        local = [i - first if first <= i < first + experts[target] else -1 for i in ids]
        if max(local, default=-1) >= 0:
            result.append((token, local))
    return result


def _ep_counts(ranks: Arguments) -> list[Expected]:
    n = range(len(ranks))
    counts = [[len(_local(rank, target)) for target in n] for rank in ranks]
    return [_copies(torch.tensor([counts[i], [row[i] for row in counts]], dtype=torch.int32)) for i in n]


def _ep_dispatch(ranks: Arguments) -> list[Expected]:
    results = []
    for target in range(len(ranks)):
        runs = [_sent(rank, target) for rank in ranks]
        results.append(_copies(*(_joined(list(parts)) for parts in zip(*runs, strict=True))))
    return results


def _sent(rank: dict[str, Any], target: int) -> tuple[Tensor, Tensor, Tensor]:
    """The run of rows that one rank sends to another: x, ids and weights."""
    x, weights, size = rank["x"], rank["topk_weights"], rank["send_rows"][target]
    top_k = weights.shape[1]
    raw = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x
    rows = torch.zeros(size, x.shape[1], dtype=raw.dtype)
    ids = torch.full((size, top_k), -1, dtype=torch.int32)
    kept = torch.zeros(size, top_k)
    for row, (token, local) in enumerate(_local(rank, target)[:size]):
        rows[row] = raw[token]
        for k, i in enumerate(local):
            if i >= 0:
                ids[row, k], kept[row, k] = i, weights[token, k]
    return rows.view(x.dtype), ids, kept


def _ep_combine(ranks: Arguments) -> list[Expected]:
    results = []
    for source, rank in enumerate(ranks):
        parts = []
        for target, other in enumerate(ranks):
            part = torch.zeros(len(rank["topk_ids"]), other["y"].shape[1], dtype=other["y"].dtype)
            start, size = sum(other["recv_rows"][:source]), other["recv_rows"][source]
            for row, (token, _) in enumerate(_local(rank, target)[:size]):
                part[token] = other["y"][start + row]
            parts.append(part)
        results.append(_sum(parts, narrow=False))
    return results


DEFINITIONS: dict[str, Callable[[Arguments], list[Expected]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ep_counts": _ep_counts,
    "ep_dispatch": _ep_dispatch,
    "ep_combine": _ep_combine,
}
