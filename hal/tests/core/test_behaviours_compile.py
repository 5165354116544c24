"""Behaviours 19 to 23: what compilers and graphs see of a selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._python_dispatch import TorchDispatchMode

import torch_hal as hal
from torch_hal.compile import torch_op_name

from .helpers import Offer, refuse_bfloat16, refuse_long, rms_norm_arguments, rms_norm_kernel


class Graphs:
    """A backend that keeps what it was given to compile."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    @property
    def targets(self) -> list[list[str]]:
        return [[str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in self.graphs]

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend=self)


def target_of(ops: hal.OpSet) -> str:
    """How a graph writes the op of the chosen kernel, which names op and kernel."""
    name = str(torch_op_name(ops.explain("rms_norm").chain[0].run))
    assert name.startswith("torch_hal::rms_norm__") and ops.rms_norm.kernel.name in name
    return name.replace("::", ".") + ".default"


def graph_text(ops: hal.OpSet) -> str:
    """The graph of one call, which compile caches are keyed by."""
    graphs = Graphs()
    graphs.compile(lambda *values: ops.rms_norm(*values))(*rms_norm_arguments())
    [graph] = graphs.graphs
    return str(graph.code)


@pytest.fixture
def sets() -> dict[str, hal.OpSet]:
    offer = Offer(rms_norm_kernel("b19_one"), rms_norm_kernel("b19_two", value=5.0, band=hal.Band.LIBRARY))
    hal.register(offer, "acme")
    return {name: hal.bind("cpu", hal.Policy(require={"rms_norm": name})) for name in ("b19_one", "b19_two", "native")}


def test_b19_a_changed_selection_changes_the_compile_cache_key(sets: dict[str, hal.OpSet]) -> None:
    keys = {name: graph_text(ops) for name, ops in sets.items()}
    assert len(set(keys.values())) == 3
    again = hal.bind("cpu", hal.Policy(require={"rms_norm": "b19_one"}))
    assert graph_text(again) == keys["b19_one"]
    assert len({ops.manifest.digest for ops in sets.values()}) == 3
    assert again.manifest.digest == sets["b19_one"].manifest.digest


def test_b19_a_compiled_function_that_meets_another_op_set_compiles_anew(sets: dict[str, hal.OpSet]) -> None:
    graphs = Graphs()
    compiled = graphs.compile(lambda ops, *values: ops.rms_norm(*values))
    arguments = rms_norm_arguments()
    for name, expected in (("b19_one", 7.0), ("b19_two", 5.0), ("b19_one", 7.0)):
        assert (compiled(sets[name], *arguments) == expected).all()
    torch.testing.assert_close(compiled(sets["native"], *arguments), hal.ops.rms_norm(*arguments))
    assert [targets[-1] for targets in graphs.targets[:2]] == [target_of(sets["b19_one"]), target_of(sets["b19_two"])]


@pytest.mark.parametrize("validation", [True, False])
def test_b20_an_op_whose_kernel_is_native_stays_fusible(validation: bool) -> None:
    """The graph that compilers get holds torch's own ops alone, between the model's."""
    seen: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        seen.append(graph)
        return graph.forward

    ops = hal.bind("cpu", hal.Policy(require={"*": "native"}, validation=validation))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, weight, eps: ops.rms_norm(x * 2, weight, eps) + 1,
        fullgraph=True,
        backend=lambda graph, examples: aot_module_simplified(graph, examples, fw_compiler=keep),
    )
    x, weight, eps = rms_norm_arguments()
    torch.testing.assert_close(compiled(x, weight, eps), hal.ops.rms_norm(x * 2, weight, eps) + 1)
    [graph] = seen
    namespaces = {node.target.namespace for node in graph.graph.nodes if node.op == "call_function"}
    assert namespaces <= {"aten", "prims"}


