"""Wrong joins: of two attentions, and of the parts of keys and queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import Mutant, edit, kernel
from .decode import packed

MERGE = "core/T17-H16-D128/bfloat16/contiguous"
UNIT = f"{MERGE}/unit/0"
PADDING = f"{MERGE}/b31_padding/0"
EMPTY = "(lse.masked_fill(lse.isinf(), -torch.inf) for lse in (lse_a, lse_b))"
TOP = "top = top.masked_fill(top.isneginf(), 0)"
SHARES = "return a / total.clamp(min=1), b / total.clamp(min=1), top + total.log()"
WEIGH = "share_a, share_b, lse = _merge_weights(lse_a, lse_b)\n    a = wide"
WEIGHED = "a = wide(out_a).masked_fill(lse_a.isinf()[..., None], 0)"
RESULT = "    return narrow(a + b, out_a), lse\n"
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Join = Callable[[Tensor, Tensor], Tensor]


def merged(name: str, why: str, old: str, new: str, case: str, check: str = "bound") -> Mutant:
    return edit("merge_state", name, why, old, new, case, check)


MERGED = (
    merged("sides_swapped", "weighs each side with the other's share", WEIGH, f"share_b, share_a{WEIGH[16:]}", UNIT),
    merged("side_a_alone", "forgets one side", RESULT, RESULT.replace("a + b", "a"), UNIT),
    merged("half_each", "weighs both sides alike", SHARES, SHARES.replace("a /", "0 * a + 0.5 * total /"), UNIT),
    merged("not_divided", "adds up without dividing", SHARES, SHARES.replace(" / total.clamp(min=1)", ""), UNIT),
    merged(
        "base_two",
        "takes the lse for one in base 2",
        "a, b = (lse_a - top).exp(), (lse_b - top).exp()",
        "a, b = (lse_a - top).exp2(), (lse_b - top).exp2()",
        UNIT,
    ),
    merged(
        "log2_lse", "gives the lse in base 2", SHARES, SHARES.replace("top + total.log()", "top + total.log2()"), UNIT
    ),
    merged(
        "lse_is_the_larger",
        "gives the larger lse for the joint one",
        SHARES,
        SHARES.replace(" + total.log()", ""),
        UNIT,
    ),
    merged("lse_without_maximum", "gives the lse less the maximum", SHARES, SHARES.replace("top + ", ""), UNIT),
    merged(
        "lse_in_bf16",
        "rounds the lse",
        SHARES,
        SHARES.replace("top + total.log()", "(top + total.log()).bfloat16().to(top.dtype)"),
        UNIT,
    ),
    merged("shares_in_bf16", "rounds the shares", SHARES, SHARES.replace("min=1)", "min=1).bfloat16()"), UNIT),
    merged(
        "no_maximum", "exponentiates without taking off the maximum", TOP, f"{TOP} * 0", f"{MERGE}/large/0", "nonfinite"
    ),
    merged("underflows", "lets both exponentials underflow", TOP, f"{TOP} * 0", f"{MERGE}/small/0", "bound"),
    merged(
        "of_the_first",
        "takes off one side's lse",
        TOP,
        "top = lse_a.masked_fill(lse_a.isneginf(), 0)",
        f"{MERGE}/apart/0",
        "nonfinite",
    ),
    merged("empty_is_nan", "two empty sides give NaN", TOP, "", PADDING, "nonfinite"),
    merged("reads_empty", "weighs what an empty side holds by 0", WEIGHED, "a = wide(out_a)", PADDING, "nonfinite"),
    merged("positive_is_full", "does not take +inf for empty", EMPTY, "(lse_a, lse_b)", PADDING, "nonfinite"),
    merged(
        "empty_lse_is_zero",
        "gives two empty sides an lse of 0",
        RESULT,
        RESULT.replace(", lse", ", lse.masked_fill(lse.isinf(), 0)"),
        PADDING,
        "nonfinite",
    ),
    merged(
        "there_and_back",
        "turns the lse into one in base 2, and back",
        SHARES,
        SHARES.replace("top + total.log()", "(top * 1.4426950408889634 + total.log2()) * 0.6931471805599453"),
        PADDING,
        "alone",
    ),
)


@kernel("merge_state", "lse_of_heads_first", "reads lse [tokens, heads] as [heads, tokens]", UNIT)
def lse_of_heads_first(
    merge: Merge, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    a, b = (lse.contiguous().view(lse.shape[::-1]).T for lse in (lse_a, lse_b))
    return merge(out_a, a, out_b, b)


@kernel("merge_state", "first_head", "weighs all heads as the first one", UNIT)
def first_head(merge: Merge, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge(out_a, lse_a, out_b, lse_b)[0], merge(out_a, lse_a[:, :1].expand_as(lse_a), out_b, lse_b)[1]


@kernel(
    "merge_state",
    "columns_left_out",
    "writes whole tiles of 16 columns",
    "core/T5-H3-D40/bfloat16/contiguous/unit/0",
    "nonfinite",
)
def columns_left_out(merge: Merge, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    whole = out_a.shape[-1] // 16 * 16
    out, merged = torch.empty_like(out_a, memory_format=torch.contiguous_format), merge(out_a, lse_a, out_b, lse_b)
    out[..., :whole] = merged[0][..., :whole]
    return out, merged[1]


@kernel("merge_state", "into_the_first", "writes the result over its first argument", UNIT, "mutation")
def into_the_first(merge: Merge, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    out_a.copy_(out)
    return out, lse


JOINED = {
    "concat_mla_k": ("core/T17-H16-P128-R64/bfloat16", "core/T5-H3-P24-R8/bfloat16"),
    "concat_mla_absorb_q": ("core/T17-H4-L512-R64/bfloat16", "core/T5-H3-L24-R8/bfloat16"),
}


def joining(op: str) -> tuple[Mutant, ...]:
    """Wrong copies of two parts into one tensor."""
    base, small = JOINED[op]
    unit, strided = f"{base}/contiguous/unit/0", f"{base}/rows/b25_strides/0"
    return (
        kernel(op, "rope_first", "puts the rotated part first", unit, "copy")(rope_first),
        kernel(op, "next_token", "gives a token the next one's rotated part", unit, "copy")(next_token),
        kernel(op, "rope_left_out", "leaves the rotated part unwritten", unit, "copy")(rope_left_out),
        kernel(op, "heads_left_out", "writes heads in fours", f"{small}/contiguous/unit/0", "copy")(heads_left_out),
        kernel(op, "adds_to_zeros", "adds to zeros, whose sign is lost", f"{base}/contiguous/specials/0", "copy")(
            adds_to_zeros
        ),
        kernel(op, "through_float16", "converts on the way", f"{base}/contiguous/specials/0", "copy")(through_float16),
        kernel(op, "packed_first", "takes the first part for contiguous", strided, "copy")(packed_first),
        kernel(op, "packed_rope", "takes the rotated part for contiguous", strided, "copy")(packed_rope),
    )


def rope_first(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return torch.cat([rope.expand(*nope.shape[:-1], -1), nope], -1)


def next_token(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, rope.roll(-1, 0))


def rope_left_out(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    joined = torch.empty_like(join(nope, rope))
    joined[..., : nope.shape[-1]] = nope
    return joined


def heads_left_out(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    joined = join(nope, rope)
    joined[..., nope.shape[-2] // 4 * 4 :, :] = 0
    return joined


def adds_to_zeros(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, rope) + 0.0


def through_float16(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, rope).half().to(nope.dtype)


def packed_first(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(packed(nope), rope)


def packed_rope(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, packed(rope))


@kernel(
    "concat_mla_k",
    "first_key",
    "every token gets the first one's rotated part",
    f"{JOINED['concat_mla_k'][0]}/contiguous/unit/0",
    "copy",
)
def first_key(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, rope[:1].expand_as(rope))


@kernel(
    "concat_mla_k",
    "first_head_alone",
    "writes the rotated part to one head",
    f"{JOINED['concat_mla_k'][0]}/contiguous/unit/0",
    "copy",
)
def first_head_alone(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    joined = join(nope, rope)
    joined[:, 1:, nope.shape[-1] :] = 0
    return joined


@kernel(
    "concat_mla_absorb_q",
    "rope_of_the_first_head",
    "every head gets the first one's rotated part",
    f"{JOINED['concat_mla_absorb_q'][0]}/contiguous/unit/0",
    "copy",
)
def rope_of_the_first_head(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, rope[..., :1, :].expand_as(rope))


@kernel(
    "concat_mla_absorb_q",
    "three_dims",
    "flattens the tokens",
    "core/T3-H4-L512-R64-s2/bfloat16/contiguous/unit/0",
    "shape",
)
def three_dims(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(nope, rope).flatten(0, -3)


@kernel(
    "concat_mla_absorb_q",
    "heads_of_queries",
    "takes [sequences, queries, heads] for [sequences, heads, queries]",
    "core/T3-H4-L512-R64-s2/bfloat16/contiguous/unit/0",
    "copy",
)
def heads_of_queries(join: Join, nope: Tensor, rope: Tensor) -> Tensor:
    return join(
        nope, rope.contiguous().view(-1, *rope.shape[1:-1][::-1], rope.shape[-1]).transpose(1, -2).reshape(rope.shape)
    )


MUTANTS = tuple(mutant for op in JOINED for mutant in joining(op))
