"""What `check_on_gpu` runs: for each kernel the same eight checks on fresh values, and its own corner cases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_hal as hal
from torch_hal.runtime import Runtime

Outcome = tuple[str, str, str, bool, str]  # op, kernel, check, whether it holds, what was seen


@dataclass(frozen=True)
class Case:
    """One op on one kernel. ``make(seed)`` gives the arguments: other values, the same shapes, for every seed."""

    op: str
    kernel: str
    make: Callable[[hal.OpSet, int], tuple[Any, ...]]
    corners: Callable[[hal.OpSet], Iterator[tuple[str, bool, str]]]
    inner: float = 0.0  # unit roundoff of a narrower step in the kernel, which the op's declaration does not know of


def check(case: Case, device: torch.device) -> Iterator[Outcome]:
    """Every check of a case, in order; one that raises is one that fails."""
    try:
        ops = hal.bind(device, hal.Policy(require={case.op: case.kernel}, trace=True))
        fast = hal.bind(device, hal.Policy(require={case.op: case.kernel}))
    except hal.Unsupported as error:
        yield case.op, case.kernel, "bound", False, _brief(error)
        return
    for name, run in _COMMON.items():
        try:
            holds, seen = run(case, fast if name in ("compiled", "captured") else ops)
        except Exception as error:
            holds, seen = False, _brief(error)
        yield case.op, case.kernel, name, holds, seen
    corners = case.corners(fast)
    while True:
        try:
            label, holds, seen = next(corners)
        except StopIteration:
            return
        except Exception as error:
            yield case.op, case.kernel, "corner case", False, _brief(error)
            return
        yield case.op, case.kernel, label, holds, seen


def runner(op: hal.Op[..., Any], function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """``function`` with its results as a tuple: of an op that writes its arguments, copies of them, written."""
    places = [list(op.signature.parameters).index(name) for name in op.mutates]

    def run(*args: Any) -> tuple[Tensor, ...]:
        values = list(args)
        for i in places:
            values[i] = values[i].clone()
        result = function(*values)
        if places:
            return tuple(values[i] for i in places)
        return result if isinstance(result, tuple) else (result,)

    return run


def excess(case: Case, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> float:
    """The largest error, as a multiple of what rounding explains, against the reference in float64.

    Bound: u·|y| for the result's rounding, 4·√k·u₃₂·S for k float32 terms whose absolute values sum to S, and
    `Case.inner`·S in 16-bit results: tensor cores take an attention's probabilities in 16 bits, and those of Hopper
    add fp8 products with 14 bits.
    """
    op = hal.ops.declared()[case.op]
    wide = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, args)
    wide = tuple(torch.float64 if isinstance(a, torch.dtype) else a for a in wide)
    exact = runner(op, op.reference)(*wide)
    terms = tuple(tree_leaves(op.terms(*wide))) if op.terms is not None else tuple(y.double().abs() for y in exact)
    length = max(1, op.measure(*args)["reduces"])
    worst = 0.0
    for y, y_exact, sums in zip(results, exact, terms, strict=True):
        value, y_exact = y.double(), y_exact.double()
        if y.shape != y_exact.shape or not torch.equal(value.isfinite(), y_exact.isfinite()):
            return float("inf")
        steps = 2 if y.dtype.itemsize == 1 else 1  # a code next to the right one, where scales differ in their last bit
        bound = steps * _roundoff(y.dtype) * y_exact.abs() + 4 * length**0.5 * _roundoff(torch.float32) * sums
        if y.dtype.itemsize == 2:
            bound = bound + case.inner * sums
        smallest = torch.finfo(y.dtype).smallest_normal * torch.finfo(y.dtype).eps
        error = ((value - y_exact).abs() / bound.clamp(min=smallest))[y_exact.isfinite()]
        worst = max(worst, error.max().item() if error.numel() else 0.0)
    return worst


def refused(
    function: Callable[..., Any], *args: Any, error: type[Exception] = hal.Unsupported, text: str = ""
) -> tuple[bool, str]:
    """Whether the call raises that error with that text."""
    try:
        function(*args)
    except error as raised:
        return text in str(raised), _brief(raised)
    except Exception as raised:
        return False, _brief(raised)
    return False, "accepted"


def _runner(case: Case, ops: hal.OpSet) -> Callable[..., tuple[Tensor, ...]]:
    return runner(hal.ops.declared()[case.op], getattr(ops, case.op))


def _bound(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    kernel = getattr(ops, case.op).kernel
    return kernel.name == case.kernel and kernel.plugin == "cuda", kernel.id


def _explained(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    verdicts = {v.kernel.name: v for v in hal.explain(case.op, ops.torch_device).verdicts}
    first, native = verdicts[case.kernel], verdicts["native"]
    return first.role == "chosen" and native.role in ("next", "behind"), f"{first.role}; native {native.role}"


def _right(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    worst = 0.0
    for seed in range(3):
        args = case.make(ops, seed)
        worst = max(worst, excess(case, args, _runner(case, ops)(*args)))
    return worst <= 1, f"{worst:.2f} of the bound"


def _traced(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    assert ops.trace is not None
    counts = ops.trace.counts()
    return counts.get((case.op, f"cuda.{case.kernel}"), 0) >= 3, str(counts)


def _repeatable(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    args, run = case.make(ops, 3), _runner(case, ops)
    first, *again = (run(*args) for _ in range(10))
    return all(_same(first, other) for other in again), "10 runs"


def _compiled(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    run, seen = _runner(case, ops), []

    def recording(graph: Any, inputs: list[Any]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    args = case.make(ops, 4)
    torch._dynamo.reset()
    torch.compile(run, fullgraph=True, backend=recording)(*args)
    same = _same(torch.compile(run, fullgraph=True)(*args), run(*args))
    named = any(f"torch_hal.{case.op}__{case.kernel}" in target for target in seen)
    return same and named, "one graph, the kernel by its name" if same and named else f"same: {same}, nodes: {seen}"


def _registered(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    target = getattr(torch.ops.torch_hal, f"{case.op}__{case.kernel}").default
    args = case.make(ops, 5)
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(a, Tensor) and a.dtype.itemsize == 1 for a in args):
        tests.remove("test_schema")  # it multiplies arguments, which torch cannot do in fp8
    outcome = torch.library.opcheck(target, args, test_utils=tests)
    return set(outcome.values()) == {"SUCCESS"}, f"{target.name()}: {', '.join(tests)}"


def _captured(case: Case, ops: hal.OpSet) -> tuple[bool, str]:
    static = tree_map_only(Tensor, torch.clone, case.make(ops, 6))
    run = _runner(case, ops)
    graph = Runtime(ops.device).capture(lambda: run(*static))
    worst = 0.0
    for seed in (7, 8, 9):
        fresh = case.make(ops, seed)
        for old, new in zip(static, fresh, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        for result in graph.results:  # what the replay leaves unwritten shows
            result.view(torch.uint8).fill_(0x7F) if result.dtype.itemsize == 1 else result.fill_(torch.nan)
        graph.replay()
        worst = max(worst, excess(case, fresh, graph.results))
    return worst <= 1, f"replayed on 3 sets of values, {worst:.2f} of the bound"


_COMMON: dict[str, Callable[[Case, hal.OpSet], tuple[bool, str]]] = {
    "bound": _bound,
    "explained": _explained,
    "right": _right,
    "traced": _traced,
    "repeatable": _repeatable,
    "compiled": _compiled,
    "registered": _registered,
    "captured": _captured,
}


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y)) for x, y in zip(a, b, strict=True))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


@contextlib.contextmanager
def process_group(backend: str) -> Iterator[str]:
    """A default process group of this process alone, by name."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


def seeded(seed: int, device: torch.device) -> Callable[..., Tensor]:
    """``normal(*shape)`` from its own generator."""
    return functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device)
