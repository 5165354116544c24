"""Generation for one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import Sequence, count
from .sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from .model import DeepSeek

PREFILL_CHUNK = 8192  # prompt tokens that are computed at a time


def generate(
    model: DeepSeek,
    ids_T: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[int]:
    """`DeepSeek.generate`: judges the request now, and runs when iterated."""
    if len(ids_T) == 0:
        raise ValueError("generate: the prompt is empty")
    count("max_new_tokens", max_new_tokens)
    params = SamplingParams(temperature, top_p, top_k, min_p, 0 if seed is None else seed)
    longest = model.config.max_positions
    if len(ids_T) + max_new_tokens > longest:
        raise ValueError(f"{len(ids_T)} prompt and {max_new_tokens} new tokens exceed the model's {longest} positions")
    if seed is None and temperature:  # without, nothing is drawn
        if model.ranks.size > 1:
            raise ValueError("seed: ranks that make up one model must draw alike: give them all the same seed")
        params = dataclasses.replace(params, seed=int(torch.randint(2**63 - 1, ())))
    return _run(model, ids_T, max_new_tokens, params, prefill_chunk)


def _run(
    model: DeepSeek, ids_T: Tensor, max_new_tokens: int, params: SamplingParams, prefill_chunk: int
) -> Iterator[int]:
    yield from _continue(model, ids_T, max_new_tokens, params, prefill_chunk)
    if model.ranks.own_tokens:
        _serve_others(model)


def _serve_others(model: DeepSeek) -> None:
    """Steps without tokens, for this rank's experts are wanted until no rank has any."""
    nothing, cache = torch.empty(0, 1, dtype=torch.int64), model.new_cache(1)
    while capacity := model.agree_capacity(0):
        model.decode(nothing, [], cache, capacity)


def _continue(
    model: DeepSeek, ids_T: Tensor, max_new_tokens: int, params: SamplingParams, prefill_chunk: int
) -> Iterator[int]:
    if max_new_tokens == 0:
        return
    sampler = Sampler(model.ops, [params])
    sequence, cache = Sequence(), model.new_cache(len(ids_T) + max_new_tokens)
    for piece in torch.split(ids_T, prefill_chunk):
        logits_BW = model.prefill([piece], [sequence], cache)
    for drawn in range(max_new_tokens):
        id_B = sampler(logits_BW, torch.tensor([drawn], device=logits_BW.device))
        yield (token := int(id_B))
        if token in model.config.eos_ids or drawn + 1 == max_new_tokens:
            return
        logits_BW = model.decode(id_B[:, None], [sequence], cache)[:, -1]
