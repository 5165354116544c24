"""How many parameters a model has, how many of them a token uses, and what it leaves in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class Counts:
    """Exact element counts, multi-token-prediction layers aside."""

    total: int
    attention_per_layer: int
    moe_per_layer: int
    active: int  # used by one token, input embedding and head included
    active_without_embedding: int
    kv_per_token: int


def counts(config: Config) -> Counts:
    """The counts of a model with this configuration."""
    c = config
    embedding = c.vocab_size * c.hidden_size
    attention = _attention(c)
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    router = c.n_routed_experts * c.hidden_size + (c.n_routed_experts if c.topk_method == "noaux_tc" else 0)
    moe = c.n_routed_experts * expert + c.n_shared_experts * expert + router
    moe_active = (c.num_experts_per_tok + c.n_shared_experts) * expert + router
    dense = 3 * c.hidden_size * c.intermediate_size

    moe_layers = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
    dense_layers = c.num_hidden_layers - moe_layers
    norms = (2 * c.num_hidden_layers + 1) * c.hidden_size
    common = c.num_hidden_layers * attention + dense_layers * dense + norms
    head = 0 if c.tie_word_embeddings else embedding
    return Counts(
        total=common + moe_layers * moe + embedding + head,
        attention_per_layer=attention,
        moe_per_layer=moe,
        active=common + moe_layers * moe_active + embedding + head,
        active_without_embedding=common + moe_layers * moe_active + embedding,
        kv_per_token=c.num_hidden_layers * c.kv_width,
    )


def _attention(c: Config) -> int:
    heads = c.num_attention_heads
    if c.q_lora_rank is None:
        query = c.hidden_size * heads * c.qk_head_dim
    else:
        query = c.hidden_size * c.q_lora_rank + c.q_lora_rank + c.q_lora_rank * heads * c.qk_head_dim
    latent = c.hidden_size * c.kv_width + c.kv_lora_rank
    expand = c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    return query + latent + expand + heads * c.v_head_dim * c.hidden_size
