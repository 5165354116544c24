"""One case on one kernel, in this process: run it, look at everything that the design promises, give a result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import torch_hal as hal
from torch_hal.errors import describe
from torch_hal.kernel import Trait
from torch_hal.native import NATIVE
from torch_hal.op import Op, declared
from torch_hal.runtime import Runtime

from . import oracle, second_opinion
from .cases import BEHAVIOURS, Case
from .memory import Placed, on_host, place, same_bits, taken, with_copies
from .provenance import Watch
from .report.schema import CaseResult, Status
from .state import State, untouched
from .subjects import bound
from .verdict import Evidence, Failure, Score


class NotTaken(Exception):
    """The kernel declares that it does not take this call, or does not promise what the case looks at."""


@dataclass(frozen=True)
class Item:
    """One case for one kernel on one device."""

    case: Case
    kernel: str  # its id
    device: str  # torch device

    @property
    def op(self) -> Op[..., Any]:
        return declared()[self.case.op]

    def ops(self, trace: bool = True) -> hal.OpSet:
        return bound(self.case.op, self.kernel, self.device, trace)

    @property
    def chosen(self) -> hal.Kernel:
        return getattr(self.ops(), self.case.op).kernel  # type: ignore[no-any-return]

    @property
    def runtime(self) -> Runtime:
        return Runtime(self.ops().device)


@dataclass
class Seen:
    """What came of a call beside its numbers."""

    ran: str = ""
    kernel_seconds: float | None = None


def judge(item: Item) -> CaseResult:
    """The result of one case; never raises for what a kernel does."""
    from .behaviours import look

    start, score, seen = time.perf_counter(), Score(), Seen()
    status: Status = "correct"
    check, message = "", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if item.case.regime in BEHAVIOURS:
                look(item, seen)
            else:
                score = numbers(item, seen)
        except NotTaken as reason:
            status, message = "unsupported", str(reason)
        except Failure as failure:
            status, check, message = "wrong", failure.check, str(failure)
            score = Score(failure.E, failure.R)
        except Exception as error:
            status, check, message = "error", type(error).__name__, _told(error)
    return CaseResult(
        id=item.case.id,
        kernel=item.kernel,
        status=status,
        check=check,
        message=message,
        E=score.E,
        R=score.R,
        seconds=time.perf_counter() - start,
        kernel_seconds=seen.kernel_seconds,
        ran=seen.ran,
        behaviours=item.case.behaviours,
        structural=item.case.structural,
    )


LONGEST = 2000  # characters of an exception's text


def _told(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = describe(error)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"
    return f"{text} (at {where.name}, {where.filename.rpartition('/')[2]}:{where.lineno})"


def numbers(item: Item, seen: Seen) -> Score:
    """Run the kernel once on poisoned memory, and again where it says that it is deterministic; compare."""
    op, case = item.op, item.case
    arguments, exact, native = truth(case)
    evidence = functools.partial(Evidence, op, arguments, exact=exact, native=native)
    if not case.structural:
        not_vacuous(case, lambda got: evidence(got=got), native)
    if item.kernel == NATIVE:
        second_opinion.check(case, arguments, exact)
    far = case.layout == "far"  # its untouched pages would be filled
    values, placed = place(arguments, case.layout, case.spec.fixed, item.ops().device.torch_device)
    with poisoned() if not far else contextlib.nullcontext(), Watch() as watch:
        got = call(item, values, seen)
    check_provenance(item, watch, seen)
    check_structure(item, native, got, values)
    check_memory(op, placed)
    score = case.spec.verdict(evidence(got=[on_host(y) for y in got]))
    if not far:
        keep_promises(item, arguments, got, seen)
    return score


@functools.lru_cache(maxsize=1)  # for one kernel after the other
def truth(case: Case) -> tuple[dict[str, Any], oracle.Exact, list[Any]]:
    """A case's arguments, which nobody may write, what they give in float64, and what native torch makes of them."""
    op = declared()[case.op]
    with untouched():
        arguments = case.arguments()
        return arguments, oracle.exact(op, arguments), oracle.native(op, arguments)


def keep_promises(item: Item, arguments: dict[str, Any], got: list[Any], seen: Seen) -> None:
    """What the kernel declares of equal inputs: the same bits again, and the same for a row whoever its neighbours."""
    case, traits, device = item.case, item.chosen.traits, item.ops().device.torch_device
    again, _ = place(arguments, case.layout, case.spec.fixed, device)
    repeated = call(item, again, second := Seen())
    seen.kernel_seconds = second.kernel_seconds  # nothing is loaded or compiled by now
    check_lasting(got, repeated)
    if Trait.DETERMINISTIC in traits:
        pairs = (case.spec.written(arguments, outputs) for outputs in (got, repeated))
        if not all(same_bits(a, b) for a, b in zip(*pairs, strict=True)):
            raise Failure("repeat", "declared deterministic, but a second call on the same bits gave others")
    if case.layout != "contiguous" or case.shape != case.spec.shapes[0].name:
        return
    if Trait.BATCH_INVARIANT in traits and case.spec.rows:
        check_invariant(item, to_device(arguments, device), got)
    if case.regime == "unit":
        check_specialised(item, to_device(arguments, device), case.spec.written(arguments, got))


