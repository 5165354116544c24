"""Twins: an in-place kernel serves the functional op by copying, a functional one the in-place op by writing back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_hal as hal

from .helpers import Offer, refuse_by_mistake, verdicts


def in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(residual * weight)


def functional(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (x + residual) * weight, x + residual


def kernel(op: str, run: Any, name: str = "acme", **fields: Any) -> hal.Kernel:
    return hal.Kernel(op, name, **{"run": run, "band": hal.Band.TUNED, **fields})


@pytest.fixture
def arguments() -> dict[str, Any]:
    return {"x": torch.randn(3, 16)[:, ::2], "residual": torch.randn(3, 8), "weight": torch.rand(8), "eps": 1e-6}


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("offered", ["fused_add_rms_norm_", "fused_add_rms_norm"])
def test_one_kernel_serves_both_forms(arguments: dict[str, Any], offered: str, named: bool, layer: bool) -> None:
    hal.register(Offer(kernel(offered, in_place if offered.endswith("_") else functional)), "acme")
    ops = hal.bind("cpu", hal.Policy(validation=not layer))
    norm, total = functional(**arguments)
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}

    for name in ("fused_add_rms_norm", "fused_add_rms_norm_"):
        bound: Any = getattr(ops, name)
        assert bound.kernel.derived_from == (None if name == offered else offered)
        call = bound.specialize(**arguments) if layer else bound
        result = call(**arguments) if named else call(*arguments.values())
        if name == "fused_add_rms_norm":
            torch.testing.assert_close(result, (norm, total))
            for key, value in before.items():
                assert torch.equal(arguments[key], value), f"{key} was written"
            assert result[0].data_ptr() != arguments["x"].data_ptr()
        else:
            assert result is None
            torch.testing.assert_close((arguments["x"], arguments["residual"]), (norm, total))


def test_an_explanation_says_that_a_kernel_copies() -> None:
    hal.register(Offer(kernel("fused_add_rms_norm_", in_place)), "acme")
    explanation = hal.explain("fused_add_rms_norm", "cpu")
    assert explanation.to_dict()["kernels"][0]["derived_from"] == "fused_add_rms_norm_"
    assert "copies around fused_add_rms_norm_" in str(explanation)


def test_a_kernel_of_its_own_comes_before_one_that_copies() -> None:
    hal.register(Offer(kernel("fused_add_rms_norm_", in_place)), "acme")
    hal.register(Offer(kernel("fused_add_rms_norm", functional)), "globex")
    ops = hal.bind("cpu")
    assert list(verdicts(ops.explain("fused_add_rms_norm"))) == ["globex.acme", "acme", "native"]
    assert list(verdicts(ops.explain("fused_add_rms_norm_"))) == ["acme", "globex.acme", "native"]


def test_a_plugin_that_serves_both_gets_nothing_derived() -> None:
    hal.register(Offer(kernel("fused_add_rms_norm_", in_place), kernel("fused_add_rms_norm", functional)), "acme")
    for name in ("fused_add_rms_norm", "fused_add_rms_norm_"):
        assert list(verdicts(hal.explain(name, "cpu"))) == ["acme", "native"]
        assert hal.explain(name, "cpu").chain[0].kernel.derived_from is None


def test_refusals_and_requirements_come_along() -> None:
    absent = kernel("fused_add_rms_norm_", in_place, "absent", requires=hal.Requires(library="no_such_library"))
    choosy = kernel("fused_add_rms_norm_", in_place, "choosy", dynamic=lambda x, residual, weight, eps: "never")
    hal.register(Offer(absent, choosy), "acme")
    with pytest.warns(hal.FallbackWarning, match="choosy: never"):
        hal.bind("cpu").fused_add_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-6)
    states = verdicts(hal.explain("fused_add_rms_norm", "cpu"))
    assert states["acme.absent"][0] == "refused" and states["acme.choosy"][0] == "chosen"


def test_a_traceable_kernel_gives_no_twin_for_a_compiler_writes_the_copy_itself() -> None:
    traceable = kernel("fused_add_rms_norm_", in_place, traits=frozenset({hal.Trait.TRACEABLE}))
    hal.register(Offer(traceable), "acme")
    assert list(verdicts(hal.explain("fused_add_rms_norm", "cpu"))) == ["native"]


def test_an_unsound_twin_is_refused_with_its_reason() -> None:
    hal.register(Offer(kernel("fused_add_rms_norm_", refuse_by_mistake)), "acme")
    with pytest.warns(hal.FallbackWarning, match=r"takes \(x, weight, eps\), the op takes \(x, residual, "):
        ops = hal.bind("cpu")
    assert ops.fused_add_rms_norm.kernel.id == ops.fused_add_rms_norm_.kernel.id == "native"


@pytest.mark.parametrize("layer", [False, True])
def test_an_in_place_op_refuses_one_tensor_for_both_places(layer: bool) -> None:
    hal.register(Offer(kernel("fused_add_rms_norm_", in_place)), "acme")
    weight, buffer = torch.ones(4), torch.ones(3, 8)
    for policy in (None, hal.Policy(require={"fused_add_rms_norm_": "native"})):
        call: Any = hal.bind("cpu", policy).fused_add_rms_norm_
        if layer:
            call = call.specialize(*(torch.empty(1, 4, device="meta") for _ in range(2)), weight.to("meta"), 1e-6)
        for x, residual in ((buffer[:, :4],) * 2, (buffer[:, ::2], buffer[:, :4])):
            with pytest.raises(hal.ArgumentError, match=r"fused_add_rms_norm_: .*in different memory"):
                call(x, residual, weight, 1e-6)
        assert (buffer == 1).all()
        call(torch.empty(0, 4), torch.empty(0, 4), weight, 1e-6)  # lie nowhere
        call(buffer.clone()[:, :4], buffer.clone()[:, 4:], weight, 1e-6)


def test_tracers_see_no_overlap_where_stand_ins_lie_nowhere() -> None:
    ops, weight = hal.bind("cpu"), torch.ones(4)

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        ops.fused_add_rms_norm_(x, residual, weight, 1e-6)
        return x

    def pair() -> tuple[Tensor, Tensor, Tensor]:
        return torch.ones(2, 4), torch.ones(2, 4), weight

    expected = step(*pair())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(*pair()), expected)
    torch.testing.assert_close(make_fx(step, tracing_mode="fake")(*pair())(*pair()), expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(value) for value in pair()]
        assert step(*fake).shape == (2, 4)
        with pytest.raises(hal.ArgumentError, match="in different memory"):
            step(fake[0], fake[0], fake[2])
