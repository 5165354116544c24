"""Devices: found without being used, probed once, refused with the cause, and never swapped for another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

import torch_hal as hal

from .helpers import H200, Offer, collected, rms_norm_kernel

ARCHS = ["ac_20", "ac_20", "ac_31"]


def acme(i: int, **facts: Any) -> hal.DeviceInfo:
    return hal.DeviceInfo("acme", "xpu", i, dispatch_key="XPU", **facts)


@pytest.fixture
def probed() -> list[int]:
    """A vendor with three devices of two archs; the fixture is the list of probes."""
    log: list[int] = []

    def probe(device: hal.DeviceInfo) -> hal.DeviceInfo | None:
        if device.vendor != "acme":
            return None
        log.append(device.index)
        facts = {"name": f"Acme {device.index}", "arch": ARCHS[device.index], "memory_total": 1 << 30}
        return replace(device, probed=True, **facts)

    def diagnose(device_type: str) -> str | None:
        return "the Acme driver is older than 7.2" if device_type in ("xpu", "acmeware") else None

    kernels = [
        rms_norm_kernel("old", requires=hal.Requires("acme", ("ac_20+",)), band=hal.Band.LIBRARY),
        rms_norm_kernel("new", requires=hal.Requires("acme", ("ac_30f",))),
    ]
    listing: Callable[[], Any] = lambda: [acme(i) for i in range(3)]  # noqa: E731
    hal.register(Offer(*kernels, torch_hal_devices=listing, torch_hal_probe=probe, torch_hal_diagnose=diagnose), "acme")
    return log


def test_listing_probes_nothing_and_binding_probes_the_one_device_once(probed: list[int]) -> None:
    listed = hal.devices()
    assert [(str(d), d.probed, d.arch) for d in listed[1:]] == [(f"xpu:{i}", False, None) for i in range(3)]
    assert listed[0].type == "cpu" and probed == []
    for _ in range(2):
        assert hal.bind("xpu:1").device == acme(1, name="Acme 1", arch="ac_20", memory_total=1 << 30, probed=True)
    assert probed == [1]


def test_devices_of_different_arch_and_the_host_work_in_one_process(probed: list[int]) -> None:
    with collected():
        chosen = {str(d): hal.bind(d).rms_norm.kernel.name for d in ("cpu", "xpu:0", "xpu:2")}
    assert chosen == {"cpu": "native", "xpu:0": "old", "xpu:2": "new"}


@pytest.mark.parametrize("device", ["xpu:2", torch.device("xpu", 2), acme(2)])
def test_a_device_is_asked_for_by_name_as_torch_writes_it_or_as_it_was_listed(probed: list[int], device: Any) -> None:
    with collected():
        ops = hal.bind(device)
    assert (ops.device.index, ops.device.arch, ops.torch_device) == (2, "ac_31", torch.device("xpu:2"))


def test_the_only_vendor_is_the_default_and_a_bare_type_its_current_device(
    probed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with collected():
        assert str(hal.bind().device) == str(hal.bind("xpu").device) == "xpu:0"
        monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.xpu, "current_device", lambda: 2)
        assert str(hal.bind("xpu").device) == "xpu:2"
        monkeypatch.setenv("TORCH_HAL_DEVICE", "cpu")
        assert str(hal.bind().device) == "cpu"


def test_the_host_is_the_default_where_there_is_nothing_else() -> None:
    host = hal.bind().device
    assert (host.vendor, host.type, host.probed, host.dist_backend, str(host)) == ("cpu", "cpu", True, "gloo", "cpu")
    assert host.memory_total is not None and host.memory_total > 1 << 28


@pytest.mark.parametrize(
    ("device", "cause"),
    [
        ("xpu:3", "device xpu:3: there is no such index; present are xpu:0, xpu:1, xpu:2"),
        ("cpu:1", "device cpu:1: there is no such index; present are cpu"),
        ("mtia:0", "no plugin offers devices of type 'mtia'; present are cpu, xpu:0, xpu:1, xpu:2"),
        ("acmeware:0", "the Acme driver is older than 7.2"),  # torch does not know the type, a plugin does
        ("nonsense", "no plugin offers devices of type 'nonsense'"),
        ("", "device '': expected a torch device such as 'cpu' or 'cuda:0'"),
        ("cuda:one", "device 'cuda:one': expected a torch device"),
        (5.5, "device 5.5: expected a torch device"),
    ],
)
def test_a_device_that_cannot_be_used_raises_with_the_cause(probed: list[int], device: Any, cause: str) -> None:
    with pytest.raises(hal.DeviceUnavailable, match=cause):
        hal.bind(device)
    with pytest.raises(hal.DeviceUnavailable, match=cause):
        hal.explain("rms_norm", device)


def test_a_vendor_without_devices_says_why() -> None:
    hal.register(Offer(torch_hal_diagnose=lambda device_type: "hidden by ACME_VISIBLE_DEVICES"), "acme")
    with pytest.raises(hal.DeviceUnavailable, match="device xpu:0: hidden by ACME_VISIBLE_DEVICES"):
        hal.bind("xpu:0")


def test_a_diagnosis_that_fails_hides_no_other_ones() -> None:
    def fail(device_type: str) -> str:
        raise OSError("no /dev/acme")

    hal.register(Offer(torch_hal_diagnose=fail), "acme")
    with pytest.raises(hal.DeviceUnavailable, match="plugin 'acme' could not say why: OSError: no /dev/acme"):
        hal.bind("xpu:0")
    hal.register(Offer(torch_hal_diagnose=lambda device_type: "the driver is too old"), "globex")
    with pytest.raises(hal.DeviceUnavailable, match="device xpu:0: the driver is too old"):
        hal.bind("xpu:0")


def test_the_setting_that_names_a_device_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HAL_DEVICE", "mtia:0")
    with pytest.raises(hal.DeviceUnavailable, match="mtia"):
        hal.bind()
    assert str(hal.bind("cpu").device) == "cpu"


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (lambda device: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda device: sys.exit("no licence"), "SystemExit: no licence"),
        (lambda device: "an H100", "AttributeError"),
        (lambda device: replace(device, index=1, probed=True), "gave xpu:1, another device"),
        (lambda device: hal.bind("xpu:0").device, "torch_hal_probe binds or explains xpu:0"),
        (lambda device: hal.explain("rms_norm", device).device, "torch_hal_probe binds or explains xpu:0"),
    ],
)
def test_a_probe_that_fails_is_the_cause_and_may_be_tried_again(probe: Callable[[Any], Any], reason: str) -> None:
    working = [False]

    def torch_hal_probe(device: hal.DeviceInfo) -> Any:
        return replace(device, arch="ac_20", probed=True) if working[0] else probe(device)

    hal.register(Offer(torch_hal_devices=lambda: [acme(0)], torch_hal_probe=torch_hal_probe), "acme")
    with pytest.raises(hal.DeviceUnavailable, match=f"device xpu:0: probing it failed: .*{reason}"):
        hal.bind("xpu:0")
    assert str(hal.bind("cpu").device) == "cpu"
    working[0] = True
    assert hal.bind("xpu:0").device.arch == "ac_20"


def test_a_type_that_torch_does_not_know_yet_can_be_listed_asked_for_and_probed() -> None:
    """As MUSA's is before torch_musa is imported, which is for the probe to do."""

    def probe(device: hal.DeviceInfo) -> hal.DeviceInfo:
        return replace(device, arch="ac_20", probed=True)

    hal.register(Offer(torch_hal_devices=lambda: [hal.DeviceInfo("acme", "acmeware")], torch_hal_probe=probe), "acme")
    assert [str(device) for device in hal.devices()][-1] == "acmeware:0"
    assert hal.explain("rms_norm", "acmeware").device.arch == "ac_20"


