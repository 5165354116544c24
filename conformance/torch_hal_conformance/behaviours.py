"""What a case can look at beside one call's numbers: compilers, graphs, batches, streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_hal.kernel import Trait
from torch_hal.native import NATIVE

from . import oracle
from .judge import Item, NotTaken, Seen, call, numbers, ready, to_device
from .memory import on_host, same_bits
from .subjects import bound
from .verdict import Evidence, Failure


def look(item: Item, seen: Seen) -> None:
    """Look at what the case's regime names. Raises Failure, or NotTaken where the kernel promises nothing of it."""
    LOOKS[item.case.regime](item, seen)


def _fresh(item: Item, seed: int = 0) -> dict[str, Any]:
    """The case's arguments on the device; another seed gives others of the same shapes."""
    return to_device(replace(item.case, seed=item.case.seed + seed).arguments(), item.ops().device.torch_device)


def _same(item: Item, values: dict[str, Any], got: list[Any], expected: list[Any], check: str, what: str) -> None:
    pairs = (item.case.spec.written(values, outputs) for outputs in (got, expected))
    for i, (a, b) in enumerate(zip(*pairs, strict=True)):
        if not same_bits(a, b):
            raise Failure(check, f"result {i} {what}")


def _compiled(item: Item, kernel: str | None = None) -> tuple[Callable[..., list[Any]], list[torch.fx.GraphModule]]:
    """The op compiled whole for this kernel, and the graphs that the compiler was given."""
    ops = bound(item.case.op, kernel or item.kernel, item.device, False)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda values: getattr(ops, item.case.op)(**values), fullgraph=True, backend=keep)

    def run(values: dict[str, Any]) -> list[Any]:
        return oracle.outputs(item.op, compiled(values), values)

    return run, graphs


def _eager(item: Item, values: dict[str, Any], seen: Seen) -> list[Any]:
    """What a call gives, in memory that no later call can write."""
    return [y.clone() for y in call(item, values, seen)]


def compile_whole(item: Item, seen: Seen) -> None:
    """Behaviour 21: one graph, and what the eager call gives."""
    expected = _eager(item, _fresh(item), seen)
    run, graphs = _compiled(item)
    values = ready(item, _fresh(item))
    got = run(values)
    if len(graphs) != 1:
        raise Failure("compile", f"expected one graph, the compiler was given {len(graphs)}")
    opaque = Trait.TRACEABLE not in item.chosen.traits
    if opaque and f"torch_hal.{item.case.op}__" not in graphs[0].code:
        raise Failure("compile", "an opaque kernel, but the graph does not name it: the compiler saw something else")
    _same(item, values, got, expected, "compile", "differs from that of the eager call")


def selection_key(item: Item, seen: Seen) -> None:
    """Behaviour 19: another choice gives another graph or, of torch ops alone, at least another manifest."""
    _eager(item, _fresh(item), seen)
    manifests = {bound(item.case.op, kernel, item.device).manifest.digest for kernel in (item.kernel, NATIVE)}
    if item.kernel == NATIVE:
        return
    if len(manifests) != 2:
        raise Failure("selection_key", "this kernel's manifest has the digest of native torch's")
    if Trait.TRACEABLE in item.chosen.traits:
        return
    codes = []
    for kernel in (item.kernel, NATIVE):
        run, graphs = _compiled(item, kernel)
        run(ready(item, _fresh(item)) if kernel == item.kernel else _fresh(item))
        codes.append(graphs[0].code)
    if codes[0] == codes[1]:
        raise Failure("selection_key", "compiled for this kernel and for native torch, the graphs are the same")


def fusible(item: Item, seen: Seen) -> None:
    """Behaviour 20: what declares that compilers may look into it is nothing but torch's own ops."""
    if Trait.TRACEABLE not in item.chosen.traits:
        raise NotTaken("an opaque kernel: it does not declare traceable")
    _eager(item, _fresh(item), seen)
    run, graphs = _compiled(item)
    run(ready(item, _fresh(item)))
    if "torch_hal." in graphs[0].code:
        raise Failure("fusible", "declared traceable, but the compiler meets an opaque op")


class NoHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what makes the host wait for a device, or shapes depend on data, wherever it runs."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "unique",
        "_pin_memory",
        "bincount",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name.startswith(self.FORBIDDEN):
            raise Failure("sync", f"declared graph_safe, but {func} makes the host wait for the device")
        if name in ("index", "index_put", "index_put_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise Failure("sync", f"declared graph_safe, but {func} with a mask makes the host wait")
        return func(*args, **(kwargs or {}))


class NoHostRead(TorchFunctionMode):
    """Refuses what hands a tensor's numbers to the host beside torch's own ops."""

    FORBIDDEN = (
        "tolist",
        "numpy",
        "cpu",
        "item",
        "__array__",
        "__repr__",
        "__format__",
        "__bool__",
        "__int__",
        "__float__",
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.FORBIDDEN:
            raise Failure("sync", f"declared graph_safe, but Tensor.{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


def capture(item: Item, seen: Seen) -> None:
    """Behaviour 22: no host sync, and where the device has graphs, capturable, with the eager call's results."""
    if Trait.GRAPH_SAFE not in item.chosen.traits:
        raise NotTaken("does not declare graph_safe")
    expected = _eager(item, _fresh(item), seen)
    values = ready(item, _fresh(item))
    ops = bound(item.case.op, item.kernel, item.device, False)
    if item.ops().device.graph_class is None:
        with NoHostSync(), NoHostRead():  # type: ignore[no-untyped-call]
            got = oracle.outputs(item.op, getattr(ops, item.case.op)(**values), values)
        _same(item, values, got, expected, "capture", "differs where nothing may wait for the device")
        return
    _captured(item, values, [_fresh(item)], [expected], "capture")


def replay(item: Item, seen: Seen) -> None:
    """Behaviour 23: a graph that was captured once sees what its inputs hold now.

    On a device without graphs the compiler's graph stands in: captured once, it must serve other values.
    """
    if Trait.GRAPH_SAFE not in item.chosen.traits:
        raise NotTaken("does not declare graph_safe")
    first, second = _fresh(item), _fresh(item, seed=1)
    expected = [_eager(item, to_device(values, item.ops().device.torch_device), seen) for values in (first, second)]
    if item.ops().device.graph_class is not None:
        _captured(item, ready(item, _fresh(item)), [first, second], expected, "replay")
        return
    run, graphs = _compiled(item)
    for values, wanted in zip((first, second), expected, strict=True):
        got = run(values := ready(item, values))
        _same(item, values, got, wanted, "replay", "of a captured graph is not that of its new inputs")
    if len(graphs) > 1 and _shapes(first) == _shapes(second):
        raise Failure("replay", "the graph depends on values: it was captured anew for other ones")


def _shapes(values: dict[str, Any]) -> dict[str, Any]:
    """Whatever a graph may depend on: shapes and numbers, not what tensors hold."""
    return {k: (v.shape, v.stride()) if isinstance(v, Tensor) else v for k, v in values.items()}


def _captured(
    item: Item, static: dict[str, Any], inputs: list[dict[str, Any]], expected: list[list[Any]], check: str
) -> None:
    """Capture on ``static``, then replay on each of ``inputs``."""
    ops = bound(item.case.op, item.kernel, item.device, False)
    graph = item.runtime.capture(lambda: getattr(ops, item.case.op)(**static))
    for values, wanted in zip(inputs, expected, strict=True):
        values = ready(item, values)
        for name, x in values.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
            elif static[name] != x:
                raise Failure(check, f"argument '{name}' is a number and differs between the two calls of this case")
        graph.replay()
        item.runtime.synchronize()
        got = oracle.outputs(item.op, graph.results, static)
        _same(item, static, got, wanted, check, "of a replay is not its inputs'")


def side_stream(item: Item, seen: Seen) -> None:
    """Right on a stream that is still busy making the arguments: the kernel runs on the current stream."""
    if item.ops().device.type == "cpu":
        numbers(Item(replace(item.case, regime="unit"), item.kernel, item.device), seen)
        return
    op, arguments = item.op, replace(item.case, regime="unit").arguments()
    call(item, to_device(arguments, item.ops().device.torch_device), seen)  # whether it is taken, and what it loads
    module: Any = torch.get_device_module(item.ops().device.type)
    device = item.ops().device.torch_device
    nothing = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    values, ready_values = to_device(nothing, device), to_device(arguments, device)
    stream, busy = module.Stream(device), torch.randn(4096, 4096, device=device)
    item.runtime.synchronize()
    with module.stream(stream):
        for _ in range(20):
            busy = busy @ busy * 1e-4
        for name, x in values.items():
            if isinstance(x, Tensor):
                x.copy_(ready_values[name])
        results = getattr(item.ops(), op.name)(**ready(item, values))
        got = oracle.outputs(op, results, values)
    item.runtime.synchronize()
    evidence = Evidence(
        op, arguments, [on_host(y) for y in got], oracle.exact(op, arguments), oracle.native(op, arguments)
    )
    try:
        item.case.spec.verdict(evidence)
    except Failure as failure:
        raise Failure("stream", f"on a busy side stream: {failure}", failure.E, failure.R) from failure


LOOKS: dict[str, Callable[[Item, Seen], None]] = {
    "b19_selection_key": selection_key,
    "b20_fusible": fusible,
    "b21_compile": compile_whole,
    "b22_capture": capture,
    "b23_replay": replay,
    "side_stream": side_stream,
}
