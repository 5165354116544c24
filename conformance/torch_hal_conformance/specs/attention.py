"""Attention over packed sequences, and what goes around attention: merging, joining keys and queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import Dim, Shape, Spec, core, deepseek, full
from ..verdict import bitwise
from ..verdicts_attention import merged
from .kv_cache import specials

# 192^-0.5 times YaRN's mscale squared: not what a kernel would take by itself from the dims that it sees.
SCALES = {"v3": 0.1352337788608801, "v2_lite": 0.11472138679292611}
NEAR = 15  # keys from the last one that regime "recent" tells apart

# (queries, keys) of each sequence. Those without queries have NaN for keys, which no result may show.
LENGTHS: Mapping[str, tuple[tuple[int, int], ...]] = {
    # a cached prefix, also across a block of 64; no queries; as many; no keys; fewer keys than queries
    "mixed": ((5, 9), (1, 70), (0, 4), (7, 7), (3, 0), (6, 2), (0, 3), (2, 3)),
    "equal": ((9, 9), (1, 1), (5, 5)),
    "one": ((1, 1),),
    "newest": ((1, 40),),
    "blocks": ((64, 64), (0, 64), (65, 129), (1, 128), (130, 65)),  # ends of tiles of 64 and 128, and beside them
    "padded": ((0, 0), (3, 0), (4, 6), (0, 0), (0, 5), (2, 2), (0, 0)),
    "chunk": ((5, 257), (0, 3), (12, 64), (1, 1)),
    "pairs": ((2, 9), (2, 40), (2, 2), (2, 70), (2, 5)),
    # one query more than 256, and single ones: as many blocks of 256 as so many queries can need
    "uneven": ((257, 300), (1, 9), (1, 1), (1, 40), (1, 2)),
    "no_keys": ((3, 0), (2, 0)),
    "no_queries": ((0, 0), (0, 5)),
    "none": (),
    "long": ((2, 4097), (3, 1000)),
    "longest": ((2, 65537),),
}


def recent_keys(ranks: Tensor, width: int) -> Tensor:
    """Key parts [..., width] with which a score rises by one from key to key; ``ranks``: counted from the last key."""
    return ranks.clamp(-NEAR, NEAR)[..., None].expand(*ranks.shape, width)


def recent_queries(q: Tensor, width: int, scale: float) -> Tensor:
    """``q`` made small, but for its last ``width`` elements, which meet those of `recent_keys`."""
    q = q / 10
    q[..., q.shape[-1] - width :] = 1 / (scale * width)
    return q


def regime_values(draw: Draw, sign: int, *shape: int) -> Tensor:
    """Data in float32: of queries, whose ``sign`` is -1, and of keys and values.

    "uniform": scores differ little, so that all weights are a little below the largest, and values add up without
    cancellation: what truncates weights or rounds sums on their way shows.
    "shifted", "negative": scores far above and far below zero. How far depends on the dtype: split softmaxes weigh
    their parts by a float32 lse, and that of thousands is rounded by more than a float32 result may be off.
    """
    far = 8 if draw.dtype.itemsize == 2 else 0.5
    shift = {"shifted": far, "negative": far * sign, "uniform": 8}.get(draw.regime)
    if shift is None:
        return draw.values(*shape, dtype=torch.float32)
    if draw.regime == "uniform" and sign < 0:
        return draw.normal(*shape, scale=0.25, dtype=torch.float32)
    return draw.normal(*shape, shift=shift, dtype=torch.float32)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def mha_varlen(draw: Draw, lens: str, H: int, Dk: int, Dv: int, causal: bool, model: str = "v3") -> dict[str, Any]:
    """Sequences in an order of the draw's; in some regimes rows of NaN after them, which belong to none."""
    pairs = LENGTHS["padded" if draw.regime == "b31_padding" else lens]
    pairs = tuple(pairs[i] for i in draw.permutation(len(pairs)).tolist())
    cu_q, cu_k = (_offsets([pair[i] for pair in pairs]) for i in (0, 1))
    padding = {"b31_padding": 9, "unit": 2, "no_keys": 2}.get(draw.regime, 0)
    total_q, total_k = int(cu_q[-1]) + padding, int(cu_k[-1]) + padding
    q, k, v = (
        regime_values(draw, sign, *shape)
        for sign, shape in ((-1, (total_q, H, Dk)), (1, (total_k, H, Dk)), (1, (total_k, H, Dv)))
    )
    if draw.regime == "recent":
        ranks = torch.cat([torch.arange(1 - keys, 1) for _, keys in pairs] + [torch.zeros(padding)])
        k[..., Dk - Dk // 3 :] = recent_keys(ranks, Dk // 3)[:, None]
        q = recent_queries(q, Dk // 3, SCALES[model])
    for x, end in ((q, cu_q[-1]), (k, cu_k[-1]), (v, cu_k[-1])):
        x[int(end) :] = torch.nan
    for b, (queries, _) in enumerate(pairs):
        if queries == 0:
            k[cu_k[b] : cu_k[b + 1]] = v[cu_k[b] : cu_k[b + 1]] = torch.nan
    loose = 29 if draw.regime in ("loose", "no_keys", "b31_padding") else 0
    return {
        "q": q.to(draw.dtype),
        "k": k.to(draw.dtype),
        "v": v.to(draw.dtype),
        "cu_q": cu_q,
        "cu_k": cu_k,
        "max_q": max((queries for queries, _ in pairs), default=0) + loose,
        "max_k": max((keys for _, keys in pairs), default=0) + loose,
        "scale": SCALES[model],
        "causal": causal,
    }


def merge_state(draw: Draw, T: int, H: int, D: int) -> dict[str, Any]:
    """Regimes are of how the two sides weigh: as much, alone, or as numbers whose exponentials overflow."""
    out_a, out_b = draw.values(T, H, D), draw.values(T, H, D)
    lse_a, lse_b = (draw.normal(T, H, scale=2, dtype=draw.wide) for _ in range(2))
    if draw.regime == "equal":
        lse_b = lse_a.clone()
    if draw.regime in ("large", "small"):
        shift = 120 if draw.regime == "large" else -120
        lse_a, lse_b = lse_a + shift, lse_b + shift
    if draw.regime == "apart":
        lse_a[::2], lse_b[1::2] = lse_a[::2] + 200, lse_b[1::2] + 200
    if draw.regime == "b31_padding":
        inf = torch.inf
        marks = torch.tensor([[0, 0], [-inf, 0], [0, -inf], [inf, 0], [0, inf], [-inf, -inf], [inf, inf], [-inf, inf]])
        which = draw.permutation(T * H).view(T, H) % len(marks)
        for side, out, lse in ((0, out_a, lse_a), (1, out_b, lse_b)):
            mark = marks[which, side]
            lse += mark
            out[mark.isinf()] = torch.nan
    return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


def concat_mla_k(draw: Draw, T: int, H: int, P: int, R: int) -> dict[str, Any]:
    return {"k_nope": specials(draw, draw.values(T, H, P)), "k_pe": specials(draw, draw.values(T, 1, R))}


def concat_mla_absorb_q(draw: Draw, T: int, H: int, L: int, R: int, s: int = 0) -> dict[str, Any]:
    """``s``: queries of each of T sequences, as another dim."""
    tokens = (T, s, H) if s else (T, H)
    return {
        "q_nope": specials(draw, draw.values(*tokens, L)),
        "q_pe": specials(draw, draw.values(*tokens, R)),
    }


MLA: dict[str, Dim] = {"Dk": 192, "Dv": 128}
SMALL: dict[str, Dim] = {"H": 3, "Dk": 24, "Dv": 40}
EMPTIES: tuple[Shape, ...] = (
    *(core("b24_empty", None, lens=lens, H=4, **MLA, causal=True) for lens in ("no_queries", "none")),
    *(core("no_keys", None, lens=lens, H=4, **MLA, causal=True) for lens in ("no_keys", "none")),
)
PREFILL = (
    core("unit", ("bfloat16", "float32"), lens="mixed", H=2, **MLA, causal=True),
    core("unit", None, lens="mixed", H=4, **MLA, causal=False),
    core("recent", ("float16",), lens="mixed", H=4, **MLA, causal=False),
    core("b31_padding", ("float16",), lens="mixed", H=4, **MLA, causal=False),
    core("unit", None, lens="equal", H=4, **MLA, causal=True),
    core("unit", None, lens="one", H=4, **MLA, causal=True),
    core("unit", ("bfloat16",), lens="mixed", H=2, **MLA, causal=True, model="v2_lite"),
    core("unit", None, lens="newest", H=16, **MLA, causal=True),
    *(core(regime, ("bfloat16",), lens="blocks", H=2, **MLA, causal=True) for regime in ("unit", "uniform")),
    core("recent", ("bfloat16",), lens="pairs", H=2, **MLA, causal=True),
    core("loose", ("bfloat16",), lens="uneven", H=2, **MLA, causal=True),
    *EMPTIES,
    *(core(regime, None, lens="mixed", **SMALL, causal=True) for regime in ("unit", "recent")),
    core("unit", None, lens="equal", H=2, Dk=64, Dv=64, causal=False),
    deepseek("unit", ("bfloat16", "float32"), lens="mixed", H=16, **MLA, causal=True, model="v2_lite"),
    deepseek("unit", ("bfloat16", "float16"), lens="equal", H=128, **MLA, causal=True),
    deepseek("unit", ("bfloat16",), lens="chunk", H=16, **MLA, causal=False),
    deepseek("recent", ("bfloat16", "float32"), lens="blocks", H=2, **MLA, causal=True),
    deepseek("unit", ("bfloat16",), lens="long", H=4, **MLA, causal=True),
    full("unit", ("bfloat16",), lens="longest", H=1, **MLA, causal=True),
)

MERGE = (
    core(T=17, H=16, D=128),
    core(T=1, H=4, D=128),
    core(T=5, H=3, D=40),
    core(regime="b31_padding", T=5, H=3, D=40),
    core(regime="b24_empty", T=0, H=16, D=128),
    deepseek(T=17, H=128, D=128),
    deepseek(T=5, H=16, D=512),  # latents of absorbed attention
    full(T=65537, H=1, D=32, dtypes=("bfloat16",)),
)
KEYS = (
    core(T=17, H=16, P=128, R=64),
    core(T=1, H=16, P=128, R=64),
    core(T=5, H=3, P=24, R=8),
    core(regime="b24_empty", T=0, H=16, P=128, R=64),
    deepseek(T=5, H=128, P=128, R=64),
    full(T=65537, H=1, P=128, R=64, dtypes=("bfloat16",)),
)
QUERIES = (
    core(T=17, H=4, L=512, R=64),
    core(T=1, H=16, L=512, R=64),
    core(T=5, H=3, L=24, R=8),
    core(T=3, H=4, L=512, R=64, s=2),
    core(regime="b24_empty", T=0, H=4, L=512, R=64),
    core(regime="b24_empty", T=0, H=4, L=512, R=64, s=2),
    deepseek(T=5, H=128, L=512, R=64),
    deepseek(T=3, H=16, L=512, R=64, s=2),
    full(T=65537, H=1, L=128, R=64, dtypes=("bfloat16",)),
)

SPECS = (
    Spec(
        "mha_varlen",
        mha_varlen,
        PREFILL,
        regimes=("tiny", "shifted", "negative", "uniform", "recent", "loose", "b31_padding"),
        structural=frozenset({"no_keys"}),
    ),
    Spec(
        "merge_state",
        merge_state,
        MERGE,
        regimes=("tiny", "shifted", "equal", "large", "small", "apart", "b31_padding"),
        rows=("out_a", "lse_a", "out_b", "lse_b"),
        verdict=merged,
    ),
    Spec("concat_mla_k", concat_mla_k, KEYS, regimes=("specials",), rows=("k_nope", "k_pe"), verdict=bitwise),
    Spec(
        "concat_mla_absorb_q",
        concat_mla_absorb_q,
        QUERIES,
        regimes=("specials",),
        rows=("q_nope", "q_pe"),
        verdict=bitwise,
    ),
)
