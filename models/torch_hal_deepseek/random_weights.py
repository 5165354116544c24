"""Checkpoints with random weights, in the layout of the released ones: for demonstrations and tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import torch_hal as hal

from .checkpoint import INDEX
from .config import Config, parse_config
from .model import allocate


def random_checkpoint(
    path: str | Path, config: Config | dict[str, Any], seed: int = 0, *, max_shard_bytes: int | None = None
) -> Path:
    """Write ``config.json`` and safetensors, sharded with an index if ``max_shard_bytes`` says so. Returns ``path``.

    Weights are normal with the deviation that keeps activations' size from layer to layer (fan-in^-1/2), norms' near
    1, the router's bias small and of both signs. Equal arguments give equal files.
    """
    config = config if isinstance(config, Config) else parse_config(config)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_to_json(config), indent=2) + "\n", encoding="utf-8")
    shapes = allocate(config, hal.bind("cpu"), device=torch.device("meta")).targets()
    generator = torch.Generator().manual_seed(seed)
    _save(path, {name: _random(name, like, config, generator) for name, like in shapes}, max_shard_bytes)
    return path


def _random(name: str, like: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    values = torch.randn(like.shape, generator=generator)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("e_score_correction_bias"):
        return 0.1 * values
    elif name != "model.embed_tokens.weight":
        values *= like.shape[-1] ** -0.5
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
    data = config.model_dump(exclude={"yarn"}, exclude_none=True)
    data["q_lora_rank"] = config.q_lora_rank
    data["rope_scaling"] = {"type": "yarn", **config.yarn.model_dump(exclude_none=True)} if config.yarn else None
    version = config.model_type.removeprefix("deepseek_v")
    return {"architectures": [f"DeepseekV{version}ForCausalLM"], **data}
