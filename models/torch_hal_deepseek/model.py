"""DeepSeek V2 and V3: embedding, decoder layers, head; and the steps that an engine runs them in.

Shapes, as suffixes: T tokens · B sequences · S new tokens of each sequence · D hidden · W words of the vocabulary
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hal as hal
from torch_hal.ops.rope import rope_cos_sin_cache

from .agreement import facts_of, together
from .batch import PREFIX_CHUNK, Decode, Prefill, plan_decode, plan_prefill
from .cache import KVCache, Sequence, count, pages_for
from .checkpoint import Checkpoint, LoadReport
from .config import Config, load_config
from .decoder import MTP, Layer
from .errors import CheckpointError, ConfigError, ParallelError
from .generate import generate
from .layers import Build, Head, ResidualNorm
from .parallel import Parallel
from .quantization import warn_of_idle
from .weights import Part, Targets

Tokens = Tensor | ListLike[int]
EMBEDDING = "model.embed_tokens"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # that ids may come in
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # that a model may compute in


class DeepSeek:
    """The model on one device, or one rank's part of it. Make one with `load`; `allocate` leaves weights uninitialised.

    Spread over processes (`Parallel`), every rank calls the same methods at the same time.
    """

    report: LoadReport

    def __init__(self, build: Build, mtp: bool = False) -> None:
        c = self.config = build.config
        self.ops, self.dtype, self.device = build.ops, build.dtype, build.device
        self.ranks, self.prefix_chunk = build.ranks, PREFIX_CHUNK
        self.heads = c.num_attention_heads // self.ranks.tp.size  # this rank's
        rope_table = rope_cos_sin_cache(
            c.max_positions,
            c.qk_rope_head_dim,
            c.rope_theta,
            yarn=c.yarn.scaling if c.yarn else None,
            device=build.device,
        )
        self.embedding_WD = build.empty(c.vocab_size, c.hidden_size)
        self.layers = [Layer(build, f"model.layers.{i}", c.is_moe(i), rope_table) for i in range(c.num_hidden_layers)]
        self.norm = ResidualNorm(build, "model.norm", c.hidden_size, c.rms_norm_eps)
        self.head = Head(build, EMBEDDING, self.embedding_WD) if c.tie_word_embeddings else Head(build, "lm_head")
        self.mtp = MTP(build, rope_table, self.embedding_WD, self.head) if mtp else None

    def targets(self) -> Targets:
        """Every tensor that the checkpoint must hold, and where it, or this rank's part of it, goes."""
        yield f"{EMBEDDING}.weight", Part.entire(self.embedding_WD)
        for layer in self.layers:
            yield from layer.targets()
        yield from self.norm.targets()
        yield from self.head.targets()
        if self.mtp is not None:
            yield from self.mtp.targets()

    def prepare(self) -> None:
        """Hand the loaded weights to the kernels that will read them."""
        for layer in self.layers:
            layer.prepare()
        self.head.prepare()
        if self.mtp is not None:
            self.mtp.prepare()

    def new_cache(self, tokens: int, sequences: int = 1) -> KVCache:
        """A cache for ``sequences`` sequences of at most ``tokens`` tokens each."""
        layers = self.config.num_hidden_layers + (self.mtp is not None)
        pages = count("sequences", sequences) * pages_for(count("tokens", tokens))
        return KVCache(self.config, pages, dtype=self.dtype, device=self.device, layers=layers)

    @torch.no_grad()
    def forward(self, ids_T: Tensor, batch: Prefill | Decode, cache: KVCache) -> Tensor:
        """Normed hidden states [T, D]. Reads and writes device tensors only: capturable."""
        residual_TD, block_TD = F.embedding(ids_T, self.embedding_WD), None
        pools = cache.pool[: len(self.layers)]  # one may be left over, for drafts
        for layer, pool in zip(self.layers, pools, strict=True):
            block_TD = layer(block_TD, residual_TD, batch, pool)
        return self.norm(block_TD, residual_TD)

    @torch.no_grad()
    def draft(self, hidden_TD: Tensor, next_ids_T: Tensor, batch: Prefill | Decode, cache: KVCache) -> Tensor:
        """Logits float32 [T, W] for the token after next, by the multi-token prediction layer.

        hidden_TD: what `forward` returned for ``batch``; next_ids_T: the token that follows each of batch's, on the
        model's device. Call it after every `forward`, for it caches too: in a layer of its own of `new_cache`.
        """
        if self.mtp is None or len(cache.pool) == self.config.num_hidden_layers:
            raise ValueError("draft: needs a model that was loaded with mtp=True, and a cache of its new_cache")
        return self.mtp(hidden_TD, F.embedding(next_ids_T, self.mtp.embedding_WD), batch, cache.pool[-1])

    @torch.no_grad()
    def prefill(
        self,
        prompts: ListLike[Tokens],
        sequences: ListLike[Sequence],
        cache: KVCache,
        capacity: int | None = None,
    ) -> Tensor:
        """Append prompts[b] to sequence b, whatever it has cached already; logits float32 [B, W] of their last tokens.

        To prefill in chunks, call again with the next piece. No prompt may be empty. capacity: see `plan_prefill`;
        None, on all ranks alike: of `agree_capacity`. Raises CacheFull if pages run out, and ValueError, either before
        anything has changed.
        """
        if len(prompts) != len(sequences):
            raise ValueError(f"prefill: expected a sequence for each prompt, got {len(prompts)} and {len(sequences)}")
        ids = [self.token_ids(prompt) for prompt in prompts]
        if any(len(part) == 0 for part in ids):
            raise ValueError("prefill: a prompt is empty: there is no last token to give logits for")
        hidden_TD, batch = self._prefill(ids, sequences, cache, capacity)
        return self.head(hidden_TD[batch.last])

    @torch.no_grad()
    def decode(
        self, ids_BS: Tensor, sequences: ListLike[Sequence], cache: KVCache, capacity: int | None = None
    ) -> Tensor:
        """Append S tokens to each of B cached sequences of any lengths; logits float32 [B, S, W] after each.

        ids_BS: [B, S] integers, S ≥ 1, on any device; on an accelerator they are not read back, so they must be valid.
        capacity: as in `prefill`. Raises CacheFull if pages run out, and ValueError, either before anything has
        changed.
        """
        self._check_decode(ids_BS, sequences)
        queries = ids_BS.shape[1]
        self._reserve(sequences, [queries] * len(sequences), cache)
        capacity = self.agree_capacity(ids_BS.numel()) if capacity is None else capacity
        batch = plan_decode(self.ops, cache, sequences, queries, self.heads, capacity)
        hidden_TD = self.forward(ids_BS.flatten().to(self.device, torch.int64), batch, cache)
        for sequence in sequences:
            sequence.length += queries
        return self.head(hidden_TD).view(*ids_BS.shape, self.config.vocab_size)

    @torch.no_grad()
    def agree_capacity(self, tokens: int) -> int:
        """The most that a rank has where this one has ``tokens`` in a step: a capacity that suits all of them.

        Where ranks have tokens of their own (`Parallel.own_tokens`), they ask one another and wait for the answer, so
        that all must call. One without tokens takes part with 0, in this and in the step, unless 0 is the answer.
        """
        if not self.ranks.own_tokens:
            return tokens
        mine = torch.tensor([tokens], device=self.device)
        return int(self.ops.all_gather(mine, self.ranks.ep.name).max())

    @torch.no_grad()
    def logits(self, token_ids: Tokens) -> Tensor:
        """Logits float32 [T, W] after each token of one sequence [T] of integers."""
        ids_T = self.token_ids(token_ids)
        hidden_TD, _ = self._prefill([ids_T], [Sequence()], self.new_cache(len(ids_T)))
        return self.head(hidden_TD)

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
        seed: equal seeds give equal ids; None: if there is anything to draw, one from torch's generator.
        Raises ValueError at once for arguments of no use, or a sequence longer than the model's positions.
        Where ranks have tokens of their own, each iterates to the end, which comes once all are done; one that has
        nothing to generate asks for 0 new tokens.
        """
        return generate(self, self.token_ids(token_ids), max_new_tokens, temperature, top_p, top_k, min_p, seed)

    def _prefill(
        self, ids: list[Tensor], sequences: ListLike[Sequence], cache: KVCache, capacity: int | None = None
    ) -> tuple[Tensor, Prefill]:
        counts = [len(part) for part in ids]
        self._reserve(sequences, counts, cache)
        capacity = self.agree_capacity(sum(counts)) if capacity is None else capacity
        batch = plan_prefill(cache, sequences, counts, self.prefix_chunk, capacity)
        ids_T = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
        hidden_TD = self.forward(ids_T.to(self.device), batch, cache)
        for sequence, more in zip(sequences, counts, strict=True):
            sequence.length += more
        return hidden_TD, batch

    def _check_decode(self, ids_BS: Tensor, sequences: ListLike[Sequence]) -> None:
        if not isinstance(ids_BS, Tensor) or ids_BS.dim() != 2 or ids_BS.dtype not in INTEGERS or not ids_BS.shape[1]:
            got = f"{ids_BS.dtype} {list(ids_BS.shape)}" if isinstance(ids_BS, Tensor) else repr(ids_BS)
            raise ValueError(f"decode: ids_BS: expected a tensor of integers [B, S] with S ≥ 1, got {got}")
        if len(ids_BS) != len(sequences):
            raise ValueError(f"decode: expected a sequence for each row of ids, got {len(sequences)} and {len(ids_BS)}")
        if ids_BS.device.type == "cpu":
            self._check_range(ids_BS)

    def _reserve(self, sequences: ListLike[Sequence], counts: ListLike[int], cache: KVCache) -> None:
        """Room for all or, raising, for none."""
        for sequence, more in zip(sequences, counts, strict=True):
            if sequence.length + more > self.config.max_positions:
                raise ValueError(
                    f"{sequence.length} + {more} tokens exceed the model's {self.config.max_positions} positions"
                )
        cache.reserve_all(sequences, counts)

    def token_ids(self, tokens: Tokens) -> Tensor:
        """Token ids on the host, checked: [T] int64."""
        try:
            ids = tokens.cpu() if isinstance(tokens, Tensor) else torch.tensor(list(tokens))
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"token ids: expected integers [T]: {error}") from error
        if ids.shape == (0,):
            ids = ids.to(torch.int64)
        if ids.dim() != 1 or ids.dtype not in INTEGERS:
            raise ValueError(f"token ids: expected integers [T], got {ids.dtype} {list(ids.shape)}")
        self._check_range(ids)
        return ids.to(torch.int64)

    def _check_range(self, ids: Tensor) -> None:
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token ids: expected 0 ≤ id < {self.config.vocab_size} (vocab_size), got {low} to {high}")


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    ops: hal.OpSet | None = None,
    policy: hal.Policy | None = None,
    dequantize: bool = False,
    mtp: bool = False,
    fuse_shared_expert: bool = False,
    parallel: Parallel | None = None,
) -> DeepSeek:
    """The model of the Hugging Face checkpoint in directory ``path``, or this process's part of it.

    dtype: of activations, and of every weight that is not FP8; None: the checkpoint's own. FP8 weights stay FP8
    whatever it is (but for kv_b_proj, which attention reads in ways that no FP8 kernel does), unless ``dequantize``
    asks for all of them in dtype. ops: a bound op set, whose device is then the model's; None: bind ``device`` under
    ``policy``. mtp: load the multi-token prediction layer too, for `DeepSeek.draft`. fuse_shared_expert: compute the
    shared expert, of which there must be one, along with the routed ones. parallel: the process groups that the model
    is spread over; only what this rank holds is read, and all ranks must call, since they make sure of one another.
    Raises ConfigError, CheckpointError or ParallelError, naming what is wrong.
    """
    if ops is not None and policy is not None:
        raise ValueError("load: give ops, which were bound under a policy already, or policy, not both")
    _check_dtype(dtype)
    if not isinstance(path, str | Path):
        raise CheckpointError(f"path: expected the directory of a checkpoint, got {path!r}")
    if Path(path).is_file():
        raise CheckpointError(f"{path}: expected the directory of a checkpoint, got a file")

    def attempt() -> DeepSeek:
        config, checkpoint = load_config(path), Checkpoint(path)
        warn_of_idle(config.quantization, checkpoint.path, checkpoint.files, config.num_hidden_layers)
        model = allocate(
            config,
            ops or hal.bind(device, policy),
            dtype=dtype,
            names=checkpoint.files,
            dequantize=dequantize,
            mtp=mtp,
            fuse_shared_expert=fuse_shared_expert,
            parallel=parallel,
        )
        model.report = checkpoint.load(model.targets(), config.num_hidden_layers)
        model.prepare()
        return model

    if parallel is None:
        return attempt()

    def facts(model: DeepSeek) -> dict[str, str]:
        quantized = model.config.quantization is not None and not dequantize
        spread = {"experts_per_rank": parallel.experts_per_rank, "own_tokens": parallel.own_tokens}
        return facts_of(model, dtype=model.dtype, quantized=quantized, mtp=mtp, **spread)

    return together(parallel, attempt, facts)


def allocate(
    config: Config,
    ops: hal.OpSet,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    names: Container[str] = (),
    dequantize: bool = False,
    mtp: bool = False,
    fuse_shared_expert: bool = False,
    parallel: Parallel | None = None,
) -> DeepSeek:
    """A model whose weights are uninitialised: fill `DeepSeek.targets`, then `DeepSeek.prepare`.

    Arguments are those of `load`, and names: the tensors that the checkpoint holds, for some have more than one form.
    """
    _check_dtype(dtype)
    if mtp and config.num_nextn_predict_layers != 1:
        raise ConfigError(f"num_nextn_predict_layers: {config.num_nextn_predict_layers}, mtp needs just 1 such layer")
    if fuse_shared_expert and config.n_shared_experts != 1:
        raise ConfigError(f"n_shared_experts: {config.n_shared_experts}, fuse_shared_expert needs just 1")
    if fuse_shared_expert and parallel and parallel.ep_group:
        raise ParallelError("fuse_shared_expert: not with an ep_group, for every rank has the shared expert")
    dtype, device = dtype or config.dtype, device or ops.torch_device
    if config.quantization and not dequantize and dtype == torch.float64:
        raise ValueError("dtype: float64 activations do not meet FP8 weights: ask for dequantize")
    build = Build(config, ops, dtype, device, parallel or Parallel(), names, dequantize, fuse_shared_expert)
    return DeepSeek(build, mtp)


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, DTYPES))} or None, got {dtype!r}")
