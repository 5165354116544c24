"""Memory while loading: the model and one shard, as ``/usr/bin/time -v`` would report it of a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepseek_cases import FP8, small

import torch_hal_deepseek as deepseek

MIB = 2**20
SHARD = 24 * MIB
SLACK = 12 * MIB  # allocators, the interpreter, and what one tensor needs while it is converted
CONFIG = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 4096,
    "torch_dtype": "bfloat16",
}
# A small model first, so that everything is imported and every pool of threads started.
PROGRAM = """
import json, re, sys, torch_hal_deepseek as deepseek
def kib(field): return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
warm_up = deepseek.load(sys.argv[1])
before = kib("VmRSS")
model = deepseek.load(sys.argv[2], **json.loads(sys.argv[3]))
held = sum(part.into.nbytes for _, part in model.targets() if part)
print(json.dumps({"grown": (kib("VmHWM") - before) * 1024, "held": held, "report": model.report.bytes}))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("bf16"), small("V3", **CONFIG), max_shard_bytes=SHARD)


@pytest.fixture(scope="module")
def fp8_path(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small("V3", **CONFIG, quantization_config=FP8)
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("fp8"), config, max_shard_bytes=SHARD)


@pytest.mark.parametrize(("kind", "options"), [("bf16", {}), ("fp8", {}), ("fp8", {"dequantize": True})])
def test_loading_takes_the_model_and_one_shard(
    kind: str, options: dict[str, Any], path: Path, fp8_path: Path, v3_path: Path
) -> None:
    source = path if kind == "bf16" else fp8_path
    shards = [file.stat().st_size for file in source.glob("*.safetensors")]
    assert len(shards) >= 3
    command = [sys.executable, "-c", PROGRAM, str(v3_path), str(source), json.dumps(options)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["held"] > 2 * SHARD
    assert 0.9 * result["held"] < result["grown"] < result["held"] + max(shards) + SLACK
