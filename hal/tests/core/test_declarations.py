"""What a plugin declares is checked when it declares it: fields by type, layouts by rule, ops by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.op import RESERVED, declared

from .helpers import Offer, rms_norm_arguments, rms_norm_kernel


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("op", None, "field 'op': expected str, got None"),
        ("op", "", "field 'op' is empty"),
        ("name", 5, "field 'name': expected str, got 5"),
        ("run", None, "field 'run': expected Target, got None"),
        ("run", 5, "field 'run': expected Target, got 5"),
        ("static", "", None),  # an empty target is for loading to report
        ("static", True, "field 'static': expected Target | None, got True"),
        ("fake", 5, "field 'fake'"),
        ("requires", None, "field 'requires': expected Requires, got None"),
        ("requires", "acme", "field 'requires'"),
        ("band", "tuned", "'tuned' is not a valid Band"),
        ("band", None, "None is not a valid Band"),
        ("traits", None, "field 'traits': expected frozenset[Trait], got None"),
        ("traits", "graph_save", "'graph_save' is not a valid Trait"),
        ("formats", None, "field 'formats'"),
        ("formats", {"x_scale_layout": "row_f32"}, "field 'formats'"),
        ("formats", [("x_scale_layout", "row_f32", "more")], "field 'formats'"),
        ("formats", [("x_scale_layout", 3)], "field 'formats'"),
        ("layout", None, "field 'layout': expected str, got None"),
        ("layout", "", "field 'layout' is empty"),
        ("layout", "*", "layout '*' is for `reads`"),
        ("reads", 5, "field 'reads'"),
        ("reads", {5}, "field 'reads'"),
        ("version", "1", "field 'version': expected int, got '1'"),
        ("version", True, "field 'version': expected int, got True"),
        ("keeps_plain", True, "keeps_plain is for a prepare or plan in layout 'plain'"),
    ],
)
def test_a_kernels_wrong_field_is_named_when_it_is_made(field: str, value: Any, named: str | None) -> None:
    if named is None:
        assert getattr(rms_norm_kernel(**{field: value}), field) == value
        return
    with pytest.raises(hal.PluginError) as raised:
        hal.Kernel(**{"op": "rms_norm", "name": "acme", "run": "acme:rms_norm", field: value})
    assert named in str(raised.value) and str(raised.value).startswith("kernel ")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: hal.Requires(arch=5), r"field 'arch': expected tuple\[str, ...\], got 5"),  # type: ignore[arg-type]
        (lambda: hal.Requires(arch=(90,)), "field 'arch'"),  # type: ignore[arg-type]
        (lambda: hal.Requires(vendor=("acme",)), "field 'vendor'"),  # type: ignore[arg-type]
        (lambda: hal.Requires(library=5), "field 'library'"),  # type: ignore[arg-type]
        (lambda: hal.Library(None), "library None: field 'name'"),  # type: ignore[arg-type]
        (lambda: hal.Library(""), "field 'name' is empty"),
        (lambda: hal.Library("acme", probe=5), "field 'probe'"),  # type: ignore[arg-type]
        (lambda: hal.DeviceInfo("acme", "xpu", -1), "device xpu:-1: expected a type such as 'cuda' and an index"),
        (lambda: hal.DeviceInfo("acme", "xpu:0"), "expected a type such as 'cuda'"),
        (lambda: hal.DeviceInfo("acme", "xpu", "0"), "field 'index': expected int, got '0'"),  # type: ignore[arg-type]
        (lambda: hal.DeviceInfo("acme", "xpu", True), "field 'index'"),
        (lambda: hal.DeviceInfo("", "xpu"), "field 'vendor' is empty"),
        (lambda: hal.DeviceInfo("acme", "xpu", name=b"A"), "field 'name': expected str, got b'A'"),  # type: ignore[arg-type]
        (lambda: hal.DeviceInfo("acme", "xpu", versions={"driver": 7}), "field 'versions'"),  # type: ignore[dict-item]
        (lambda: hal.DeviceInfo("acme", "xpu", memory_total=1.5), "field 'memory_total'"),  # type: ignore[arg-type]
    ],
)
def test_other_declarations_name_their_wrong_field_too(make: Any, named: str) -> None:
    with pytest.raises(hal.PluginError, match=named):
        make()


def test_one_name_alone_is_a_collection_of_one() -> None:
    kernel = rms_norm_kernel(traits="deterministic", reads="acme")
    assert kernel.traits == {hal.Trait.DETERMINISTIC} and kernel.layouts == {"plain", "acme"}
    assert hal.Requires(arch="sm_90", features="fp8") == hal.Requires(arch=("sm_90",), features=frozenset({"fp8"}))  # type: ignore[arg-type]
    assert hal.DeviceInfo("acme", "xpu", features="fp8").features == {"fp8"}  # type: ignore[arg-type]


def dense(weight: Tensor) -> list[Tensor]:
    return [weight.contiguous()]


@pytest.mark.parametrize("part", ["prepare", "plan"])
def test_what_is_laid_out_anew_is_named_or_said_to_stay_plain(part: str) -> None:
    run = hal.ops.linear.reference
    companion: dict[str, Any] = {part: dense}
    with pytest.raises(hal.PluginError, match=r"needs a `layout` of its own, or keeps_plain=True"):
        hal.Kernel("linear", "acme", run, **companion)
    with pytest.raises(hal.PluginError, match="keeps_plain is for a prepare or plan in layout 'plain'"):
        hal.Kernel("linear", "acme", run, layout="acme", keeps_plain=True, **companion)
    assert hal.Kernel("linear", "acme", run, layout="acme", **companion).layouts == {"acme"}
    assert hal.Kernel("linear", "acme", run, keeps_plain=True, **companion).layouts == {"plain"}


def test_prepared_weights_that_stay_plain_can_be_handed_on() -> None:
    def refuse(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
        return "takes at most 2 rows" if x.shape[0] > 2 else None

    def run(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
        return x @ weight.T

    kernel = hal.Kernel("linear", "acme", run, dynamic=refuse, prepare=dense, keeps_plain=True, band=hal.Band.TUNED)
    hal.register(Offer(kernel), "acme")
    ops = hal.bind("cpu")
    x, weight = torch.randn(3, 8), torch.randn(8, 5).T
    laid = ops.linear.prepare(weight)
    with pytest.warns(hal.FallbackWarning, match="takes at most 2 rows"):
        torch.testing.assert_close(ops.linear(x, *laid.tensors, laid.layout), x @ weight.T)


def test_an_op_set_keeps_its_own_names() -> None:
    ops = hal.bind("cpu")
    public = {name for name in dir(ops) if not name.startswith("_")}
    assert public - set(declared()) == RESERVED


@pytest.mark.parametrize("name", [*sorted(RESERVED), "_frozen", "__init__", "<lambda>"])
def test_an_op_that_would_hide_them_is_refused(name: str) -> None:
    def reference(x: Tensor) -> Tensor:
        return x.clone()

    reference.__name__ = name
    with pytest.raises(hal.HalError, match=f"op '{name}': .*rename the op"):
        hal.op(shapes={"x": "T D"}, dtypes={"x": torch.float32})(reference)
    assert name not in declared()


def test_an_ops_arguments_leave_the_call_frames_own_names_alone() -> None:
    def acme_hidden(x: Tensor, _why: int) -> Tensor:
        return x.clone()

    with pytest.raises(hal.HalError, match="op 'acme_hidden': arguments must not begin with '_': _why"):
        hal.op(shapes={"x": "T D"}, dtypes={"x": torch.float32})(acme_hidden)


class ByValue:
    """A callable that compares by value, and so has no hash, as instances of dataclasses have none."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth of a tensor is ambiguous")

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, self.value)


