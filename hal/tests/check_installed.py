"""Run by the interpreter of a fresh environment, from an empty folder: what a user gets from the wheel alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

import torch_hal as hal
from torch_hal.plugins import discover

ENVIRONMENT = Path(sys.prefix).resolve()
PACKAGES = {"torch_hal", "torch_hal_conformance", "torch_hal_cuda", "torch_hal_deepseek"}


def main() -> None:
    distribution = importlib.metadata.distribution("torch-hal")
    assert distribution.version == hal.__version__, (distribution.version, hal.__version__)

    files = {str(file) for file in distribution.files or ()}
    owned = {file.split("/")[0] for file in files if not file.startswith("..")}
    assert owned == PACKAGES | {f"torch_hal-{hal.__version__}.dist-info"}, owned
    assert {"torch_hal/py.typed"} <= files
    assert not [file for file in files if "tests" in file.split("/")]

    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, package
        assert Path(spec.origin).resolve().is_relative_to(ENVIRONMENT), spec.origin

    states = {plugin.name: plugin.state for plugin in discover().plugins}
    assert states["cuda"] == "loaded", states

    ops = hal.bind("cpu")
    x = torch.randn(3, 64)
    torch.testing.assert_close(ops.rms_norm(x, torch.ones(64), 1e-6).square().mean(-1), torch.ones(3))
    print(f"torch-hal {hal.__version__} works from {ENVIRONMENT}")


if __name__ == "__main__":
    main()
