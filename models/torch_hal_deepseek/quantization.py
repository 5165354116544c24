"""How a checkpoint's weights are quantised, read from its ``config.json``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from torch_hal.formats import BLOCK

PROJECTIONS = (  # what is FP8 in an FP8 checkpoint; embeddings, heads, routers and norms never are
    "q_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)
_DRAFTS = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")  # in no other layer
_LAYER = re.compile(r"\blayers\\?\.(\d{1,9})")  # in a name or an expression
_SUPPORTED = {  # settings -> supported values; None: it may be absent
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "weight_block_size": ([BLOCK, BLOCK],),
    "scale_fmt": ("ue8m0", "float", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": (None, []),
}

log = logging.getLogger(__name__)


class Quantization(pydantic.BaseModel):
    """FP8 as V3 has it: e4m3 weights with a scale for every 128×128, activations in groups of 128 as they come."""

    model_config = pydantic.ConfigDict(frozen=True)

    ue8m0: bool = False  # activations' scales are powers of two: V3.1
    skipped: tuple[str, ...] = ()  # modules that stay as they are; "re:" starts a regular expression

    def covers(self, module: str) -> bool:
        """Whether the module of that name is FP8: a projection, and no entry is its name or a part of its path."""
        return module.rpartition(".")[2] in PROJECTIONS and not any(_means(entry, module) for entry in self.skipped)

    def idle(self, tensors: Iterable[str], num_layers: int) -> list[str]:
        """The entries of ``skipped`` that mean no module of a checkpoint with these tensors: misspelt, perhaps.

        Not those that mean what a DeepSeek may have and this one lacks: a head, layers past the last.
        """
        modules = [name.removesuffix(".weight") for name in tensors]
        modules += ["lm_head", *(f"model.layers.{num_layers}.{part}" for part in _DRAFTS)]
        entries = [entry for entry in self.skipped if not any(int(i) >= num_layers for i in _LAYER.findall(entry))]
        return [entry for entry in entries if not any(_means(entry, module) for module in modules)]

    def to_json(self) -> dict[str, Any]:
        """As ``quantization_config`` of a released ``config.json`` spells it."""
        result: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        result["weight_block_size"] = [BLOCK, BLOCK]
        if self.ue8m0:
            result["scale_fmt"] = "ue8m0"
        if self.skipped:
            result["modules_to_not_convert"] = list(self.skipped)
        return result


def warn_of_idle(quantization: Quantization | None, path: Path, tensors: Iterable[str], num_layers: int) -> None:
    """Name the entries of modules_to_not_convert and ignored_layers that do nothing for the checkpoint in ``path``."""
    if quantization is not None and (idle := quantization.idle(tensors, num_layers)):
        where = "modules_to_not_convert or ignored_layers"
        log.warning("%s: quantization_config: %s: no module is named by %s", path, where, ", ".join(map(repr, idle)))


def _means(entry: str, module: str) -> bool:
    """Whether an entry of ``skipped`` is the module's name, a part of its path, or an expression that it matches."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}."


def read_quantization(settings: Any) -> Quantization | None:
    """``quantization_config``; ValueError names the setting that is not supported."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ValueError(f"quantization_config: expected an object, got {settings!r}")
    if not settings:
        return None
    for key, supported in _SUPPORTED.items():
        value = settings.get(key)
        if (list(value) if isinstance(value, tuple) else value) not in supported:
            raise ValueError(f"quantization_config.{key}: {value!r} is not supported, only {supported[0]!r}")
    skipped = [entry for key in ("modules_to_not_convert", "ignored_layers") for entry in _modules(settings, key)]
    return Quantization(ue8m0=settings.get("scale_fmt") == "ue8m0", skipped=tuple(dict.fromkeys(skipped)))


def _modules(settings: Mapping[str, Any], key: str) -> list[str]:
    """A list of names and expressions, checked."""
    entries = settings.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"quantization_config.{key}: expected a list of names, got {entries!r}")
    for entry in entries:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"quantization_config.{key}: {entry!r} is no regular expression: {error}") from None
    return list(entries)
