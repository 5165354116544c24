"""Behaviours 7 to 10: what may serve at all, decided at bind with a reason, on the device that is asked for."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_hal as hal
from torch_hal.device import arch_matches

from .helpers import (
    H200,
    Offer,
    collected,
    messages,
    refuse_bfloat16,
    refuse_long,
    rms_norm_arguments,
    rms_norm_kernel,
    verdicts,
    write_distribution,
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
        assert "native: the policy wants" in text
        assert "library no_such_library is not installed" in text
        if wish in ("unsound", "acme"):
            assert "takes (x, eps), the op takes (x, weight, eps)" in text


def test_b07_a_required_plugin_that_is_broken_or_switched_off_is_unsupported_with_the_cause(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": "raise OSError('no libacme')"})
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


@pytest.mark.parametrize(("answer", "reason"), [("", "its probe gave no reason"), (False, "False")])
def test_b09_a_probe_that_answers_anything_but_none_refuses(answer: object, reason: str) -> None:
    library = hal.Library("torch", probe=lambda device: answer)
    hal.register(Offer(rms_norm_kernel(requires=hal.Requires(library=library))), "acme")
    with pytest.warns(hal.FallbackWarning, match=f"acme: {reason}"):
        assert verdicts(hal.bind("cpu").explain("rms_norm"))["acme"] == ("refused", reason)


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
        "acme.unbuilt": (
            "refused",
            "loading it raised AttributeError: module 'acme_unbuilt' has no attribute 'rms_norm'",
        ),
        "acme.ready": ("chosen", ""),
        "native": ("behind", ""),
    }
