"""``torch-hal new-backend``: what it refuses, and that what it writes is fit to be anybody's own."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from torch_hal_conformance import new_backend
from torch_hal_conformance.cases import every_case
from torch_hal_conformance.xfails import FILE, load

ROOT = Path(__file__).parents[2]
TODAY = datetime.date(2030, 1, 31)
NAMES = ("a", "acme", "b2_", "the_longest_name_that_a_vendor_could_wish_for")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Acme", "is no name for a backend"),
        ("2fast", "is no name for a backend"),
        ("acme-hal", "is no name for a backend"),
        ("", "is no name for a backend"),
        ("../acme", "is no name for a backend"),
        ("acme\n", "is no name for a backend"),
        ("native", "torch_hal's own"),
        ("cuda", "installed already"),
        ("conformance", "installed already"),
    ],
)
def test_a_name_that_will_not_do_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(new_backend.NewBackendError, match=why):
        new_backend.write(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_only_an_empty_folder_is_written_to(tmp_path: Path) -> None:
    kept = tmp_path / "mine.txt"
    kept.write_text("mine")
    with pytest.raises(new_backend.NewBackendError, match="not empty"):
        new_backend.write("acme", tmp_path)
    with pytest.raises(new_backend.NewBackendError, match="cannot write"):
        new_backend.write("acme", kept)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"] and kept.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert new_backend.write("acme", tmp_path / "empty").joinpath("pyproject.toml").exists()


def test_the_command_says_what_to_do_next_or_what_is_wrong_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(new_backend.new_backend)
    good, again = (CliRunner().invoke(app, ["acme"]) for _ in range(2))
    assert good.exit_code == 0 and "torch-hal conformance --backend acme" in good.stdout
    assert (tmp_path / "torch-hal-acme" / "torch_hal_acme" / "kernels.py").exists()
    assert again.exit_code == 2 and again.stderr.count("\n") == 1 and "--directory" in again.stderr


def test_every_template_is_used() -> None:
    templates = Path(new_backend.__file__).parent / "template"
    assert {path.name for path in templates.iterdir()} == set(new_backend.FILES.values())


@pytest.mark.parametrize("name", NAMES)
def test_what_it_writes_is_a_distribution_with_a_known_failure(name: str, tmp_path: Path) -> None:
    folder = new_backend.write(name, tmp_path / "new", TODAY)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    [(entry, package)] = project["entry-points"]["torch_hal.backends"].items()
    assert entry == name and (folder / package / "py.typed").exists() and (folder / package / FILE).exists()
    [known] = load(str(folder / package), every_case(), lambda op, kernel: True, TODAY + datetime.timedelta(days=180))
    assert known.arch == "*" and known.expires > TODAY


@pytest.mark.parametrize("name", NAMES)
def test_what_it_writes_is_tidy(name: str, tmp_path: Path) -> None:
    """By its own settings, and by the stricter ones of this project."""
    folder = new_backend.write(name, tmp_path / "new")
    for settings in (folder, ROOT):
        for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
            check(folder, "ruff", *command, "--config", str(settings / "pyproject.toml"), ".")


def test_what_it_writes_is_typed(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    folder = new_backend.write("acme", tmp_path / "new")
    cache = pytestconfig.rootpath / ".mypy_cache" / "new_backend"  # to read torch for the first time takes a while
    check(folder, "mypy", "--strict", "--cache-dir", str(cache), "torch_hal_acme", "tests")


def check(folder: Path, module: str, *arguments: str) -> None:
    environment = {**os.environ, "MYPYPATH": str(ROOT / "hal")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
