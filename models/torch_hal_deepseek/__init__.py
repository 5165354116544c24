"""DeepSeek V2, V2-Lite and V3 (and R1, which is V3), written once against torch_hal's ops.

``load`` reads a Hugging Face checkpoint; ``model.logits`` and ``model.generate`` serve one sequence; ``model.prefill``
and ``model.decode``, with a `KVCache`, are what an engine batches requests with.
"""

from __future__ import annotations

from .batch import Decode, Prefill, PrefixChunk, plan_decode, plan_prefill
from .cache import KVCache, Sequence
from .checkpoint import Checkpoint, LoadReport
from .config import Config, load_config, parse_config
from .counts import Counts, counts
from .errors import CacheFull, CheckpointError, ConfigError
from .model import DeepSeek, allocate, load
from .random_weights import random_checkpoint
from .sampling import Sampler, SamplingParams

__all__ = [
    "CacheFull",
    "Checkpoint",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Counts",
    "Decode",
    "DeepSeek",
    "KVCache",
    "LoadReport",
    "Prefill",
    "PrefixChunk",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "allocate",
    "counts",
    "load",
    "load_config",
    "parse_config",
    "plan_decode",
    "plan_prefill",
    "random_checkpoint",
]
