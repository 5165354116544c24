"""How well the multi-token prediction layer drafts."""

from __future__ import annotations

import torch

from .batch import plan_prefill
from .cache import Sequence
from .model import DeepSeek, Tokens


@torch.no_grad()
def draft_acceptance(model: DeepSeek, token_ids: Tokens) -> float:
    """The share of greedy drafts that the model itself would have chosen, over a text of at least 3 tokens.

    After each token but the last two, the layer drafts the token after next, the next one given, and the model chooses
    it, likewise. Over a text that the model wrote greedily, that is how often speculation's first draft is accepted.
    """
    ids = model.token_ids(token_ids)
    count = len(ids) - 1
    if count < 2:
        raise ValueError(f"draft_acceptance: expected at least 3 tokens, got {len(ids)}")
    cache, sequence = model.new_cache(count), Sequence()
    cache.reserve(sequence, count)
    batch = plan_prefill(cache, [sequence], [count], capacity=model.agree_capacity(count))
    ids = ids.to(model.device)
    hidden_TD = model.forward(ids[:-1], batch, cache)
    drafts_T = model.draft(hidden_TD, ids[1:], batch, cache).argmax(-1)
    chosen_T = model.head(hidden_TD).argmax(-1)
    return float((drafts_T[:-1] == chosen_T[1:]).float().mean())
