"""Collectives: one case on as many processes as it has ranks, judged here from what each of them got."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_hal.errors import describe

from .judge import Item, NotTaken
from .memory import poison, same_bits
from .ranks_oracle import Expected, expected
from .ranks_pool import AHEAD, StartError, close, offer, pool, withdraw
from .ranks_worker import GROUP_TIMEOUT, Answer, Job
from .report.schema import CaseResult, Status
from .verdict import Evidence, Failure, Score

__all__ = ["close", "judge_ranks", "offer", "withdraw"]

LIMIT = 1.5 * GROUP_TIMEOUT  # seconds for a case: the group's own time-out comes first
FAULTS = {"dead_rank": "was killed before its call", "timeout": "never made its call"}
PATIENCE = (
    0.5,
    2.0,
    8.0,
)  # a faulty group's time-out in seconds; longer where a busy machine took that long for a good call
SLOWER = 5.0  # times that on devices, whose libraries take longer to join
SPARE = 10.0  # seconds after a group's time-out within which every rank must have given up
PAIRS = ((0, 2), (1, 3))  # the regime "subgroup": groups of two whose ranks are not those of the processes
SAME_EVERYWHERE = frozenset({"all_reduce"})

Results = list[list[Any]]  # each rank's results


class Crashed(Exception):
    """A rank's process ended."""


class Raised(Exception):
    """A rank raised; ``kind`` is the exception's type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def judge_ranks(item: Item) -> CaseResult:
    """The result of one case; never raises for what a kernel does."""
    start, score, answers = time.perf_counter(), Score(), list[Answer]()
    status: Status = "correct"
    check, message = "", ""
    try:
        needed = _processes(item)
        score = _fault(item, needed, answers) if item.case.regime in FAULTS else _numbers(item, needed, answers)
    except NotTaken as reason:
        status, message = "unsupported", str(reason)
    except Failure as failure:
        status, check, message = "wrong", failure.check, str(failure)
        score = Score(failure.E, failure.R)
    except Crashed as death:
        status, check, message = "crashed", "crash", str(death)
    except Raised as error:
        status, check, message = "error", error.kind, str(error)
    except Exception as error:
        status, check, message = "error", type(error).__name__, describe(error)
    return CaseResult(
        id=item.case.id,
        kernel=item.kernel,
        status=status,
        check=check,
        message=message,
        E=score.E,
        R=score.R,
        seconds=time.perf_counter() - start,
        kernel_seconds=max((a.seconds for a in answers if a.seconds is not None), default=None),
        ran=next((a.ran for a in answers if a.ran), ""),
        behaviours=item.case.behaviours,
        structural=item.case.structural,
    )


def _ranks(item: Item) -> int:
    shape = next(shape for shape in item.case.spec.shapes if shape.name == item.case.shape)
    return int(str(dict(shape.dims)["ranks"]))


def _processes(item: Item) -> int:
    """How many processes the case takes. NotTaken where the machine cannot seat them."""
    device = item.ops().device
    needed = 4 if item.case.regime == "subgroup" else _ranks(item)
    if not dist.is_backend_available(device.dist_backend):
        raise NotTaken(f"this torch has no process groups of '{device.dist_backend}', which {device} needs")
    if device.type != "cpu":
        module: Any = torch.get_device_module(device.type)
        if (have := module.device_count()) < needed:
            raise NotTaken(f"needs {needed} devices, has {have}")
    return needed


def _groups(item: Item) -> tuple[tuple[int, ...], ...]:
    return PAIRS if item.case.regime == "subgroup" else (tuple(range(_ranks(item))),)


def _numbers(item: Item, processes: int, answers: list[Answer]) -> Score:
    """Run the kernel on every rank; compare what each got, in both calls, with the definition."""
    calls = [item.case.arguments(stale)["ranks"] for stale in (False, True)]
    wanted = [expected(item.case.op, call) for call in calls]
    if not item.case.structural:
        _not_vacuous(item, calls[0], *wanted)
    asked = _ask(item, Job(item.case, item.kernel, _groups(item)), processes)
    answers += asked
    results = {answer.rank: answer.results() for answer in answers}
    score = Score()
    for group in _groups(item):
        for i, (arguments, want) in enumerate(zip(calls, wanted, strict=True)):
            if got := [results[rank][i] for rank in group if i < len(results[rank])]:
                score.meet(_verdict(item, arguments, want, got, "" if i == 0 else "in a call after the first, "))
    return score


def _verdict(item: Item, arguments: list[dict[str, Any]], want: list[Expected], got: Results, when: str = "") -> Score:
    """The score over all ranks of a group. Raises Failure, which names the rank."""
    score = Score()
    for rank, (own, expect, results) in enumerate(zip(arguments, want, got, strict=True)):
        try:
            _same_shapes(results, expect.native)
            score.meet(item.case.spec.verdict(Evidence(item.op, own, results, expect.exact, expect.native)))
        except Failure as failure:
            told = f"{when}rank {rank} of {len(got)}: {failure}"
            raise Failure(failure.check, told, failure.E, failure.R) from failure
    if item.case.op in SAME_EVERYWHERE:
        for rank, results in enumerate(got):
            if not all(same_bits(a, b) for a, b in zip(results, got[0], strict=True)):
                raise Failure("ranks", f"{when}rank {rank} got other bits than rank 0: ranks would drift apart")
    return score


def _same_shapes(got: list[Any], want: list[Tensor]) -> None:
    for i, (y, like) in enumerate(zip(got, want, strict=True)):
        for check in ("shape", "dtype"):
            if getattr(y, check) != getattr(like, check):
                raise Failure(check, f"result {i}: expected {check} {getattr(like, check)}, got {getattr(y, check)}")


def _not_vacuous(item: Item, arguments: list[dict[str, Any]], want: list[Expected], stale: list[Expected]) -> None:
    """Refuse a case that zeros, poison or another call's results would pass on every rank."""
    written: dict[str, Callable[[int, Tensor], Tensor]] = {
        "zeros": lambda rank, y: torch.zeros_like(y),
        "poison": lambda rank, y: _poisoned(y),
    }
    tried = {
        what: [[make(rank, y) for y in expect.native] for rank, expect in enumerate(want)]
        for what, make in written.items()
    }
    tried["a stale result"] = [expect.native for expect in stale]
    for what, got in tried.items():
        try:
            _verdict(item, arguments, want, got)
        except Failure:
            continue
        raise Failure("vacuous", f"{what} would pass this case, so that passing it means nothing")


