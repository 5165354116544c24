"""Multi-token prediction: the layer against the paper's equations, sharing of weights, caching, acceptance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepseek_cases import BLOCKS, FP8, relative_error, small, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

import torch_hal as hal
import torch_hal_deepseek as deepseek

FILE = "model.safetensors"
LENGTH = 70
PREFIX = "model.layers.3"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("mtp"), small("V3"), seed=1, mtp=True)


def forward(model: deepseek.DeepSeek, ids: Tensor) -> tuple[Tensor, Any, deepseek.KVCache]:
    """The normed states of all but the last token, their batch, and the cache."""
    count = len(ids) - 1
    cache, sequence = model.new_cache(count), deepseek.Sequence()
    cache.reserve(sequence, count)
    batch = deepseek.plan_prefill(cache, [sequence], [count])
    return model.forward(ids[:-1], batch, cache), batch, cache


def drafts(model: deepseek.DeepSeek, ids: Tensor) -> Tensor:
    hidden_TD, batch, cache = forward(model, ids)
    return model.draft(hidden_TD, ids[1:], batch, cache)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def by_the_paper(path: Path, hidden_TD: Tensor, next_ids: Tensor) -> Tensor:
    """DeepSeek-V3 (2024), equations 21 to 23, around transformers' decoder layer. Embedding first, as released."""
    arguments = {k: v for k, v in small("V3").items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = DeepseekV3Config(**arguments, attn_implementation="eager", experts_implementation="eager")
    stored = load_file(path / FILE)
    mtp = {k.removeprefix(f"{PREFIX}."): v for k, v in stored.items() if k.startswith(PREFIX)}
    embedded = F.embedding(next_ids, mtp.get("embed_tokens.weight", stored["model.embed_tokens.weight"]))
    both = torch.cat([rms_norm(embedded, mtp["enorm.weight"]), rms_norm(hidden_TD, mtp["hnorm.weight"])], -1)
    x = (both @ mtp["eh_proj.weight"].T)[None]
    layer = DeepseekV3DecoderLayer(config, 2).eval()
    experts = [[mtp.pop(f"mlp.experts.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(8)]
    mtp["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
    mtp["mlp.experts.down_proj"] = torch.stack([down for *_, down in experts])
    layer.load_state_dict({name: mtp[name] for name in layer.state_dict()})
    count = len(next_ids)
    mask = torch.full((count, count), -math.inf).triu(1)[None, None]
    with torch.no_grad():
        angles = DeepseekV3RotaryEmbedding(config)(x, torch.arange(count)[None])
        x = layer(x, attention_mask=mask, position_embeddings=angles)
    x = (x[0] if isinstance(x, tuple) else x).view(count, -1)
    return rms_norm(x, mtp["shared_head.norm.weight"]) @ mtp.get("shared_head.head.weight", stored["lm_head.weight"]).T


def test_drafts_are_the_papers(path: Path) -> None:
    ids, model = token_ids(LENGTH), deepseek.load(path, mtp=True)
    hidden_TD, batch, cache = forward(model, ids)
    expected = by_the_paper(path, hidden_TD, ids[1:])
    got = model.draft(hidden_TD, ids[1:], batch, cache)
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 1e-5


def test_the_model_is_as_without(path: Path) -> None:
    with_mtp, without = deepseek.load(path, mtp=True), deepseek.load(path)
    assert with_mtp.report.speculative == ()
    assert len(without.report.speculative) == with_mtp.report.tensors - without.report.tensors > 0
    assert torch.equal(with_mtp.logits(token_ids(20)), without.logits(token_ids(20)))
    assert (len(with_mtp.new_cache(5).pool), len(without.new_cache(5).pool)) == (4, 3)


def test_embedding_and_head_are_the_models_own_unless_stored(path: Path, tmp_path: Path) -> None:
    """Releases hold both twice; some tools drop the copies, and then nothing that is drafted is right, in silence."""
    shared = deepseek.load(path, mtp=True)
    assert shared.mtp is not None
    assert shared.mtp.embedding_WD is shared.embedding_WD and shared.mtp.head is shared.head
    tensors = load_file(path / FILE)
    tensors[f"{PREFIX}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{PREFIX}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    copied, ids = deepseek.load(tmp_path, mtp=True), token_ids(20)
    assert copied.report.tensors == shared.report.tensors + 2
    assert torch.equal(drafts(copied, ids), drafts(shared, ids))
    tensors[f"{PREFIX}.shared_head.head.weight"] *= -1
    save_file(tensors, tmp_path / FILE)
    assert torch.equal(drafts(deepseek.load(tmp_path, mtp=True), ids), -drafts(shared, ids))


def test_drafting_step_by_step_is_drafting_at_once(path: Path) -> None:
    """Prefilled, then with the batches of decode steps of one and of two tokens: as speculation runs."""
    model, ids = deepseek.load(path, mtp=True), token_ids(30)
    expected = drafts(model, ids)
    cache, sequence, got = model.new_cache(30), deepseek.Sequence(), []
    for begin, end in [(0, 20), (20, 21), (21, 23), (23, 25), (25, 29)]:
        cache.reserve(sequence, end - begin)
        batch: Any
        if begin == 0:
            batch = deepseek.plan_prefill(cache, [sequence], [end])
        else:
            batch = deepseek.plan_decode(model.ops, cache, [sequence], end - begin, model.heads)
        hidden_TD = model.forward(ids[begin:end], batch, cache)
        got.append(model.draft(hidden_TD, ids[begin + 1 : end + 1], batch, cache))
        sequence.length = end
    assert relative_error(torch.cat(got), expected) < 1e-5


def test_fp8(tmp_path: Path) -> None:
    path = deepseek.random_checkpoint(tmp_path, small("V3", **BLOCKS, quantization_config=FP8), seed=1, mtp=True)
    model, exact = deepseek.load(path, mtp=True), deepseek.load(path, mtp=True, dequantize=True)
    assert model.mtp is not None
    assert model.mtp.layer.attention.o.weight.dtype == torch.float8_e4m3fn
    assert model.mtp.eh_proj.weight.dtype == torch.float32  # never quantised in releases; if it is, its scale tells
    got, expected = drafts(model, token_ids(9)), drafts(exact, token_ids(9))
    assert 1e-3 < relative_error(got, expected) < 0.5
    tensors = load_file(path / FILE)
    name = "model.layers.2.eh_proj.weight"
    tensors[name], tensors[f"{name}_scale_inv"] = hal.ops.block_quant_fp8(tensors[name])
    save_file(tensors, path / FILE)
    model = deepseek.load(path, mtp=True)
    assert model.mtp is not None
    assert model.mtp.eh_proj.weight.dtype == torch.float8_e4m3fn
    assert relative_error(drafts(model, token_ids(9)), expected) < 0.5


# --- acceptance ---


def test_acceptance_counts_drafts_that_the_model_would_choose(path: Path) -> None:
    model, ids = deepseek.load(path, mtp=True), token_ids(40)
    chosen, drafted = model.logits(ids).argmax(-1).tolist(), drafts(model, ids).argmax(-1).tolist()
    agreed = [drafted[i] == chosen[i + 1] for i in range(38)]
    assert deepseek.draft_acceptance(model, ids) == pytest.approx(sum(agreed) / 38)


def test_a_layer_that_sees_through_drafts_perfectly(path: Path, tmp_path: Path) -> None:
    """A model whose layers add nothing repeats a token's fixed successor; a layer that adds nothing to the embedding
    of the next token does so as well."""
    tensors = load_file(path / FILE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("eh_proj.weight"):
            tensor.copy_(torch.eye(64, 128))
        elif name.endswith(("norm.weight", "layernorm.weight")):
            tensor.fill_(1)
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert deepseek.draft_acceptance(deepseek.load(tmp_path, mtp=True), token_ids(40)) == 1.0
    tensors["model.layers.3.eh_proj.weight"].neg_()
    save_file(tensors, tmp_path / FILE)
    assert deepseek.draft_acceptance(deepseek.load(tmp_path, mtp=True), token_ids(40)) == 0.0


def test_errors(path: Path) -> None:
    model = deepseek.load(path)
    with pytest.raises(ValueError, match="draft: needs a model that was loaded with mtp=True"):
        drafts(model, token_ids(5))
    drafting = deepseek.load(path, mtp=True)
    cache = deepseek.KVCache(drafting.config, 1, dtype=torch.float32, device="cpu")
    batch = deepseek.plan_prefill(cache, [], [])
    with pytest.raises(ValueError, match="a cache of its new_cache"):
        drafting.draft(torch.empty(0, 64), torch.empty(0, dtype=torch.int64), batch, cache)
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        deepseek.draft_acceptance(drafting, [1, 2])
    for layers in (0, 2):
        config = deepseek.parse_config(small("V3", num_nextn_predict_layers=layers))
        with pytest.raises(deepseek.ConfigError, match=f"num_nextn_predict_layers: {layers}, mtp needs just 1"):
            deepseek.allocate(config, hal.bind("cpu"), mtp=True)
