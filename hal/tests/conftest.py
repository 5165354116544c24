"""What every test here starts from: no setting of the caller's, a seed, and fresh interpreters on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCH_HAL_")]:
        monkeypatch.delenv(name)
    torch.manual_seed(0)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """``run_python(code, python=…, **variables)``: what a new interpreter prints; its failure fails the test."""

    def run(code: str, python: str = sys.executable, **variables: str) -> str:
        env = {**os.environ, **variables}
        done = subprocess.run([python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
