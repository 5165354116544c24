"""Policies: where they come from, what they mean, and that one which can mean nothing is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

import torch_hal as hal
from torch_hal.policy import resolve

from .helpers import Offer, rms_norm_arguments, rms_norm_kernel, verdicts


@pytest.fixture
def acme() -> None:
    hal.register(Offer(rms_norm_kernel("fast"), rms_norm_kernel("slow", value=5.0, band=hal.Band.PORTABLE)), "acme")


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("fast", "acme.fast"),
        ("slow", "acme.slow"),
        ("acme", "acme.fast"),
        ("acme.slow", "acme.slow"),
        ("ac*", "acme.fast"),
        ("*.slow", "acme.slow"),
        ("native", "native"),
        (["slow", "fast"], "acme.slow"),
        (["native", "slow"], "native"),
    ],
)
def test_a_preference_names_kernels_plugins_or_both_in_order(pattern: Any, chosen: str) -> None:
    for policy in (hal.Policy(prefer={"rms_norm": pattern}), hal.Policy(require={"rms_nor[m]": pattern})):
        assert hal.bind("cpu", policy).rms_norm.kernel.id == chosen


@pytest.mark.usefixtures("acme")
def test_deny_leaves_out_and_says_so() -> None:
    ops = hal.bind("cpu", hal.Policy(deny={"rms_nor[m]": ["fast", "native"]}))
    assert verdicts(ops.explain("rms_norm")) == {
        "acme.fast": ("refused", "denied by policy"),
        "acme.slow": ("chosen", ""),
        "native": ("refused", "denied by policy"),
    }
    with pytest.raises(hal.Unsupported, match=r"acme\.fast: denied.*acme\.slow: denied.*native: denied"):
        hal.bind("cpu", hal.Policy(deny={"rms_norm": ["acme", "native"]}))


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("field", ["prefer", "require", "deny"])
@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"rms_nrom": "fast"}, "'rms_nrom' matches no op"),
        ({"rms_norm": "fsat"}, "'fsat' matches no kernel; offered are acme.fast, acme.slow, native"),
        ({"linear": "fast"}, "'fast' matches no kernel"),  # an op that it does not serve
        ({"rms_norm": ["fast", "acme.fsat"]}, "'acme.fsat' matches no kernel"),
        ({"rms_norm": []}, "names no kernel"),
        ({"rms_norm": ""}, "'' matches no kernel"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(field: str, rules: dict[str, Any], named: str) -> None:
    policy = hal.Policy(**{field: rules})
    for use in (lambda: hal.bind("cpu", policy), lambda: hal.explain("rms_norm", "cpu", policy)):
        with pytest.raises(hal.PolicyError, match=f"policy.{field}.*{named}"):
            use()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"perfer": {}}, "perfer"),
        ({"prefer": 5}, "prefer"),
        ({"prefer": {"rms_norm": 5}}, "prefer.rms_norm"),
        ({"prefer": "rms_norm"}, "expected 'op_glob=kernel,kernel"),
        ({"fallback": "ignore"}, "fallback"),
        ({"validation": "maybe"}, "validation"),
    ],
)
def test_a_field_that_cannot_be_read_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(hal.PolicyError, match=named):
        hal.Policy(**values)


def test_a_policy_does_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        hal.Policy().trace = True  # type: ignore[misc]


def test_variables_say_what_code_says() -> None:
    environ = {
        "TORCH_HAL_PREFER": " rms_norm = acme, native ; moe_*=triton",
        "TORCH_HAL_DENY": "*=slow",
        "TORCH_HAL_VALIDATION": "0",
        "TORCH_HAL_TRACE": "true",
        "TORCH_HAL_FALLBACK": "error",
        "TORCH_HAL_PLUGINS": "x",
        "OTHER": "x",
    }
    assert resolve(None, {"TORCH_HAL_PREFER": "*=a;*=b,c"}).prefer == {"*": ("a", "b", "c")}
    assert resolve(None, environ) == hal.Policy(
        prefer={"rms_norm": ("acme", "native"), "moe_*": ("triton",)},
        deny={"*": ("slow",)},
        validation=False,
        trace=True,
        fallback="error",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREFER", "rms_norm"),
        ("PREFER", "rms_norm="),
        ("REQUIRE", "=acme"),
        ("VALIDATION", "maybe"),
        ("FALLBACK", "warning"),
        ("GRAPH_SAFE", ""),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error_naming_the_field(name: str, value: str) -> None:
    with pytest.raises(hal.PolicyError, match=name.lower()):
        resolve(None, {f"TORCH_HAL_{name}": value})


def test_code_beats_variables_beat_the_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('deterministic = true\ntrace = true\nfallback = "error"\n[prefer]\n"rms_*" = ["acme", "native"]\n')
    environ = {"TORCH_HAL_POLICY": str(file), "TORCH_HAL_TRACE": "off", "TORCH_HAL_FALLBACK": "warn"}
    policy = resolve(hal.Policy(fallback="error"), environ)
    assert policy.prefer == {"rms_*": ("acme", "native")}
    assert (policy.deterministic, policy.trace, policy.fallback) == (True, False, "error")
    # A field that code sets to its default is set; one that it leaves alone is not.
    assert resolve(hal.Policy(deterministic=False), environ).deterministic is False
    assert resolve(hal.Policy(), environ).deterministic is True


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "No such file"),
        ("prefer = ", "policy.toml"),
        ("perfer = {}", "perfer"),
        ("validation = 'x'", "validation"),
        ("[prefer]\nrms_norm = 3", "prefer.rms_norm"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, named: str
) -> None:
    file = tmp_path / "policy.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("TORCH_HAL_POLICY", str(file))
    with pytest.raises(hal.PolicyError, match=named):
        hal.bind("cpu")


@pytest.mark.usefixtures("acme")
def test_the_environment_reaches_bind_and_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HAL_REQUIRE", "rms_norm=slow")
    assert hal.bind("cpu").rms_norm.kernel.name == "slow"
    assert hal.explain("rms_norm", "cpu").chain[0].kernel.name == "slow"
    assert hal.bind("cpu", hal.Policy(require={})).rms_norm.kernel.name == "fast"
    monkeypatch.setenv("TORCH_HAL_REQUIRE", "rms_norm=solw")
    with pytest.raises(hal.PolicyError, match="solw"):
        hal.bind("cpu")


class Watched(MutableMapping[str, str]):
    """An environment that knows whether it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> str:
        self.asked.append(name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: str) -> None: ...

    def __delitem__(self, name: str) -> None: ...

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_the_environment_is_read_at_bind_and_never_at_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = hal.bind("cpu")
    watched = Watched()
    monkeypatch.setattr(os, "environ", watched)
    hal.bind("cpu")
    assert {"TORCH_HAL_REQUIRE", "TORCH_HAL_POLICY"} <= set(watched.asked)
    watched.asked.clear()
    ops.rms_norm(*rms_norm_arguments())
    ops.rms_norm.specialize(*rms_norm_arguments())(*rms_norm_arguments())
    assert watched.asked == []


def test_a_policy_that_is_changed_in_place_changes_no_bound_set() -> None:
    hal.register(Offer(rms_norm_kernel()), "acme")
    rules: dict[str, Any] = {"rms_norm": ["native"]}
    ops = hal.bind("cpu", hal.Policy(require=rules))
    rules["rms_norm"] = ["acme"]
    assert ops.rms_norm.kernel.id == "native"
    assert ops.policy.require == {"rms_norm": ("native",)}
