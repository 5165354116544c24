"""NVIDIA devices without any: what is listed, what is said, and what a probe would tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_hal as hal
from torch_hal.plugins import discover
from torch_hal_cuda import device as cuda
from torch_hal_cuda import torch_hal_devices, torch_hal_diagnose, torch_hal_probe
from torch_hal_cuda.kernels import KERNELS

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150 << 30, warp_size=32, is_integrated=False
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A CUDA build of torch, a driver that serves it, and two GPUs; each test takes something away."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "musa", None, raising=False)
    monkeypatch.setattr(cuda, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2, raising=False)
    monkeypatch.setattr(cuda, "_PCI", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_devices_are_listed_unprobed(machine: pytest.MonkeyPatch) -> None:
    first, second = torch_hal_devices()
    assert [str(first), str(second)] == ["cuda:0", "cuda:1"]
    assert (first.vendor, first.dist_backend, first.dispatch_key, first.graph_class) == (
        "nvidia", "nccl", "CUDA", "CUDAGraph",
    )  # fmt: skip
    assert (first.arch, first.memory_total, first.warp_size, first.fp8, first.probed) == (None, None, None, None, False)
    assert torch_hal_diagnose("cuda") is None
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("capability", "arch", "fp8", "features"),
    [
        ((8, 0), "sm_80", None, {"bf16"}),
        ((8, 9), "sm_89", "e4m3fn", {"bf16", "fp8"}),
        ((9, 0), "sm_90", "e4m3fn", {"bf16", "fp8", "tma", "pdl"}),
        ((10, 3), "sm_103", "e4m3fn", {"bf16", "fp8", "tma", "pdl"}),
        ((7, 5), "sm_75", None, set()),
    ],
)
def test_probe_fills_in_the_facts(
    machine: pytest.MonkeyPatch, capability: tuple[int, int], arch: str, fp8: str | None, features: set[str]
) -> None:
    properties = SimpleNamespace(**{**vars(PROPERTIES), "major": capability[0], "minor": capability[1]})
    machine.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device = torch_hal_probe(cuda.devices()[1])
    assert device is not None and device.probed and device.index == 1
    assert (device.arch, device.fp8, device.features) == (arch, fp8, features)
    assert (device.name, device.memory_total, device.warp_size) == ("NVIDIA H200", 150 << 30, 32)
    assert device.versions["cuda"] == "13.0" and device.versions["driver"] == "13.0"


def test_another_vendors_device_is_not_probed() -> None:
    assert torch_hal_probe(hal.DeviceInfo("amd", "cuda")) is None


@pytest.mark.parametrize("device_type", ["cpu", "musa", "xpu"])
def test_other_types_are_not_diagnosed(device_type: str) -> None:
    assert torch_hal_diagnose(device_type) is None


@pytest.mark.parametrize(
    ("build", "text"),
    [
        ({"cuda": None}, "is built without CUDA; install a CUDA build of torch"),
        ({"cuda": None, "hip": "6.3.42134"}, "is built for ROCm 6.3.42134: its 'cuda' devices are AMD GPUs"),
        ({"cuda": None, "musa": "4.3"}, "is built for MUSA 4.3"),
        ({"cuda": "13.0", "musa": "4.3"}, "is built for MUSA 4.3"),
    ],
)
def test_a_torch_for_other_hardware(machine: pytest.MonkeyPatch, build: dict[str, str | None], text: str) -> None:
    for name, version in build.items():
        machine.setattr(torch.version, name, version)
    assert text in str(torch_hal_diagnose("cuda"))
    assert list(torch_hal_devices()) == []


def test_no_driver(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(cuda, "driver_version", lambda: None)
    assert torch_hal_diagnose("cuda") == "no NVIDIA GPU and no NVIDIA driver (libcuda) on this machine"
    slot = tmp_path / "0000:01:00.0"
    slot.mkdir()
    (slot / "vendor").write_text("0x10de\n")
    (slot / "class").write_text("0x030200\n")
    assert "on the PCI bus, but its driver (libcuda) is not installed" in str(torch_hal_diagnose("cuda"))
    machine.setattr(torch.version, "cuda", None)
    assert "(an NVIDIA GPU is on the PCI bus)" in str(torch_hal_diagnose("cuda"))
    assert list(torch_hal_devices()) == []


@pytest.mark.parametrize(("driver", "usable"), [((12, 8), False), ((13, 0), True), ((13, 2), True), ((14, 0), True)])
def test_a_driver_must_serve_torchs_cuda(machine: pytest.MonkeyPatch, driver: tuple[int, int], usable: bool) -> None:
    machine.setattr(cuda, "driver_version", lambda: driver)
    assert (torch_hal_diagnose("cuda") is None) == usable
    assert len(list(torch_hal_devices())) == (2 if usable else 0)
    if not usable:
        text = "the NVIDIA driver is too old: it serves CUDA 12.8, torch is built for CUDA 13.0"
        assert text in str(torch_hal_diagnose("cuda"))


def test_within_one_major_version_an_older_driver_serves(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.version, "cuda", "13.4")
    assert torch_hal_diagnose("cuda") is None


def test_hidden_by_the_variable(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.setattr(torch.cuda, "device_count", lambda: 0)
    assert "hidden by CUDA_VISIBLE_DEVICES='' (2 present)" in str(torch_hal_diagnose("cuda"))
    assert list(torch_hal_devices()) == []


def test_a_driver_that_reports_no_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "device_count", lambda: 0)
    machine.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 0, raising=False)
    assert "reports no GPU" in str(torch_hal_diagnose("cuda"))
    machine.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "reports no GPU" in str(torch_hal_diagnose("cuda"))


def test_a_missing_driver_library_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", absent)
    assert cuda.driver_version() is None


OPS = {kernel.op for kernel in KERNELS}
HOPPER_ONLY = {"fp8_block_linear", "mla_decode"}


@pytest.mark.parametrize(
    ("vendor", "arch", "features", "refused"),
    [
        ("nvidia", "sm_90", {"fp8"}, set()),
        ("nvidia", "sm_100", {"fp8"}, HOPPER_ONLY),
        ("nvidia", "sm_120", {"fp8"}, HOPPER_ONLY),
        ("nvidia", "sm_80", set(), HOPPER_ONLY | {"per_token_group_quant_fp8"}),
        ("nvidia", "sm_75", set(), OPS - {"all_reduce"}),
        ("amd", "gfx942", {"fp8"}, OPS),
        ("mthreads", "mp_31", {"fp8"}, OPS),
    ],
)
def test_kernels_keep_to_their_hardware(vendor: str, arch: str, features: set[str], refused: set[str]) -> None:
    device = hal.DeviceInfo(vendor, "cuda", arch=arch, features=frozenset(features))
    reasons = {kernel.op: kernel.requires.refuse(device) for kernel in KERNELS}
    assert {op for op, reason in reasons.items() if reason} == refused
    wanted = "made for nvidia" if vendor != "nvidia" else f"the device is {arch}"
    assert all(wanted in str(reasons[op]) for op in refused)


def test_bind_says_why_there_is_no_device(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "-1")
    machine.setattr(torch.cuda, "device_count", lambda: 0)
    installed = any(plugin.name == "cuda" for plugin in discover().plugins)
    if not installed:
        import torch_hal_cuda

        hal.register(torch_hal_cuda, "cuda")
    try:
        with pytest.raises(hal.DeviceUnavailable, match="hidden by CUDA_VISIBLE_DEVICES='-1'"):
            hal.bind("cuda:0")
    finally:
        if not installed:
            hal.unregister("cuda")
