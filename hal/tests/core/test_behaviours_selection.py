"""Behaviours 7 to 10 and 14 to 17: what may serve, what is chosen, and that nothing changes in silence."""

from __future__ import annotations

import itertools
import random
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.device import arch_matches
from torch_hal.op import declared

from .helpers import (
    H200,
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


def test_b07_require_never_falls_back_and_gives_every_reason() -> None:
    hal.register(
        Offer(
            rms_norm_kernel("foreign", requires=hal.Requires(vendor="nvidia")),
            rms_norm_kernel("absent", requires=hal.Requires(library="no_such_library")),
            rms_norm_kernel("unsound", run=lambda x, eps: x),
        ),
        "acme",
    )
    for wish in ("foreign", "absent", "unsound", "acme"):
        with pytest.raises(hal.Unsupported) as caught:
            hal.bind("cpu", hal.Policy(require={"rms_norm": wish}))
        text = str(caught.value)
        assert f"the policy requires {wish}" in text
        assert "made for nvidia, the device is cpu" in text
        assert "native: the policy requires" in text
        assert ("library no_such_library is not installed" in text) == (wish in ("absent", "acme", "foreign", "unsound"))
        assert ("takes (x, eps), the op takes (x, weight, eps)" in text) == (wish in ("unsound", "acme"))


def test_b07_a_required_plugin_that_is_broken_or_switched_off_is_unsupported_with_the_cause(
    site: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .helpers import write_distribution

    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": "raise OSError('no libacme')"})  # type: ignore[arg-type]
    with pytest.warns(hal.PluginWarning):
        hal.refresh()
    for wish in ("acme", "acme.fast"):
        with pytest.raises(hal.Unsupported, match="plugin acme: OSError: no libacme"):
            hal.bind("cpu", hal.Policy(require={"rms_norm": wish}))
    assert hal.bind("cpu", hal.Policy(deny={"*": "acme"})).rms_norm.kernel.id == "native"
    assert hal.bind("cpu", hal.Policy(require={"rms_norm": ["acme", "native"]})).rms_norm.kernel.id == "native"
    monkeypatch.setenv("TORCH_HAL_PLUGINS", "-acme")
    hal.refresh()
    with pytest.raises(hal.Unsupported, match="plugin acme: switched off by TORCH_HAL_PLUGINS"):
        hal.bind("cpu", hal.Policy(require={"rms_norm": "acme"}))


def test_b07_a_required_kernel_refuses_calls_rather_than_hand_them_over() -> None:
    hal.register(Offer(rms_norm_kernel(static=refuse_bfloat16, dynamic=refuse_long)), "acme")
    ops = hal.bind("cpu", hal.Policy(require={"rms_norm": "acme"}))
    assert (ops.rms_norm(*rms_norm_arguments(4)) == 7).all()
    with pytest.raises(hal.Unsupported, match=r"x=float32\[5, 8\].*acme: takes at most 4 rows, got 5"):
        ops.rms_norm(*rms_norm_arguments(5))
    with pytest.raises(hal.Unsupported, match="acme: takes no bfloat16"):
        ops.rms_norm.specialize(*rms_norm_arguments(dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("arch", "pattern", "satisfied"),
    [
        ("sm_100", "sm_100f", True),
        ("sm_103", "sm_100f", True),
        ("sm_120", "sm_100f", False),
        ("sm_121", "sm_120f", True),
        ("sm_90", "sm_100f", False),
        ("sm_120", "sm_100", False),
        ("sm_120", "sm_100+", True),
        ("sm_90", "sm_100+", False),
        ("sm_89", "sm_89+", True),
        ("sm_90", "sm_9", False),
        ("gfx942", "gfx94?", True),
        ("gfx950", "gfx94?", False),
        ("gfx950", "gfx942+", False),  # hexadecimal names have no order
        ("gfx90a", "gfx90a", True),
        ("mp_31", "mp_22+", True),
        ("mp_31", "sm_31", False),  # another vendor's domain
        ("mp_90", "sm_80+", False),
        ("mp_100", "sm_100f", False),
        (None, "*", False),
    ],
)
def test_b08_arch_patterns(arch: str | None, pattern: str, satisfied: bool) -> None:
    assert arch_matches(arch, pattern) is satisfied


def test_b08_sm120_does_not_satisfy_sm100_family() -> None:
    requires = hal.Requires("nvidia", ("sm_100f",))
    hal.register(Offer(rms_norm_kernel(requires=requires)), "acme")
    with pytest.warns(hal.FallbackWarning, match="built for sm_100f, the device is sm_120"):
        ops = hal.bind(replace(H200, arch="sm_120"))
    assert ops.rms_norm.kernel.id == "native"
    assert hal.explain("rms_norm", replace(H200, arch="sm_103")).chain[0].kernel.id == "acme"


def test_b08_the_same_arch_number_of_another_vendor_satisfies_nothing() -> None:
    hal.register(Offer(rms_norm_kernel(requires=hal.Requires("nvidia", ("sm_90",)))), "acme")
    other = hal.DeviceInfo("globex", "xpu", arch="sm_90", probed=True)
    with collected() as caught:
        explanation = hal.bind(other).explain("rms_norm")
    assert verdicts(explanation)["acme"] == ("refused", "made for nvidia, the device is globex")
    assert messages(caught, hal.FallbackWarning) == []  # it never was a candidate here


@pytest.mark.parametrize("how", ["a reason", "an exception", "an exit"])
def test_b09_a_library_without_an_image_for_this_gpu_is_rejected_and_the_process_lives(how: str) -> None:
    def probe(device: hal.DeviceInfo) -> str | None:
        if how == "an exception":
            raise RuntimeError("no kernel image is available for execution on the device")
        return sys.exit("no kernel image") if how == "an exit" else "no kernel image for sm_90"

    library = hal.Library("torch", probe=probe)
    hal.register(Offer(rms_norm_kernel(requires=hal.Requires("nvidia", library=library))), "acme")
    with pytest.warns(hal.FallbackWarning, match="rms_norm on cuda:0 falls back from acme to native.*no kernel image"):
        ops = hal.bind(H200)
    assert ops.rms_norm.kernel.id == "native"
    with pytest.raises(hal.Unsupported, match="no kernel image"):
        hal.bind(H200, hal.Policy(require={"rms_norm": "acme"}))
    with pytest.raises(hal.Unsupported, match="no kernel image"):
        hal.bind(H200, hal.Policy(fallback="error"))


def test_b10_a_jit_kernel_that_cannot_build_is_demoted_with_its_reason_at_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind is before weights load: probing runs there, importing the kernel's module too, and each once."""
    probes: list[str] = []

    def probe(device: hal.DeviceInfo) -> str:
        probes.append(str(device))
        return "needs a C++ compiler to build its kernels: c++ is not installed"

    monkeypatch.setitem(sys.modules, "acme_unbuilt", types.ModuleType("acme_unbuilt"))
    hal.register(
        Offer(
            rms_norm_kernel("jit", requires=hal.Requires(library=hal.Library("torch", probe=probe))),
            rms_norm_kernel("unbuilt", run="acme_unbuilt:rms_norm"),
            rms_norm_kernel("ready", value=5.0, band=hal.Band.PORTABLE),
        ),
        "acme",
    )
    for _ in range(2):
        with pytest.warns(hal.FallbackWarning, match="from acme.jit to acme.ready: acme.jit: needs a C\\+\\+ compiler"):
            ops = hal.bind("cpu")
    assert probes == ["cpu"]
    assert verdicts(ops.explain("rms_norm")) == {
        "acme.jit": ("refused", "needs a C++ compiler to build its kernels: c++ is not installed"),
        "acme.unbuilt": ("refused", "loading it raised AttributeError: module 'acme_unbuilt' has no attribute 'rms_norm'"),
        "acme.ready": ("chosen", ""),
        "native": ("behind", ""),
    }


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
    hal.register(Offer(rms_norm_kernel(requires=requires), rms_norm_kernel("b", op="silu_and_mul", requires=requires)), "acme")
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
    with pytest.warns(hal.FallbackWarning, match="may refuse a call on weights in its layout 'swapped', which no other"):
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
        torch.testing.assert_close(ops.linear.specialize(x, prepared, layout)(x, prepared, layout), x @ weight.T + offset)


def test_b17_plain_weights_still_find_a_kernel_behind_a_preparing_one() -> None:
    hal.register(Offer(preparing()), "acme")
    ops = hal.bind("cpu")
    x, weight = torch.randn(3, 4), torch.randn(2, 4)
    with collected():
        torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
    assert ops.linear.kernel.name == "swapper" and "native" in verdicts(ops.explain("linear"))
    assert set(ops) == set(declared())
