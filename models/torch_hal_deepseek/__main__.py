"""``python -m torch_hal_deepseek``; see `cli`."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line. Exit code 0: done, 1: an error that the message explains, 2: wrong usage."""
    if importlib.util.find_spec("typer") is None:
        sys.exit("torch_hal_deepseek: the command line needs typer: pip install 'torch-hal[cli,deepseek]'")
    from .cli import app

    app(prog_name="python -m torch_hal_deepseek")


if __name__ == "__main__":
    main()
