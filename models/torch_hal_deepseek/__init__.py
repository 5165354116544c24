"""DeepSeek V2, V2-Lite, Coder-V2, V3, R1 and V3.1, bf16 or FP8, written once against torch_hal's ops.

``load`` reads a Hugging Face checkpoint; ``model.logits`` and ``model.generate`` serve one sequence; ``model.prefill``
and ``model.decode``, with a `KVCache`, are what an engine batches requests with.
"""

from __future__ import annotations

from .batch import Decode, Prefill, PrefixChunk, plan_decode, plan_prefill
from .cache import KVCache, Sequence
from .checkpoint import Checkpoint, LoadReport
from .config import Config, load_config, parse_config
from .counts import Counts, counts
from .errors import CacheFull, CheckpointError, ConfigError, ParallelError
from .model import DeepSeek, allocate, load
from .parallel import Parallel
from .quantization import Quantization
from .quantize import quantize_checkpoint
from .random_weights import random_checkpoint
from .sampling import Sampler, SamplingParams
from .speculation import draft_acceptance

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
    "Parallel",
    "ParallelError",
    "Prefill",
    "PrefixChunk",
    "Quantization",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "allocate",
    "counts",
    "draft_acceptance",
    "load",
    "load_config",
    "parse_config",
    "plan_decode",
    "plan_prefill",
    "quantize_checkpoint",
    "random_checkpoint",
]