def check_lasting(first: list[Any], second: list[Any]) -> None:
    """Results stay what they are: whoever holds them may call again."""
    owners = {y.untyped_storage().data_ptr() for y in first if y.numel()}
    if any(y.numel() and y.untyped_storage().data_ptr() in owners for y in second):
        raise Failure("alias", "a second call's results lie where the first one's did, which are still held")


MANY = 130  # rows: more than a kernel's tile


def check_invariant(item: Item, arguments: dict[str, Any], got: list[Any]) -> None:
    """A row has the same bits alone, with another, and among many, wherever it stands there."""
    spec = item.case.spec
    rows = {name: arguments[name] for name in spec.rows}
    names = {name: arguments[name] for name in spec.names_rows if arguments[name] is not None}
    number = len(next(iter(rows.values())))
    if number == 0:
        return
    for n in (1, 2, MANY + number):
        index = torch.arange(n, device=got[0].device) % number
        values = arguments | {name: taken(x, index) for name, x in rows.items()}
        values |= {name: with_copies(x, number, n) for name, x in names.items()}
        for mine, all_ in zip(call(item, values, Seen()), got, strict=True):
            if not same_bits(mine, taken(all_, index)):
                raise Failure(
                    "batch", f"declared batch_invariant, but rows have other bits among {n} than among {number}"
                )


def check_specialised(item: Item, arguments: dict[str, Any], expected: list[Any]) -> None:
    """A layer that binds the call once, on arguments that only stand for others, gets the same."""
    op = item.op
    if op.prepare is not None or op.plan is not None:  # what stands for prepared weights, the kernel alone knows
        return
    function = getattr(bound(item.case.op, item.kernel, item.device, False), op.name)
    stand_ins = tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), arguments
    )
    try:
        specialised = function.specialize(**stand_ins)
    except hal.HalError as error:
        raise Failure("specialize", f"taken as a call, but not as a layer's: {error}") from error
    results = specialised(**arguments)
    item.runtime.synchronize()
    got = item.case.spec.written(arguments, oracle.outputs(op, results, arguments))
    if not all(same_bits(a, b) for a, b in zip(got, expected, strict=True)):
        raise Failure("specialize", "bound once for such calls, it gives other bits")


def call(item: Item, values: dict[str, Any], seen: Seen) -> list[Any]:
    """The bound op's outputs, its weights prepared and its schedule planned as an engine would have it."""
    op, ops = item.op, item.ops()
    function = getattr(ops, op.name)
    values = ready(item, values)
    assert ops.trace is not None
    ops.trace.calls.clear()
    before, start = State.now(), time.perf_counter()
    try:
        results = function(**values)
    except hal.Unsupported as refusal:
        if ops.trace.calls:
            raise Failure("refusal", f"refused from inside the kernel, not by its refusals: {refusal}") from refusal
        raise NotTaken(str(refusal)) from refusal
    finally:
        after = State.now()
        before.restore()
    if changed := before.changes(after):
        raise Failure("state", f"left torch itself changed, for everybody: {'; '.join(changed)}")
    item.runtime.synchronize()
    seen.kernel_seconds = time.perf_counter() - start
    seen.ran = ", ".join(kernel for _, kernel, _ in ops.trace.calls)
    return oracle.outputs(op, results, values)


