"""The ``torch-hal`` command; needs the extra ``torch-hal[cli]``."""

from __future__ import annotations

import sys


def main() -> int:
    """Entry point of ``torch-hal`` and ``python -m torch_hal``."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"torch-hal: the command needs {error.name}: pip install 'torch-hal[cli]'", file=sys.stderr)
        return 2
    return run()
