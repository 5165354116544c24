"""Checkpoints with random weights, in the layout of the released ones: for demonstrations and tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import INDEX
from .config import Config, parse_config
from .quantize import outline, quantize, weight_files

# DeepSeek-V3's structure on a laptop's scale: latent attention with a compressed query, YaRN positions, a dense layer,
# then experts in groups, chosen by sigmoid scores with a correction bias, beside a shared one.
SMALL_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "float32",
}


def random_checkpoint(
    path: str | Path,
    config: Config | dict[str, Any],
    seed: int = 0,
    *,
    mtp: bool = False,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write ``config.json`` and safetensors, sharded with an index if ``max_shard_bytes`` says so. Returns ``path``.

    mtp: with the multi-token prediction layer, but no copies of embedding and head. FP8 where the config says so.
    Weights are normal with the deviation that keeps activations' size from layer to layer (fan-in^-1/2), norms' near
    1, the router's bias small and of both signs. Equal arguments give equal files.
    """
    config = config if isinstance(config, Config) else parse_config(config)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for old in weight_files(path):  # a stale index would win over what is written now
        old.unlink()
    (path / "config.json").write_text(json.dumps(_to_json(config), indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, config, generator) for name, shape in _shapes(config, mtp)}
    _save(path, quantize(tensors, config.quantization) if config.quantization else tensors, max_shard_bytes)
    return path


def _shapes(config: Config, mtp: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What a checkpoint that is not quantised holds."""
    for name, part in outline(config.model_copy(update={"quantization": None}), mtp=mtp).targets():
        assert part is not None
        yield name, part.whole


def _random(name: str, shape: tuple[int, ...], config: Config, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("e_score_correction_bias"):
        return 0.1 * values
    elif name != "model.embed_tokens.weight":
        values *= shape[-1] ** -0.5
    return values.to(config.dtype)


def _save(path: Path, tensors: dict[str, Tensor], max_shard_bytes: int | None) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if room is not None and max_shard_bytes is not None:
            if tensor.nbytes > room and shards[-1]:
                shards.append({})
                room = max_shard_bytes
            room -= tensor.nbytes
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, path / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _to_json(config: Config) -> dict[str, Any]:
    """The fields as a released ``config.json`` spells them."""
    data = config.model_dump(exclude={"yarn", "quantization"}, exclude_none=True)
    data["num_key_value_heads"] = config.num_attention_heads  # MLA groups no heads
    data["q_lora_rank"] = config.q_lora_rank
    data["rope_scaling"] = {"type": "yarn", **config.yarn.model_dump(exclude_none=True)} if config.yarn else None
    if config.quantization:
        data["quantization_config"] = config.quantization.to_json()
    version = config.model_type.removeprefix("deepseek_v")
    return {"architectures": [f"DeepseekV{version}ForCausalLM"], **data}
