"""Wrong draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

BASE = "core/B37-V1000/float32/contiguous"
UNIT = f"{BASE}/unit/0"
DRAWN = "positive & (cumulative > threshold)"
UNIFORM = "threshold = uniform(seeds, offsets).unsqueeze(-1)"
BITS = "(_logical_shift(_mix(start + (offsets + 1) * _GOLDEN), 11)).to(torch.float64) * 2.0**-53"

MUTANTS = (
    edit(
        "sample",
        "highest",
        "takes the highest",
        "torch.where(first < probs.shape[-1], first, last)",
        "probs.argmax(-1)",
        UNIT,
        "draw",
    ),
    edit(
        "sample",
        "one_seed",
        "all rows draw with the first one's seed",
        UNIFORM,
        UNIFORM.replace("seeds", "seeds[:1].expand_as(seeds)"),
        UNIT,
        "draw",
    ),
    edit(
        "sample",
        "no_offset",
        "every draw of a request is its first",
        UNIFORM,
        UNIFORM.replace("offsets", "offsets * 0"),
        "core/B4096-V24/float32/contiguous/distribution/0",
        "distribution",
    ),
    edit(
        "sample",
        "row_in_seed",
        "a row's place changes what it draws",
        UNIFORM,
        UNIFORM.replace("seeds", "seeds + torch.arange(len(seeds))"),
        f"{BASE}/b34_seeds/0",
        "seed",
    ),
    edit(
        "sample",
        "neighbours",
        "neighbouring seeds have one stream, shifted",
        "start = _mix(seeds + _GOLDEN)",
        "start = seeds * _GOLDEN",
        f"{BASE}/b34_seeds/0",
        "draw",
    ),
    edit(
        "sample",
        "short_seeds",
        "cuts seeds to 32 bits",
        UNIFORM,
        UNIFORM.replace("seeds", "seeds & 0xFFFFFFFF"),
        f"{BASE}/b34_seeds/0",
        "draw",
    ),
    edit(
        "sample",
        "short_offsets",
        "cuts offsets to 32 bits",
        UNIFORM,
        UNIFORM.replace("offsets", "offsets & 0xFFFFFFFF"),
        f"{BASE}/b34_seeds/0",
        "draw",
    ),
    edit(
        "sample",
        "short_numbers",
        "draws numbers of 24 bits",
        BITS,
        BITS.replace("11", "40").replace("53", "24"),
        f"{BASE}/edges/0",
        "draw",
    ),
    edit(
        "sample",
        "next_output",
        "starts with the stream's second number",
        "(offsets + 1)",
        "(offsets + 2)",
        UNIT,
        "draw",
    ),
    edit(
        "sample",
        "arithmetic_shift",
        "shifts the sign in",
        "return (z >> bits) & ((1 << (64 - bits)) - 1)",
        "return z >> bits",
        UNIT,
        "draw",
    ),
    edit(
        "sample",
        "upto",
        "takes the first token whose sum reaches the number, even one of probability zero",
        DRAWN,
        "cumulative >= threshold",
        f"{BASE}/edges/0",
        "support",
    ),
    edit(
        "sample",
        "last_upto",
        "takes the token whose sum reaches the number, not the one after",
        DRAWN,
        "positive & (cumulative >= threshold)",
        f"{BASE}/edges/0",
        "draw",
    ),
    edit(
        "sample",
        "cumulates_in_float32",
        "cumulates in float32",
        "probs.to(torch.float64).cumsum(-1)",
        "probs.cumsum(-1)",
        f"{BASE}/fine_sums/0",
        "draw",
    ),
    edit(
        "sample",
        "sum_of_one",
        "takes for granted that a row sums to 1",
        " * cumulative[:, -1:]",
        "",
        f"{BASE}/sums/0",
        "draw",
    ),
    edit(
        "sample",
        "last_of_all",
        "takes the last token of all where none is found",
        "torch.where(positive, vocab, 0).amax(-1)",
        "torch.full_like(first, probs.shape[-1] - 1)",
        f"{BASE}/degenerate/0",
        "support",
    ),
    edit(
        "sample",
        "beyond",
        "gives the number after the last token where none is found",
        "torch.where(first < probs.shape[-1], first, last)",
        "first",
        f"{BASE}/degenerate/0",
        "ids",
    ),
    edit("sample", "ids_in_int64", "gives int64 ids", "first, last).to(torch.int32)", "first, last)", UNIT, "dtype"),
)


@kernel("sample", "global_generator", "draws from the process's generator", UNIT, "draw")
def global_generator(sample: Any, probs: Tensor, seeds: Tensor, offsets: Tensor) -> Tensor:
    state = torch.get_rng_state()
    ids = torch.multinomial(probs.nan_to_num(1.0) + 1e-30, 1)[:, 0].int()
    torch.set_rng_state(state)
    return ids
