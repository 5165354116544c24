"""The guide for authors, done as it stands: its commands, its changes to files, and what it shows of both.

From an empty folder, where the wheel is installed and the checkout is not to be found. In the guide a ``console`` block
holds commands, each with what it prints below it; ``…`` stands for anything, and a number for any number, since figures
grow with the suite. The title says with what its commands exit, or, of any other block, of which file it is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "conformance-guide.md"
BLOCK = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
WHERE = """
from importlib.util import find_spec
print(find_spec("torch_hal").origin, find_spec("torch_hal_conformance").origin)
"""
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@dataclass(frozen=True)
class Shell:
    """Where the guide's reader is: an environment of their own, and a folder."""

    environment: Path
    folder: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        variables = {
            k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTEST_", "PYTHON", "TORCH_HAL_"))
        }
        variables |= {
            "PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this one the other way round: there is no isolation
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            env=variables,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def must(self, command: str, code: int = 0) -> str:
        done = self.run(command)
        assert done.returncode == code, f"$ {command}\nexit code {done.returncode}, expected {code}\n{done.stdout}"
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """An environment that sees what this one has installed, torch too, but the wheel in place of the checkout."""
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    subprocess.run(built, cwd=ROOT, check=True, capture_output=True)
    [wheel] = (tmp_path / "wheel").glob("*.whl")
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    venv.create(environment, with_pip=False, symlinks=True)
    [packages] = environment.glob("lib/python*/site-packages")
    # Folders alone, and nothing of what .pth files in them add, such as a checkout that is installed to be edited.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))
    folder.mkdir()
    made = Shell(environment, folder)
    made.must(f"python -m pip install --no-deps --ignore-installed {wheel}")
    return made


@pytest.mark.timeout(300)  # a minute on one core that has nothing else to do
def test_the_guide_works_as_it_stands(shell: Shell) -> None:
    where = shell.must(f"python -c {shlex.quote(WHERE)}").split()
    assert len(where) == 2 and all(Path(path).is_relative_to(shell.environment) for path in where), where
    for language, title, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if language == "console":
            shell = follow(shell, text, int(title.removeprefix("exits with ") or 0))
        elif language == "diff":
            mend(shell.folder / title, text)
        else:
            missing = same(f"…\n{text}…", (shell.folder / title).read_text(encoding="utf-8"))
            assert not missing, f"{title} does not hold what the guide shows of it: {missing}"


def test_every_block_of_the_guide_is_looked_at() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(BLOCK.findall(text))


def follow(shell: Shell, text: str, code: int) -> Shell:
    """Do a block's commands; the shell after them."""
    for command, shown in sessions(text):
        if command.startswith("cd "):
            shell = Shell(shell.environment, shell.folder / command.removeprefix("cd "))
            continue
        printed = shell.must(command, code)
        missing = same(shown or "…", printed)
        assert not missing, f"$ {command}\nexpected, after what the guide shows before it: {missing}\ngot:\n{printed}"
    return shell


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Each command, and what the guide shows below it."""
    for session in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = session.partition("\n")
        yield command, shown


def same(shown: str, text: str) -> str:
    """What of ``shown`` does not come in ``text`` where it should, or that there is more; empty if all is well."""
    rest, gap = [plain(line) for line in text.splitlines()], False
    for line in shown.splitlines():
        if line == "…":
            gap = True
            continue
        pattern = re.compile(".*".join(map(re.escape, plain(line).split("…"))))
        found = next((i for i, other in enumerate(rest) if pattern.fullmatch(other)), None)
        if found is None or (found > 0 and not gap):
            return line
        rest, gap = rest[found + 1 :], False
    return "" if gap or not any(rest) else f"nothing more, but there is {rest}"


def plain(line: str) -> str:
    return NUMBER.sub("0", line.rstrip())


def mend(path: Path, change: str) -> None:
    """Change a file as a block of ``-``, ``+`` and other lines says."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path} has not once what the guide changes:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")
