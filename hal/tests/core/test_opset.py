"""Bound ops: the op's own signature, validation, tracing, notes on errors, layers, and what stays out of a frame."""

from __future__ import annotations

import copy
import inspect
import linecache
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hal as hal

from .helpers import Offer, collected, messages, refuse_bfloat16, refuse_long, rms_norm_arguments, rms_norm_kernel

UNCHECKED = hal.Policy(validation=False)


def source_of(function: Callable[..., Any]) -> str:
    return "".join(linecache.getlines(function.__code__.co_filename))


def test_a_bound_op_is_the_op_as_a_function() -> None:
    ops = hal.bind("cpu")
    for name in ops:
        bound, op = getattr(ops, name), getattr(hal.ops, name)
        assert inspect.signature(bound) == op.signature
        assert (bound.__name__, bound.__doc__, bound.op) == (name, op.__doc__, op)
    assert "rms_norm" in set(ops) and len(list(ops)) == len(set(ops))
    assert repr(ops).startswith(f"<OpSet of {len(list(ops))} ops on cpu, manifest ")
    assert ops.torch_device == torch.device("cpu")


@pytest.mark.parametrize("policy", [hal.Policy(), UNCHECKED])
def test_arguments_go_by_position_by_name_and_by_default(policy: hal.Policy) -> None:
    ops = hal.bind("cpu", policy)
    x, weight, eps = rms_norm_arguments()
    expected = hal.ops.rms_norm(x, weight, eps)
    torch.testing.assert_close(ops.rms_norm(x, eps=eps, weight=weight), expected)
    torch.testing.assert_close(ops.linear(x, torch.eye(8)), x)  # layout has its default
    with pytest.raises(TypeError, match=r"rms_norm\(\) missing 1 required positional argument: 'eps'"):
        ops.rms_norm(x, weight)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        ops.rms_norm(x, weight, epsilon=eps)


def test_a_set_never_changes() -> None:
    ops = hal.bind("cpu")
    with pytest.raises(AttributeError, match="an op set never changes: cannot set 'rms_norm'"):
        ops.rms_norm = ops.linear  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="cannot set 'device'"):
        ops.device = hal.devices()[0]
    with pytest.raises(AttributeError, match="cannot delete 'rms_norm'"):
        del ops.rms_norm
    with pytest.raises(AttributeError, match="rms_nrom"):
        _ = ops.rms_nrom
    duplicate = copy.deepcopy(ops)  # as copying a model that holds it does
    assert duplicate.manifest == ops.manifest
    x = rms_norm_arguments()
    torch.testing.assert_close(duplicate.rms_norm(*x), ops.rms_norm(*x))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": "text"}, r"argument 'x': expected a tensor \[..., D\], got str"),
        ({"x": None}, "argument 'x': expected a tensor .*, got NoneType"),
        ({"x": torch.ones(3, 8, device="meta")}, "argument 'x': expected a tensor on cpu, got one on meta; move it"),
        ({"weight": torch.ones(8, 1)}, r"argument 'weight': expected rank 1 \[D\], got shape \(8, 1\)"),
        ({"x": torch.ones(3, 8, dtype=torch.int32)}, "argument 'x': expected torch.bfloat16 or .*, got torch.int32"),
        ({"weight": torch.ones(8, dtype=torch.float16)}, "argument 'weight': .* torch.float32, got torch.float16"),
        ({"weight": torch.ones(4)}, r"argument 'weight': expected \[D\] with D = 8 \(D=8\), got shape \(4,\)"),
    ],
)
def test_a_call_that_breaks_the_contract_names_argument_expected_and_got(changed: dict[str, Any], message: str) -> None:
    x, weight, eps = rms_norm_arguments()
    arguments = {"x": x, "weight": weight, "eps": eps, **changed}
    with pytest.raises(hal.ArgumentError, match=f"^rms_norm: {message}"):
        hal.bind("cpu").rms_norm(**arguments)


def test_validation_is_on_by_default_and_off_by_policy() -> None:
    hal.register(Offer(rms_norm_kernel()), "acme")
    broken = (torch.ones(3, 8), torch.ones(4), 1e-6)
    with pytest.raises(hal.ArgumentError):
        hal.bind("cpu").rms_norm(*broken)
    ops = hal.bind("cpu", UNCHECKED)
    assert (ops.rms_norm(*broken) == 7).all()
    assert "shape" not in source_of(ops.rms_norm)