def test_a_device_that_torch_does_not_know_even_after_the_probe_is_unavailable() -> None:
    hal.register(Offer(torch_hal_devices=lambda: [hal.DeviceInfo("acme", "acmeware", 3, probed=True)]), "acme")
    for device in ("acmeware:3", None):
        with pytest.raises(hal.DeviceUnavailable, match="device acmeware:3: torch does not know it: RuntimeError"):
            hal.bind(device)
    assert str(hal.bind("cpu").device) == "cpu"


def test_a_probe_may_bind_the_host() -> None:
    def probe(device: hal.DeviceInfo) -> hal.DeviceInfo:
        return replace(device, name=hal.bind("cpu").rms_norm.kernel.id, probed=True)

    hal.register(Offer(torch_hal_devices=lambda: [acme(0)], torch_hal_probe=probe), "acme")
    assert hal.bind("xpu:0").device.name == "native"


def test_a_diagnosis_that_asks_for_the_device_itself_is_named() -> None:
    hal.register(Offer(torch_hal_diagnose=lambda device_type: str(hal.bind(device_type))), "acme")
    with pytest.raises(hal.DeviceUnavailable, match="torch_hal_diagnose binds what it is asked about"):
        hal.bind("xpu:0")


def test_a_librarys_probe_that_binds_does_not_wait_for_itself() -> None:
    def probe(device: hal.DeviceInfo) -> str | None:
        with collected():
            return f"without it {hal.bind(device).rms_norm.kernel.id} would run"

    kernel = rms_norm_kernel(requires=hal.Requires(library=hal.Library("torch", probe=probe)))
    hal.register(Offer(kernel), "acme")
    with pytest.warns(hal.FallbackWarning, match="acme: without it native would run"):
        hal.bind("cpu")


def test_an_emulated_device_can_be_bound_without_its_hardware() -> None:
    with collected():
        ops = hal.bind(H200)
    assert ops.device is H200
    with pytest.raises(hal.ArgumentError, match="argument 'x': expected a tensor on cuda:0, got one on cpu"):
        ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)


def test_a_description_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        H200.arch = "sm_100"  # type: ignore[misc]
    with pytest.raises(TypeError):
        replace(H200, versions={"a": "1"}).versions["a"] = "2"  # type: ignore[index]
    assert hash(H200) == hash(replace(H200)) and replace(H200) == H200
