"""DeepSeek-V3 (DeepSeek-AI, 2024) for training, in plain torch: the names of modules are the checkpoint's.

So ``state_dict`` is the file. Written apart from torch_hal_deepseek and without its ops, it is also a second opinion
on them. Everything is computed in the plainest way: attention expanded, every expert on every token.

Shapes, as suffixes: B sequences · T tokens · D hidden · H heads · N key width without position · R rotary width ·
V value width · E experts · K experts of a token · I intermediate width · G groups · W words of the vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace as Config
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOS, EOS = 256, 257  # ids 0..255 are bytes

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "torch_hal_tokenizer": "bytes",
    "vocab_size": 320,  # a multiple of 64; ids from 258 on are never seen
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "intermediate_size": 384,
    "hidden_act": "silu",
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, intermediate), linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Which experts a token goes to, and with which weights: noaux_tc.

    The bias sways the choice, not the weights. It is no parameter: `rebalance` moves it by the load, one small step
    a batch, which balances the experts without a loss that would disturb the model's own.
    """

    load: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("load", torch.zeros(c.n_routed_experts), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Every expert's weight, 0 where it is not chosen: [B, T, E] float32."""
        c = self.c
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_BTE = F.linear(x_BTD.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            swayed_BTGE = (scores_BTE + self.e_score_correction_bias).unflatten(-1, (c.n_group, -1))
            groups = swayed_BTGE.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
            kept_BTG = torch.zeros_like(swayed_BTGE[..., 0]).scatter(-1, groups, 1.0)
            chosen = swayed_BTGE.masked_fill(kept_BTG.unsqueeze(-1) == 0, -math.inf).flatten(-2)
            ids_BTK = chosen.topk(c.num_experts_per_tok, dim=-1).indices
            mask_BTE = torch.zeros_like(scores_BTE).scatter(-1, ids_BTK, 1.0)
            if self.training:
                self.load.add_(mask_BTE.sum((0, 1)))
        weights_BTE = scores_BTE * mask_BTE
        return weights_BTE / (weights_BTE.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    @torch.no_grad()
    def rebalance(self, step: float) -> Tensor:
        """Make overloaded experts less and idle ones more likely; the largest load, relative to the mean."""
        self.e_score_correction_bias.add_(step * torch.sign(self.load.mean() - self.load))
        worst = self.load.max() / self.load.mean()
        self.load.zero_()
        return worst


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = nn.ModuleList(MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.n_routed_experts))
        self.shared_experts = MLP(c.hidden_size, c.n_shared_experts * c.moe_intermediate_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """All experts side by side are one wide MLP, whose intermediates the gate weighs."""
        gate, up, down = (
            torch.cat([getattr(expert, name).weight for expert in self.experts], dim)
            for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
        )
        inner = (F.silu(F.linear(x_BTD, gate)) * F.linear(x_BTD, up)).unflatten(-1, (len(self.experts), -1))
        weighed = (inner * self.gate(x_BTD).unsqueeze(-1)).to(inner.dtype).flatten(-2)
        return F.linear(weighed, down) + self.shared_experts(x_BTD)


def yarn_mscale(c: Config) -> float:
    scaling = c.rope_scaling
    return 0.1 * float(scaling["mscale_all_dim"]) * math.log(scaling["factor"]) + 1.0


def rotations(c: Config) -> Tensor:
    """Unit complex numbers [positions, R / 2] that turn a pair of dimensions; YaRN (Peng et al., 2023).

    Dimensions that turn less than beta_slow times within the original length are slowed down by the factor, those
    that turn more than beta_fast times are left alone, with a linear ramp between.
    """
    yarn, rotary = c.rope_scaling, c.qk_rope_head_dim

    def dimension(turns: float) -> float:
        return (
            rotary
            * math.log(yarn["original_max_position_embeddings"] / (turns * math.tau))
            / (2 * math.log(c.rope_theta))
        )

    low, high = (
        max(math.floor(dimension(yarn["beta_fast"])), 0),
        min(math.ceil(dimension(yarn["beta_slow"])), rotary - 1),
    )
    frequency = c.rope_theta ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    slowed = ((torch.arange(rotary // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = frequency / yarn["factor"] * slowed + frequency * (1 - slowed)
    angle = torch.outer(torch.arange(c.max_position_embeddings, dtype=torch.float64), frequency)
    return torch.stack([angle.cos(), angle.sin()], -1).float()


def rotate(x_BTHR: Tensor, rotations_TR: Tensor) -> Tensor:
    """Neighbouring dimensions are a pair (interleaved), and stay in place."""
    even, odd = x_BTHR.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotations_TR[: x_BTHR.shape[1], None].unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x_BTHR.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, expanded."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, width = c, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, 1e-6)
        self.q_b_proj = linear(c.q_lora_rank, c.num_attention_heads * width)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, 1e-6)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(c.num_attention_heads * c.v_head_dim, c.hidden_size)
        self.scale = width**-0.5 * yarn_mscale(c) ** 2

    def forward(self, x_BTD: Tensor, rotations_TR: Tensor) -> Tensor:
        c = self.c
        heads = (c.num_attention_heads, -1)
        q_BTHP = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))).unflatten(-1, heads)
        q_nope, q_pe = q_BTHP.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x_BTD).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv_BTHX = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, heads)
        k_nope, v_BTHV = kv_BTHX.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_pe = rotate(k_pe.unsqueeze(2), rotations_TR).expand(-1, -1, c.num_attention_heads, -1)
        q_BTHP = torch.cat([q_nope, rotate(q_pe, rotations_TR)], -1)
        k_BTHP = torch.cat([k_nope, k_pe], -1)
        q, k, v = (t.transpose(1, 2) for t in (q_BTHP, k_BTHP, v_BTHV))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, c: Config, index: int, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c) if index >= c.first_k_dense_replace else MLP(c.hidden_size, c.intermediate_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, rotations_TR: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), rotations_TR))
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))


