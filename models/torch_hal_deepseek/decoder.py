"""Decoder layers: those of the model, and the one that predicts a token further.

Shapes, as suffixes: T tokens · D hidden · W words of the vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import MLA
from .batch import Decode, Prefill
from .layers import MLP, Build, Head, Norm, ResidualNorm, linear
from .moe import MoE
from .parallel import Span
from .weights import Part, Targets


class Layer:
    """A decoder layer: attention, then a dense MLP or a mixture of experts, each behind a norm."""

    def __init__(self, build: Build, prefix: str, moe: bool, rope_table: Tensor) -> None:
        c = build.config
        self.input_norm = ResidualNorm(build, f"{prefix}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attention = MLA(build, f"{prefix}.self_attn", rope_table)
        self.post_attention_norm = ResidualNorm(
            build, f"{prefix}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps
        )
        self.mlp = MoE(build, f"{prefix}.mlp") if moe else MLP(build, f"{prefix}.mlp", c.intermediate_size)
        self.sum = build.sum_over(build.ranks.tp)

    def targets(self) -> Targets:
        for part in (self.input_norm, self.attention, self.post_attention_norm, self.mlp):
            yield from part.targets()

    def prepare(self) -> None:
        self.attention.prepare()
        self.mlp.prepare()

    def __call__(self, block_TD: Tensor | None, residual_TD: Tensor, batch: Prefill | Decode, cache: Tensor) -> Tensor:
        """The MLP's output; block_TD is the previous layer's, not yet in the residual stream, which is updated."""
        x_TD = self.sum(self.attention(self.input_norm(block_TD, residual_TD), batch, cache))
        x_TD = self.post_attention_norm(x_TD, residual_TD)
        return self.sum(self.mlp(x_TD, batch) if isinstance(self.mlp, MoE) else self.mlp(x_TD))


class MTP:
    """Multi-token prediction (DeepSeek-V3, 2024, section 2.2): one more layer, which sees one token further.

    From the model's normed state at a token and the embedding of the token that follows, the logits of the one after
    it. Embedding and head are the model's own where the checkpoint does not hold them a second time.
    """

    def __init__(self, build: Build, rope_table: Tensor, embedding_WD: Tensor, head: Head) -> None:
        c = build.config
        prefix = f"model.layers.{c.num_hidden_layers}"
        self.embedding_name, head_name = f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head"
        self.owns_embedding = self.embedding_name in build.names
        self.owns_head = f"{head_name}.weight" in build.names
        self.embedding_WD = torch.empty_like(embedding_WD) if self.owns_embedding else embedding_WD
        self.enorm, self.hnorm = (
            Norm(build, f"{prefix}.{name}", c.hidden_size, c.rms_norm_eps) for name in ("enorm", "hnorm")
        )
        hidden = Span.all(c.hidden_size)
        self.eh_proj = linear(build, Span.all(2 * c.hidden_size), (f"{prefix}.eh_proj", hidden))
        self.layer = Layer(build, prefix, True, rope_table)
        self.norm = ResidualNorm(build, f"{prefix}.shared_head.norm", c.hidden_size, c.rms_norm_eps)
        self.head = Head(build, head_name) if self.owns_head else head

    def targets(self) -> Targets:
        for part in (self.enorm, self.hnorm, self.eh_proj, self.layer, self.norm):
            yield from part.targets()
        if self.owns_embedding:
            yield self.embedding_name, Part.entire(self.embedding_WD)
        if self.owns_head:
            yield from self.head.targets()

    def prepare(self) -> None:
        self.eh_proj.prepare()
        self.layer.prepare()
        if self.owns_head:
            self.head.prepare()

    def __call__(self, hidden_TD: Tensor, embedded_TD: Tensor, batch: Prefill | Decode, cache: Tensor) -> Tensor:
        """Logits float32 [T, W]. embedded_TD: of the tokens that follow; cache: a pool of this layer's own."""
        residual_TD = self.eh_proj(torch.cat([self.enorm(embedded_TD), self.hnorm(hidden_TD)], -1))
        block_TD = self.layer(None, residual_TD, batch, cache)
        return self.head(self.norm(block_TD, residual_TD))
