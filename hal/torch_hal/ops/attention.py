"""Attention: packed multi-head prefill, paged latent decode, and what joins their pieces.

Everywhere: lse is the natural logarithm of the sum of exponentials of the scaled scores, per query and head, never
rounded to a narrow type; a query without keys gives out 0 and lse -inf.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..check import FLOAT, FP8
from ..contracts import Contracts
from ..errors import ArgumentError
from ..kv_formats import KV_FORMATS
from ..numerics import narrow, wide
from ..op import PLAIN, op
from ._attention import (
    Attend,
    attend,
    attend_intermediate,
    attend_intermediate_rows,
    attend_terms,
    exact_lse,
    finite_terms,
    paged,
    varlen,
)
from .kv_cache import decode_rows

LSE = (torch.float32, torch.float64)  # float64 where the inputs are
ROUNDING = (
    "Scores and softmax in float32. Probabilities stay float32 here; a kernel may round them to q's dtype before their "
    "product with the values, which the error bound allows for. out is rounded once, lse never."
)


def _results(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """What out and lse look like, for any lengths: no loop over blocks that would tie a compiled graph to a shape."""
    return q.new_empty(*q.shape[:-1], value_dim), wide(q).new_empty(q.shape[:-1])


@op(
    shapes={"q": "Tq H Dk", "k": "Tk H Dk", "v": "Tk H Dv", "cu_q": "offsets", "cu_k": "offsets"},
    dtypes={"q": FLOAT, "k": "q", "v": "q", "cu_q": torch.int32, "cu_k": torch.int32},
    where={
        "offsets >= 1": "cu_q and cu_k hold B + 1 offsets, the first of them 0",
        "max_q >= 0": "max_q is a length",
        "max_k >= 0": "max_k is a length",
    },
    fake=lambda q, k, v, *_, **__: _results(q, v.shape[-1]),
    free=("Tq", "Tk", "offsets"),
    reduces="max(Dk, min(max_k, Tk))",
    flops="2 * Tq * min(max_k, Tk) * H * (Dk + Dv)",
    terms=lambda q, k, v, cu_q, cu_k, max_q, max_k, scale, causal: finite_terms(
        *varlen(attend_terms, (q, k, v, cu_q, cu_k), max_q, max_k, scale, causal)
    ),
    intermediate=lambda q, k, v, cu_q, cu_k, max_q, max_k, scale, causal: exact_lse(
        *varlen(attend_intermediate, (q, k, v, cu_q, cu_k), max_q, max_k, scale, causal)
    ),
    contracts=Contracts(
        C1_empties="No queries, no sequences and sequences without queries give no rows; a query that sees no key "
        "(no keys at all, or fewer keys than queries, causally) gives out 0 and lse -inf.",
        C3_strides="Outer strides are free: k and v are slices of one wider projection.",
        C7_sentinels="None. Rows of q, k and v past the last offset belong to no sequence and may hold anything.",
        C8_unwritten_rows="Rows past cu_q[-1] are written too: out 0, lse -inf. No sequence's result depends on rows "
        "of another or of none, NaN and inf included; within a sequence they may spread to all its queries.",
        C9_rounding=ROUNDING,
        C11_capture="No host sync: offsets stay on the device, max_q and max_k are upper bounds known to the host.",
        C13_ids="cu_q and cu_k are int32.",
    ),
)
def mha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences of unequal lengths, keys wider than values if need be: MLA's prefill.

    q: [Tq, H, Dk] bf16/f16/f32; k: [Tk, H, Dk]; v: [Tk, H, Dv]; one dtype. Sequence b owns rows
    cu_q[b] ≤ i < cu_q[b + 1] of q, and those of cu_k in k and v; cu_q, cu_k: [B + 1] int32, rising from 0.
    max_q, max_k: no sequence is longer (longer ones: undefined); scale: multiplies q·k.
    causal: aligned bottom-right, query i of n sees keys j ≤ i + m - n of m: the last one sees all.
    Returns (out [Tq, H, Dv] in q's dtype, lse [Tq, H] float32): softmax(scale·q·kᵀ)·v and its normaliser, so that
    `merge_state` can join it with other keys' attention. Source: FlashAttention's varlen interface, lse transposed.
    """
    return varlen(attend, (q, k, v, cu_q, cu_k), max_q, max_k, scale, causal)


