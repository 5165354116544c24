"""The distribution: what the wheel holds and asks for, that torch is left alone, and a third party's plugin."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_hal import __version__

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OFFLINE = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}


def pip(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pip on another environment, with no index and no setting of this machine's."""
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), *arguments]
    return subprocess.run(command, env=OFFLINE, capture_output=True, text=True, timeout=100)


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_four_packages_and_one_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"torch_hal-{__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"torch_hal-{__version__}.dist-info/entry_points.txt").decode()
    packages = {name.split("/")[0] for name in names} - {f"torch_hal-{__version__}.dist-info"}
    assert packages == {"torch_hal", "torch_hal_conformance", "torch_hal_cuda", "torch_hal_deepseek"}
    assert "torch_hal/py.typed" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert f"\nVersion: {__version__}\n" in metadata
    assert "torch-hal = torch_hal.cli:main" in entry_points
    assert re.search(r"\[torch_hal\.backends\]\ncuda = torch_hal_cuda\n", entry_points)
    assert PROJECT["dynamic"] == ["version"]


def test_torch_is_asked_for_by_a_lower_bound_and_no_kernel_library_at_all() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(requirement for group in extras.values() for requirement in group)]
    assert [r for r in asked if re.match(r"torch(?![\w-])", r)] == ["torch>=2.9"]
    vendors = r"nvidia|cuda|cupy|triton|pytorch|torch[_-](?!hal)|flash|sgl|deep[_-]gemm|aiter|rocm|musa|torchada"
    assert not [r for r in asked if re.match(vendors, r)]
    assert not [r for r in asked if "==" in r or "<" in r]


@pytest.mark.parametrize(("version", "kept"), [("2.9.0+vendor", True), ("2.8.0+vendor", False)])
def test_installing_leaves_a_vendors_torch_alone(wheel: Path, tmp_path: Path, version: str, kept: bool) -> None:
    """Beside a vendor's torch, pip would install torch-hal and nothing else; one too old is an error, not a swap."""
    venv.create(tmp_path, with_pip=False, symlinks=True)
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "_", distribution.metadata["Name"]).lower()
        if name not in ("torch", "torch_hal"):
            pretend_installed(tmp_path, name, distribution.version, distribution.read_text("METADATA") or "")
    pretend_installed(tmp_path, "torch", version, f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")

    report = tmp_path / "report.json"
    requirement = f"{wheel}[cli,deepseek]"
    done = pip(tmp_path, "install", "--no-index", "--dry-run", "--quiet", "--report", str(report), requirement)

    if kept:
        assert done.returncode == 0, done.stderr
        planned = json.loads(report.read_text())["install"]
        assert [entry["metadata"]["name"] for entry in planned] == ["torch-hal"]
    else:
        assert done.returncode != 0
        assert "torch>=2.9" in done.stderr


def pretend_installed(environment: Path, name: str, version: str, metadata: str) -> None:
    folder = site_packages(environment) / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")


REPORT = """
import json, sys, torch
import torch_hal as hal
ops = hal.bind("cpu")
loaded_early = "acme_hal.norm" in sys.modules
x, weight = torch.randn(5, 64), torch.rand(64)
torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), hal.ops.rms_norm(x, weight, 1e-6))
print(json.dumps({**ops.explain("rms_norm").to_dict(), "text": str(ops.explain("rms_norm"))}))
"""


def test_a_third_partys_plugin_wins_is_explained_and_goes(tmp_path: Path, run_python: Callable[..., str]) -> None:
    environment, source = tmp_path / "environment", tmp_path / "source"
    shutil.copytree(Path(__file__).parent / "acme_plugin", source)
    venv.create(environment, with_pip=False, symlinks=True)
    shared = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(shared)]
    (site_packages(environment) / "shared.pth").write_text("\n".join(lines))
    python = str(environment / "bin" / "python")

    done = pip(environment, "install", "--no-index", "--no-deps", "--no-build-isolation", str(source))
    assert done.returncode == 0, done.stderr
    installed = json.loads(run_python(REPORT, python))
    assert [(k["plugin"], k["kernel"], k["state"]) for k in installed["kernels"]][:2] == [
        ("acme", "acme", "chosen"),
        ("native", "native", "next"),
    ]
    assert "acme" in installed["text"] and "tuned" in installed["text"]

    done = pip(environment, "uninstall", "--yes", "acme-hal")
    assert done.returncode == 0, done.stderr
    gone = json.loads(run_python(REPORT, python))
    assert [(k["kernel"], k["state"]) for k in gone["kernels"]] == [("native", "chosen")]
    assert "acme" not in gone["text"]


def test_ci_runs_the_readmes_test_command() -> None:
    readme = (ROOT / "README.md").read_text()
    [command] = re.findall(r"^.*nox -s tests$", readme, re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()
