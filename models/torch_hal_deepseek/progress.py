"""A progress bar on stderr, where a person is looking."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(bytes)``. Draws only on a terminal, and only with rich installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)
