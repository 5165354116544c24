"""Selection: one order that never depends on luck, nothing imported before its turn, and reasons for everything."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import torch_hal as hal
from torch_hal.kernel import _version_ok
from torch_hal.policy import Policy
from torch_hal.selection import select

from .helpers import (
    H200,
    Offer,
    collected,
    messages,
    refuse_long,
    rms_norm_kernel,
    state_of,
    verdicts,
    write_distribution,
)


def ranked(kernels: list[hal.Kernel], policy: hal.Policy) -> list[str]:
    explanation = select(hal.ops.rms_norm, hal.devices()[0], kernels, policy)
    return [verdict.kernel.id for verdict in explanation.verdicts]


def test_the_order_is_wish_then_band_then_direct_then_plugin_then_yield_whatever_order_they_come_in() -> None:
    kernels = [
        rms_norm_kernel("wished", band=hal.Band.PORTABLE, plugin="zeta"),
        rms_norm_kernel("tuned", band=hal.Band.TUNED, plugin="zeta", position=9),
        rms_norm_kernel("first", band=hal.Band.LIBRARY, plugin="acme", position=1),
        rms_norm_kernel("second", band=hal.Band.LIBRARY, plugin="acme", position=2),
        rms_norm_kernel("other", band=hal.Band.LIBRARY, plugin="globex", position=0),
        rms_norm_kernel("derived", band=hal.Band.LIBRARY, plugin="acme", position=0, derived_from="rms_norm_"),
    ]
    expected = ["zeta.wished", "zeta.tuned", "acme.first", "acme.second", "globex.other", "acme.derived"]
    for shuffled in itertools.islice(itertools.permutations(kernels), 0, None, 37):
        assert ranked(list(shuffled), Policy(prefer={"rms_norm": "wished"})) == expected


def test_two_plugins_never_break_each_other_and_native_comes_last() -> None:
    for plugin in ("globex", "acme"):
        hal.register(Offer(rms_norm_kernel("fast", dynamic=refuse_long)), plugin)
    assert list(verdicts(hal.bind("cpu").explain("rms_norm"))) == ["acme.fast", "globex.fast", "native"]
    hal.unregister("acme")
    assert hal.bind("cpu").rms_norm.kernel.id == "globex.fast"


def test_code_is_imported_only_when_its_kernel_may_run(site: Path) -> None:
    """Neither listing nor what comes after a kernel that takes every call imports a kernel's module."""
    source = """
from torch_hal import Band, Kernel, Requires, hookimpl

@hookimpl
def torch_hal_kernels():
    yield Kernel("rms_norm", "winner", run="acme_winner:rms_norm", band=Band.TUNED)
    yield Kernel("rms_norm", "behind", run="acme_behind:rms_norm", band=Band.LIBRARY)
    yield Kernel("rms_norm", "foreign", run="acme_foreign:rms_norm", requires=Requires("nvidia"), band=30)
    yield Kernel("silu_and_mul", "denied", run="acme_denied:silu_and_mul")
"""
    kernel = "def rms_norm(x, weight, eps): return x"
    modules = {"acme_hal": source, "acme_winner": kernel, "acme_behind": kernel}
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, modules)
    hal.refresh()
    assert state_of("acme").state == "loaded"
    assert not {"acme_winner", "acme_behind"} & set(sys.modules)
    ops = hal.bind("cpu", hal.Policy(deny={"silu_and_mul": "denied"}))
    assert verdicts(ops.explain("rms_norm")) == {
        "acme.foreign": ("refused", "made for nvidia, the device is cpu"),
        "acme.winner": ("chosen", ""),
        "acme.behind": ("behind", ""),
        "native": ("behind", ""),
    }
    assert "acme_winner" in sys.modules and "acme_behind" not in sys.modules


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        (hal.Requires("amd"), "made for amd, the device is nvidia"),
        (hal.Requires(arch="sm_80"), "built for sm_80, the device is sm_90"),  # type: ignore[arg-type]
        (hal.Requires(features="tcgen05"), "needs device features tcgen05"),  # type: ignore[arg-type]
        (hal.Requires(arch=("sm_80", "sm_100f")), "built for sm_80, sm_100f, the device is sm_90"),
        (hal.Requires(features=frozenset({"tma", "tcgen05", "cluster"})), "needs device features cluster, tcgen05"),
        (hal.Requires(library="no_such_library"), "library no_such_library is not installed"),
        (hal.Requires(library="torch>=99"), "library torch is .*, wants >=99"),
        (hal.Requires(library="json>=1"), "library json: its version is unknown, wants >=1"),
    ],
)
def test_what_a_kernel_requires_is_the_reason_when_it_is_not_there(requires: hal.Requires, reason: str) -> None:
    kernel = rms_norm_kernel(requires=requires)
    with pytest.raises(hal.Unsupported, match=f"rms_norm on cuda:0: no kernel may serve. acme: {reason}"):
        select(hal.ops.rms_norm, H200, [kernel], Policy())


def test_a_device_that_was_never_probed_satisfies_no_arch() -> None:
    device = hal.DeviceInfo("nvidia", "cuda")
    with pytest.raises(hal.Unsupported, match="the device is unprobed"):
        select(hal.ops.rms_norm, device, [rms_norm_kernel(requires=hal.Requires(arch=("sm_90",)))], Policy())