def failing(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise KeyError("a kernel's own error")


@pytest.mark.parametrize("layer", [False, True])
def test_a_kernel_that_raises_is_the_users_exception_with_a_note_and_nothing_is_retried(layer: bool) -> None:
    calls = []

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append(x)
        return failing(x, weight, eps)

    hal.register(Offer(rms_norm_kernel(run=run, dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu")
    x, weight, eps = torch.ones(4, 16)[:, ::2], torch.ones(8), 1e-6
    callable_: Callable[..., Tensor] = ops.rms_norm.specialize(x, weight, eps) if layer else ops.rms_norm
    for _ in range(2):  # nothing is banned either
        with pytest.raises(KeyError) as caught:
            callable_(x, weight, eps)
        assert caught.value.args == ("a kernel's own error",)
        assert caught.value.__notes__ == [
            "torch_hal: in rms_norm(x=float32[4, 8] strides (16, 2), weight=float32[8], eps=1e-06), "
            "kernel 'acme' of plugin 'acme' on cpu"
        ]
        assert "return _run0(x, weight, eps)" in "".join(traceback.format_exception(caught.value))
    assert len(calls) == 2


def test_a_kernels_argument_error_is_not_taken_for_a_refusal() -> None:
    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        raise hal.Unsupported("inside the kernel")

    hal.register(Offer(rms_norm_kernel(run=run, dynamic=refuse_long)), "acme")
    with pytest.raises(hal.Unsupported, match="inside the kernel"):
        hal.bind("cpu").rms_norm(*rms_norm_arguments())


def test_tracing_records_which_kernel_ran_with_which_shapes_and_labels_the_profiler() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(trace=True))
    layer = ops.rms_norm.specialize(*rms_norm_arguments())
    with torch.profiler.profile() as profile, collected():
        ops.rms_norm(*rms_norm_arguments(3))
        ops.rms_norm(*rms_norm_arguments(5))
        layer(*rms_norm_arguments(2))
        ops.linear(torch.ones(1, 8)[:, ::2], torch.ones(3, 4))
    assert ops.trace is not None
    assert list(ops.trace.calls) == [
        ("rms_norm", "acme", ("float32[3, 8]", "float32[8]", "1e-06")),
        ("rms_norm", "native", ("float32[5, 8]", "float32[8]", "1e-06")),
        ("rms_norm", "acme", ("float32[2, 8]", "float32[8]", "1e-06")),
        ("linear", "native", ("float32[1, 4] strides (8, 2)", "float32[3, 4]", "'plain'")),
    ]
    assert ops.trace.counts() == {("rms_norm", "acme"): 2, ("rms_norm", "native"): 1, ("linear", "native"): 1}
    labels = {event.key for event in profile.key_averages()}
    assert {"torch_hal::rms_norm:acme", "torch_hal::rms_norm:native", "torch_hal::linear:native"} <= labels


def test_without_tracing_nothing_of_it_remains() -> None:
    ops = hal.bind("cpu")
    assert ops.trace is None
    for name in ops:
        assert not {"_record", "_range"} & set(getattr(ops, name).__globals__)
        assert "_record" not in source_of(getattr(ops, name))


def test_a_call_is_handed_on_in_order_and_only_the_reference_is_worth_a_warning() -> None:
    few, many = rms_norm_kernel("few", dynamic=refuse_long), rms_norm_kernel("many", 5.0, band=hal.Band.LIBRARY)
    hal.register(Offer(few, many), "acme")
    ops = hal.bind("cpu")
    with collected() as caught:
        assert (ops.rms_norm(*rms_norm_arguments(4)) == 7).all()
        assert (ops.rms_norm(*rms_norm_arguments(5)) == 5).all()
    assert messages(caught, hal.FallbackWarning) == []
    assert [loaded.kernel.name for loaded in ops.explain("rms_norm").chain] == ["few", "many"]


def test_a_hand_over_to_the_reference_is_an_error_where_the_policy_says_so() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(fallback="error"))
    assert (ops.rms_norm(*rms_norm_arguments(4)) == 7).all()
    for _ in range(2):  # at every call, not only the first
        with pytest.raises(hal.Unsupported, match=r"acme: takes at most 4 rows, got 5 \(policy.fallback is 'error'\)"):
            ops.rms_norm(*rms_norm_arguments(5))


def test_a_chain_without_takers_says_why_each_refused() -> None:
    hal.register(Offer(rms_norm_kernel("a", dynamic=refuse_long), rms_norm_kernel("b", static=refuse_bfloat16)), "acme")
    ops = hal.bind("cpu", hal.Policy(deny={"rms_norm": "native"}))
    with pytest.raises(hal.Unsupported) as caught:
        ops.rms_norm(*rms_norm_arguments(9, torch.bfloat16))
    assert str(caught.value) == (
        "rms_norm on cpu: no bound kernel takes this call (x=bfloat16[9, 8], weight=bfloat16[8], eps=1e-06). "
        "acme.a: takes at most 4 rows, got 9; acme.b: takes no bfloat16"
    )


def test_specialising_gives_the_kernel_itself_where_nothing_else_is_left() -> None:
    kernel = rms_norm_kernel(static=refuse_bfloat16)
    hal.register(Offer(kernel), "acme")
    arguments = rms_norm_arguments()
    assert hal.bind("cpu", UNCHECKED).rms_norm.specialize(*arguments) is kernel.run
    native = hal.bind("cpu", hal.Policy(validation=False, require={"rms_norm": "native"}))
    assert native.rms_norm.specialize(*arguments) is hal.ops.rms_norm.reference
    for policy in (hal.Policy(), hal.Policy(validation=False, trace=True)):
        assert hal.bind("cpu", policy).rms_norm.specialize(*arguments) is not kernel.run


def test_a_static_refusal_is_asked_when_a_layer_is_built_and_never_again() -> None:
    asked: list[torch.dtype] = []

    def static(x: Tensor, weight: Tensor, eps: float) -> str | None:
        asked.append(x.dtype)
        return None

    hal.register(Offer(rms_norm_kernel(static=static, dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(validation=False))
    assert asked == []
    x, weight, eps = rms_norm_arguments()
    layer = ops.rms_norm.specialize(x.to("meta"), weight=weight.to("meta"), eps=eps)
    built = len(asked)
    assert built > 0
    for rows in (0, 1, 3):
        assert (layer(*rms_norm_arguments(rows)) == 7).all()
    assert len(asked) == built
    assert "_static" not in source_of(layer) and "_dynamic0(x, weight, eps)" in source_of(layer)


def test_a_static_refusal_that_looks_at_the_token_dimension_is_found_out() -> None:
    hal.register(Offer(rms_norm_kernel(static=lambda x, weight, eps: refuse_long(x, weight, eps))), "acme")
    with pytest.raises(hal.PluginError, match=r"depends on a free dimension .* make it a dynamic one"):
        hal.bind("cpu").rms_norm.specialize(*rms_norm_arguments(2))


def test_a_static_refusal_may_look_at_a_weights_strides() -> None:
    def static(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
        return None if weight.is_contiguous() else "wants dense rows"

    def run(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
        return x @ weight.T + 100

    hal.register(Offer(hal.Kernel("linear", "acme", run=run, static=static)), "acme")
    ops = hal.bind("cpu", hal.Policy(validation=False))
    x, strided = torch.ones(2, 4), torch.ones(4, 3).T
    assert ops.linear.specialize(x, strided.contiguous()) is run
    with pytest.warns(hal.FallbackWarning, match="acme: wants dense rows"):
        assert ops.linear.specialize(x, strided)(x, strided)[0, 0] == 4


def test_specialising_checks_the_contract_and_takes_meta_tensors_of_any_token_count() -> None:
    ops = hal.bind("cpu", UNCHECKED)
    x, weight, eps = rms_norm_arguments()
    with pytest.raises(hal.ArgumentError, match="argument 'weight'"):
        ops.rms_norm.specialize(x.to("meta"), weight[:4].to("meta"), eps)
    layer = ops.rms_norm.specialize(x[:0].to("meta"), weight.to("meta"), eps)
    torch.testing.assert_close(layer(x, weight, eps), hal.ops.rms_norm(x, weight, eps))


def test_a_layer_with_validation_checks_its_calls() -> None:
    ops = hal.bind("cpu")
    layer = ops.rms_norm.specialize(*rms_norm_arguments())
    with pytest.raises(hal.ArgumentError, match="argument 'weight'"):
        layer(torch.ones(3, 8), torch.ones(4), 1e-6)


def test_what_a_kernel_wants_of_the_caller_is_on_the_bound_op() -> None:
    def plan(seq_lens: Tensor, host_lens: list[int], num_heads: int, queries: int, page_size: int) -> list[Tensor]:
        return [torch.full((4,), num_heads, dtype=torch.int32)]

    reference = hal.ops.mla_decode.reference
    planned = hal.Kernel("mla_decode", "acme", run=reference, plan=plan, layout="acme", formats=(("scale", "x"),))
    hal.register(Offer(planned), "acme")
    arguments = (torch.tensor([3], dtype=torch.int32), [3], 2, 1, 4)
    (tensor,), layout = hal.bind("cpu").mla_decode.plan(*arguments)
    assert (tensor.tolist(), layout) == ([2, 2, 2, 2], "acme")
    assert hal.bind("cpu").mla_decode.formats == {"scale": "x"}
    native = hal.bind("cpu", hal.Policy(require={"*": "native"}))
    (tensor,), layout = native.mla_decode.plan(*arguments)
    assert (tensor.numel(), layout, native.mla_decode.formats) == (0, "plain", {})
    assert not hasattr(native.rms_norm, "plan") and not hasattr(native.rms_norm, "prepare")
    with pytest.raises(hal.ArgumentError, match="host_lens"):
        native.mla_decode.plan(arguments[0], [], 2, 1, 4)


def test_binding_again_brings_no_new_torch_ops() -> None:
    """Derived and older kernels wrap their functions; a wrapper a bind would be a torch op a bind."""
    from torch_hal.compile import _names

    def in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        x.zero_()

    def older(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    hal.register(
        Offer(hal.Kernel("fused_add_rms_norm_", "acme", in_place), hal.Kernel("linear", "acme", older)), "acme"
    )
    hal.bind("cpu")
    before = len(_names)
    for _ in range(3):
        hal.bind("cpu")
    assert len(_names) == before