class SharedHead(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class PredictionLayer(Layer):
    """Multi-token prediction: from the model's normed state at t and the token t + 1, the state for token t + 2."""

    def __init__(self, c: Config, index: int, dropout: float) -> None:
        super().__init__(c, index, dropout)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = linear(2 * c.hidden_size, c.hidden_size)
        self.shared_head = SharedHead(c)

    def predict(self, hidden_BTD: Tensor, embedded_BTD: Tensor, rotations_TR: Tensor) -> Tensor:
        both = torch.cat([self.enorm(embedded_BTD), self.hnorm(hidden_BTD)], -1)
        return self.shared_head.norm(self(self.eh_proj(both), rotations_TR))


class Model(nn.Module):
    def __init__(self, c: Config, dropout: float) -> None:
        super().__init__()
        depth = c.num_hidden_layers
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        layers: list[nn.Module] = [Layer(c, i, dropout) for i in range(depth)]
        self.layers = nn.ModuleList([*layers, PredictionLayer(c, depth, dropout)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class DeepSeekV3(nn.Module):
    def __init__(self, config: Mapping[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        c = self.c = Config(**config)
        self.model = Model(c, dropout)
        self.lm_head = linear(c.hidden_size, c.vocab_size)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("rotations", rotations(c), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Normal weights of deviation fan-in^-1/2, smaller where they add to the residual stream."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deviation = 0.5 if "embed_tokens" in name else weight.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    deviation *= (2 * len(self.model.layers)) ** -0.5
                nn.init.normal_(weight, std=deviation)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Normed states [B, T, D]."""
        x_BTD = self.dropout(self.model.embed_tokens(ids_BT))
        for layer in self.model.layers[:-1]:
            x_BTD = layer(x_BTD, self.rotations)
        return self.model.norm(x_BTD)

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, W] for the next token, and [B, T - 1, W] for the one after it, that one given."""
        hidden_BTD = self.hidden(ids_BT)
        embedded_BTD = self.dropout(self.model.embed_tokens(ids_BT[:, 1:]))
        drafted_BTD = self.model.layers[-1].predict(hidden_BTD[:, :-1], embedded_BTD, self.rotations)
        return self.lm_head(hidden_BTD), self.lm_head(drafted_BTD)

    def loss(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Nats per token of both predictions over sequences of T tokens, the first of which is only given."""
        logits, drafts = self(ids_BT[:, :-1])
        return _nats(logits, ids_BT[:, 1:]), _nats(drafts, ids_BT[:, 2:])


def _nats(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
