"""What one rank's process does: it joins a process group, then runs its part of one case after the other.

Started by `ranks_pool`, from a server that has imported this module, so that a rank begins within milliseconds.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import io
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, fields
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import torch_hal as hal
from torch_hal.errors import describe
from torch_hal.kernel import Trait
from torch_hal.runtime import Runtime

from .behaviours import LOOKS, look
from .cases import Case
from .judge import (
    Item,
    NotTaken,
    Seen,
    call,
    check_lasting,
    check_memory,
    check_provenance,
    check_structure,
    poisoned,
    to_device,
)
from .memory import Placed, on_host, place, same_bits
from .oracle import outputs
from .provenance import Watch
from .verdict import Failure

GROUP_TIMEOUT = 60.0  # seconds that a rank waits for the others; a case of the largest takes a tenth


@dataclass(frozen=True)
class Seat:
    """Which process of which group this is."""

    rank: int
    size: int
    device_type: str
    folder: str  # where the ranks find one another, and write what they print
    plugins: tuple[tuple[str, str], ...] = ()  # name and module of what must be registered besides what is installed

    @property
    def device(self) -> str:
        return "cpu" if self.device_type == "cpu" else f"{self.device_type}:{self.rank}"

    @property
    def printed(self) -> str:
        return os.path.join(self.folder, f"rank{self.rank}.txt")


@dataclass(frozen=True)
class Job:
    """One step of a case. ``groups``: ranks that form a group, each of which makes the call on its own.

    step: "judge"; "fault", one call that ``victim`` does not make, being killed or idle. timeout: the group's, if it
    is to have one of its own; ``tag`` tells such a group from others of the same ranks.
    """

    case: Case
    kernel: str
    groups: tuple[tuple[int, ...], ...]
    step: str = "judge"
    victim: int | None = None
    timeout: float | None = None
    tag: str = ""


@dataclass(frozen=True)
class Answer:
    """What became of a job on one rank. status: "ok", "unsupported", "wrong", "error"; of a fault "raised", "returned",
    "absent"; said by the pool "died", "silent"; and "ready".
    """

    rank: int
    status: str
    check: str = ""
    message: str = ""
    outputs: bytes = b""  # a list of results for each call that was made, by torch.save
    ran: str = ""
    seconds: float | None = None

    def results(self) -> list[list[Any]]:
        loaded: list[list[Any]] = torch.load(io.BytesIO(self.outputs), weights_only=True) if self.outputs else []
        return loaded


@dataclass(frozen=True)
class RankCase(Case):
    """A case as one rank of a group sees it."""

    group: str = ""
    rank: int = 0

    @classmethod
    def of(cls, case: Case, group: str, rank: int) -> RankCase:
        return cls(**{field.name: getattr(case, field.name) for field in fields(Case)}, group=group, rank=rank)

    def arguments(self, stale: bool = False) -> dict[str, Any]:
        own: dict[str, Any] = super().arguments(stale)["ranks"][self.rank]
        return {**own, "group": self.group}


def layout(case: Case) -> str:
    """How the arguments lie in memory: a dim of the shape, as collectives have no cases of layouts alone."""
    shape = next(shape for shape in case.spec.shapes if shape.name == case.shape)
    return str(dict(shape.dims).get("layout", case.layout))


def serve(seat: Seat, connection: Connection) -> None:
    """Answer jobs until the other end is closed."""
    printed = os.open(seat.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(seat,), daemon=True).start()
    try:
        rank = Rank(seat)
    except Exception as error:
        connection.send(
            Answer(seat.rank, "error", type(error).__name__, f"could not join the group: {describe(error)}")
        )
        return
    connection.send(Answer(seat.rank, "ready"))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            _end(seat)
        connection.send(rank.answer(job))


def _end_with_parent(seat: Seat) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _end(seat)


def _end(seat: Seat) -> NoReturn:
    """End at once: to leave a group in good order needs the others, who may be gone."""
    shutil.rmtree(seat.folder, ignore_errors=True)  # whoever made it was killed
    os._exit(0)


class Rank:
    """A process that has joined a group."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        for name, plugin in seat.plugins:
            hal.register(importlib.import_module(plugin), name)
        self.runtime = Runtime(hal.bind(seat.device).device)
        if seat.device_type == "cpu":
            torch.set_num_threads(1)
        else:
            module: Any = torch.get_device_module(seat.device_type)
            module.set_device(seat.rank)
        everyone = self.runtime.init_process_group(
            init_method=f"file://{seat.folder}/rendezvous",
            rank=seat.rank,
            world_size=seat.size,
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )
        self._groups: dict[tuple[tuple[tuple[int, ...], ...], float | None, str], str] = {
            ((tuple(range(seat.size)),), None, ""): everyone
        }

    def answer(self, job: Job) -> Answer:
        """Do the job; what a kernel raises is an answer."""
        answer = functools.partial(Answer, self.seat.rank)
        try:
            item, seen = self._item(job), Seen()
            if job.step == "fault":
                return self._fault(job, item)
            results = run(item, seen)
        except NotTaken as reason:
            return answer("unsupported", message=str(reason))
        except Failure as failure:
            return answer("wrong", failure.check, str(failure))
        except Exception as error:
            return answer("error", type(error).__name__, describe(error))
        stream = io.BytesIO()
        torch.save(results, stream)
        return answer("ok", outputs=stream.getvalue(), ran=seen.ran, seconds=seen.kernel_seconds)

    def _item(self, job: Job) -> Item:
        mine = next(group for group in job.groups if self.seat.rank in group)
        return Item(RankCase.of(job.case, self._group(job), mine.index(self.seat.rank)), job.kernel, self.seat.device)

    def _group(self, job: Job) -> str:
        """The name of this rank's group, made at first need: by every rank, in the same order."""
        key = (job.groups, job.timeout, job.tag)
        for ranks in job.groups if key not in self._groups else ():
            name = self.runtime.new_group(ranks) if job.timeout is None else self._short(ranks, job.timeout)
            if self.seat.rank in ranks:
                self._groups[key] = name
        return self._groups[key]

    def _short(self, ranks: tuple[int, ...], seconds: float) -> str:
        """A group that soon gives up, and says so on the host: where a device waits, its library must be told to."""
        backend = self.runtime.device.dist_backend
        variable = f"TORCH_{backend.upper()}_BLOCKING_WAIT"
        before = os.environ.get(variable)
        os.environ[variable] = "1"
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend=backend)
        del os.environ[variable]
        os.environ |= {variable: before} if before is not None else {}
        return str(getattr(group, "group_name", ""))

    def _fault(self, job: Job, item: Item) -> Answer:
        if self.seat.rank == job.victim:
            if job.case.regime == "dead_rank":
                os.kill(os.getpid(), signal.SIGKILL)
            return Answer(self.seat.rank, "absent")
        values = to_device(item.case.arguments(), item.ops().device.torch_device)
        start = time.monotonic()
        try:
            call(item, values, Seen())
        except Exception as error:
            return Answer(
                self.seat.rank, "raised", type(error).__name__, describe(error), seconds=time.monotonic() - start
            )
        return Answer(self.seat.rank, "returned", seconds=time.monotonic() - start)