def _poisoned(like: Tensor) -> Tensor:
    poison(filled := torch.empty_like(like))
    return filled


def _ask(item: Item, job: Job, processes: int, spare: bool = False) -> list[Answer]:
    """The answers, all of them good. Raises what the first that was not says."""
    try:
        group = pool(processes, item.ops().device.type, spare)
    except StartError as error:
        raise Raised("StartError", f"the ranks did not come together: {error}") from error
    answers = group.ask(job, LIMIT)
    _blame(answers)
    return sorted(answers, key=lambda answer: answer.rank)


def _blame(answers: list[Answer]) -> None:
    """Raise for the rank that failed first, as the others' errors are mostly of its making; a death goes before all."""
    size, waiting = len(answers), [a.rank for a in answers if a.status == "silent"]
    while_others = f"; meanwhile {_named(waiting)} waited in vain" if waiting else ""
    for answer in sorted(answers, key=lambda a: a.status != "died"):
        told = f"rank {answer.rank} of {size}: {answer.message}{while_others}"
        if answer.status == "died":
            raise Crashed(told)
        if answer.status == "unsupported":
            if {a.status for a in answers} == {"unsupported"}:
                raise NotTaken(answer.message)
            others = _named([a.rank for a in answers if a.status != "unsupported"])
            raise Failure(
                "refusal", f"rank {answer.rank} of {size} refuses the call and {others} not: {answer.message}"
            )
        if answer.status == "wrong":
            raise Failure(answer.check, told)
        if answer.status == "error":
            raise Raised(answer.check, told)
    if waiting:
        done = [answer.rank for answer in answers if answer.status == "ok"]
        after = f"{AHEAD:g} s after {_named(done)}" if done else f"within {LIMIT:g} s"
        raise Failure("hang", f"{_named(waiting)} of {size} gave no answer {after}, and no rank raised: it would hang")


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _fault(item: Item, processes: int, answers: list[Answer]) -> Score:
    """A call that everybody makes, which must be right, and one that the last rank does not: the others must raise."""
    victim = processes - 1
    unit = 1.0 if item.ops().device.type == "cpu" else SLOWER
    for seconds in (unit * patience for patience in PATIENCE):
        job = Job(item.case, item.kernel, _groups(item), timeout=seconds, tag=f"{item.case.id} {seconds}")
        try:
            _ask(item, job, processes, spare=True)
        except Raised:
            if seconds == unit * PATIENCE[-1]:
                raise
            continue  # the machine may be too busy for so short a time-out
        break
    fault = functools.partial(Job, item.case, item.kernel, _groups(item), "fault", victim)
    limit = seconds + SPARE
    faulty = pool(processes, item.ops().device.type, spare=True)
    answers += faulty.ask(fault(timeout=seconds, tag=job.tag), limit, grace=limit)
    why = f"rank {victim} of {processes} {FAULTS[item.case.regime]}, and the group's time-out is {seconds:g} s"
    for answer in answers:
        if answer.rank == victim or answer.status == "raised":
            continue
        if answer.status == "returned":
            raise Failure("fault", f"rank {answer.rank} got a result, although {why}: expected an error")
        if answer.status == "silent":
            raise Failure("hang", f"rank {answer.rank} hung: no error within {limit:g} s, although {why}")
        raise Crashed(f"rank {answer.rank}: {answer.message}: expected an error that can be caught; {why}")
    return Score()
