"""Attention in plain float64 loops, and calls whose unused memory is poisoned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

L, R = 512, 64  # kv_lora_rank, qk_rope_head_dim

# Half a unit in the last place of out (eps / 2), and float32 arithmetic below it.
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 3e-6, "atol": 1e-6},
    torch.float16: {"rtol": 2**-11 * 1.01, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8 * 1.01, "atol": 1e-6},
}
DTYPES = list(TOLERANCE)
Result = tuple[Tensor, Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def offsets(lens: list[int]) -> Tensor:
    return torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32)


def query_by_loop(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> tuple[Tensor, float]:
    """One query of one head: the softmax written out."""
    if not keys:
        return torch.zeros_like(q), -math.inf
    scores = [scale * float(q.double() @ k.double()) for k in keys]
    top = max(scores)
    total = sum(math.exp(s - top) for s in scores)
    parts = [math.exp(s - top) / total * v.double() for s, v in zip(scores, values, strict=True)]
    return torch.stack(parts).sum(0), top + math.log(total)


def mha_by_loop(
    q: Tensor, k: Tensor, v: Tensor, lens_q: list[int], lens_k: list[int], scale: float, causal: bool
) -> Result:
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    start_q = start_k = 0
    for n, m in zip(lens_q, lens_k, strict=True):
        for i in range(n):
            seen = range(start_k, start_k + (max(0, m - n + i + 1) if causal else m))
            for h in range(q.shape[1]):
                result, normaliser = query_by_loop(
                    q[start_q + i, h], [k[j, h] for j in seen], [v[j, h] for j in seen], scale
                )
                if seen:
                    out[start_q + i, h], lse[start_q + i, h] = result, normaliser
        start_q, start_k = start_q + n, start_k + m
    return out, lse


def assert_result(got: Result, want: Result, dtype: torch.dtype) -> None:
    assert got[0].dtype == dtype
    assert got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got[0].double(), want[0], **TOLERANCE[dtype])
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(got[1].double(), want[1], **TOLERANCE[exact])


def pack(lens_q: list[int], lens_k: list[int], dtype: torch.dtype = torch.float32, heads: int = 2) -> dict[str, Any]:
    kv = normal(sum(lens_k), heads, 24 + 16, dtype=dtype, seed=1)  # as the expanded [k_nope | v]: strided slices
    return {
        "q": normal(sum(lens_q), heads, 24, dtype=dtype),
        "k": kv[..., :24],
        "v": kv[..., 24:],
        "cu_q": offsets(lens_q),
        "cu_k": offsets(lens_k),
        "max_q": max(lens_q, default=0),
        "max_k": max(lens_k, default=0),
        "scale": 0.31,
    }


def paged(lens: list[int], queries: int, dtype: torch.dtype, page_size: int = 4, heads: int = 2) -> dict[str, Any]:
    """Shuffled pages of one layer of a pool; NaN wherever no sequence's tokens are, garbage page numbers past them."""
    per_sequence = 1 + max([-(-n // page_size) for n in lens], default=0)
    pages = per_sequence * len(lens) + 1
    cache = torch.full((pages, 2, page_size, L + R), torch.nan, dtype=dtype)[:, 1]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.empty(len(lens), per_sequence, dtype=torch.int32)
    for b, n in enumerate(lens):
        used = -(-n // page_size)
        garbage = [-1, 2**31 - 1, order[-1], pages]
        row = [order.pop() if p < used else garbage[(b + p) % 4] for p in range(per_sequence)]
        table[b] = torch.tensor(row, dtype=torch.int32)
        tokens = normal(n, L + R, dtype=dtype, seed=10 + b)
        for j in range(n):
            cache[row[j // page_size], j % page_size] = tokens[j]
    q = normal(len(lens), queries, heads, L + R, dtype=dtype, seed=2)
    return {
        "q_nope": q[..., :L],
        "q_pe": q[..., L:],
        "cache": cache,
        "page_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": 0.07,
    }


def decode_by_loop(call: dict[str, Any]) -> Result:
    q = torch.cat([call["q_nope"], call["q_pe"]], -1).double()
    cache, table, (batch, queries, heads, _) = call["cache"], call["page_table"].tolist(), q.shape
    out, lse = torch.zeros(batch, queries, heads, L, dtype=torch.float64), torch.empty(batch, queries, heads)
    lse = lse.double()
    for b, length in enumerate(call["seq_lens"].tolist()):
        rows = [cache[table[b][j // cache.shape[1]], j % cache.shape[1]] for j in range(length)]
        for i in range(queries):
            seen = rows[: max(0, length - queries + 1 + i)]
            for h in range(heads):
                result, lse[b, i, h] = query_by_loop(q[b, i, h], seen, [row[:L] for row in seen], call["scale"])
                out[b, i, h] = result[:L]
    return out, lse