@pytest.mark.filterwarnings("ignore::torch_hal.FallbackWarning")
@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("layer", [True, False])
def test_b21_frames_with_refusals_compile_whole(validation: bool, trace: bool, layer: bool) -> None:
    """Validation, tracing, static and dynamic refusals and the hand-over: nothing of a frame breaks the graph."""
    hal.register(Offer(rms_norm_kernel("b21", static=refuse_bfloat16, dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(validation=validation, trace=trace))
    callable_: Callable[..., Tensor] = ops.rms_norm.specialize(*rms_norm_arguments()) if layer else ops.rms_norm
    graphs = Graphs()
    compiled = graphs.compile(lambda *values: callable_(*values))
    assert (compiled(*rms_norm_arguments(3)) == 7).all()
    assert [t for t in graphs.targets[0] if "torch_hal" in t] == [target_of(ops)]
    handed_over = rms_norm_arguments(5)
    torch.testing.assert_close(compiled(*handed_over), hal.ops.rms_norm(*handed_over))
    assert not [t for t in graphs.targets[-1] if "torch_hal" in t]


def test_b21_arguments_by_name_compile_whole_too() -> None:
    hal.register(Offer(rms_norm_kernel("b21_named")), "acme")
    ops = hal.bind("cpu", hal.Policy(validation=False))
    x, weight, eps = rms_norm_arguments()
    kernel_itself = ops.rms_norm.specialize(x, weight, eps)
    for callable_ in (ops.rms_norm, kernel_itself):
        compiled = Graphs().compile(lambda x, weight, callable_=callable_: callable_(x, eps=eps, weight=weight))
        assert (compiled(x, weight) == 7).all()


def test_b21_an_argument_that_breaks_the_contract_is_an_error_under_compile_too() -> None:
    ops = hal.bind("cpu")
    x, weight, eps = rms_norm_arguments()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *values: ops.rms_norm(*values), backend="eager")
    with pytest.raises(Exception, match="argument 'weight'"):
        compiled(x, weight[:4], eps)


class NoHostSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device, or allocates pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        assert not name.startswith(("_local_scalar_dense", "nonzero", "is_nonzero", "_pin_memory", "equal")), name
        assert not (kwargs or {}).get("pin_memory"), name
        return func(*args, **(kwargs or {}))


def test_b22_neither_a_frame_nor_a_hand_over_nor_a_trace_syncs() -> None:
    """References are tested op by op in test_contracts; this is what stands around them."""
    hal.register(Offer(rms_norm_kernel(static=refuse_bfloat16, dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(trace=True))
    layer = ops.rms_norm.specialize(*rms_norm_arguments())
    with pytest.warns(hal.FallbackWarning), NoHostSync():
        for rows in (3, 5):
            for callable_ in (ops.rms_norm, layer):
                callable_(*rms_norm_arguments(rows))


def test_b22_graph_safe_is_a_trait_that_the_policy_can_ask_for() -> None:
    declared_safe = rms_norm_kernel("safe", value=5.0, band=hal.Band.PORTABLE, traits=frozenset({hal.Trait.GRAPH_SAFE}))
    hal.register(Offer(rms_norm_kernel("unsafe"), declared_safe), "acme")
    assert hal.bind("cpu").rms_norm.kernel.name == "unsafe"
    ops = hal.bind("cpu", hal.Policy(graph_safe=True))
    assert ops.rms_norm.kernel.name == "safe"
    assert all(hal.Trait.GRAPH_SAFE in getattr(ops, name).kernel.traits for name in ops)
    assert "the policy asks for graph_safe, which it does not declare" in str(ops.explain("rms_norm"))
    with pytest.raises(hal.Unsupported, match="graph_safe"):
        hal.bind("cpu", hal.Policy(graph_safe=True, require={"rms_norm": "unsafe"}))


def test_b22_a_graph_safe_set_hands_no_call_to_a_kernel_that_is_not() -> None:
    safe = frozenset({hal.Trait.GRAPH_SAFE})
    hal.register(Offer(rms_norm_kernel("safe", dynamic=refuse_long, traits=safe), rms_norm_kernel("unsafe")), "acme")
    ops = hal.bind("cpu", hal.Policy(graph_safe=True))
    assert [loaded.kernel.name for loaded in ops.explain("rms_norm").chain] == ["safe", "native"]


def test_b23_a_compiled_graph_sees_new_input_values_and_in_place_writes() -> None:
    def in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        residual.add_(x)
        x.copy_(residual * 2)

    hal.register(Offer(hal.Kernel("fused_add_rms_norm_", "b23", run=in_place, band=hal.Band.TUNED)), "acme")
    for policy in (hal.Policy(), hal.Policy(require={"fused_add*": "native"})):
        ops = hal.bind("cpu", policy)
        graphs = Graphs()

        def step(x: Tensor, residual: Tensor, weight: Tensor, ops: hal.OpSet = ops) -> Tensor:
            ops.fused_add_rms_norm_(x, residual, weight, 1e-6)
            return x + residual

        compiled = graphs.compile(step)
        for seed in range(3):
            torch.manual_seed(seed)
            x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
            mine, theirs = (x.clone(), residual.clone()), (x.clone(), residual.clone())
            torch.testing.assert_close(compiled(*mine, weight), step(*theirs, weight))
            torch.testing.assert_close(mine, theirs)
            assert not torch.equal(mine[1], residual)
        assert len(graphs.graphs) == 1
