"""Collectives: ``arguments`` gives those of every rank, ``{"ranks": [...]}``, but the group, which each rank adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import FLOATS, LAYOUTS, Dim, Shape, Spec, core, deepseek, full

RANKS = (2, 4)
BYTES = ("int32", "int64", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
NARROW = ("bfloat16",)


def common(dtypes: tuple[str, ...] = NARROW, **dims: Dim) -> Iterator[Shape]:
    """What every collective is looked at for beside its numbers, at its base shape's dims."""
    yield core("subgroup", dtypes, ranks=2, **dims)
    for layout in LAYOUTS:
        yield core("b25_strides", dtypes, ranks=2, **dims, layout=layout)
    for regime in ("b21_compile", "b22_capture", "b23_replay"):
        yield core(regime, dtypes, ranks=2, **dims)
    for regime in ("dead_rank", "timeout"):
        yield core(regime, dtypes, ranks=2, **dims)
        yield deepseek(regime, dtypes, ranks=4, **dims)
    yield deepseek("b21_compile", dtypes, ranks=4, **dims)
    for regime in ("b19_selection_key", "b20_fusible", "side_stream"):
        yield deepseek(regime, dtypes, ranks=2, **dims)


def payload(draw: Draw, *shape: int) -> Tensor:
    """Values of a wide type; of any other, and in the regime "bits" of all, whatever bits there are."""
    if draw.dtype == torch.bool:
        return draw.integers(0, 2, *shape, dtype=torch.bool)
    if draw.dtype in (torch.float32, torch.bfloat16, torch.float16) and draw.regime != "bits":
        return draw.values(*shape)
    raw = draw.integers(0, 256, *shape, draw.dtype.itemsize, dtype=torch.uint8)
    return raw.view(draw.dtype).squeeze(-1)


def _addends(draw: Draw, ranks: int, *shape: int) -> list[Tensor]:
    """A tensor for each rank; what they sum to is small in the regime "cancelling", inf or NaN here and there in
    "nonfinite".
    """
    xs = [draw.values(*shape) for _ in range(ranks)]
    if draw.regime == "cancelling":
        rest = torch.stack(xs[:-1]).double().sum(0)
        xs[-1] = (0.01 * xs[-1].double() - rest).to(draw.dtype)
    elif draw.regime == "nonfinite":
        flat = [x.view(-1) for x in xs]
        flat[0][0::31], flat[-1][7::62], flat[-1][0::93] = torch.inf, -torch.inf, -torch.inf
        flat[-1][3::41] = torch.nan
    return xs


def _shape(M: int, D: int, H: int) -> tuple[int, ...]:
    return tuple(n for n in (M, H, D) if n >= 0)


def all_reduce(draw: Draw, ranks: int, M: int = -1, D: int = -1, H: int = -1, layout: str = "") -> dict[str, Any]:
    """A dim that is not given is not there: with none, x is a single number."""
    return {"ranks": [{"x": x} for x in _addends(draw, ranks, *_shape(M, D, H))]}


def reduce_scatter(draw: Draw, ranks: int, M: int, D: int = -1, H: int = -1, layout: str = "") -> dict[str, Any]:
    """``M`` rows stay with each rank."""
    return {"ranks": [{"x": x} for x in _addends(draw, ranks, *_shape(M * ranks, D, H))]}


def all_gather(draw: Draw, ranks: int, M: int, D: int = -1, H: int = -1, layout: str = "") -> dict[str, Any]:
    return {"ranks": [{"x": payload(draw, *_shape(M, D, H))} for _ in range(ranks)]}


def all_to_all(draw: Draw, ranks: int, M: int, D: int = -1, sizes: str = "uneven", layout: str = "") -> dict[str, Any]:
    sent = [[_run(sizes, ranks, M, source, target) for target in range(ranks)] for source in range(ranks)]
    received = [list(column) for column in zip(*sent, strict=True)]
    return {
        "ranks": [
            {"x": payload(draw, *_shape(sum(rows), D, -1)), "output_sizes": come, "input_sizes": rows}
            for rows, come in zip(sent, received, strict=True)
        ]
    }