def ready(item: Item, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments with weights prepared and a schedule planned, where the kernel does so."""
    op, kernel, spec = item.op, item.chosen, item.case.spec
    function = getattr(item.ops(), op.name)
    values = dict(values)
    if op.prepare is not None and kernel.prepare is not None:
        parameters = list(inspect.signature(op.prepare).parameters)
        try:
            laid = function.prepare(**values)
        except hal.Unsupported as refusal:
            raise NotTaken(str(refusal)) from refusal
        values |= {**dict(zip(parameters, laid.tensors, strict=True)), "layout": laid.layout}
    if op.plan is not None and kernel.plan is not None and spec.plan is not None:
        checktaken(item, values)
        wanted = spec.plan(values)
        planned = function.plan(**wanted)
        check_plan_size(planned.tensors[0], function.plan(**{k: _nothing(v) for k, v in wanted.items()}).tensors[0])
        values |= {"plan": planned.tensors[0], "layout": planned.layout}
    return values


def _nothing(lengths: Any) -> Any:
    """Sequences' lengths, on the device or the host, all 0; anything else as it is."""
    if isinstance(lengths, Tensor):
        return torch.zeros_like(lengths)
    return [0] * len(lengths) if isinstance(lengths, list) else lengths


def check_plan_size(plan: Tensor, empty: Tensor) -> None:
    """A captured graph is given other lengths by copying a new plan over the old one."""
    if plan.shape != empty.shape:
        raise Failure(
            "plan",
            f"a plan's size may not depend on lengths: {tuple(plan.shape)} for this call's, "
            f"{tuple(empty.shape)} if all are 0",
        )


def checktaken(item: Item, values: dict[str, Any]) -> None:
    """Raise NotTaken where the kernel's refusals say so: nobody plans a call that will not be made."""
    loaded = getattr(item.ops(), item.op.name).explanation.chain[0]
    for refuse in (loaded.static, loaded.dynamic):
        if refuse is not None and (why := refuse(*item.op.bind(**values).values())) is not None:
            raise NotTaken(why)


def check_provenance(item: Item, watch: Watch, seen: Seen) -> None:
    if seen.ran != item.kernel:
        raise Failure("provenance", f"expected kernel {item.kernel} alone to run, saw {seen.ran or 'none'}")
    if item.kernel == NATIVE or item.case.regime == "b24_empty":
        return
    if own := watch.entered & _one_function(item.op):
        seen.ran += ", then the native reference"
        raise Failure("provenance", f"kernel {item.kernel} called {min(own)}'s reference: native torch answered")


def _one_function(op: Op[..., Any]) -> set[str]:
    """The op, and those that are it in place, or not in place: their references are one."""
    functional = op.twin_of or op.name
    return {name for name, other in declared().items() if functional in (name, other.twin_of)}


def check_structure(item: Item, like: list[Any], got: list[Any], values: dict[str, Any]) -> None:
    """As many results as native torch gives, of their shapes and dtypes, on the device, in memory of their own."""
    op = item.op
    if len(got) != len(like):
        raise Failure("outputs", f"expected {len(like)} results, got {len(got)}")
    owners = {x.untyped_storage().data_ptr(): k for k, x in values.items() if isinstance(x, Tensor) and x.numel()}
    for i, (y, expected) in enumerate(zip(got, like, strict=True)):
        if type(y) is not Tensor or y.requires_grad:
            what = "one that requires grad" if type(y) is Tensor else type(y).__name__
            raise Failure("outputs", f"result {i}: expected a plain tensor, got {what}")
        for check in ("shape", "dtype"):
            have, want = getattr(y, check), getattr(expected, check)
            if have != want:
                raise Failure(check, f"result {i}: expected {check} {_plain(want)}, got {_plain(have)}")
        if y.device != item.ops().device.torch_device:
            raise Failure("device", f"result {i}: expected it on {item.device}, got it on {y.device}")
        if i < len(got) - len(op.mutates):
            if y.numel():
                others = [j for j, z in enumerate(got[:i]) if z.numel() and _one_storage(y, z)]
                if others and _overlap(y, got[others[0]]):
                    raise Failure("alias", f"results {others[0]} and {i} lie in the same memory")
            if y.numel() and (owner := owners.get(y.untyped_storage().data_ptr())):
                raise Failure("alias", f"result {i} lies in the memory of argument '{owner}'")
            if y.numel() and _steps(y) != _steps(expected):
                raise Failure("strides", f"result {i}: expected strides {expected.stride()}, got {y.stride()}")


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether some byte of one storage belongs to both: parts of one allocation may lie side by side."""
    used = torch.zeros(a.untyped_storage().nbytes(), dtype=torch.int32)
    for x in (a, b):
        first: Tensor = torch.zeros((), dtype=torch.int64)
        for size, step in zip(x.shape, x.stride(), strict=True):
            first = first[..., None] + torch.arange(size) * step
        start = (first.flatten() + int(x.storage_offset())) * x.element_size()
        used[(start[:, None] + torch.arange(x.element_size())).flatten()] += 1
    return bool((used > 1).any())


def _steps(x: Tensor) -> list[int]:
    """Strides that say something: those of dims with more than one element."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def check_memory(op: Op[..., Any], placed: dict[str, Placed]) -> None:
    for name, argument in placed.items():
        written = name in op.mutates
        if argument.changed(written):
            if written:
                raise Failure("canary", f"wrote outside of argument '{name}': before, after or between its elements")
            raise Failure("mutation", f"argument '{name}' was changed, which the op does not declare")


def not_vacuous(case: Case, evidence: Callable[[list[Any]], Evidence], native: list[Any]) -> None:
    """Refuse a case that zeros, poison or another call's results would pass."""
    stale = oracle.native(declared()[case.op], case.arguments(stale=True))
    written = {
        "zeros": [torch.zeros_like(y) for y in native],
        "poison": [_poison_like(y) for y in native],
        "a stale result": stale,
    }
    for what, got in written.items():
        try:
            case.spec.verdict(evidence(got))
        except AssertionError:
            continue
        except RuntimeError:  # stale results of other shapes cannot be compared
            continue
        raise Failure("vacuous", f"{what} would pass this case, so that passing it means nothing")


def _poison_like(y: Tensor) -> Tensor:
    from .memory import poison

    poison(filled := torch.empty_like(y))
    return filled


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch allocates starts as NaN, or as the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def to_device(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments in memory of their own on ``device``, strides kept."""

    def move(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    moved: dict[str, Any] = tree_map_only(Tensor, move, arguments)
    return moved
