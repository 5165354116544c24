"""Sampling: a mask over logits, filters over probabilities, and the draw."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..draw_experts import INDEX, strangers
from ..draw_uniform import offset_of
from ..spec import Spec, core, deepseek, full
from ..verdict import bitwise
from ..verdicts_sampling import drawn, filtered

FLOAT32 = ("float32",)
BF16 = ("bfloat16",)
INT64 = torch.iinfo(torch.int64)


def probabilities(draw: Draw, B: int, V: int) -> Tensor:
    """Rows [B, V] that sum to 1."""
    if draw.regime in ("ties", "boundary"):  # few values, all dyadic
        x = torch.exp2(-draw.integers(0, 3, B, V).float())
        if draw.regime == "boundary":  # sums, too: 1/4, 1/8, 1/8, then 1/16 …
            powers = torch.tensor([2.0, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5])
            x = torch.zeros(B, V)
            x[:, : len(powers)] = torch.exp2(-powers)
            return x[:, draw.permutation(V)]
        return x / x.sum(-1, keepdim=True)
    if draw.regime == "fine_sums":  # the first is nearly all; float32 loses the others where it adds them to it
        x = 2.0**-26 + 2.0**-40 * torch.stack([draw.permutation(V) for _ in range(B)]).float()
        x[:, 0] = 1 - V * 2.0**-26
        return x
    x = draw.normal(B, V, dtype=torch.float32, scale=30.0 if draw.regime == "peaked" else 2.0).softmax(-1)
    if draw.regime == "degenerate":  # rows without mass, and with NaN, in both halves of the numbers' special values
        x[::4] = 0.0
        x[1::4, V // 2] = math.nan
    return x


def numbers(draw: Draw, B: int, special: list[float], low: float, high: float) -> Tensor:
    """A number a row: the special ones in turn, and between them any."""
    found = draw.uniform(low, high, B)
    turn = int(draw.integers(0, len(special), 1))
    every = torch.tensor(special)[(torch.arange(B) + turn) % len(special)]
    return torch.where(torch.arange(B) % 3 == 2, found, every)


def top_k(draw: Draw, B: int, V: int) -> dict[str, Any]:
    special = [1, 0, 2, -1, max(V - 1, 1), V, 3, V + 1, max(V // 2, 1), 2**31 - 1, 5, -(2**31)]
    turn = int(draw.integers(0, len(special), 1))
    every = torch.tensor(special)[(torch.arange(B) + turn) % len(special)].int()
    ranks = torch.where(torch.arange(B) % 3 == 2, draw.integers(1, V + 1, B), every)
    return {"probs": probabilities(draw, B, V), "top_k": ranks}


def top_p(draw: Draw, B: int, V: int) -> dict[str, Any]:
    special = [0.5, 0.0, 0.25, 1.0, 0.75, -1.0, 0.375, 2.0, 1e-6, 0.999, 0.9]
    probs, least = probabilities(draw, B, V), numbers(draw, B, special, 0.05, 0.99)
    if draw.regime == "fine_sums":
        least = (probs[:, 0] + 2.0**-24 * draw.integers(1, V // 5, B)).float()
    return {"probs": probs, "top_p": least}


def min_p(draw: Draw, B: int, V: int) -> dict[str, Any]:
    """No probability is so near the bound that float32 might not tell on which side: on it is another matter."""
    special = [0.5, 0.0, 0.25, 1.0, 0.125, -1.0, 1.5, 1e-6, 0.02]
    least, probs = numbers(draw, B, special, 0.001, 0.9), probabilities(draw, B, V)
    bound = probs.amax(-1, keepdim=True).double() * least[:, None].clamp(max=1).double()
    near = ((probs - bound).abs() < 1e-5 * bound) & (probs != bound)
    return {"probs": torch.where(near, probs / 2, probs), "min_p": least}


def sample(draw: Draw, B: int, V: int) -> dict[str, Any]:
    regime = draw.regime
    probs = probabilities(draw, B, V)
    seeds = torch.tensor([_word(draw) for _ in range(B)], dtype=torch.int64)
    offsets = draw.integers(0, 5000, B, dtype=torch.int64)
    if regime in ("b34_seeds", "distribution"):
        probs = probs[:1].expand(B, V).contiguous()
    if regime == "distribution":  # as many requests, and as many draws of each, that all differ
        seeds, offsets = torch.arange(B) // 64 + seeds[0] // 2, torch.arange(B) % 64
    if regime == "b34_seeds":
        seeds, offsets = _requests(draw, seeds, offsets)
    if regime == "sums":
        probs = probs * torch.exp2(draw.integers(-100, 100, B, 1).float())
    if regime in ("sparse", "edges"):
        probs, offsets = _edges(draw, probs, seeds)
    if regime == "fine_sums":
        wanted = draw.uniform(0.1, 0.9, B, dtype=torch.float64) * V * 2.0**-26
        offsets = torch.tensor(
            [offset_of(int((1 - u) * 2**53), s) for u, s in zip(wanted.tolist(), seeds.tolist(), strict=True)]
        )
    if regime == "degenerate":
        probs[2::4, 1 :: max(V // 3, 1)] = math.inf
        probs[1::4, -V // 4 :] = 0.0
        probs[1, :-1], probs[1, -1] = 0.0, math.nan
    return {"probs": probs, "seeds": seeds, "offsets": offsets}


def _word(draw: Draw) -> int:
    high, low = draw.integers(-(2**31), 2**31, 2, dtype=torch.int64).tolist()
    return int(high) * 2**32 + int(low) + 2**31


def _requests(draw: Draw, seeds: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of one request, of neighbouring ones, of the ends of the range; the first and the last are the same."""
    seed = int(seeds[0])
    pairs = [
        (seed, 0), (seed, 1), (seed, 2), (seed, -1), (seed + 1, 0), (seed + 2, 0), (0, 0), (0, 1), (1, 0), (-1, 0),
        (INT64.max, 0), (INT64.min, 0), (seed, INT64.max), (seed, INT64.min), (seed, 2**40), (seed + 2**32, 0),
    ]  # fmt: skip
    wanted = torch.tensor(pairs, dtype=torch.int64)[: len(seeds) - 1]
    seeds[: len(wanted)], offsets[: len(wanted)] = wanted.unbind(1)
    seeds[-1], offsets[-1] = seeds[0], offsets[0]
    return seeds, offsets


