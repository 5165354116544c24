"""Behaviours 14 to 17: which kernel takes a call, and that nothing changes in silence."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.op import declared

from .helpers import (
    Offer,
    collected,
    messages,
    refuse_bfloat16,
    refuse_by_mistake,
    refuse_long,
    rms_norm_arguments,
    rms_norm_kernel,
    verdicts,
)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_b14_a_raising_refusal_drops_the_kernel_when_automatic_and_raises_when_explicit(kind: str) -> None:
    hal.register(Offer(rms_norm_kernel(**{kind: refuse_by_mistake})), "acme")
    arguments = rms_norm_arguments()
    reason = "acme: its refusal raised ZeroDivisionError: a refusal's own mistake"

    ops = hal.bind("cpu")
    with pytest.warns(hal.FallbackWarning, match=f"from acme to native for a call: {reason}"):
        torch.testing.assert_close(ops.rms_norm(*arguments), hal.ops.rms_norm(*arguments))
    if kind == "static":
        with pytest.warns(hal.FallbackWarning, match=f"from acme to native for a layer: {reason}"):
            layer = hal.bind("cpu").rms_norm.specialize(*arguments)
        torch.testing.assert_close(layer(*arguments), hal.ops.rms_norm(*arguments))

    explicit = hal.bind("cpu", hal.Policy(require={"rms_norm": ["acme", "native"]}))
    with pytest.raises(ZeroDivisionError):
        explicit.rms_norm(*arguments)
    if kind == "static":
        with pytest.raises(ZeroDivisionError):
            explicit.rms_norm.specialize(*arguments)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def limited(i: int, dtypes: set[torch.dtype], rows: int) -> hal.Kernel:
    """A kernel that takes some dtypes (static) and at most some rows (dynamic), and gives its own number."""

    def static(x: Tensor, weight: Tensor, eps: float) -> str | None:
        return None if x.dtype in dtypes else "dtype"

    def dynamic(x: Tensor, weight: Tensor, eps: float) -> str | None:
        return None if x.shape[0] <= rows else "rows"

    return rms_norm_kernel(f"k{i}", value=float(i), static=static, dynamic=dynamic)


@pytest.mark.parametrize("with_native", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_b15_automatic_selection_accepts_every_input_that_some_kernel_accepts(seed: int, with_native: bool) -> None:
    """A call runs on the first kernel that takes it, specialised or not."""
    draw = random.Random(seed)
    limits = [(set(draw.sample(DTYPES, draw.randint(0, 3))), draw.randint(0, 6)) for _ in range(draw.randint(1, 4))]
    hal.register(Offer(*(limited(i, *limit) for i, limit in enumerate(limits))), "many")
    ops = hal.bind("cpu", hal.Policy() if with_native else hal.Policy(deny={"rms_norm": "native"}))
    for dtype, rows in itertools.product(DTYPES, (0, 3, 6)):
        arguments = rms_norm_arguments(rows, dtype)
        takers = [i for i, (dtypes, most) in enumerate(limits) if dtype in dtypes and rows <= most]
        with collected():
            for call in (ops.rms_norm, lambda *values: ops.rms_norm.specialize(*values)(*values)):
                if takers:
                    assert (call(*arguments) == takers[0]).all()
                elif with_native:
                    torch.testing.assert_close(call(*arguments), hal.ops.rms_norm(*arguments))
                else:
                    with pytest.raises(hal.Unsupported):
                        call(*arguments)


def test_b16_falling_to_the_reference_warns_once_an_op_with_the_reason() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu")
    layers = [ops.rms_norm.specialize(*rms_norm_arguments()) for _ in range(3)]
    with collected() as caught:
        for call in (ops.rms_norm, ops.rms_norm, *layers):
            call(*rms_norm_arguments(5))
            call(*rms_norm_arguments(2))
    [message] = messages(caught, hal.FallbackWarning)
    assert message == "rms_norm on cpu falls back from acme to native for a call: acme: takes at most 4 rows, got 5"
    assert caught[0].filename == __file__  # where the call stands, not in the frame


def test_b16_layers_that_no_kernel_takes_warn_once_too() -> None:
    hal.register(Offer(rms_norm_kernel(static=refuse_bfloat16)), "acme")
    ops = hal.bind("cpu")
    arguments = rms_norm_arguments(dtype=torch.bfloat16)
    with collected() as caught:
        for _ in range(3):
            ops.rms_norm.specialize(*arguments)(*arguments)
    [message] = messages(caught, hal.FallbackWarning)
    assert message == "rms_norm on cpu falls back from acme to native for a layer: acme: takes no bfloat16"
    assert caught[0].filename == __file__
    strict = hal.bind("cpu", hal.Policy(fallback="error"))
    with pytest.raises(hal.Unsupported, match="takes no bfloat16"):
        strict.rms_norm.specialize(*arguments)
    with pytest.raises(hal.Unsupported, match="takes no bfloat16"):
        strict.rms_norm(*arguments)


def test_b16_bind_warns_once_an_op_and_points_at_the_caller() -> None:
    requires = hal.Requires(library="no_such_library")
    hal.register(
        Offer(rms_norm_kernel(requires=requires), rms_norm_kernel("b", op="silu_and_mul", requires=requires)), "acme"
    )
    with collected() as caught:
        hal.bind("cpu")
    assert sorted(text.split()[0] for text in messages(caught, hal.FallbackWarning)) == ["rms_norm", "silu_and_mul"]
    assert {warning.filename for warning in caught} == {__file__}


def prepare_swapped(weight: Tensor) -> list[Tensor]:
    return [weight.T.contiguous()]


def linear_swapped(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
    return x @ (weight if layout == "swapped" else weight.T)


def linear_reader(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
    return linear_swapped(x, weight, layout) + 100


def refuse_tall(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
    return "too tall" if x.shape[0] > 4 else None


def preparing(**fields: object) -> hal.Kernel:
    given = {"run": linear_swapped, "prepare": prepare_swapped, "layout": "swapped", "band": hal.Band.TUNED, **fields}
    return hal.Kernel("linear", "swapper", **given)  # type: ignore[arg-type]


def test_b17_prepared_weights_never_reach_a_kernel_that_does_not_declare_their_layout() -> None:
    hal.register(Offer(preparing(static=lambda x, weight, layout="plain": None)), "acme")
    ops = hal.bind("cpu")
    x, weight = torch.randn(3, 4), torch.randn(2, 4)
    (prepared,), layout = ops.linear.prepare(weight)
    assert layout == "swapped"
    torch.testing.assert_close(ops.linear(x, prepared, layout), x @ weight.T)
    native = hal.bind("cpu", hal.Policy(require={"linear": "native"}))
    with pytest.raises(hal.ArgumentError, match="native: does not read layout 'swapped'"):
        native.linear(x, prepared, layout)
    with pytest.raises(hal.Unsupported, match="native: does not read layout 'swapped'"):
        native.linear.specialize(x, prepared, layout)
    unchecked = hal.bind("cpu", hal.Policy(require={"linear": "native"}, validation=False))
    with pytest.raises(hal.ArgumentError, match="does not read layout 'swapped'"):
        unchecked.linear(x, prepared, layout)
    with pytest.raises(hal.HalError, match="mistyped"):
        ops.linear(x, prepared, "mistyped")


def test_b17_a_preparing_kernel_that_may_refuse_needs_a_partner_for_its_layout() -> None:
    hal.register(Offer(preparing(dynamic=refuse_tall)), "acme")
    with pytest.warns(
        hal.FallbackWarning, match="may refuse a call on weights in its layout 'swapped', which no other"
    ):
        assert hal.bind("cpu").linear.kernel.id == "native"
    hal.unregister("acme")

    partner = hal.Kernel("linear", "partner", run=linear_reader, layout="swapped", band=hal.Band.LIBRARY)
    hal.register(Offer(preparing(dynamic=refuse_tall), partner), "acme")
    ops = hal.bind("cpu")
    assert [loaded.kernel.name for loaded in ops.explain("linear").chain][:2] == ["swapper", "partner"]
    weight = torch.randn(2, 4)
    (prepared,), layout = ops.linear.prepare(weight)
    for rows, offset in ((3, 0), (6, 100)):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ops.linear(x, prepared, layout), x @ weight.T + offset)
        torch.testing.assert_close(
            ops.linear.specialize(x, prepared, layout)(x, prepared, layout), x @ weight.T + offset
        )


def test_b17_plain_weights_still_find_a_kernel_behind_a_preparing_one() -> None:
    hal.register(Offer(preparing()), "acme")
    ops = hal.bind("cpu")
    x, weight = torch.randn(3, 4), torch.randn(2, 4)
    with collected():
        torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
    assert ops.linear.kernel.name == "swapper" and "native" in verdicts(ops.explain("linear"))
    assert set(ops) == set(declared())
