"""Sampling: a mask over logits, filters over probabilities, and a draw whose randomness belongs to the request.

Models mask logits with ``apply_token_bitmask_``, then pass their softmax through ``top_k_renorm``, ``top_p_renorm`` and
``min_p_renorm``, in this order, then `sample`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..check import FLOAT, INDEX
from ..contracts import Contracts
from ..numerics import wide
from ..op import declared, op

_PROBS = (torch.float32, torch.float64)
_FILTER = Contracts(
    C7_sentinels="Values that filter nothing are identities, see below.",
    C9_rounding="Kept probabilities are divided once, in float32, by their float32 sum.",
    C10_determinism="A row does not depend on the others.",
    C13_ids="Takes and gives no ids; positions in a row are token ids.",
)


@op(
    shapes={"probs": "B V", "top_k": "B"},
    dtypes={"probs": _PROBS, "top_k": torch.int32},
    where={"V >= 1": "the vocabulary is not empty"},
    reduces="V",
    flops="2 * probs.numel()",
    terms=lambda probs, top_k: declared()["top_k_renorm"].reference(probs, top_k),
    contracts=_FILTER,
)
def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep the ``top_k`` highest probabilities of each row and renormalise.

    probs: float32 [B, V], non-negative, rows sum to 1, any strides; top_k: int32 [B], ≤ 0 or ≥ V: the row as it is.
    Returns float32 [B, V]. Every probability equal to the k-th is kept, so more than k may be. A row of zeros stays
    so; a NaN makes a filtered row NaN.
    """
    vocab = probs.shape[-1]
    rank = (top_k.to(torch.int64) - 1).clamp(0, vocab - 1).unsqueeze(-1)
    pivot = probs.sort(dim=-1, descending=True).values.gather(-1, rank)
    return _keep(probs, pivot, identity=(top_k <= 0) | (top_k >= vocab))


