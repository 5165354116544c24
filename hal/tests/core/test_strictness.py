"""What must not pass in silence: replays that differ, types that are not those declared, layouts nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hal as hal

from .helpers import Offer, refuse_bfloat16, refuse_long, rms_norm_arguments, rms_norm_kernel


def linear(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
    return x @ (weight if layout == "acme_t" else weight.T)


def transposed(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous()]


def not_float32(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
    return "float32" if x.dtype == torch.float32 else None


def linear_kernel(**fields: Any) -> hal.Kernel:
    return hal.Kernel("linear", "acme", run=linear, prepare=transposed, layout="acme_t", **fields)


def test_a_replay_that_would_run_anything_else_is_refused() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    pinned = hal.bind("cpu").manifest.pin()
    assert hal.bind("cpu", pinned).manifest.digest == hal.bind("cpu").manifest.digest
    hal.unregister("acme")
    with pytest.raises(hal.HalError, match=r"pinned\['rms_norm'\]: 'acme.acme' matches no kernel"):
        hal.bind("cpu", pinned)
    fp4 = hal.Requires(features=frozenset({"fp4"}))
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long, requires=fp4)), "acme")
    with pytest.raises(hal.Unsupported, match=r"would run native.native \(the policy pins acme.acme, native.native\)"):
        hal.bind("cpu", pinned)


@pytest.mark.parametrize("refusal", [{"dynamic": refuse_long}, {"static": refuse_bfloat16}])
def test_fallback_error_holds_under_compile(refusal: dict[str, Any]) -> None:
    hal.register(Offer(rms_norm_kernel(**refusal)), "acme")
    ops = hal.bind("cpu", hal.Policy(fallback="error"))
    arguments = rms_norm_arguments(100, torch.bfloat16)
    with pytest.raises(hal.Unsupported, match="falls back from acme to native"):
        ops.rms_norm(*arguments)
    compiled = torch.compile(lambda *values: ops.rms_norm(*values), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="falls back from acme to native"):
        compiled(*arguments)


def test_getting_past_a_preferred_kernel_warns_whoever_takes_the_call() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    hal.register(Offer(rms_norm_kernel("beta")), "beta")
    ops = hal.bind("cpu", hal.Policy(prefer={"rms_norm": "acme"}))
    with pytest.warns(hal.FallbackWarning, match="falls back from acme to beta for a call"):
        ops.rms_norm(*rms_norm_arguments(100))


def test_a_name_of_a_plugin_and_of_another_ones_kernel_is_ambiguous() -> None:
    hal.register(Offer(rms_norm_kernel("acme")), "aaa")
    hal.register(Offer(rms_norm_kernel("acme")), "acme")
    with pytest.raises(hal.PolicyError, match=r"'acme' is a plugin and also aaa\.acme"):
        hal.bind("cpu", hal.Policy(require={"rms_norm": "acme"}))
    assert hal.bind("cpu", hal.Policy(require={"rms_norm": "acme.*"})).rms_norm.kernel.plugin == "acme"


def test_a_layer_is_held_to_what_it_was_specialised_for() -> None:
    hal.register(Offer(rms_norm_kernel(static=refuse_bfloat16)), "acme")
    layer = hal.bind("cpu").rms_norm.specialize(*rms_norm_arguments())
    with pytest.raises(hal.Unsupported, match=r"no bound kernel takes this call .*acme: "):
        layer(*rms_norm_arguments(3, torch.bfloat16))


@pytest.mark.parametrize(("op", "dim"), [("mha_varlen", "Tq"), ("mla_kv_gather", "N"), ("mla_decode", "B")])
def test_every_op_says_which_of_its_dims_are_free(op: str, dim: str) -> None:
    assert dim in hal.ops.declared()[op].free


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eps": "1e-6"}, "argument 'eps': expected a float, got str '1e-6'"),
        ({"eps": None}, "argument 'eps': expected a float, got NoneType"),
        ({"eps": True}, "argument 'eps': expected a float, got bool"),
        ({"eps": torch.ones(4, 1)}, "argument 'eps': expected a float, got Tensor"),
    ],
)
def test_numbers_are_of_the_declared_type(changed: dict[str, Any], message: str) -> None:
    arguments = dict(zip(("x", "weight", "eps"), rms_norm_arguments(), strict=True)) | changed
    for call in (hal.bind("cpu").rms_norm, hal.ops.rms_norm):
        with pytest.raises(hal.ArgumentError, match=f"^rms_norm: {message}"):
            call(**arguments)


@pytest.mark.parametrize("top_k", [2.0, "2", True, None])
def test_counts_are_ints(top_k: Any) -> None:
    with pytest.raises(hal.ArgumentError, match="topk_softmax: argument 'top_k': expected an int"):
        hal.bind("cpu").topk_softmax(torch.ones(2, 4), top_k, True)


def test_flags_are_bools() -> None:
    with pytest.raises(hal.ArgumentError, match="argument 'renormalize': expected a bool, got str 'False'"):
        hal.bind("cpu").topk_softmax(torch.ones(2, 4), 2, "False")


def test_weights_are_prepared_by_the_kernel_that_will_take_the_calls() -> None:
    hal.register(Offer(linear_kernel(static=not_float32)), "acme")
    ops = hal.bind("cpu")
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert ops.linear.prepare(weight).layout == "acme_t"
    assert ops.linear.prepare(weight.bfloat16(), x=x.bfloat16().to("meta")).layout == "acme_t"
    prepared = ops.linear.prepare(weight=weight, x=x.to("meta"))
    assert prepared.layout == "plain"
    with pytest.warns(hal.FallbackWarning, match="does not read layout 'plain'"):
        torch.testing.assert_close(ops.linear(x, *prepared.tensors, prepared.layout), x @ weight.T)


def test_a_bare_op_reads_weights_only_as_checkpoints_hold_them() -> None:
    with pytest.raises(hal.ArgumentError, match="linear: argument 'layout': expected 'plain', got 'acme_t'"):
        hal.ops.linear(torch.ones(2, 4), torch.ones(4, 4), "acme_t")


def test_a_bare_op_wants_its_tensors_on_one_device() -> None:
    with pytest.raises(hal.ArgumentError, match="argument 'weight': expected a tensor on cpu, got one on meta"):
        hal.ops.rms_norm(torch.ones(2, 4), torch.ones(4, device="meta"), 1e-6)


def test_a_partner_behind_a_kernel_that_takes_every_plain_call_is_found() -> None:
    def short(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
        return None if x.shape[0] <= 2 else "long"

    plain = hal.Kernel("linear", "plain", run=lambda x, weight, layout="plain": x @ weight.T, band=hal.Band.LIBRARY)
    partner = hal.Kernel("linear", "partner", run=linear, layout="acme_t", band=hal.Band.PORTABLE)
    hal.register(Offer(linear_kernel(dynamic=short, band=hal.Band.TUNED), plain, partner), "acme")
    ops = hal.bind("cpu")
    assert [loaded.kernel.name for loaded in ops.explain("linear").chain] == ["acme", "plain", "partner"]
    x, weight = torch.randn(9, 8), torch.randn(5, 8)
    prepared = ops.linear.prepare(weight)
    torch.testing.assert_close(ops.linear(x, *prepared.tensors, prepared.layout), x @ weight.T)


@pytest.mark.parametrize("answer", [[], [None], [torch.ones(2), torch.ones(2)], None])
def test_what_prepare_gives_is_counted(answer: Any) -> None:
    kernel = hal.Kernel("linear", "acme", run=linear, prepare=lambda weight: answer, layout="acme_t")
    hal.register(Offer(kernel), "acme")
    with pytest.raises(hal.PluginError, match=r"prepare of acme for linear gave .*, expected 1 tensor\(s\)"):
        hal.bind("cpu").linear.prepare(torch.ones(2, 2))


@pytest.mark.parametrize("answer", [False, True, "", 3])
def test_a_refusal_is_a_reason_or_none(answer: Any) -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=lambda x, weight, eps: answer)), "acme")
    with pytest.raises(hal.PluginError, match=f"kernel 'acme' of rms_norm: a refusal gave {answer!r}, expected None"):
        hal.bind("cpu").rms_norm(*rms_norm_arguments())


def test_the_kernels_own_exception_survives_a_note_that_fails() -> None:
    class Odd(Exception):
        add_note = None  # type: ignore[assignment]

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        raise Odd

    hal.register(Offer(rms_norm_kernel(run=run)), "acme")
    with pytest.raises(Odd):
        hal.bind("cpu").rms_norm(*rms_norm_arguments())


def test_unknown_variables_are_typing_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HAL_PREFFER", "x=y")
    with pytest.raises(hal.PolicyError, match="variable TORCH_HAL_PREFFER means nothing; did you mean"):
        hal.bind("cpu")
