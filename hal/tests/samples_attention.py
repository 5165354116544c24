"""Sample calls of the cache and attention ops: small, with strided views, empties and sentinels where they may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

L, R = 512, 64  # kv_lora_rank, qk_rope_head_dim: a row of the cache is 576 wide
NOPE, VALUE = 32, 24
HEADS, PAGE_SIZE = 2, 4

Sample = Callable[[Generator, torch.dtype, int], dict[str, Any]]


def normal(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def integers(values: list[int], generator: Generator, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=generator.device)


def mla_kv_store(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    pages = tokens // PAGE_SIZE + 2
    projection = normal(generator, dtype, tokens, L + R)
    slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=generator.device)[:tokens]
    slots[2::5] = -1
    slots[4::5] = pages * PAGE_SIZE
    return {
        "cache": normal(generator, dtype, pages, PAGE_SIZE, L + R),
        "slots": slots,
        "c_kv": projection[:, :L],
        "k_pe": projection[:, L:],
    }


def mla_kv_gather(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    store = mla_kv_store(generator, dtype, tokens)
    return {"cache": store["cache"], "slots": store["slots"].to(torch.int32), "kv_lora_rank": L}


def mha_varlen(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Three sequences: with a cached prefix, without queries, and with fewer keys than queries where there are two."""
    half = tokens // 2
    queries, keys = [tokens - half, 0, half], [tokens - half + 3, 2, max(0, half - 1)]
    kv = normal(generator, dtype, sum(keys), HEADS, NOPE + VALUE)
    k_pe = normal(generator, dtype, sum(keys), 1, R).expand(-1, HEADS, -1)
    return {
        "q": normal(generator, dtype, tokens, HEADS, NOPE + R),
        "k": torch.cat([kv[..., :NOPE], k_pe], -1),
        "v": kv[..., NOPE:],
        "cu_q": integers([0, *torch.tensor(queries).cumsum(0).tolist()], generator),
        "cu_k": integers([0, *torch.tensor(keys).cumsum(0).tolist()], generator),
        "max_q": max(queries),
        "max_k": max(keys),
        "scale": 0.11,
        "causal": True,
    }


def mla_decode(generator: Generator, dtype: torch.dtype, sequences: int) -> dict[str, Any]:
    """Two new tokens each, unequal lengths (some 0, as padding has), scattered pages, garbage where none is needed."""
    per_sequence, queries = 4, 2
    pages = sequences * per_sequence + 1
    lens = [(5 * i + 3) % 14 for i in range(sequences)]
    table = torch.randperm(pages, generator=generator, device=generator.device)[: sequences * per_sequence]
    table = table.view(sequences, per_sequence).to(torch.int32)
    for i, length in enumerate(lens):
        table[i, -(-length // PAGE_SIZE) :] = -1 if i % 2 else 1 << 30
    q = normal(generator, dtype, sequences, queries, HEADS, L + R)
    return {
        "q_nope": q[..., :L],
        "q_pe": q[..., L:],
        "cache": normal(generator, dtype, pages, PAGE_SIZE, L + R),
        "page_table": table,
        "seq_lens": integers(lens, generator),
        "scale": 0.05,
    }


def merge_state(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    lse_type = torch.float64 if dtype == torch.float64 else torch.float32
    lse_a, lse_b = (3 * normal(generator, lse_type, tokens, HEADS) for _ in range(2))
    lse_a[1::4] = -torch.inf
    lse_b[2::4] = torch.inf
    lse_a[3::4, 0] = lse_b[3::4, 0] = -torch.inf
    out_a, out_b = (normal(generator, dtype, tokens, HEADS, VALUE) for _ in range(2))
    return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


def concat_mla_k(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    projection = normal(generator, dtype, tokens, 1, L + R)
    return {
        "k_nope": normal(generator, dtype, tokens, HEADS, NOPE + VALUE)[..., :NOPE],
        "k_pe": projection[..., L:],
    }


def concat_mla_absorb_q(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {
        "q_nope": normal(generator, dtype, HEADS, tokens, L).transpose(0, 1),
        "q_pe": normal(generator, dtype, tokens, HEADS, NOPE + R)[..., NOPE:],
    }


SAMPLES: dict[str, Sample] = {
    "mla_kv_store": mla_kv_store,
    "mla_kv_gather": mla_kv_gather,
    "mha_varlen": mha_varlen,
    "mla_decode": mla_decode,
    "merge_state": merge_state,
    "concat_mla_k": concat_mla_k,
    "concat_mla_absorb_q": concat_mla_absorb_q,
}