def plan_mla_decode(
    seq_lens: Tensor, host_lens: list[int], num_heads: int, queries: int, page_size: int
) -> list[Tensor]:
    """The schedule of `mla_decode` for one step, shared by all layers; the reference needs none: an empty tensor.

    seq_lens: [B] int32; host_lens: the same lengths, on the host. A plan is one flat int32 tensor, whose size depends
    on B, num_heads, queries, page_size and the device alone, never on lengths, so that a captured graph's plan is
    updated with ``copy_``.
    """
    if len(host_lens) != seq_lens.shape[0]:
        raise ArgumentError(
            f"mla_decode's plan: argument 'host_lens': expected {seq_lens.shape[0]} lengths, those of seq_lens, "
            f"got {len(host_lens)}; pass one host length a sequence"
        )
    return [seq_lens.new_empty(0, dtype=torch.int32)]


def _paged(
    attend: Attend,
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Tensor | None = None,
    layout: str = PLAIN,
) -> tuple[Tensor, Tensor]:
    q = torch.cat([q_nope, q_pe], -1)
    return paged(attend, q, cache, page_table, seq_lens, scale, q_nope.shape[-1])


@op(
    shapes={
        "q_nope": "B s H L",
        "q_pe": "B s H R",
        "cache": "pages page_size L+R",
        "page_table": "B P",
        "seq_lens": "B",
        "plan": "_",
    },
    dtypes={
        "q_nope": FLOAT,
        "q_pe": "q_nope",
        "cache": "q_nope",
        "page_table": torch.int32,
        "seq_lens": torch.int32,
        "plan": torch.int32,
    },
    fake=lambda q_nope, *_, **__: _results(q_nope, q_nope.shape[-1]),
    free=("B", "P", "pages"),
    reduces="max(L + R, P * page_size)",
    flops="2 * B * s * H * P * page_size * (2 * L + R)",
    traffic="(B * P * page_size * (L + R) + B * s * H * (2 * L + R)) * cache.element_size() + 4 * B * (s * H + P + 1)",
    terms=lambda *args, **kwargs: finite_terms(*_paged(attend_terms, *args, **kwargs)),
    intermediate=lambda *args, **kwargs: exact_lse(*_paged(attend_intermediate, *args, **kwargs)),
    plan=plan_mla_decode,
    contracts=Contracts(
        C1_empties="B = 0 and s = 0 give no rows; a query that sees no key (seq_len 0, or below s) gives 0 and -inf.",
        C3_strides="Outer strides are free: q_nope and q_pe may be slices of one tensor, cache one layer of a pool.",
        C7_sentinels="None. Entries of page_table past a sequence's own pages may be anything; they are never followed "
        "out of the cache.",
        C8_unwritten_rows="Every row is written: the padding of a captured batch takes seq_len 0 and gets out 0, "
        "lse -inf. Rows of the cache past a length, NaN and inf included, never reach a result.",
        C9_rounding=ROUNDING,
        C11_capture="No host sync: lengths stay on the device. A plan's size never depends on lengths: it is updated "
        "by copy_ under replay.",
        C13_ids="page_table and seq_lens are int32.",
    ),
)
def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Tensor | None = None,
    layout: str = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA attention of the newest tokens over a paged latent cache (DeepSeek-V2, section 2.1).

    q_nope: [B, s, H, L] queries already multiplied by W_UK, q_pe: [B, s, H, R] rotated; bf16/f16/f32.
    cache: [pages, page_size, L + R] rows [c_kv | k_pe] of q's dtype, which key and (c_kv alone) value of all heads
    are read from; it holds the s new tokens already. page_table: [B, P] int32, a sequence's pages in order;
    seq_lens: [B] int32 ≤ P·page_size, the s new tokens included; scale: multiplies the scores.
    Query i of s sees keys j < seq_len - s + 1 + i. plan, layout: what ``plan`` gave for these lengths, or nothing.
    Returns (out [B, s, H, L] in q's dtype, lse [B, s, H] float32): softmax(scale·(q_nope·c_kv + q_pe·k_pe))·c_kv, to
    be multiplied by W_UV, and its normaliser. Source: FlashMLA, whose lse is [B, H, s] and +inf where empty.
    """
    return _paged(attend, q_nope, q_pe, cache, page_table, seq_lens, scale)


def _paged_fp8(
    attend: Attend,
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_format: str,
    plan: Tensor | None = None,
    layout: str = PLAIN,
) -> tuple[Tensor, Tensor]:
    q, rank = torch.cat([q_nope, q_pe], -1), q_nope.shape[-1]

    def read(rows: Tensor) -> Tensor:
        return torch.cat(decode_rows(rows, cache.dtype, rank, kv_format, wide(q).dtype), -1)

    return paged(attend, q, cache.view(torch.uint8), page_table, seq_lens, scale, rank, read)


@op(
    shapes={**mla_decode.shapes, "cache": "pages page_size W"},
    free=("B", "P", "pages"),
    dtypes={**mla_decode.dtypes, "cache": FP8},
    where={
        "kv_format in KV_FORMATS": f"the format is one of {', '.join(KV_FORMATS)}",
        "KV_FORMATS[kv_format].fits(W, L)": "the format's tiles divide the latent, and a row of the cache has room",
        "W == KV_FORMATS[kv_format].row_bytes(L, R)": "a row of the cache has the format's bytes for L and R",
    },
    fake=mla_decode.fake,
    reduces=mla_decode.reduces,
    flops=mla_decode.flops,
    traffic="B * P * page_size * W + B * s * H * (2 * L + R) * q_nope.element_size() + 4 * B * (s * H + P + 1)",
    terms=lambda *args, **kwargs: finite_terms(*_paged_fp8(attend_terms, *args, **kwargs)),
    intermediate=lambda *args, **kwargs: _paged_fp8(attend_intermediate_rows, *args, **kwargs),
    plan=plan_mla_decode,
    contracts=replace(
        mla_decode.contracts,
        C5_fp8_kind="cache's dtype.",
        C6_fp8_cast="None: codes are read, queries stay as they are.",
        C9_rounding="Rows mean code · scale in float32, unrounded; a kernel may round them to q's dtype, as FlashMLA "
        f"does. {ROUNDING}",
    ),
)
def mla_decode_fp8(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_format: str,
    plan: Tensor | None = None,
    layout: str = PLAIN,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` over an 8-bit latent cache, whose rows `mla_kv_store_fp8` wrote.

    cache: [pages, page_size, W] of fp8, W the bytes of a row in ``kv_format`` (see `KV_FORMATS`). Everything else,
    is as in `mla_decode` over the rows [c_kv | k_pe] that the codes mean. Returns (out, lse) as it does.
    """
    return _paged_fp8(attend, q_nope, q_pe, cache, page_table, seq_lens, scale, kv_format)


def _merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each side's share [T, H] (0 and 0 where both are empty) and the joint lse."""
    lse_a, lse_b = (lse.masked_fill(lse.isinf(), -torch.inf) for lse in (lse_a, lse_b))
    top = torch.maximum(lse_a, lse_b)
    top = top.masked_fill(top.isneginf(), 0)
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    total = a + b  # at least 1 unless both are empty
    return a / total.clamp(min=1), b / total.clamp(min=1), top + total.log()


def _merge_terms(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    share_a, share_b, lse = (x[..., None] for x in _merge_weights(lse_a, lse_b))
    empty_a, empty_b = lse_a.isinf()[..., None], lse_b.isinf()[..., None]
    a, b = wide(out_a).masked_fill(empty_a, 0), wide(out_b).masked_fill(empty_b, 0)
    gap = (lse_a - lse_b)[..., None].abs().masked_fill(empty_a | empty_b, 0)
    # A share may be reckoned as exp(lse_i - lse), whose exponent is as far off as lse is large.
    size = lse.masked_fill(lse.isinf(), 0).abs() + 1
    out = size * (share_a * a.abs() + share_b * b.abs()) + share_a * share_b * (a - b).abs() * gap
    return out, (lse.masked_fill(lse.isinf(), 0).abs() + 1)[..., 0]


@op(
    shapes={"out_a": "T H D", "lse_a": "T H", "out_b": "T H D", "lse_b": "T H"},
    dtypes={"out_a": FLOAT, "lse_a": LSE, "out_b": "out_a", "lse_b": "lse_a"},
    reduces="2",
    flops="3 * T * H * D",
    terms=_merge_terms,
    contracts=Contracts(
        C7_sentinels="An lse of -inf or +inf (some libraries' habit) marks its side as empty: its out is not read.",
        C8_unwritten_rows="Both sides empty: out 0, lse -inf. NaN in an empty side's out never reaches the result.",
        C9_rounding="Computed in float32; out is rounded once, lse never.",
    ),
)
def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out_a, out_b: [T, H, D] bf16/f16/f32; lse_a, lse_b: [T, H] float32, natural logarithm, ±inf for an empty set.
    Returns (out [T, H, D] in out_a's dtype, lse [T, H]): Σ out_i·e^(lse_i - lse), lse = log Σ e^lse_i.
    With one side empty the other comes back exactly. Source: Cascade inference; FlashInfer's has base-2 lse.
    """
    share_a, share_b, lse = _merge_weights(lse_a, lse_b)
    a = wide(out_a).masked_fill(lse_a.isinf()[..., None], 0) * share_a[..., None]
    b = wide(out_b).masked_fill(lse_b.isinf()[..., None], 0) * share_b[..., None]
    return narrow(a + b, out_a), lse


@op(
    shapes={"k_nope": "T H P", "k_pe": "T 1 R"},
    dtypes={"k_nope": FLOAT, "k_pe": "k_nope"},
    contracts=Contracts(
        C3_strides="Outer strides are free: k_nope is a slice of the expanded [k_nope | v], k_pe of the projection.",
        C9_rounding="A copy: bitwise.",
    ),
)
def concat_mla_k(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """MLA's full keys: each head's own part, then the rotated part that all heads share.

    k_nope: [T, H, P] bf16/f16/f32; k_pe: [T, 1, R], the same dtype. Returns [T, H, P + R].
    """
    return torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], -1)


@op(
    shapes={"q_nope": "... H L", "q_pe": "... H R"},
    dtypes={"q_nope": FLOAT, "q_pe": "q_nope"},
    where={"q_nope.shape[:-1] == q_pe.shape[:-1]": "q_nope and q_pe have the same tokens and heads"},
    contracts=Contracts(
        C3_strides="Outer strides are free: q_nope is a transposed batched product, q_pe a slice of the projection.",
        C9_rounding="A copy: bitwise.",
    ),
)
def concat_mla_absorb_q(q_nope: Tensor, q_pe: Tensor) -> Tensor:
    """MLA's absorbed queries, as kernels with one query tensor want them.

    q_nope: [..., H, L] bf16/f16/f32, multiplied by W_UK; q_pe: [..., H, R] rotated; one dtype. Returns [..., H, L+R].
    """
    return torch.cat([q_nope, q_pe], -1)