@op(
    shapes={"probs": "B V", "top_p": "B"},
    dtypes={"probs": _PROBS, "top_p": _PROBS},
    where={"V >= 1": "the vocabulary is not empty"},
    reduces="V",
    flops="3 * probs.numel()",
    terms=lambda probs, top_p: declared()["top_p_renorm"].reference(probs, top_p),
    contracts=Contracts(
        C7_sentinels=_FILTER.C7_sentinels,
        C9_rounding="Cumulated in float64; kept probabilities are divided once, in float32, by their float32 sum.",
        C10_determinism=_FILTER.C10_determinism,
        C13_ids=_FILTER.C13_ids,
    ),
)
def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's nucleus and renormalise (Holtzman et al., 2020).

    probs: float32 [B, V], non-negative, rows sum to 1, any strides; top_p: float32 [B], ≥ 1: the row as it is;
    ≤ 0: the highest alone. A probability is kept while those above it sum to at most ``top_p``, and so is every one
    equal to the lowest kept. Returns float32 [B, V]. A row of zeros stays so; a NaN makes a filtered row NaN.
    """
    descending = probs.sort(dim=-1, descending=True).values
    above = descending.to(torch.float64).cumsum(-1) - descending
    count = (above <= top_p.unsqueeze(-1)).sum(-1, keepdim=True).clamp(min=1)
    return _keep(probs, descending.gather(-1, count - 1), identity=top_p >= 1)


@op(
    shapes={"probs": "B V", "min_p": "B"},
    dtypes={"probs": _PROBS, "min_p": _PROBS},
    where={"V >= 1": "the vocabulary is not empty"},
    reduces="V",
    flops="2 * probs.numel()",
    terms=lambda probs, min_p: declared()["min_p_renorm"].reference(probs, min_p),
    contracts=_FILTER,
)
def min_p_renorm(probs: Tensor, min_p: Tensor) -> Tensor:
    """Keep what is at least ``min_p`` times as likely as the likeliest, and renormalise (Nguyen et al., 2024).

    probs: float32 [B, V], non-negative, any strides; min_p: float32 [B], ≤ 0: the row as it is; ≥ 1: the highest
    alone. A probability equal to the bound is kept. Returns float32 [B, V]. A row of zeros stays so; a NaN makes a
    filtered row NaN.
    """
    pivot = probs.amax(-1, keepdim=True) * min_p.clamp(max=1).unsqueeze(-1).to(probs.dtype)
    return _keep(probs, pivot, identity=min_p <= 0)


@op(
    shapes={"probs": "B V", "seeds": "B", "offsets": "B"},
    dtypes={"probs": _PROBS, "seeds": torch.int64, "offsets": torch.int64},
    where={"1 <= V < 2**31": "the vocabulary is not empty and its ids fit int32"},
    rounds=0,
    reduces="V",
    flops="probs.numel()",
    contracts=Contracts(
        C7_sentinels="Gives no sentinel: ids lie in [0, V), also for rows that hold NaN or no mass.",
        C9_rounding="Cumulated and compared in float64.",
        C10_determinism="A row's id depends on its own probabilities, seed and offset alone.",
        C13_ids="Gives int32 ids; takes int64 seeds and offsets, every value of them valid.",
    ),
)
def sample(probs: Tensor, seeds: Tensor, offsets: Tensor) -> Tensor:
    """Draw one token a row from its probabilities, with randomness from its request's seed.

    probs: float32 [B, V], non-negative, any sum, any strides; seeds: int64 [B], one a request; offsets: int64 [B], the
    number of the draw within the request. Returns int32 [B]. The uniform number is `uniform` of (seed, offset), part
    of the contract: every kernel draws the same. The id is the first of positive probability whose cumulative
    probability exceeds ``uniform · sum``; rounding can never reach a token of probability zero.
    A row with NaN, inf or without mass gives its last positive probability's id, or 0.
    """
    cumulative = probs.to(torch.float64).cumsum(-1)
    threshold = uniform(seeds, offsets).unsqueeze(-1) * cumulative[:, -1:]
    positive = probs > 0
    vocab = torch.arange(probs.shape[-1], device=probs.device)
    first = torch.where(positive & (cumulative > threshold), vocab, probs.shape[-1]).amin(-1)
    last = torch.where(positive, vocab, 0).amax(-1)
    return torch.where(first < probs.shape[-1], first, last).to(torch.int32)


_BITMASK_SHAPES = {"logits": "B V", "bitmask": "B ceil_div(V,32)", "indices": "_"}
_BITMASK_DTYPES = {"logits": FLOAT, "bitmask": torch.int32, "indices": INDEX}
_BITMASK = Contracts(
    C3_strides="Outer strides are free: bitmask may be a slice of a wider one.",
    C7_sentinels="A negative or too large entry of indices is skipped; bits past V are not read.",
    C9_rounding="None: allowed logits keep their bits, NaN included; the others become -inf.",
    C10_determinism="Exact; a row named twice is masked as if named once.",
    C13_ids="indices are int32 or int64.",
)


@op(shapes=_BITMASK_SHAPES, dtypes=_BITMASK_DTYPES, rounds=0, contracts=_BITMASK)
def apply_token_bitmask(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> Tensor:
    """Set the logits of tokens that a grammar forbids to -inf (XGrammar; Dong et al., 2024).

    logits: [B, V] bf16/f16/f32, any strides; bitmask: int32 [B, ⌈V/32⌉], token t being bit t % 32, lowest first, of
    word t // 32: 1 allows it; indices: int32/int64 [N], the rows to mask, each with the bitmask's row of that number;
    the other rows stay as they are. None: all rows. Returns logits' shape and dtype. A row may lose all its tokens.
    """
    return logits.masked_fill(_forbidden(logits, bitmask, indices), -torch.inf).contiguous()


@op(
    shapes=_BITMASK_SHAPES,
    dtypes=_BITMASK_DTYPES,
    mutates=("logits",),
    twin_of="apply_token_bitmask",
    rounds=0,
    contracts=replace(_BITMASK, C4_mutation="Writes logits; returns nothing."),
)
def apply_token_bitmask_(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> None:
    """In-place twin of `apply_token_bitmask`: logits become the masked ones."""
    logits.masked_fill_(_forbidden(logits, bitmask, indices), -torch.inf)


def uniform(seeds: Tensor, offsets: Tensor) -> Tensor:
    """float64 numbers in [0, 1), multiples of 2⁻⁵³: the high 53 bits of output ``offset`` of each seed's own SplitMix64
    stream, the first being output 0.

    The stream starts at the first output of SplitMix64(seed), so that neighbouring seeds have unrelated streams.
    Integers only, hence equal on every device. (Steele, Lea and Flood, 2014.)
    """
    start = _mix(seeds + _GOLDEN)
    return (_logical_shift(_mix(start + (offsets + 1) * _GOLDEN), 11)).to(torch.float64) * 2.0**-53


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits: torch's int64 arithmetic wraps as unsigned does."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _logical_shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _keep(probs: Tensor, pivot: Tensor, identity: Tensor) -> Tensor:
    """Rows with what lies below their pivot dropped, renormalised; rows marked ``identity`` untouched."""
    kept = torch.where(wide(probs) < pivot, 0.0, probs)  # "not below" rather than "at least": NaN stays visible
    total = kept.sum(-1, keepdim=True)
    renormalised = kept / torch.where(total == 0, 1.0, total)
    return torch.where(identity.unsqueeze(-1), probs, renormalised)


def _forbidden(logits: Tensor, bitmask: Tensor, indices: Tensor | None) -> Tensor:
    """Where [B, V] a token must go."""
    rows, vocab = logits.shape
    shift = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    forbidden = (bitmask.unsqueeze(-1) >> shift & 1 == 0).flatten(1)[:, :vocab]
    if indices is None:
        return forbidden
    row = torch.arange(rows, device=bitmask.device)
    return forbidden & (row.unsqueeze(-1) == indices).any(-1, keepdim=True)
