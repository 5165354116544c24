"""The examples of the README and the guides, run as they stand: installed plugin, a checkpoint's folder and all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [Path("README.md"), *sorted(page.relative_to(ROOT) for page in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE_CHECKPOINT = """
from torch_hal_deepseek import random_checkpoint
from torch_hal_deepseek.random_weights import SMALL_CONFIG
random_checkpoint("DeepSeek-V2-Lite", SMALL_CONFIG | {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2})
"""


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (ROOT / page).read_text()], ids=str)
def test_every_example_runs(page: Path, tmp_path: Path, run_python: Callable[..., str]) -> None:
    """A block that begins with a file's name is that file; entry points are installed; the rest is one program."""
    program = []
    for language, code in BLOCK.findall((ROOT / page).read_text()):
        if named := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / named[1]).write_text(code)
        elif language == "python":
            program.append(code)
        elif language == "toml" and "entry-points" in code:
            install(tmp_path, tomllib.loads(code)["project"]["entry-points"])
    if "torch_hal_deepseek.load" in "".join(program):
        run_python(MAKE_CHECKPOINT)
    run_python("\n".join(program), PYTHONWARNINGS="error::UserWarning")


def install(folder: Path, groups: dict[str, dict[str, str]]) -> None:
    """A distribution with these entry points, as far as discovery can tell: the folder is on the program's path."""
    info = folder / "acme_hal-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hal\nVersion: 1.0\n")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *map(" = ".join, points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))
