"""What every test here starts from: no setting of the caller's, and a seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from deepseek_cases import small

import torch_hal_deepseek as deepseek


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCH_HAL_")]:
        monkeypatch.delenv(name)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def v3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small V3 with random weights."""
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("v3"), small("V3"), seed=1)


@pytest.fixture
def model(v3_path: Path) -> deepseek.DeepSeek:
    return deepseek.load(v3_path)
