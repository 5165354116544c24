"""Groups of rank processes, kept alive between cases: asked, watched, and stopped when one fails."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch_hal as hal

from .ranks_worker import Answer, Job, Seat, serve

START = 180.0  # seconds for the processes of a group to begin; plugins may be slow to import
GRACE = 2.0  # seconds that the others have to answer after one said that it failed
AHEAD = 20.0  # seconds that a rank may be done before another: each takes part in what the others do
GOOD = frozenset({"ready", "ok", "raised", "returned", "absent"})

_offered: dict[str, str] = {}  # plugins that are not installed: name -> module
_pools: dict[tuple[int, str, bool], Pool] = {}


class StartError(Exception):
    """The processes did not come to work together, before any kernel was called."""


class Pool:
    """``size`` processes on devices of one type, joined in a process group."""

    def __init__(self, size: int, device_type: str) -> None:
        """Raises StartError."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.ranks_preload"])
        self._folder = tempfile.TemporaryDirectory(prefix="torch_hal_ranks_")
        self._seats = [Seat(r, size, device_type, self._folder.name, tuple(_offered.items())) for r in range(size)]
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for seat in self._seats:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(seat, there), daemon=True, name=f"rank {seat.rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        if bad := [answer for answer in self._answers(START, GRACE) if answer.status != "ready"]:
            self.close()
            raise StartError(f"rank {bad[0].rank} of {size}: {bad[0].message}")

    def ask(self, job: Job, limit: float, grace: float = GRACE) -> list[Answer]:
        """Every rank's answer, in the order in which they came; at most ``limit`` seconds, and ``grace`` after the
        first that failed. The group is stopped unless all ranks agree that nothing, or nobody, failed.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it died after its last answer: that is found below
                connection.send(job)
        answers = self._answers(limit, grace)
        statuses = {answer.status for answer in answers}
        if statuses not in ({"ok"}, {"unsupported"}):
            self.close()
        return answers

    @property
    def alive(self) -> bool:
        return bool(self._processes)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def _answers(self, limit: float, grace: float) -> list[Answer]:
        end = time.monotonic() + limit
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: list[Answer] = []
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                answers.append(self._answer(connection, waiting.pop(connection)))
                good = answers[-1].status in GOOD
                end = min(end, time.monotonic() + (max(grace, AHEAD) if good else grace))
        return answers + [Answer(rank, "silent") for rank in sorted(waiting.values())]

    def _answer(self, connection: Connection, rank: int) -> Answer:
        """What a rank said, or how it died."""
        try:
            answer: Answer = connection.recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            how = _how(self._processes[rank].exitcode)
            return Answer(rank, "died", "crash", f"{how}{_last_words(Path(self._seats[rank].printed))}")
        return answer


def pool(size: int, device_type: str, spare: bool = False) -> Pool:
    """The group of that size, started unless it is alive; ``spare``: another one, which may be broken."""
    found = _pools.get((size, device_type, spare))
    if found is None or not found.alive:
        found = _pools[size, device_type, spare] = Pool(size, device_type)
    return found


def offer(name: str, module: str) -> None:
    """Register the plugin that ``module`` is, here and in every rank process that starts from now on."""
    hal.register(importlib.import_module(module), name)
    _offered[name] = module
    close()


def withdraw(name: str) -> None:
    """Take back what `offer` offered."""
    hal.unregister(name)
    del _offered[name]
    close()


@atexit.register
def close() -> None:
    """End all groups; the next call that needs one starts it."""
    for running in _pools.values():
        running.close()
    _pools.clear()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _last_words(printed: Path, lines: int = 6) -> str:
    """The end of what a rank printed."""
    try:
        words = printed.read_text(errors="replace")[-4000:].strip().splitlines()[-lines:]
    except FileNotFoundError:
        return ""
    return "".join(f"\n  | {line}" for line in words)
