"""Second oracles of attention: for each query and head, the sum over the keys that it sees.

A sequence of `mha_varlen` that holds inf or NaN may have them in all its results: there they are 0, in the oracle's
results and in canonical ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .convert import Array, Canonical, Codes, Oracle
from .kv_cache import meant


def attend(scores: Sequence[float], values: Sequence[Array], width: int) -> tuple[Array, float]:
    """(Σ_j e^s_j · v_j / Σ_j e^s_j, ln Σ_j e^s_j); without keys (0, −∞). Exponents relative to the largest score."""
    if len(scores) == 0:
        return np.zeros(width), -math.inf
    largest = math.nan if any(math.isnan(score) for score in scores) else max(scores)
    if not math.isfinite(largest):
        return np.full(width, math.nan), largest
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    out = np.zeros(width)
    with np.errstate(invalid="ignore"):  # 0 · ∞
        for weight, value in zip(weights, values, strict=True):
            out += weight / total * value
    return out, largest + math.log(total)


def sequences(cu_q: Array, cu_k: Array) -> Iterator[tuple[range, range]]:
    """Each sequence's rows of queries and of keys."""
    for b in range(len(cu_q) - 1):
        yield range(int(cu_q[b]), int(cu_q[b + 1])), range(int(cu_k[b]), int(cu_k[b + 1]))


def _holds_only_numbers(queries: range, keys: range, q: Array, k: Array, v: Array) -> bool:
    return all(np.isfinite(x[list(rows)]).all() for x, rows in ((q, queries), (k, keys), (v, keys)))


def mha_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array,
    cu_k: Array,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
) -> list[Any]:
    """Rows of no sequence see no key."""
    tokens, heads, _ = q.shape
    width = v.shape[2]
    out, lse = np.zeros((tokens, heads, width)), np.full((tokens, heads), -math.inf)
    for queries, keys in sequences(cu_q, cu_k):
        if not _holds_only_numbers(queries, keys, q, k, v):
            lse[list(queries)] = 0
            continue
        for i, row in enumerate(queries):
            last = i + len(keys) - len(queries)  # the last query sees the last key
            seen = [key for j, key in enumerate(keys) if j <= last or not causal]
            for head in range(heads):
                scores = [scale * float(np.sum(q[row, head] * k[key, head])) for key in seen]
                out[row, head], lse[row, head] = attend(scores, [v[key, head] for key in seen], width)
    return [out, lse]


def latent_attention(
    q_nope: Array, q_pe: Array, c_kv: Array, k_pe: Array, page_table: Array, seq_lens: Array, scale: float
) -> list[Any]:
    """One cached row [c_kv | k_pe] is the key of all heads, and its c_kv their value."""
    batch, new, heads, rank = q_nope.shape
    page_size = c_kv.shape[1]
    out, lse = np.zeros(q_nope.shape), np.zeros((batch, new, heads))
    for b, i, head in np.ndindex(batch, new, heads):
        scores, values = [], []
        for j in range(int(seq_lens[b]) - new + 1 + i):
            page, offset = page_table[b, j // page_size], j % page_size
            latent, rotated = c_kv[page, offset], k_pe[page, offset]
            scores.append(scale * float(np.sum(q_nope[b, i, head] * latent) + np.sum(q_pe[b, i, head] * rotated)))
            values.append(latent)
        out[b, i, head], lse[b, i, head] = attend(scores, values, rank)
    return [out, lse]


def mla_decode(
    q_nope: Array,
    q_pe: Array,
    cache: Array,
    page_table: Array,
    seq_lens: Array,
    scale: float,
    plan: Array | None = None,
    layout: str = "plain",
) -> list[Any]:
    rank = q_nope.shape[3]
    return latent_attention(q_nope, q_pe, cache[..., :rank], cache[..., rank:], page_table, seq_lens, scale)


def mla_decode_fp8(
    q_nope: Array,
    q_pe: Array,
    cache: Codes,
    page_table: Array,
    seq_lens: Array,
    scale: float,
    kv_format: str,
    plan: Array | None = None,
    layout: str = "plain",
) -> list[Any]:
    c_kv, k_pe = meant(cache, q_nope.shape[3], kv_format)
    return latent_attention(q_nope, q_pe, c_kv, k_pe, page_table, seq_lens, scale)


def merge_state(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> list[Any]:
    """A side whose lse is infinite is empty."""
    out, lse = np.zeros(out_a.shape), np.zeros(lse_a.shape)
    for row in np.ndindex(lse_a.shape):
        sides = [(float(lse_a[row]), out_a[row]), (float(lse_b[row]), out_b[row])]
        full = [side for side in sides if not math.isinf(side[0])]
        out[row], lse[row] = attend([side[0] for side in full], [side[1] for side in full], out_a.shape[2])
    return [out, lse]


def concat_mla_k(k_nope: Array, k_pe: Array) -> list[Any]:
    """Every head gets the same k_pe."""
    tokens, heads, nope = k_nope.shape
    k = np.zeros((tokens, heads, nope + k_pe.shape[2]))
    for token, head in np.ndindex(tokens, heads):
        k[token, head] = [*k_nope[token, head], *k_pe[token, 0]]
    return [k]


def concat_mla_absorb_q(q_nope: Array, q_pe: Array) -> list[Any]:
    q = np.zeros((*q_nope.shape[:-1], q_nope.shape[-1] + q_pe.shape[-1]))
    for row in np.ndindex(q_nope.shape[:-1]):
        q[row] = [*q_nope[row], *q_pe[row]]
    return [q]


def _canonical_varlen(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    out, lse = (result.copy() for result in results)
    for queries, keys in sequences(arguments["cu_q"], arguments["cu_k"]):
        if not _holds_only_numbers(queries, keys, arguments["q"], arguments["k"], arguments["v"]):
            out[list(queries)], lse[list(queries)] = 0, 0
    return [out, lse]


ORACLES: dict[str, Oracle] = {
    "mha_varlen": mha_varlen,
    "mla_decode": mla_decode,
    "mla_decode_fp8": mla_decode_fp8,
    "merge_state": merge_state,
    "concat_mla_k": concat_mla_k,
    "concat_mla_absorb_q": concat_mla_absorb_q,
}
CANONICAL: dict[str, Canonical] = {"mha_varlen": _canonical_varlen}
