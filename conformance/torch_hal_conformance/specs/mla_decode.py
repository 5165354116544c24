"""Absorbed attention of the newest tokens over a paged cache of latents, in 16 bits and more or in 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..draw import Draw
from ..spec import Dim, Shape, Spec, core, deepseek, full
from ..verdicts_attention import attended
from .attention import SCALES, recent_keys, recent_queries, regime_values
from .kv_cache_fp8 import encoded, fp8_kind

# What a batch's sequences have cached, new tokens included, given the page size.
LENGTHS: Mapping[str, Callable[[int], list[int]]] = {
    "few": lambda page: [page + 3, page, 1],
    "mixed": lambda page: [2 * page + 1, 3 * page, page - 1, page + 3, page, 2, 1],
    "one": lambda page: [1],
    "newest": lambda page: [2 * page + 9],
    "padded": lambda page: [0, 2 * page - 1, 0, 1, 0],
    "no_keys": lambda page: [0, 0, 0],
    "none": lambda page: [],
    "split": lambda page: [2049, 700],
    "longer": lambda page: [32769],
    "longest": lambda page: [65537],
}


@dataclass(frozen=True)
class Paged:
    """Sequences over pages in no order. Whatever no sequence owns holds NaN, table entries past its pages anything."""

    lengths: list[int]
    page: int
    table: Tensor  # [B, P]
    page_of: Tensor  # [pages]: sequence · P + its page, or -1 where it is nobody's

    @classmethod
    def drawn(cls, draw: Draw, lens: str, page: int) -> Paged:
        lengths = LENGTHS["padded" if draw.regime == "b31_padding" else lens](page)
        lengths = [lengths[i] for i in draw.permutation(len(lengths)).tolist()]
        width = max((-(-n // page) for n in lengths), default=0)
        width += page < 64  # a column that nobody needs, where it costs little
        owned = sum(-(-n // page) for n in lengths)
        order = draw.permutation(owned + 1)  # the last one is nobody's
        table = torch.tensor([-1, 1 << 30, int(order[-1])])[draw.permutation(len(lengths) * width) % 3]
        table, page_of = table.view(len(lengths), width), torch.full((owned + 1,), -1)
        free = iter(order.tolist())
        for b, n in enumerate(lengths):
            for i in range(-(-n // page)):
                table[b, i] = next(free)
                page_of[table[b, i]] = b * width + i
        return cls(lengths, page, table.to(torch.int32), page_of)

    def ranks(self) -> Tensor:
        """[pages, page]: 0 for a sequence's last row, negative before it, positive past it and where nobody's is."""
        width, lengths = max(self.table.shape[1], 1), torch.tensor([*self.lengths, 0])
        sequence, i = self.page_of.div(width, rounding_mode="floor"), self.page_of % width
        rows = i[:, None] * self.page + torch.arange(self.page)
        return torch.where(self.page_of[:, None] >= 0, rows - lengths[sequence, None] + 1, self.page)


def _call(draw: Draw, lens: str, H: int, s: int, L: int, R: int, page: int, model: str) -> dict[str, Any]:
    """The arguments with a cache in float32."""
    paged, scale = Paged.drawn(draw, lens, page), SCALES[model]
    q = regime_values(draw, -1, len(paged.lengths), s, H, L + R)
    ranks = paged.ranks()
    cache = regime_values(draw, 1, *ranks.shape, L + R)
    if draw.regime == "recent":  # what lies past a sequence would weigh more than all of it
        cache[..., L:] = recent_keys(ranks, R)
        q = recent_queries(q, R, scale)
    else:
        cache[ranks > 0] = torch.nan
    seq_lens = torch.tensor(paged.lengths, dtype=torch.int32)
    if draw.regime == "b31_padding":
        q[seq_lens == 0] = torch.nan
    q = q.to(draw.dtype)
    return {
        "q_nope": q[..., :L].contiguous(),
        "q_pe": q[..., L:].contiguous(),
        "cache": cache,
        "page_table": paged.table,
        "seq_lens": seq_lens,
        "scale": scale,
    }


def mla_decode(draw: Draw, lens: str, H: int, s: int, L: int, R: int, page: int, model: str = "v3") -> dict[str, Any]:
    call = _call(draw, lens, H, s, L, R, page, model)
    return call | {"cache": call["cache"].to(draw.dtype)}


def mla_decode_fp8(
    draw: Draw, lens: str, H: int, s: int, L: int, R: int, page: int, kv_format: str, model: str = "v3"
) -> dict[str, Any]:
    call = _call(draw, lens, H, s, L, R, page, model)
    cache = encoded(draw, call["cache"], L, kv_format, fp8_kind(draw))
    return call | {"cache": cache, "kv_format": kv_format}


def plan(arguments: dict[str, Any]) -> dict[str, Any]:
    _, queries, heads, _ = arguments["q_nope"].shape
    return {
        "seq_lens": arguments["seq_lens"],
        "host_lens": arguments["seq_lens"].tolist(),
        "num_heads": heads,
        "queries": queries,
        "page_size": arguments["cache"].shape[1],
    }


def shapes(regimes: tuple[str, ...], small_rank: int, longest: str, **extra: Dim) -> tuple[Shape, ...]:
    """All at the dims that kernels are made for, and every regime at small ones that none is made for."""
    real: dict[str, Dim] = {"L": 512, "R": 64, "page": 64, **extra}
    small: dict[str, Dim] = {"lens": "mixed", "H": 3, "s": 3, "L": small_rank, "R": 16, "page": 4, **extra}
    return (
        core("unit", ("bfloat16", "float32"), lens="few", H=16, s=1, **real),
        core("unit", ("float16",), lens="few", H=16, s=2, **real),
        core("recent", ("bfloat16",), lens="few", H=16, s=2, **real),
        core("uniform", ("bfloat16",), lens="newest", H=16, s=1, **real),
        core("unit", ("bfloat16",), lens="one", H=16, s=1, **real),
        *(core("b24_empty", None, lens=lens, H=16, s=s, **real) for lens, s in (("none", 1), ("few", 0))),
        core("no_keys", ("bfloat16", "float32"), lens="no_keys", H=16, s=1, **real),
        *(
            core(regime, None if regime == "unit" else ("bfloat16", "float32"), **small)
            for regime in ("unit", *regimes)
        ),
        core("unit", None, **small | {"page": 1, "s": 2}),
        core("unit", ("bfloat16",), **small | {"s": 4}),
        core("unit", ("bfloat16",), **small | {"H": 32, "s": 1, "model": "v2_lite"}),
        *(
            core(regime, None, **small | {"page": 64, "lens": "newest", "s": 1, "H": 8})
            for regime in ("unit", "uniform")
        ),
        deepseek("unit", None, lens="mixed", H=16, s=1, **real, model="v2_lite"),
        deepseek("unit", ("bfloat16", "float16"), lens="few", H=128, s=1, **real),
        deepseek("unit", ("bfloat16",), lens="few", H=128, s=2, **real),
        deepseek("unit", ("bfloat16",), lens="split", H=16, s=1, **real),
        deepseek("unit", ("bfloat16",), lens="newest", H=16, s=1, **real | {"page": 1}),
        full("unit", ("bfloat16",), lens=longest, H=1, s=1, **real),
    )


VALUES = ("shifted", "negative", "uniform", "recent", "b31_padding")

SPECS = (
    Spec(
        "mla_decode",
        mla_decode,
        shapes(("tiny", *VALUES), 32, "longest"),
        regimes=("tiny", *VALUES),
        rows=("q_nope", "q_pe", "page_table", "seq_lens"),
        structural=frozenset({"no_keys"}),
        verdict=attended,
        plan=plan,
    ),
    Spec(
        "mla_decode_fp8",
        mla_decode_fp8,
        (
            *shapes((*VALUES, "b27_scales", "b28_zero_groups", "b29_fnuz"), 256, "longer", kv_format="ds_mla"),
            *(
                core(regime, ("bfloat16", "float32"), lens="mixed", H=3, s=3, L=32, R=16, page=4, kv_format="flat")
                for regime in ("unit", *VALUES, "b29_fnuz")
            ),
            *(
                core(regime, ("bfloat16",), lens="few", H=16, s=1, L=512, R=64, page=64, kv_format="flat")
                for regime in ("unit", "recent", "b31_padding", "b29_fnuz")
            ),
            deepseek("unit", ("bfloat16",), lens="few", H=128, s=2, L=512, R=64, page=64, kv_format="flat"),
        ),
        regimes=(*VALUES, "b27_scales", "b28_zero_groups", "b29_fnuz"),
        rows=("q_nope", "q_pe", "page_table", "seq_lens"),
        structural=frozenset({"no_keys"}),
        verdict=attended,
        plan=plan,
    ),
)
