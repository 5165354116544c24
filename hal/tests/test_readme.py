"""The examples of the README and the guides, run as they stand: installed plugin, a checkpoint's folder and all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import PythonRunner

ROOT = Path(__file__).parents[2]
PAGES = [Path("README.md"), *sorted(page.relative_to(ROOT) for page in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE_CHECKPOINT = """
from torch_hal_deepseek.demo import CONFIG, random_checkpoint
random_checkpoint("DeepSeek-V2-Lite", CONFIG, seed=0)
"""


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_example_runs(page: Path, tmp_path: Path, run_python: PythonRunner) -> None:
    """A block that starts with a file's name is that file; entry points are installed; the rest is one program."""
    program = []
    for language, code in BLOCK.findall((ROOT / page).read_text()):
        if language == "toml" and "entry-points" in code:
            install_entry_points(tmp_path, code)
        elif named := re.match(r"# (\w+\.(?:py|toml))\n", code):
            (tmp_path / named[1]).write_text(code)
        elif language == "python":
            program.append(code)
    if "torch_hal_deepseek.load" in "".join(program):
        run_python(MAKE_CHECKPOINT)
    if program:
        run_python("\n".join(program), PYTHONWARNINGS="error")