def _run(sizes: str, ranks: int, M: int, source: int, target: int) -> int:
    """How many rows go from one rank to another."""
    last = ranks - 1
    return {
        "even": M,
        "uneven": 0 if (source + 2 * target) % 3 == 0 else M + 2 * source - target,  # another number back
        "varied": M + 3 * source + target,  # no zeros
        "one_way": M if source and not target else 0,
        "silent": 0 if last in (source, target) else M + source,  # the last rank sends and gets nothing
        "none": 0,
    }[sizes]


ANY_SHAPE = (core(ranks=2, M=515), core(ranks=4, M=3, H=5, D=24), core(ranks=2, M=1, D=512))

REDUCED = (
    core(ranks=2, M=17, D=64),
    core(ranks=4, M=17, D=64),
    *ANY_SHAPE,
    *(core("b24_empty", ranks=ranks, M=0, D=64) for ranks in RANKS),
    *(core("cancelling", ranks=ranks, M=17, D=64) for ranks in RANKS),
    *(core("nonfinite", ranks=ranks, M=17, D=64) for ranks in RANKS),
    core("shifted", ranks=4, M=17, D=64),
    *(core("chunks", ("float32", "bfloat16"), ranks=ranks, M=129, D=1025) for ranks in RANKS),
    *common(M=17, D=64),
    deepseek(ranks=2, M=17, D=2048),
    deepseek(ranks=4, M=33, D=5120),
    deepseek(ranks=4, M=17, D=7168),
    deepseek("chunks", NARROW, ranks=2, M=257, D=7168),
    full("chunks", NARROW, ranks=2, M=65537, D=64),
)
MOVED = (
    core(ranks=2, M=17, D=64),
    core(ranks=4, M=17, D=64),
    *ANY_SHAPE,
    *(core("bits", ("float32", "bfloat16", *BYTES), ranks=ranks, M=17, D=64) for ranks in RANKS),
    *(core("b24_empty", ("float32", "bfloat16", "float8_e4m3fn"), ranks=ranks, M=0, D=64) for ranks in RANKS),
    *(core("chunks", NARROW, ranks=ranks, M=257, D=1025) for ranks in RANKS),
    *common(M=17, D=64),
    deepseek(ranks=4, M=5, D=25600),  # the logits of V2-Lite's vocabulary
    deepseek(ranks=2, M=33, D=7168),
    deepseek(dtypes=("float8_e4m3fn",), ranks=4, M=33, D=7168),
    deepseek(ranks=2, M=65, D=576),  # latent rows
    full("chunks", NARROW, ranks=2, M=65537, D=64),
)
EXCHANGED = (
    core(ranks=2, M=9, D=64, sizes="varied"),
    core(ranks=4, M=9, D=64, sizes="varied"),
    *(
        core(ranks=ranks, M=9, D=64, sizes=sizes)
        for sizes in ("even", "uneven", "one_way", "silent")
        for ranks in RANKS
    ),
    core(ranks=2, M=131, sizes="uneven"),
    *(core("bits", ("float32", "bfloat16", *BYTES), ranks=ranks, M=9, D=64, sizes="uneven") for ranks in RANKS),
    *(
        core("b24_empty", ("float32", "bfloat16", "float8_e4m3fn"), ranks=ranks, M=0, D=64, sizes="none")
        for ranks in RANKS
    ),
    *(core("chunks", NARROW, ranks=ranks, M=129, D=1025, sizes="uneven") for ranks in RANKS),
    *common(M=9, D=64, sizes="varied"),
    deepseek(ranks=2, M=17, D=2048, sizes="uneven"),
    deepseek(dtypes=("bfloat16", "float8_e4m3fn"), ranks=4, M=33, D=7168, sizes="uneven"),
    deepseek(dtypes=("float32",), ranks=4, M=33, D=56, sizes="uneven"),  # the codes' scales
    full("chunks", NARROW, ranks=2, M=32768, D=64, sizes="uneven"),
)

SPECS = (
    Spec("all_reduce", all_reduce, (*REDUCED, core(ranks=2)), dtypes=FLOATS, ranks=RANKS),
    Spec("all_gather", all_gather, MOVED, dtypes=FLOATS, ranks=RANKS),
    Spec("reduce_scatter", reduce_scatter, REDUCED, dtypes=FLOATS, ranks=RANKS),
    Spec("all_to_all", all_to_all, EXCHANGED, dtypes=FLOATS, ranks=RANKS),
)
