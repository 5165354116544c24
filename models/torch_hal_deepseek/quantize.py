"""FP8 twins of checkpoints: e4m3 weights with a scale for every block of 128×128, in the layout of DeepSeek-V3's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import torch_hal as hal
from torch_hal.ops import block_quant_fp8

from .checkpoint import INDEX, Checkpoint
from .config import Config, load_config
from .errors import CheckpointError
from .model import DeepSeek, allocate
from .quantization import Quantization
from .weights import SCALE, Part, Targets


def quantize_checkpoint(source: str | Path, out: str | Path, *, ue8m0: bool = False) -> Path:
    """Write to directory ``out`` what ``source`` holds, with every projection in FP8; one shard is in memory at a time.

    ue8m0: scales are powers of two, and activations' will be, as in V3.1. Files that are not weights are copied.
    Returns ``out``. Raises ConfigError or CheckpointError, naming what is wrong, missing or quantised already: before
    anything is written, but for what only the data tells, as values that are not finite.
    """
    source, out = Path(source), Path(out)
    config = load_config(source)
    if config.quantization is not None:
        raise CheckpointError(f"{source}: is quantised already")
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{out}: is the checkpoint itself, give another directory")
    if held := weight_files(out):
        raise CheckpointError(f"{out}: holds weights already ({held[0].name}); give another directory, or empty it")
    checkpoint, quantization = Checkpoint(source), Quantization(ue8m0=ue8m0)
    paths = sorted(set(checkpoint.files.values()))
    for path in paths:
        checkpoint.header(path)  # judged as a whole, for it is read as a whole
    checkpoint.check(_needed(checkpoint, config, quantization), config.num_hidden_layers)
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for path in paths:
        tensors = quantize(_read(checkpoint, path), quantization)
        save_file(tensors, out / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (source / INDEX).exists():
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            shutil.copy(path, out)
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(out / "config.json", {**settings, "quantization_config": quantization.to_json()})
    return out


def outline(config: Config, names: Container[str] = (), *, mtp: bool = False) -> DeepSeek:
    """A model without storage, whose targets say what a checkpoint holds. Which kernels are wished for is no matter."""
    anything = hal.Policy(prefer={}, require={}, deny={}, pinned={}, deterministic=False, graph_safe=False)
    return allocate(config, hal.bind("cpu", anything), device=torch.device("meta"), names=names, mtp=mtp)


def _needed(checkpoint: Checkpoint, config: Config, quantization: Quantization) -> Targets:
    """What `load` needs, drafts' layer too if any of it is there; and, as it is, whatever else would be quantised."""
    drafts = f"model.layers.{config.num_hidden_layers}."
    mtp = config.num_nextn_predict_layers == 1 and any(name.startswith(drafts) for name in checkpoint.files)
    yield from outline(config, checkpoint.files, mtp=mtp).targets()
    for name in checkpoint.files:
        if quantization.covers(name.removesuffix(".weight")):
            entry = checkpoint.entry(name)
            yield name, Part.entire(torch.empty(entry.shape if entry else (), device="meta"))


def weight_files(folder: Path) -> list[Path]:
    """The files of a directory that `load` would read weights from, or their places in others."""
    return [*folder.glob("*.safetensors"), *folder.glob(INDEX)]


def quantize(tensors: Mapping[str, Tensor], quantization: Quantization) -> dict[str, Tensor]:
    """Each projection's weight as codes and scales; what else there is, as it is."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() >= 2 and quantization.covers(name.removesuffix(".weight")):
            if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
                raise CheckpointError(f"{name}: values that are not finite cannot be quantised")
            result[name], result[name + SCALE] = block_quant_fp8(tensor, ue8m0=quantization.ue8m0)
        else:
            result[name] = tensor
    return result


def _read(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """All that comes from a shard."""
    names = checkpoint.stored(path)
    try:
        with safe_open(path, framework="pt") as shard:
            return {name: shard.get_tensor(name) for name in shard.keys() if name in names}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
