"""Backends that are installed for one test, and the command in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def environment_with(folder: Path, name: str, module: str) -> dict[str, str]:
    """The environment of a process in which ``module``, of this folder or ``folder``, is installed as a backend."""
    info = folder / "site" / f"{name}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch_hal.backends]\n{name} = {module}\n")
    path = [str(folder / "site"), str(folder), str(HERE), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TORCH_HAL_PLUGINS": name, "OMP_NUM_THREADS": "1"}


def suite(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """``torch-hal conformance`` with these options."""
    program = [sys.executable, "-m", "torch_hal_conformance.command", *options]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=110)
