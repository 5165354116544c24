"""Sample calls of the cache, attention and bitmask ops: small, with strided views, empties and sentinels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from torch_hal.kv_formats import KV_FORMATS
from torch_hal.ops.kv_cache import mla_kv_store_fp8 as store_fp8

L, R = 512, 64  # kv_lora_rank, qk_rope_head_dim: a row of the cache is 576 wide
NOPE, VALUE = 32, 24
HEADS, PAGE_SIZE = 2, 4

Sample = Callable[[Generator, torch.dtype, int], dict[str, Any]]


def normal(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def integers(values: list[int], generator: Generator, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=generator.device)


def mha_kv_store(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    store, kv = mla_kv_store(generator, dtype, tokens), normal(generator, dtype, tokens, HEADS, NOPE + VALUE)
    pages = store["cache"].shape[0]
    return {
        "k_cache": normal(generator, dtype, pages, PAGE_SIZE, HEADS, NOPE),
        "v_cache": normal(generator, dtype, pages, PAGE_SIZE, HEADS, VALUE),
        "slots": store["slots"],
        "k": kv[..., :NOPE],
        "v": kv[..., NOPE:],
    }


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


def quantised(rows: Tensor, kv_format: str) -> Tensor:
    """A cache [pages, page_size, W] of the rows [pages, page_size, L + R]."""
    pages, page_size, _ = rows.shape
    cache = torch.zeros(pages, page_size, KV_FORMATS[kv_format].row_bytes(L, R), dtype=torch.uint8, device=rows.device)
    cache, rows = cache.view(torch.float8_e4m3fn), rows.flatten(0, 1)
    slots = torch.arange(pages * page_size, device=rows.device)
    store_fp8(cache, slots, rows[:, :L], rows[:, L:], kv_format)
    return cache


def mla_kv_store_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    store = mla_kv_store(generator, dtype, tokens)
    return {**store, "cache": quantised(store["cache"], "ds_mla"), "kv_format": "ds_mla"}


def mla_kv_gather_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    gather = mla_kv_gather(generator, dtype, tokens)
    return {**gather, "cache": quantised(gather["cache"], "ds_mla"), "kv_format": "ds_mla", "out_dtype": dtype}


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


def mla_decode_fp8(generator: Generator, dtype: torch.dtype, sequences: int) -> dict[str, Any]:
    decode = mla_decode(generator, dtype, sequences)
    return {**decode, "cache": quantised(decode["cache"], "ds_mla"), "kv_format": "ds_mla"}


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


def apply_token_bitmask(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """A vocabulary that ends within a word; rows named twice, not at all, and too many."""
    words = torch.randint(-(2**31), 2**31, (rows, 3), generator=generator, device=generator.device)
    return {
        "logits": normal(generator, dtype, rows, 70),
        "bitmask": words.to(torch.int32),
        "indices": integers([2, 0, 2, -1, rows], generator),
    }


SAMPLES: dict[str, Sample] = {
    "mha_kv_store": mha_kv_store,
    "mla_kv_store": mla_kv_store,
    "mla_kv_store_fp8": mla_kv_store_fp8,
    "mla_kv_gather": mla_kv_gather,
    "mla_kv_gather_fp8": mla_kv_gather_fp8,
    "mha_varlen": mha_varlen,
    "mla_decode": mla_decode,
    "mla_decode_fp8": mla_decode_fp8,
    "merge_state": merge_state,
    "concat_mla_k": concat_mla_k,
    "concat_mla_absorb_q": concat_mla_absorb_q,
    "apply_token_bitmask": apply_token_bitmask,
    "apply_token_bitmask_": apply_token_bitmask,
}