def _edges(draw: Draw, probs: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Dyadic probabilities among zeros, and numbers 0, the largest, and on and next to the borders between tokens.

    After half of all comes a token of 2⁻³³, which no number of 32 bits can tell from the one after it.
    """
    coarse, fine = torch.full((63,), 2.0**-7), 2.0 ** -torch.tensor([33.0, 8, 9, 10, 10])
    fine[-1] -= 2.0**-33
    values = torch.cat([coarse, coarse[:1], fine, coarse])
    for row in range(len(probs)):
        places = (draw.permutation(probs.shape[1] - 2)[: len(values)] + 1).sort().values  # not the first, not the last
        probs[row] = 0.0
        probs[row, places] = values
    if draw.regime == "sparse":
        probs = probs * draw.uniform(0.5, 2, *probs.shape)
    border = int(draw.integers(1, 64, 1)) << 46
    wanted = [0, 2**53 - 1, border, border - 1, border + 1, 2**52, 2**52 + 2**20, 2**52 + 2**20 - 1, 1]
    offsets = [offset_of(wanted[row % len(wanted)], int(seeds[row]), row) for row in range(len(probs))]
    return probs, torch.tensor(offsets, dtype=torch.int64)


def bitmask(draw: Draw, B: int, V: int, indices: str = "none", N: int = 9) -> dict[str, Any]:
    """Some rows are named twice and some not at all; one has lost all its tokens."""
    logits = draw.values(B, V)
    if draw.regime == "specials":
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 6e-8]).to(draw.dtype)
        logits[:, ::3] = odd[draw.integers(0, len(odd), *logits[:, ::3].shape)]
    words = draw.integers(-(2**31), 2**31, B, -(-V // 32))
    words[3:4] = 0
    words[4:5] = -1
    if indices == "none":
        return {"logits": logits, "bitmask": words, "indices": None}
    dtype = INDEX[indices]
    rows = draw.integers(0, max(B // 2, 1), N, dtype=torch.int64).to(dtype)
    if B == 0 or draw.regime == "b32_sentinels":  # nobody names the rows that these could be taken for
        outside = strangers(B, dtype)
        others = outside[torch.arange(N) % len(outside)]
        rows = torch.where(torch.arange(N) % 2 == 0, others, rows.clamp(min=1) if B else others)
    return {"logits": logits, "bitmask": words, "indices": rows}


FILTERS = (
    core(B=37, V=1000),
    core(B=1, V=1000),
    core(B=13, V=67),
    core(regime="ties", B=13, V=67),
    core(B=12, V=2),
    core(regime="single", B=5, V=1),
    core(regime="b24_empty", B=0, V=1000),
    deepseek(B=3, V=102400),
    deepseek(B=3, V=129280),
    full(B=65537, V=40),
)
SAMPLE = (
    core(B=37, V=1000),
    core(B=1, V=1000),
    core(B=13, V=67),
    core(regime="distribution", B=4096, V=24),
    core(regime="single", B=5, V=1),
    core(regime="b24_empty", B=0, V=1000),
    deepseek(B=3, V=102400),
    deepseek(B=5, V=129280),
    deepseek(regime="edges", B=9, V=129280),
    full(B=65537, V=24),
)
BITMASK = (
    core(B=17, V=1000, indices="int32"),
    core(B=17, V=1000),
    core(B=17, V=1000, indices="int64"),
    core(regime="b32_sentinels", B=17, V=1000, indices="int64"),
    core(B=17, V=1000, indices="int32", N=0),
    core(B=1, V=33),
    core(B=9, V=64),
    core(B=9, V=7),
    core(regime="b24_empty", B=0, V=1000),
    core(regime="b24_empty", B=0, V=1000, indices="int32"),
    deepseek(B=5, V=102400, dtypes=BF16),
    deepseek(B=5, V=129280, indices="int32"),
    full(B=65537, V=40, dtypes=BF16),
)
FILTER_REGIMES = ("ties", "peaked", "degenerate")
SINGLE = frozenset({"single"})


def _filter(op: str, arguments: Any, number: str, *regimes: str) -> Spec:
    return Spec(
        op,
        arguments,
        FILTERS,
        dtypes=FLOAT32,
        regimes=(*FILTER_REGIMES, *regimes),
        rows=("probs", number),
        structural=SINGLE,
        verdict=filtered,
    )


def _mask(op: str) -> Spec:
    return Spec(
        op,
        bitmask,
        BITMASK,
        regimes=("b32_sentinels", "specials"),
        rows=("logits", "bitmask"),
        names_rows=("indices",),
        verdict=bitwise,
    )


SPECS = (
    _filter("top_k_renorm", top_k, "top_k"),
    _filter("top_p_renorm", top_p, "top_p", "boundary", "fine_sums"),
    _filter("min_p_renorm", min_p, "min_p", "boundary"),
    Spec(
        "sample",
        sample,
        SAMPLE,
        dtypes=FLOAT32,
        regimes=("b34_seeds", "edges", "sparse", "fine_sums", "ties", "peaked", "sums", "degenerate"),
        rows=("probs", "seeds", "offsets"),
        structural=SINGLE,
        verdict=drawn,
    ),
    _mask("apply_token_bitmask"),
    _mask("apply_token_bitmask_"),
)
