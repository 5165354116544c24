"""A kernel's code: what its signatures must be, named where they differ, and older contracts that still fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.loading import load_kernel
from torch_hal.op import _OPS, op

from .helpers import Offer, collected, rms_norm_arguments, rms_norm_kernel


@pytest.fixture
def scale() -> Iterator[hal.Op[..., Any]]:
    """An op in the second version of its contract, which added ``bias`` and ``offset``."""

    @op(shapes={"x": "T D", "offset": "D"}, dtypes={"x": (torch.float32, torch.bfloat16), "offset": "x"}, version=2)
    def acme_scale(x: Tensor, by: float, bias: float = 0.0, offset: Tensor | None = None) -> Tensor:
        y = x * by + bias
        return y if offset is None else y + offset

    yield acme_scale
    _OPS.pop("acme_scale", None)


def good(x: Tensor, by: float, bias: float = 0.0, offset: Tensor | None = None) -> Tensor:
    return x * by + bias


def swapped(by: float, x: Tensor, bias: float = 0.0, offset: Tensor | None = None) -> Tensor:
    return x * by


def extra(x: Tensor, by: float, bias: float = 0.0, offset: Tensor | None = None, stream: int = 0) -> Tensor:
    return x * by


def without_by(x: Tensor) -> Tensor:
    return x


def another_default(x: Tensor, by: float, bias: float = 1.0, offset: Tensor | None = None) -> Tensor:
    return x * by + bias


def no_default(x: Tensor, by: float, bias: float, offset: Tensor | None) -> Tensor:
    return x * by + bias


def by_keyword(x: Tensor, *, by: float, bias: float = 0.0, offset: Tensor | None = None) -> Tensor:
    return x * by


def anything(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(())


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (swapped, r"takes \(by, x, bias, offset\), the op takes \(x, by, bias, offset\)"),
        (extra, r"takes \(x, by, bias, offset, stream\), the op takes \(x, by, bias, offset\)"),
        (without_by, r"takes \(x\), the op takes \(x, by, bias, offset\)"),
        (another_default, "the op's default for 'bias'"),
        (no_default, "the op's default for 'bias'"),
        (by_keyword, "by position and by name"),
        (anything, "by position and by name"),
        ("acme_no_such_module:f", "acme_no_such_module"),
        ("torch:no_such_function", "no_such_function"),
        ("torch", "expected 'module:attribute'"),
        ("math:pi", "3.14159.* is not a callable"),
    ],
)
def test_a_kernel_whose_signature_differs_is_refused_naming_the_difference(
    scale: hal.Op[..., Any], run: Any, named: str
) -> None:
    hal.register(Offer(hal.Kernel("acme_scale", "acme", run=run)), "acme")
    with pytest.warns(hal.FallbackWarning, match=rf"acme: loading it raised \w+: .*{named}"):
        ops = hal.bind("cpu")
    assert ops.acme_scale.kernel.id == "native"


@pytest.mark.parametrize("part", ["static", "dynamic"])
def test_refusals_are_held_to_the_same_signature(scale: hal.Op[..., Any], part: str) -> None:
    kernel: Any = {part: swapped}
    with pytest.raises(hal.PluginError, match=rf"{part} of acme_scale takes \(by, x, bias, offset\)"):
        load_kernel(hal.Kernel("acme_scale", "acme", run=good, **kernel), scale)


@pytest.mark.parametrize("part", ["prepare", "plan"])
def test_an_op_without_prepare_or_plan_takes_no_kernel_with_one(scale: hal.Op[..., Any], part: str) -> None:
    kernel: Any = {part: good, "layout": "acme"}
    with pytest.raises(hal.PluginError, match=f"acme_scale has no {part}"):
        load_kernel(hal.Kernel("acme_scale", "acme", run=good, **kernel), scale)


def test_prepare_and_plan_are_held_to_their_own_signatures() -> None:
    def plan(seq_lens: Tensor, num_heads: int) -> list[Tensor]:
        return [seq_lens]

    def prepare(w: Tensor) -> list[Tensor]:
        return [w]

    for declared, part, takes in (
        (hal.ops.mla_decode, {"plan": plan}, r"plan of mla_decode takes \(seq_lens, num_heads\), the op takes"),
        (hal.ops.linear, {"prepare": prepare}, r"prepare of linear takes \(w\), the op takes \(weight\)"),
    ):
        kernel = hal.Kernel(declared.name, "acme", run=declared.reference, layout="acme", **part)  # type: ignore[arg-type]
        with pytest.raises(hal.PluginError, match=takes):
            load_kernel(kernel, declared)


def older(x: Tensor, by: float) -> Tensor:
    return x * by + 100


def older_refusal(x: Tensor, by: float) -> str | None:
    return "takes positive factors" if by <= 0 else None


def test_a_kernel_of_an_older_contract_serves_what_that_contract_had(scale: hal.Op[..., Any]) -> None:
    hal.register(Offer(hal.Kernel("acme_scale", "acme", run=older, dynamic=older_refusal)), "acme")
    ops = hal.bind("cpu")
    x = torch.ones(2, 3)
    with collected() as caught:
        for call in (ops.acme_scale, ops.acme_scale.specialize(x, 2.0)):
            assert (call(x, 2.0) == 102).all()
            assert (call(x, by=2.0, bias=0.0) == 102).all()
            assert (call(x, 2.0, 1.0) == 3).all()
            assert (call(x, 2.0, offset=torch.ones(3)) == 3).all()
            assert (call(x, -2.0) == -2).all()
    assert "made for version 1 of the contract, which has no 'bias'" in str(caught[0].message)
    alone = hal.bind("cpu", hal.Policy(require={"acme_scale": "acme"}))
    with pytest.raises(hal.Unsupported, match="has no 'offset'"):
        alone.acme_scale(x, 2.0, offset=torch.ones(3))


@pytest.mark.parametrize("validation", [True, False])
def test_a_kernel_of_an_older_contract_compiles_whole(scale: hal.Op[..., Any], validation: bool) -> None:
    hal.register(Offer(hal.Kernel("acme_scale", "acme", run=older)), "acme")
    ops = hal.bind("cpu", hal.Policy(validation=validation))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, by: ops.acme_scale(x, by), fullgraph=True, backend="eager")
    assert (compiled(torch.ones(2, 3), 2.0) == 102).all()


class Object:
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, 7.0)

    def method(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, 7.0)


@pytest.mark.parametrize(
    "run",
    [Object(), Object().method, functools.lru_cache(Object().method), hal.ops.rms_norm.reference],
    ids=["object", "method", "cached", "reference"],
)
def test_whatever_can_be_called_may_be_a_kernel_eager_and_compiled(run: Callable[..., Tensor]) -> None:
    hal.register(Offer(rms_norm_kernel("any_callable", run=run)), "acme")
    ops = hal.bind("cpu")
    x, weight, eps = rms_norm_arguments()
    torch._dynamo.reset()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(lambda *values: ops.rms_norm(*values), fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(x, weight, eps), ops.rms_norm(x, weight, eps))
    assert "torch_hal.rms_norm__" in graphs[0] and ops.rms_norm.kernel.name == "any_callable"


def test_a_kernel_that_is_the_reference_itself_leaves_native_traceable() -> None:
    hal.register(Offer(rms_norm_kernel("the_reference", run=hal.ops.rms_norm.reference)), "acme")
    hal.bind("cpu")
    native = hal.bind("cpu", hal.Policy(require={"*": "native"}))
    torch._dynamo.reset()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch.compile(lambda *values: native.rms_norm(*values), fullgraph=True, backend=keep)(*rms_norm_arguments())
    assert "torch_hal" not in graphs[0]