def run(item: Item, seen: Seen) -> list[list[Any]]:
    """The results of each call that the case makes, none where it is looked at by itself. Raises Failure."""
    if item.case.regime == "side_stream":
        return on_busy_stream(item, seen)
    if item.case.regime in LOOKS:
        look(item, seen)
        return []
    return judged(item, seen)


@dataclass
class Made:
    """One call, and what is to be looked at once no other rank waits for this one any more."""

    arguments: dict[str, Any]
    values: dict[str, Any]
    placed: dict[str, Placed]
    watch: Watch
    got: list[Any]
    again: list[Any] | None


def judged(item: Item, seen: Seen) -> list[list[Any]]:
    """The results of the case's call, and of one with other values after it, with every check that needs no oracle.

    Everything is run before anything is looked at: a rank that stops earlier than the others leaves them waiting.
    """
    made = [_made(item, stale, seen) for stale in (False, True)]
    like = outputs(item.op, item.op.run_fake(**made[0].arguments), made[0].arguments)
    check_structure(item, like, made[0].got, made[0].values)
    for one in made:
        check_provenance(item, one.watch, seen)
        check_memory(item.op, one.placed)
        if one.again is not None and not all(same_bits(a, b) for a, b in zip(one.got, one.again, strict=True)):
            raise Failure("repeat", "declared deterministic, but a second call on the same bits gave others")
    return [[on_host(y) if isinstance(y, Tensor) else y for y in one.got] for one in made]


def _made(item: Item, stale: bool, seen: Seen) -> Made:
    device, spec = item.ops().device.torch_device, item.case.spec
    arguments = item.case.arguments(stale)
    values, placed = place(arguments, layout(item.case), spec.fixed, device)
    with poisoned(), Watch() as watch:
        got = call(item, values, seen)
    again = None
    if Trait.DETERMINISTIC in item.chosen.traits:
        again = call(item, place(arguments, layout(item.case), spec.fixed, device)[0], Seen())
        check_lasting(got, again)
    return Made(arguments, values, placed, watch, got, again)


def on_busy_stream(item: Item, seen: Seen) -> list[list[Any]]:
    """The results of a call on a stream that is still busy making the arguments; on the host, of a plain one."""
    device = item.ops().device.torch_device
    values = to_device(item.case.arguments(), device)
    got = call(item, values, seen)  # connects the ranks, which may make every stream wait
    if item.ops().device.type != "cpu":
        late = {name: torch.zeros_like(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        module: Any = torch.get_device_module(item.ops().device.type)
        busy = torch.randn(4096, 4096, device=device)
        item.runtime.synchronize()
        with module.stream(module.Stream(device)):
            for _ in range(20):
                busy = busy @ busy * 1e-4
            for name, x in late.items():
                if isinstance(x, Tensor):
                    x.copy_(values[name])
            got = call(item, late, seen)
    return [[y.cpu() for y in got]]
