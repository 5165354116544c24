"""Experts spread over ranks: ``arguments`` gives those of every rank, as in `collectives`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import FLOATS, Shape, Spec, core, deepseek, full
from .collectives import BYTES, NARROW, RANKS, common, payload

NO_EXPERT = (-1, -7, 1 << 30)  # and one past the last
CAPACITY = 3  # rows beyond the tokens of the rank that has most


@dataclass(frozen=True)
class Layer:
    """What all ranks agree on, and each one's ids."""

    experts: list[int]
    topk_ids: list[Tensor]
    sizes: list[list[int]]  # rows from one rank (outer) to another (inner)
    counts: list[list[int]]  # how many of them are tokens

    def lists(self, rank: int) -> dict[str, Any]:
        received = [row[rank] for row in self.sizes]
        return {"experts_per_rank": self.experts, "send_rows": self.sizes[rank], "recv_rows": received}


def layer(
    draw: Draw, index: torch.dtype, ranks: int, M: int, E: int, K: int, experts: str, tokens: str, sizes: str
) -> Layer:
    """``E`` experts a rank: "even"; "uneven"; "bare", rank 1 having none. ``M`` tokens a rank: "even"; "uneven";
    "idle", rank 0 having none; "drawn", a few more or less. ``sizes``: "exact"; "capacity"; "small", about half.
    """
    held = [{"even": E, "uneven": E + 2 - rank, "bare": 0 if rank == 1 else E}[experts] for rank in range(ranks)]
    drawn = draw.integers(M - 8, M + 9, ranks).tolist() if tokens == "drawn" else [M] * ranks
    have = [{"uneven": M + 5 * rank, "idle": 0 if rank == 0 else M}.get(tokens, drawn[rank]) for rank in range(ranks)]
    ids = [_ids(draw, held, count, K).to(index) for count in have]
    counts = [[_wanting(x, held, target) for target in range(ranks)] for x in ids]
    if sizes == "capacity":
        rows = [[max(have) + CAPACITY] * ranks] * ranks
    else:
        rows = [[n if sizes == "exact" else n // 2 for n in row] for row in counts]
    return Layer(held, ids, rows, counts)


def _ids(draw: Draw, held: list[int], count: int, K: int) -> Tensor:
    total = held[0] if draw.regime == "hot" else sum(held)  # "hot": the first rank's experts alone
    ids = torch.rand(count, total, generator=draw.generator).argsort(-1)[:, :K]
    if draw.regime == "sentinels" and count:
        ids[1::4, 0], ids[2::4, -1], ids[3::4] = NO_EXPERT[0], NO_EXPERT[2], NO_EXPERT[1]
        ids[5::8] = sum(held)
    return ids


def _wanting(ids: Tensor, held: list[int], target: int) -> int:
    first = sum(held[:target])
    return int(((ids >= first) & (ids < first + held[target])).any(-1).sum())


def ep_counts(
    draw: Draw, ranks: int, M: int, E: int, K: int, experts: str = "even", tokens: str = "even", layout: str = ""
) -> dict[str, Any]:
    made = layer(draw, draw.dtype, ranks, M, E, K, experts, tokens, "exact")
    return {"ranks": [{"topk_ids": ids, "experts_per_rank": made.experts} for ids in made.topk_ids]}


def ep_dispatch(
    draw: Draw,
    ranks: int,
    M: int,
    D: int,
    E: int,
    K: int,
    experts: str = "even",
    tokens: str = "even",
    sizes: str = "capacity",
    index: str = "int64",
    layout: str = "",
) -> dict[str, Any]:
    made = layer(draw, getattr(torch, index), ranks, M, E, K, experts, tokens, sizes)
    return {
        "ranks": [
            {
                "x": payload(draw, len(ids), D),
                "topk_ids": ids,
                "topk_weights": draw.uniform(0.1, 1.0, len(ids), K),
                **made.lists(rank),
            }
            for rank, ids in enumerate(made.topk_ids)
        ]
    }


def ep_combine(
    draw: Draw,
    ranks: int,
    M: int,
    D: int,
    E: int,
    K: int,
    experts: str = "even",
    tokens: str = "even",
    sizes: str = "capacity",
    index: str = "int64",
    layout: str = "",
) -> dict[str, Any]:
    """Padding rows of y are NaN."""
    made = layer(draw, getattr(torch, index), ranks, M, E, K, experts, tokens, sizes)
    arguments = []
    for rank, ids in enumerate(made.topk_ids):
        runs = []
        for source in range(ranks):
            run = _made(draw, rank, made.sizes[source][rank], D)
            run[made.counts[source][rank] :] = torch.nan
            runs.append(run)
        arguments.append({"y": torch.cat(runs), "topk_ids": ids, **made.lists(rank)})
    return {"ranks": arguments}


def _made(draw: Draw, rank: int, rows: int, D: int) -> Tensor:
    """A run of y. In the regime "overflow", two ranks' rows overflow float16 before the other two's bring them back."""
    if draw.regime == "overflow":
        return draw.normal(rows, D, scale=100.0, shift=50000.0 if rank < 2 else -49000.0)
    return draw.values(rows, D)


def _kinds(dtypes: tuple[str, ...], **dims: Any) -> tuple[Shape, ...]:
    """Who has experts, and who has tokens."""
    one: dict[str, Any] = {**dims, "M": 1}
    return (
        *(core(dtypes=dtypes, ranks=ranks, **dims, experts="uneven", tokens="uneven") for ranks in RANKS),
        *(core(dtypes=dtypes, ranks=ranks, **dims, tokens="idle") for ranks in RANKS),
        *(core("sentinels", dtypes, ranks=ranks, **dims) for ranks in RANKS),
        *(core("b24_empty", dtypes, ranks=ranks, **{**dims, "M": 0}) for ranks in RANKS),
        core(dtypes=dtypes, ranks=4, **dims, experts="bare"),
        core(dtypes=dtypes, ranks=4, **{**one, "K": 1}),
    )


BASE: dict[str, Any] = {"M": 17, "D": 64, "E": 4, "K": 3}
ROUTED = (
    core(ranks=2, **BASE),
    core(ranks=4, **BASE),
    *_kinds(NARROW, **BASE),
    *(core("hot", NARROW, ranks=ranks, **BASE) for ranks in RANKS),
    *(core(dtypes=NARROW, ranks=ranks, **BASE, sizes=sizes) for sizes in ("exact", "small") for ranks in RANKS),
    core(dtypes=NARROW, ranks=2, **BASE, experts="bare", tokens="idle", sizes="exact"),
    core("sentinels", NARROW, ranks=4, **BASE, tokens="uneven", sizes="exact", index="int32"),
    core("chunks", NARROW, ranks=2, M=129, D=1025, E=4, K=3),
    *common(**BASE),
    deepseek(dtypes=NARROW, ranks=2, M=33, D=2048, E=32, K=6),
    deepseek(dtypes=NARROW, ranks=4, M=17, D=5120, E=40, K=6, sizes="exact"),
    deepseek(dtypes=NARROW, ranks=4, M=17, D=7168, E=64, K=8, index="int32"),
    full("chunks", NARROW, ranks=2, M=2049, D=2048, E=32, K=6),
)
COUNTED = ("int64", "int32")
SPECS = (
    Spec(
        "ep_counts",
        ep_counts,
        (
            core(ranks=2, M=17, E=4, K=3),
            core(ranks=4, M=17, E=4, K=3),
            *(core("hot", ranks=ranks, M=17, E=4, K=3, tokens="drawn") for ranks in RANKS),
            core(ranks=2, M=17, E=4, K=3, experts="bare", tokens="drawn"),
            *_kinds(COUNTED, M=17, E=4, K=3),
            *common(("int64",), M=17, E=4, K=3),
            deepseek(ranks=2, M=33, E=32, K=6),
            deepseek(ranks=4, M=17, E=64, K=8),
            full(ranks=2, M=8193, E=32, K=6),
        ),
        dtypes=COUNTED,
        ranks=RANKS,
    ),
    Spec(
        "ep_dispatch",
        ep_dispatch,
        (
            *ROUTED,
            *(core("bits", BYTES, ranks=2, **BASE, sizes=sizes) for sizes in ("exact", "capacity")),
            deepseek(dtypes=("float8_e4m3fn",), ranks=4, M=17, D=7168, E=64, K=8, sizes="exact"),
            deepseek(dtypes=("float32",), ranks=4, M=17, D=56, E=64, K=8, sizes="exact"),  # the codes' scales
        ),
        dtypes=FLOATS,
        ranks=RANKS,
    ),
    Spec(
        "ep_combine",
        ep_combine,
        (*ROUTED, core("overflow", ("float16",), ranks=4, M=17, D=64, E=4, K=8), core("shifted", ranks=4, **BASE)),
        dtypes=FLOATS,
        ranks=RANKS,
    ),
)