def test_callables_without_a_hash_serve_as_any_part_of_a_kernel() -> None:
    class Refuse(ByValue):
        def __call__(self, x: Tensor, weight: Tensor, eps: float) -> None:  # type: ignore[override]
            return None

    class Probe(ByValue):
        def __call__(self, device: hal.DeviceInfo) -> None:  # type: ignore[override]
            return None

    library = hal.Library("torch", probe=Probe(0.0))
    kernels = [
        rms_norm_kernel(name, run=ByValue(value), dynamic=Refuse(0.0), requires=hal.Requires(library=library))
        for name, value in (("five", 5.0), ("six", 6.0))
    ]
    hal.register(Offer(*kernels), "acme")
    for _ in range(2):
        for name, value in (("five", 5.0), ("six", 6.0)):
            ops = hal.bind("cpu", hal.Policy(require={"rms_norm": name}))
            assert (ops.rms_norm(*rms_norm_arguments()) == value).all()


def test_twins_and_older_contracts_take_callables_without_a_hash() -> None:
    class InPlace(ByValue):
        def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:  # type: ignore[override]
            residual.add_(x)

    class Older(ByValue):
        def __call__(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return x @ weight.T

    hal.register(
        Offer(hal.Kernel("fused_add_rms_norm_", "acme", InPlace(0.0)), hal.Kernel("linear", "acme", Older(0.0))), "acme"
    )
    ops = hal.bind("cpu")
    x, residual = torch.ones(2, 4), torch.ones(2, 4)
    assert (ops.fused_add_rms_norm(x, residual, torch.ones(4), 0.0)[1] == 2).all() and (residual == 1).all()
    assert (ops.linear(x, torch.ones(3, 4)) == 4).all()


@pytest.mark.parametrize("name", ["rms_norm", "router_gemm", "fused_add_rms_norm"])
def test_a_float32_weight_serves_an_argument_of_any_type(name: str) -> None:
    """float64 too, in which oracles are evaluated."""
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.rand(8, 8)
    weight = weight if name == "router_gemm" else weight[0]
    rest = {"rms_norm": (1e-6,), "router_gemm": (), "fused_add_rms_norm": (1e-6,)}[name]
    inputs = (x, x) if name == "fused_add_rms_norm" else (x,)
    op: Any = declared()[name]
    torch.testing.assert_close(op(*inputs, weight, *rest), op(*inputs, weight.double(), *rest), rtol=0, atol=0)
    assert op.terms(*inputs, weight, *rest) is not None
