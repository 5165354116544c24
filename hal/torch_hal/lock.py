"""The one lock under which everything that a process shares changes: plugins, devices, probes, torch ops.

One, because plugins' own code runs under it and may come back for more: two locks could be taken in either order.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterator

from .errors import PluginError


class Lock:
    """A re-entrant lock that a forked child finds free, whichever other thread held it in the parent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def _after_fork(self) -> None:
        """Only the thread that forked lives on: what it cannot take, nobody is left to release."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


LOCK = Lock()

_here = threading.local()  # not shared, so that a forked child does not inherit what other threads were at


@contextlib.contextmanager
def no_return(task: Hashable, rule: str) -> Iterator[None]:
    """Run foreign code as a part of ``task``: PluginError with the ``rule`` if that code comes back to the task."""
    running: set[Hashable] = _here.__dict__.setdefault("running", set())
    if task in running:
        raise PluginError(rule)
    running.add(task)
    try:
        yield
    finally:
        running.discard(task)
