"""Sample arguments of routing, experts and sampling. Small; collectives need a process group and have none here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

Sample = Callable[[Generator, torch.dtype, int], dict[str, Any]]

EXPERTS, TOP_K, HIDDEN, INTER, VOCAB = 16, 4, 48, 24, 96


def _normal(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _float32_or(dtype: torch.dtype) -> torch.dtype:
    """The dtype of weights and probabilities beside tensors of ``dtype``: float32, or float64 for the oracle."""
    return torch.promote_types(dtype, torch.float32)


def _topk_softmax(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"logits": _normal(generator, dtype, tokens, EXPERTS), "top_k": TOP_K, "renormalize": False}


def _grouped_topk(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    groups = {"num_groups": 4, "topk_groups": 2, "scale": 16.0}
    return {**_topk_softmax(generator, dtype, tokens), **groups}


def _biased_grouped_topk(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    bias = _normal(generator, _float32_or(dtype), EXPERTS) - 1.0  # some biased scores are negative
    return {**_grouped_topk(generator, dtype, tokens), "bias": bias, "renormalize": True, "scale": 2.5}


def _fused_experts(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    ids = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator)  # some say "no expert"
    return {
        "x": _normal(generator, dtype, tokens, HIDDEN),
        "w13": _normal(generator, dtype, EXPERTS, 2 * INTER, HIDDEN) / 8,
        "w2": _normal(generator, dtype, EXPERTS, HIDDEN, INTER) / 8,
        "topk_weights": torch.rand(tokens, TOP_K, generator=generator).to(_float32_or(dtype)),
        "topk_ids": ids.to(torch.int32),
    }


def _moe_sum_reduce(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"x": _normal(generator, dtype, tokens, TOP_K, HIDDEN), "scale": 2.5}


def _shared_expert_add(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    routed, shared = (_normal(generator, dtype, tokens, HIDDEN) for _ in range(2))
    return {"routed": routed, "shared": shared, "alpha": 0.4}


def _probs(generator: Generator, dtype: torch.dtype, rows: int) -> Tensor:
    return _normal(generator, _float32_or(dtype), rows, VOCAB).mul(2).softmax(-1)


def _top_k_renorm(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    top_k = torch.randint(-1, VOCAB + 2, (rows,), generator=generator)
    return {"probs": _probs(generator, dtype, rows), "top_k": top_k.to(torch.int32)}


def _top_p_renorm(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {"probs": _probs(generator, dtype, rows), "top_p": torch.rand(rows, generator=generator)}


def _min_p_renorm(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {"probs": _probs(generator, dtype, rows), "min_p": torch.rand(rows, generator=generator)}


def _sample(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return {"probs": _probs(generator, dtype, rows), "seeds": seeds, "offsets": torch.arange(rows)}


SAMPLES: dict[str, Sample] = {
    "topk_softmax": _topk_softmax,
    "grouped_topk": _grouped_topk,
    "biased_grouped_topk": _biased_grouped_topk,
    "fused_experts": _fused_experts,
    "moe_sum_reduce": _moe_sum_reduce,
    "shared_expert_add": _shared_expert_add,
    "top_k_renorm": _top_k_renorm,
    "top_p_renorm": _top_p_renorm,
    "min_p_renorm": _min_p_renorm,
    "sample": _sample,
}
