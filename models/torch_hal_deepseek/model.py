"""DeepSeek V2 and V3: embedding, decoder layers, head; and the steps that an engine runs them in.

Shapes, as suffixes: T tokens · B sequences · S new tokens of each sequence · D hidden · W words of the vocabulary
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from collections.abc import Sequence as ListLike
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hal as hal
from torch_hal.ops.rope import rope_cos_sin_cache

from .attention import MLA
from .batch import PREFIX_CHUNK, Decode, Prefill, plan_decode, plan_prefill
from .cache import KVCache, Sequence, pages_for
from .checkpoint import Checkpoint, LoadReport
from .config import Config, load_config
from .generate import generate
from .layers import MLP, Build, Linear, ResidualNorm, Targets
from .moe import MoE

Tokens = Tensor | ListLike[int]


class Layer:
    """A decoder layer: attention, then a dense MLP or a mixture of experts, each behind a norm."""

    def __init__(self, build: Build, index: int, rope_table: Tensor) -> None:
        c = build.config
        self.input_norm = ResidualNorm(build, c.hidden_size, c.rms_norm_eps)
        self.attention = MLA(build, rope_table)
        self.post_attention_norm = ResidualNorm(build, c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(build) if c.is_moe(index) else MLP(build, c.intermediate_size)

    def targets(self, prefix: str, names: Container[str]) -> Targets:
        yield f"{prefix}.input_layernorm.weight", self.input_norm.weight
        yield from self.attention.targets(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", self.post_attention_norm.weight
        if isinstance(self.mlp, MoE):
            yield from self.mlp.targets(f"{prefix}.mlp", names)
        else:
            yield from self.mlp.targets(f"{prefix}.mlp")

    def prepare(self) -> None:
        self.attention.prepare()
        self.mlp.prepare()

    def __call__(self, block_TD: Tensor | None, residual_TD: Tensor, batch: Prefill | Decode, cache: Tensor) -> Tensor:
        """The MLP's output; block_TD is the previous layer's, not yet in the residual stream, which is updated."""
        x_TD = self.attention(self.input_norm(block_TD, residual_TD), batch, cache)
        return self.mlp(self.post_attention_norm(x_TD, residual_TD))


class DeepSeek:
    """The model on one device. Make one with `load`; `allocate` leaves its weights uninitialised."""

    report: LoadReport

    def __init__(self, build: Build) -> None:
        c = self.config = build.config
        self.ops, self.dtype, self.device = build.ops, build.dtype, build.device
        self.prefix_chunk = PREFIX_CHUNK
        rope_table = rope_cos_sin_cache(
            c.max_positions,
            c.qk_rope_head_dim,
            c.rope_theta,
            yarn=c.yarn.scaling if c.yarn else None,
            device=build.device,
        )
        self.embedding_WD = build.empty(c.vocab_size, c.hidden_size)
        self.layers = [Layer(build, i, rope_table) for i in range(c.num_hidden_layers)]
        self.norm = ResidualNorm(build, c.hidden_size, c.rms_norm_eps)
        self.head = Linear(build, c.vocab_size if not c.tie_word_embeddings else 0, c.hidden_size)
        if c.tie_word_embeddings:
            self.head.weight = self.embedding_WD

    def targets(self, names: Container[str] = ()) -> Targets:
        """Every tensor that a checkpoint must hold, and where it goes. ``names``: those that it does hold."""
        yield "model.embed_tokens.weight", self.embedding_WD
        for i, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{i}", names)
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head.weight

    def prepare(self) -> None:
        """Hand the loaded weights to the kernels that will read them."""
        for layer in self.layers:
            layer.prepare()
        self.head.prepare()

    def new_cache(self, tokens: int, sequences: int = 1) -> KVCache:
        """A cache for ``sequences`` sequences of at most ``tokens`` tokens each."""
        return KVCache(self.config, sequences * pages_for(tokens), dtype=self.dtype, device=self.device)

    def forward(self, ids_T: Tensor, batch: Prefill | Decode, cache: KVCache) -> Tensor:
        """Normed hidden states [T, D]. Reads and writes device tensors only: capturable."""
        residual_TD, block_TD = F.embedding(ids_T, self.embedding_WD), None
        for layer, pool in zip(self.layers, cache.pool, strict=True):
            block_TD = layer(block_TD, residual_TD, batch, pool)
        return self.norm(block_TD, residual_TD)

    def prefill(self, prompts: ListLike[Tokens], sequences: ListLike[Sequence], cache: KVCache) -> Tensor:
        """Append prompts[b] to sequence b, whatever it has cached already; logits float32 [B, W] of their last tokens.

        To prefill in chunks, call again with the next piece. No prompt may be empty.
        """
        ids = [self._ids(prompt) for prompt in prompts]
        if any(len(part) == 0 for part in ids):
            raise ValueError("prefill: a prompt is empty: there is no last token to give logits for")
        hidden_TD, batch = self._prefill(ids, sequences, cache)
        return self.head(hidden_TD[batch.last]).to(torch.float32)

    def decode(self, ids_BS: Tensor, sequences: ListLike[Sequence], cache: KVCache) -> Tensor:
        """Append S tokens to each of B cached sequences of any lengths; logits float32 [B, S, W] after each.

        ids_BS: [B, S] integers, on any device; on the model's own they are not read back, so they must be valid.
        """
        queries = ids_BS.shape[1]
        self._reserve(sequences, [queries] * len(sequences), cache)
        batch = plan_decode(self.ops, cache, sequences, queries, self.config.num_attention_heads)
        hidden_TD = self.forward(ids_BS.flatten().to(self.device), batch, cache)
        for sequence in sequences:
            sequence.length += queries
        return self.head(hidden_TD).to(torch.float32).view(*ids_BS.shape, self.config.vocab_size)

    def logits(self, token_ids: Tokens) -> Tensor:
        """Logits float32 [T, W] after each token of one sequence [T] of integers."""
        ids_T = self._ids(token_ids)
        hidden_TD, _ = self._prefill([ids_T], [Sequence()], self.new_cache(len(ids_T)))
        return self.head(hidden_TD).to(torch.float32)

    def generate(
        self,
        token_ids: Tokens,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield up to ``max_new_tokens`` ids that continue the prompt, the last of which may be an end of sequence.

        temperature 0: the likeliest id. Else a draw from softmax(logits / temperature), of the top_k (0: all)
        likeliest, of the fewest that make up top_p, of those at least min_p times as likely as the likeliest.
        seed: equal seeds give equal ids; None draws one from torch's generator.
        Raises ValueError at once for arguments out of range or a sequence longer than the model's positions.
        """
        return generate(self, self._ids(token_ids), max_new_tokens, temperature, top_p, top_k, min_p, seed)

    def _prefill(self, ids: list[Tensor], sequences: ListLike[Sequence], cache: KVCache) -> tuple[Tensor, Prefill]:
        counts = [len(part) for part in ids]
        self._reserve(sequences, counts, cache)
        batch = plan_prefill(cache, sequences, counts, self.prefix_chunk)
        ids_T = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
        hidden_TD = self.forward(ids_T.to(self.device), batch, cache)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
        return hidden_TD, batch

    def _reserve(self, sequences: ListLike[Sequence], counts: ListLike[int], cache: KVCache) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.length + count > self.config.max_positions:
                raise ValueError(
                    f"{sequence.length} + {count} tokens exceed the model's {self.config.max_positions} positions"
                )
            cache.reserve(sequence, count)

    def _ids(self, tokens: Tokens) -> Tensor:
        """Token ids on the host, checked: [T] int64."""
        try:
            ids = tokens.cpu() if isinstance(tokens, Tensor) else torch.tensor(list(tokens))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"token ids: expected integers [T]: {error}") from error
        if ids.shape == (0,):
            ids = ids.to(torch.int64)
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"token ids: expected integers [T], got {ids.dtype} {list(ids.shape)}")
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token ids: expected 0 ≤ id < {self.config.vocab_size} (vocab_size), got {low} to {high}")
        return ids.to(torch.int64)


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    ops: hal.OpSet | None = None,
    policy: hal.Policy | None = None,
) -> DeepSeek:
    """The model of the Hugging Face checkpoint in directory ``path``.

    dtype: the weights' and activations'; None: the checkpoint's own. ops: a bound op set, whose device is then the
    model's; None: bind ``device`` under ``policy``. Raises ConfigError or CheckpointError, naming what is wrong.
    """
    if ops is not None and policy is not None:
        raise ValueError("load: give ops, which were bound under a policy already, or policy, not both")
    config, checkpoint = load_config(path), Checkpoint(path)
    model = allocate(config, ops or hal.bind(device, policy), dtype=dtype)
    model.report = checkpoint.load(dict(model.targets(checkpoint.files)), config.num_hidden_layers)
    model.prepare()
    return model


def allocate(
    config: Config,
    ops: hal.OpSet,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> DeepSeek:
    """A model whose weights are uninitialised: fill `DeepSeek.targets`, then `DeepSeek.prepare`."""
    return DeepSeek(Build(config, ops, dtype or config.dtype, device or ops.torch_device))
