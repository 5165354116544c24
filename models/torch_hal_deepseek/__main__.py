"""``python -m torch_hal_deepseek``; see `cli`."""

from __future__ import annotations

import importlib.util
import os
import sys


def main() -> None:
    """Run the command line.

    Exit code 0: done, 1: an error that the message explains, 2: wrong usage, 141: whoever read the output has gone.
    """
    if importlib.util.find_spec("typer") is None:
        sys.exit("torch_hal_deepseek: the command line needs typer: pip install 'torch-hal[cli,deepseek]'")
    from .cli import READER_GONE, app

    try:
        try:
            app(prog_name="python -m torch_hal_deepseek")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, not at exit, where Python would complain
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)


if __name__ == "__main__":
    main()
