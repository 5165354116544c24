"""Opaque kernels as torch ops: one for each kernel, named by it, lazily, for whatever a compiler does around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.compile import torch_op_name

from .helpers import H200, Offer, collected, rms_norm_arguments, rms_norm_kernel


def shifted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return hal.ops.rms_norm.reference(x, weight, eps) + 1


def in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(residual * weight)


def older_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def targets(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """What the one graph of a call calls."""
    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=keep)(*arguments)
    return found


def op_of(ops: hal.OpSet, name: str) -> Any:
    """The torch op of the kernel that the set chose."""
    bound: Any = getattr(ops, name)
    qualified = torch_op_name(bound.__globals__["_run0"])
    assert qualified is not None
    return getattr(torch.ops.torch_hal, qualified.partition("::")[2]).default


def test_a_graph_names_the_kernel_and_two_sets_live_in_one_graph() -> None:
    hal.register(
        Offer(rms_norm_kernel("graph_a"), rms_norm_kernel("graph_b", value=5.0, band=hal.Band.LIBRARY)), "acme"
    )
    a, b = hal.bind("cpu"), hal.bind("cpu", hal.Policy(prefer={"rms_norm": "graph_b"}))
    both = targets(lambda *values: (a.rms_norm(*values), b.rms_norm(*values)), *rms_norm_arguments())
    assert both == ["torch_hal.rms_norm__graph_a.default", "torch_hal.rms_norm__graph_b.default"]


def test_kernels_of_one_name_from_two_plugins_are_two_ops() -> None:
    for plugin, value in (("acme", 7.0), ("globex", 5.0)):
        hal.register(Offer(rms_norm_kernel("one_name", value=value)), plugin)
    sets = [hal.bind("cpu", hal.Policy(require={"rms_norm": plugin})) for plugin in ("acme", "globex")]
    names = [op_of(ops, "rms_norm").name() for ops in sets]
    assert names == ["torch_hal::rms_norm__one_name", "torch_hal::rms_norm__globex_one_name"]
    torch._dynamo.reset()
    for ops, value in zip(sets, (7.0, 5.0), strict=True):
        compiled = torch.compile(lambda *values, ops=ops: ops.rms_norm(*values), fullgraph=True, backend="aot_eager")
        assert (compiled(*rms_norm_arguments()) == value).all()


def test_one_callable_may_serve_two_ops() -> None:
    def gemm(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.T).float()

    kernels = [hal.Kernel(op, "shared_gemm", gemm, band=hal.Band.TUNED) for op in ("router_gemm", "absorbed_bmm")]
    hal.register(Offer(*kernels), "acme")
    ops = hal.bind("cpu")
    names = {name: op_of(ops, name).name() for name in ("router_gemm", "absorbed_bmm")}
    assert names == {name: f"torch_hal::{name}__shared_gemm" for name in names}
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert targets(lambda: ops.router_gemm(x, weight))[-1] == "torch_hal.router_gemm__shared_gemm.default"
    torch.testing.assert_close(ops.router_gemm(x, weight), x @ weight.T)


@pytest.mark.parametrize("derived", [False, True])
def test_every_kind_of_kernel_passes_opcheck(derived: bool) -> None:
    """A functional one, a mutating one, its functional twin, and one of an older contract."""
    names = ("fused_add_rms_norm" if derived else "fused_add_rms_norm_", "rms_norm", "linear")
    hal.register(
        Offer(
            hal.Kernel("rms_norm", "checked", shifted),
            hal.Kernel("fused_add_rms_norm_", "checked", in_place),
            hal.Kernel("linear", "checked", older_linear),
        ),
        "acme",
    )
    ops = hal.bind("cpu")
    x, weight, eps = rms_norm_arguments()
    arguments = {names[0]: (x, torch.randn(3, 8), weight, eps), "rms_norm": (x[:, ::2], weight[::2], eps)}
    arguments["linear"] = (x, torch.randn(5, 8))  # layout left to its default, as torch leaves it out
    for name in names:
        assert getattr(ops, name).kernel.name == "checked"
        torch.library.opcheck(op_of(ops, name), arguments[name])


def test_a_mutating_op_is_functionalised_and_its_write_is_seen() -> None:
    hal.register(Offer(hal.Kernel("fused_add_rms_norm_", "mutating", in_place)), "acme")
    ops = hal.bind("cpu")
    assert "Tensor(a0!) x, Tensor(a1!) residual" in str(op_of(ops, "fused_add_rms_norm_")._schema)

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        x = x * 2
        ops.fused_add_rms_norm_(x, residual, weight, 1e-6)
        return x + 1

    values = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    eager, compiled = [v.clone() for v in values], [v.clone() for v in values]
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    torch.testing.assert_close((got, compiled), (step(*eager), eager))


def test_a_specialised_kernel_is_its_torch_op_in_a_graph_too() -> None:
    kernel = rms_norm_kernel("specialised")
    hal.register(Offer(kernel), "acme")
    layer = hal.bind("cpu", hal.Policy(validation=False)).rms_norm.specialize(*rms_norm_arguments())
    assert layer is kernel.run
    assert targets(lambda *values: layer(*values), *rms_norm_arguments()) == ["torch_hal.rms_norm__specialised.default"]


def test_a_traceable_kernel_is_traced_through() -> None:
    def composed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.square().mean(-1, keepdim=True).add(eps).rsqrt() * x * weight

    hal.register(Offer(rms_norm_kernel("traced", run=composed, traits=frozenset({hal.Trait.TRACEABLE}))), "acme")
    ops = hal.bind("cpu")
    found = targets(lambda *values: ops.rms_norm(*values), *rms_norm_arguments())
    assert found and not [target for target in found if "torch_hal" in target]


def test_a_kernels_own_fake_is_used_where_it_has_one() -> None:
    def wide(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
        return x.new_zeros(x.shape[0], 40)

    kernel = hal.Kernel("linear", "faked", wide, layout="wide40", fake=wide, band=hal.Band.TUNED)
    hal.register(Offer(kernel), "acme")
    ops = hal.bind("cpu")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: ops.linear(x, w, "wide40") + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2, 4), torch.ones(7)).shape == (2, 40)


def test_a_fake_may_be_in_a_module_that_binds(site: Path) -> None:
    source = (
        "import torch_hal\nops = torch_hal.bind('cpu')\ndef fake(x, weight, eps):\n    return x.new_empty(x.shape)\n"
    )
    (site / "acme_fake.py").write_text(source)
    kernel = rms_norm_kernel("fake_binds", fake="acme_fake:fake")
    hal.register(Offer(kernel), "acme")
    with collected():  # in which this kernel is not to be had yet
        assert hal.bind("cpu").rms_norm.kernel.name == "fake_binds"
    hal.unregister("acme")
    hal.register(Offer(rms_norm_kernel("fake_gone", fake="acme_fake:gone")), "acme")
    with pytest.warns(hal.FallbackWarning, match="has no attribute 'gone'"):
        assert hal.bind("cpu").rms_norm.kernel.id == "native"


def test_a_callable_that_is_two_kernels_has_an_op_for_each() -> None:
    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, 3.0)

    hal.register(Offer(*(rms_norm_kernel(name, run=run) for name in ("twice_a", "twice_b"))), "acme")
    for _ in range(2):
        sets = [hal.bind("cpu", hal.Policy(require={"rms_norm": name})) for name in ("twice_a", "twice_b")]
        names = [op_of(ops, "rms_norm").name() for ops in sets]
        assert names == ["torch_hal::rms_norm__twice_a", "torch_hal::rms_norm__twice_b"]


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm_"])
def test_a_gradient_never_vanishes_in_an_opaque_kernel(name: str) -> None:
    kernels = {"rms_norm": shifted, "fused_add_rms_norm_": in_place}
    hal.register(Offer(*(hal.Kernel(op, "no_gradient", run) for op, run in kernels.items())), "acme")
    ops: Any = hal.bind("cpu")

    def step(x: Tensor) -> Tensor:
        x = x * 2
        return ops.rms_norm(x, weight, 1e-6) if name == "rms_norm" else add(x)

    def add(x: Tensor) -> Tensor:
        ops.fused_add_rms_norm_(x, torch.zeros_like(x), weight, 1e-6)
        return x

    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    assert step(x).requires_grad  # as eager calls of a kernel that is made of torch ops do
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    message = f"{name}: kernel 'acme.no_gradient' has no gradient under torch.compile"
    with pytest.raises(Exception, match=message):
        compiled(x)
    with pytest.raises(NotImplementedError, match=message):
        arguments = (x * 2, weight) if name == "rms_norm" else (x * 2, torch.zeros(3, 8), weight)
        op_of(ops, name)(*arguments, 1e-6)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not compiled(x).requires_grad
    assert not compiled(x.detach()).requires_grad


def test_ops_are_registered_for_the_devices_own_dispatch_key_when_they_are_bound() -> None:
    kernel = rms_norm_kernel("keyed", requires=hal.Requires("nvidia"))
    hal.register(Offer(kernel), "acme")
    assert torch_op_name(kernel.run) is None
    hal.bind("cpu")
    assert torch_op_name(kernel.run) is None
    hal.bind(H200)
    name = torch_op_name(kernel.run)
    assert name == "torch_hal::rms_norm__keyed"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(name, "CUDA") and not has_kernel(name, "CPU")


def test_eager_calls_bypass_the_torch_op() -> None:
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    hal.register(Offer(rms_norm_kernel("bypassed")), "acme")
    ops = hal.bind("cpu")
    arguments = rms_norm_arguments()
    with Watch():
        ops.rms_norm(*arguments)
        op_of(ops, "rms_norm")(*arguments)
    assert seen.count("torch_hal") == 1 and "aten" in seen
