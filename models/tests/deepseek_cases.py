"""Configurations and checkpoints that the tests of the DeepSeek models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

# Released models' rows of facts (section 1), as their config.json files spell them.
_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
    "moe_layer_freq": 1,
    "torch_dtype": "bfloat16",
}


def _released_yarn(mscale: float) -> dict[str, Any]:
    return {**YARN, "factor": 40, "original_max_position_embeddings": 4096, "mscale": mscale, "mscale_all_dim": mscale}


RELEASED: dict[str, dict[str, Any]] = {
    "V2-Lite": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": None,
        "rope_scaling": _released_yarn(0.707),
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "V2": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 3,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
        "q_lora_rank": 1536,
        "rope_scaling": _released_yarn(0.707),
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "V3": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "num_nextn_predict_layers": 1,
        "rope_scaling": _released_yarn(1.0),
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}

_SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "rope_scaling": YARN,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "float32",
}


def small(released: str, **changes: Any) -> dict[str, Any]:
    """A released model's config in small."""
    groups = {"V2-Lite": {}, "V2": {"n_group": 4, "topk_group": 2}, "V3": {"n_group": 4, "topk_group": 2}}[released]
    ranks = {"q_lora_rank": 24} if RELEASED[released]["q_lora_rank"] else {}
    dense = {"first_k_dense_replace": 1}
    return {**RELEASED[released], **_SMALL, **groups, **ranks, **dense, **changes}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The larger of ‖a - b‖ / ‖b‖ and max|a - b| / max|b|."""
    assert got.shape == expected.shape
    difference = got - expected
    return max(
        float(difference.norm() / expected.norm()),
        float(difference.abs().max() / expected.abs().max()),
    )


def token_ids(count: int, vocab: int = 101, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed))


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_UE8M0 = {**FP8, "scale_fmt": "ue8m0"}

# Whole FP8 blocks of 128, two or more of each dimension that ranks share, but for kv_a's rows, as in released models.
BLOCKS = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
}