@pytest.mark.parametrize(
    ("have", "wanted", "fine"),
    [
        ("1.4.2", ">=1.4", True),
        ("1.10", ">=1.9", True),
        ("1.4", ">=1.4.0", True),
        ("1.4.0", "==1.4", True),
        ("1.4.2", "==1.4", True),
        ("1.4", "==1.4.0", True),
        ("1.40", "==1.4", False),
        ("1.4", "!=1.4.0", False),
        ("1.4.1", "<=1.4", False),
        ("1.4", "<1.4.0", False),
        ("1.4.0", ">1.4", False),
        ("2.0", ">=1.2,<2", False),
        ("1.9.9", " >= 1.2 , < 2 ", True),
        ("0.6.0.post1+cu130", ">=0.6", True),
        ("unknown", ">=0.1", False),
    ],
)
def test_versions_compare_as_numbers(have: str, wanted: str, fine: bool) -> None:
    assert _version_ok(have, wanted) is fine


@pytest.mark.parametrize("text", ["acme kernels", "acme>=", "acme>=one", "acme~=1.4", ">=1.4", "acme>=1.4 or so", ""])
def test_a_library_requirement_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="requirement"):
        hal.Requires(library=text)


def test_looking_for_a_library_imports_nothing(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    (site / "acme_kernels").mkdir()
    (site / "acme_kernels" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert hal.Library("acme_kernels").missing() is None
    assert hal.Library("acme_kernels.flash").missing() is None
    monkeypatch.setitem(sys.modules, "acme_half", types.ModuleType("acme_half"))  # has no spec: half-imported
    assert hal.Library("acme_half").missing() == "library acme_half is not installed"


def test_requirements_that_raise_are_a_reason() -> None:
    class Bad(hal.Requires):
        def refuse(self, device: hal.DeviceInfo) -> str | None:
            raise KeyError("arch")

    hal.register(Offer(rms_norm_kernel(requires=Bad())), "acme")
    with pytest.warns(hal.FallbackWarning, match="its requirements raised KeyError: 'arch'"):
        assert hal.bind("cpu").rms_norm.kernel.id == "native"


def test_a_preference_that_cannot_be_met_is_one_warning_from_what_to_what_and_why() -> None:
    foreign = rms_norm_kernel("foreign", requires=hal.Requires("nvidia"))
    hal.register(Offer(foreign, rms_norm_kernel("ours", value=5.0)), "acme")
    with collected() as caught:
        hal.bind("cpu")
        assert messages(caught, hal.FallbackWarning) == []  # nobody asked for it
        hal.bind("cpu", hal.Policy(prefer={"rms_norm": "foreign"}))
    assert messages(caught, hal.FallbackWarning) == [
        "rms_norm on cpu falls back from acme.foreign to acme.ours: acme.foreign: made for nvidia, the device is cpu"
    ]
    with pytest.raises(hal.Unsupported, match=r"from acme.foreign to acme.ours.*policy.fallback is 'error'"):
        hal.bind("cpu", hal.Policy(prefer={"rms_norm": "foreign"}, fallback="error"))


def test_an_explanation_says_for_every_candidate_chosen_or_why_not() -> None:
    hal.register(
        Offer(
            rms_norm_kernel("denied"),
            rms_norm_kernel("absent", requires=hal.Requires(library="no_such_library")),
            rms_norm_kernel("choosy", dynamic=refuse_long),
            rms_norm_kernel("taker", value=5.0, band=hal.Band.LIBRARY),
        ),
        "acme",
    )
    explanation = hal.explain("rms_norm", "cpu", hal.Policy(deny={"*": "denied"}))
    expected = [
        ("denied", "refused", "denied by policy", "policy"),
        ("absent", "refused", "library no_such_library is not installed", "missing"),
        ("choosy", "chosen", "may refuse a call", ""),
        ("taker", "next", "", ""),
        ("native", "behind", "kernels before it take every call", ""),
    ]
    data = json.loads(json.dumps(explanation.to_dict()))
    assert (data["op"], data["device"]) == ("rms_norm", "cpu")
    assert [(k["kernel"], k["state"], k["reason"], k["cause"]) for k in data["kernels"]] == expected
    assert data["kernels"][2]["refusals"] == ["dynamic"]
    lines = str(explanation).splitlines()
    assert lines[0] == "rms_norm on cpu:"
    assert [line.split()[:2] for line in lines[1:]] == [[state, f"acme.{name}"] for name, state, *_ in expected[:4]] + [
        ["behind", "native"]
    ]
    assert "may refuse a call" in lines[3]
    assert [loaded.kernel.name for loaded in explanation.chain] == ["choosy", "taker"]


def test_explaining_and_binding_agree_and_an_unknown_op_is_an_error() -> None:
    hal.register(Offer(rms_norm_kernel(dynamic=refuse_long)), "acme")
    assert hal.explain("rms_norm", "cpu").to_dict() == hal.bind("cpu").explain("rms_norm").to_dict()
    with pytest.raises(hal.PolicyError, match="no op 'rms_nrom'"):
        hal.explain("rms_nrom", "cpu")
    with pytest.raises(KeyError, match="no op 'rms_nrom'"):
        hal.bind("cpu").explain("rms_nrom")


@pytest.mark.parametrize(("field", "trait"), [("deterministic", "DETERMINISTIC"), ("graph_safe", "GRAPH_SAFE")])
def test_a_required_trait_leaves_out_kernels_that_do_not_declare_it(field: str, trait: str) -> None:
    with_it = rms_norm_kernel("with_it", value=5.0, band=hal.Band.PORTABLE, traits=frozenset({hal.Trait[trait]}))
    hal.register(Offer(rms_norm_kernel("without"), with_it), "acme")
    policy: Any = hal.Policy(**{field: True})
    ops = hal.bind("cpu", policy)
    assert ops.rms_norm.kernel.name == "with_it"
    assert verdicts(ops.explain("rms_norm"))["acme.without"][1].endswith(f"asks for {field}, which it does not declare")
    with pytest.warns(hal.FallbackWarning, match=f"from acme.without to acme.with_it.*asks for {field}"):
        hal.bind("cpu", policy.model_copy(update={"prefer": {"rms_norm": ("without",)}}))
