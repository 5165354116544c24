"""FP8 twins of checkpoints: e4m3 weights with a scale for every block of 128×128, in the layout of DeepSeek-V3's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torch_hal.ops import block_quant_fp8

from .checkpoint import INDEX, Checkpoint
from .config import load_config
from .errors import CheckpointError
from .quantization import Quantization
from .weights import SCALE


def quantize_checkpoint(source: str | Path, out: str | Path, *, ue8m0: bool = False) -> Path:
    """Write to directory ``out`` what ``source`` holds, with every projection in FP8; one shard is in memory at a time.

    ue8m0: scales are powers of two, and activations' will be, as in V3.1. Files that are not weights are copied.
    Returns ``out``. Raises ConfigError or CheckpointError, naming what is wrong, or what is quantised already.
    """
    source, out = Path(source), Path(out)
    if load_config(source).quantization is not None:
        raise CheckpointError(f"{source}: is quantised already")
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{out}: is the checkpoint itself, give another directory")
    if held := weight_files(out):
        raise CheckpointError(f"{out}: holds weights already ({held[0].name}); give another directory, or empty it")
    checkpoint = Checkpoint(source)
    files = checkpoint.files
    for path in sorted(set(files.values())):
        checkpoint.header(path)  # what is wrong with a file is found before anything is written
    quantization = Quantization(ue8m0=ue8m0)
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(set(files.values())):
        tensors = quantize(_read(checkpoint, path), quantization)
        save_file(tensors, out / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (source / INDEX).exists():
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            shutil.copy(path, out)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(out / "config.json", {**config, "quantization_config": quantization.to_json()})
    return out


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
    """A whole shard."""
    checkpoint.header(path)  # says what is wrong with a file, and waits for no pipe
    try:
        with safe_open(path, framework="pt") as shard:
            return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
