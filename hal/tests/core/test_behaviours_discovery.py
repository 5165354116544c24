"""Behaviours 1 to 6, 11 and 12: plugins are found, isolated, retried and reported, and finding them touches nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_hal as hal
from torch_hal import plugins
from torch_hal.op import declared

from .helpers import (
    Offer,
    collected,
    messages,
    rms_norm_arguments,
    rms_norm_kernel,
    state_of,
    write_acme,
    write_distribution,
)

RAISES = "raise OSError('libacme.so.7: cannot open shared object file')"
HALF_WAY = """
import sys
import torch
from torch_hal import Kernel, hookimpl, op

@op(shapes={"x": "..."}, dtypes={})
def acme_only(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@hookimpl
def torch_hal_kernels():
    yield Kernel("rms_norm", "broken", run="nowhere:at_all", band=30)
    FAILURE
"""
REPORT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_hal as hal
    from torch_hal.plugins import discover
    states = {p.name: p.state for p in discover().plugins}
    winner = hal.bind("cpu").rms_norm.kernel.id
print(json.dumps({"states": states, "winner": winner, "warnings": [str(w.message) for w in caught]}))
"""


def test_b01_an_entry_point_that_raises_gives_one_warning_naming_plugin_and_exception(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    write_distribution(tmp_path, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": RAISES})
    report = json.loads(run_python(REPORT))
    [warning] = [text for text in report["warnings"] if "acme" in text]
    assert "plugin 'acme' (acme-hal 1.0, acme_hal)" in warning
    assert "OSError: libacme.so.7: cannot open shared object file" in warning
    assert report["states"]["acme"] == "broken"


@pytest.mark.parametrize("failure", ["raise RuntimeError('half-way')", "sys.exit(3)", "yield 'not a kernel'"])
def test_b02_a_broken_entry_point_stops_no_other_and_leaves_nothing_behind(site: Path, failure: str) -> None:
    write_distribution(
        site, "broken-hal", {"broken": "broken_hal"}, {"broken_hal": HALF_WAY.replace("FAILURE", failure)}
    )
    write_acme(site)
    ops, modules = set(declared()), set(sys.modules)
    with collected() as caught:
        registry = hal.refresh()
    assert len(messages(caught, hal.PluginWarning)) == 1
    assert (state_of("broken").state, state_of("acme").state) == ("broken", "loaded")
    assert not [kernel for kernel in registry.kernels if kernel.plugin == "broken"]
    assert set(declared()) == ops
    assert "broken_hal" not in set(sys.modules) - modules
    assert hal.bind("cpu").rms_norm.kernel.id == "acme"


@pytest.mark.parametrize(
    ("kernels", "named"),
    [
        ("yield Kernel('rms_norm', 'Acme', run='m:f')", "'Acme'"),
        ("yield Kernel('rms_norm', 'native', run='m:f')", "'native'"),
        ("yield Kernel('rms_norm', 'a', run='m:f'); yield Kernel('rms_norm', 'a', run='m:g')", "twice"),
        ("return Kernel('rms_norm', 'a', run='m:f')", "not iterable"),
        ("yield Kernel('rms_norm', 'a', run='m:f', requires=Requires(library='acme>=1.x'))", "'>=1.x'"),
        ("yield Kernel('rms_norm')", "missing 2 required"),
        ("yield Kernel('rms_norm', 'a', run='m:f', band=7)", "7 is not a valid Band"),
        ("yield Kernel('rms_norm', 'a', run='m:f', traits={'graph_save'})", "'graph_save' is not a valid Trait"),
    ],
)
def test_b02_junk_from_a_plugin_is_its_own_failure(site: Path, kernels: str, named: str) -> None:
    source = f"""
from torch_hal import Kernel, Requires, hookimpl
@hookimpl
def torch_hal_kernels():
    {kernels}
"""
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": source})
    with pytest.warns(hal.PluginWarning, match="acme"):
        hal.refresh()
    assert state_of("acme").state == "broken"
    assert named in state_of("acme").error


@pytest.mark.parametrize("value", ["", "acme hal", "no_such_module", "acme_hal:no_such_attribute", "acme_hal:"])
def test_b02_a_malformed_or_dangling_entry_point_is_reported(site: Path, value: str) -> None:
    write_distribution(site, "acme-hal", {"acme": value}, {"acme_hal": "x = 1"})
    with pytest.warns(hal.PluginWarning, match="acme"):
        hal.refresh()
    assert state_of("acme").state == "broken"


def test_b02_metadata_without_its_metadata_file_stops_nothing(site: Path) -> None:
    write_distribution(site, "husk", {"husk": "husk_hal"}, metadata=False)
    write_acme(site)
    with pytest.warns(hal.PluginWarning, match=r"husk.*husk-1\.0\.dist-info"):
        hal.refresh()
    assert (state_of("husk").state, state_of("acme").state) == ("broken", "loaded")


def test_b03_a_failed_discovery_can_be_retried_in_the_same_process(site: Path) -> None:
    write_acme(site)
    good = (site / "acme_hal.py").read_text()
    (site / "acme_hal.py").write_text("import acme_helper\nraise ImportError('first run: a cache is being built')")
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_helper": "x = 1"})
    with pytest.warns(hal.PluginWarning, match="a cache is being built"):
        hal.refresh()
    assert hal.bind("cpu").rms_norm.kernel.id == "native"
    (site / "acme_hal.py").write_text(good + "\n# mended")
    hal.refresh()
    assert state_of("acme").state == "loaded"
    assert hal.bind("cpu").rms_norm.kernel.id == "acme"


def test_b03_an_error_filter_on_warnings_does_not_hide_the_registry(site: Path) -> None:
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": RAISES})
    with pytest.raises(hal.PluginWarning):  # this project's own filter
        hal.refresh()
    assert state_of("acme").state == "broken"
    assert hal.bind("cpu").rms_norm.kernel.id == "native"


def test_b04_a_plugin_whose_one_kernel_is_unusable_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x[..., : x.shape[-1] // 2], 5.0)

    offer = Offer(
        rms_norm_kernel(run="no_such_module:rms_norm"),
        hal.Kernel("silu_and_mul", "acme", run=silu_and_mul),
        hal.Kernel("an_op_of_the_future", "acme", run=silu_and_mul),
    )
    hal.register(offer, "acme")
    with pytest.warns(hal.FallbackWarning, match="rms_norm on cpu falls back from acme to native"):
        ops = hal.bind("cpu")
    assert ops.rms_norm.kernel.id == "native"
    assert ops.silu_and_mul(torch.ones(2, 4)).tolist() == [[5.0, 5.0]] * 2
    assert "an_op_of_the_future" in state_of("acme").notes[0]


def test_b05_an_override_reaches_the_next_bind_and_says_so_and_no_earlier_one() -> None:
    from torch_hal.ops import rms_norm as imported_early

    arguments = rms_norm_arguments()
    before = hal.bind("cpu")
    early = before.rms_norm
    hal.register(Offer(rms_norm_kernel()), "acme")
    after = hal.bind("cpu")

    assert (after.rms_norm(*arguments) == 7).all()
    assert after.explain("rms_norm").chosen is not None and after.explain("rms_norm").chosen.kernel.id == "acme"
    assert "chosen   acme" in str(after.explain("rms_norm"))
    assert after.manifest.digest != before.manifest.digest
    for callable_ in (early, before.rms_norm, imported_early):
        torch.testing.assert_close(callable_(*arguments), hal.ops.rms_norm.reference(*arguments))

    hal.unregister("acme")
    assert hal.bind("cpu").rms_norm.kernel.id == "native"
    assert (after.rms_norm(*arguments) == 7).all()


def test_b06_two_vendors_at_once_name_both_and_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = hal.DeviceInfo("acme", "xpu", probed=True), hal.DeviceInfo("globex", "mtia", probed=True)
    hal.register(Offer(torch_hal_devices=lambda: [one]), "acme")
    hal.register(Offer(torch_hal_devices=lambda: [other]), "globex")
    with pytest.raises(hal.DeviceUnavailable, match=r"acme \(xpu:0\) and globex \(mtia:0\).*TORCH_HAL_DEVICE"):
        hal.bind()
    assert hal.bind("cpu").device.vendor == "cpu"
    monkeypatch.setenv("TORCH_HAL_DEVICE", "mtia:0")
    assert hal.bind().device == other


def test_b06_two_distributions_with_one_name_are_an_error_naming_both(site: Path) -> None:
    write_acme(site)
    write_distribution(site, "globex-hal", {"acme": "globex_hal"}, {"globex_hal": "x = 1"})
    with pytest.warns(hal.PluginWarning, match=r"acme-hal 1\.0 \(acme_hal\) and globex-hal 1\.0 \(globex_hal\)"):
        hal.refresh()
    assert state_of("acme").state == "broken"
    assert "TORCH_HAL_PLUGINS=-acme" in state_of("acme").error


def test_b06_two_plugins_that_claim_one_device_are_named_with_the_setting(site: Path) -> None:
    source = """
from torch_hal import DeviceInfo, hookimpl
@hookimpl
def torch_hal_devices():
    yield DeviceInfo("acme", "xpu", probed=True)
"""
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": source})
    hal.register(Offer(torch_hal_devices=lambda: [hal.DeviceInfo("globex", "xpu", probed=True)]), "globex")
    advice = r"TORCH_HAL_PLUGINS=-acme or unregister\('globex'\)"
    with pytest.raises(hal.PluginError, match=rf"'acme' and 'globex' both claim device xpu:0.*{advice}"):
        hal.bind("xpu:0")
    hal.unregister("globex")
    assert hal.bind("xpu:0").device.vendor == "acme"


LISTING = """
import json, sys, torch
before = set(sys.modules)
import torch_hal as hal
from torch_hal.plugins import discover
kernels = [(k.plugin, k.op) for k in discover().kernels]
devices = [str(d) for d in hal.devices()]
new = sorted({m.partition(".")[0] for m in set(sys.modules) - before})
print(json.dumps({"new": new, "plugins": sorted({p for p, _ in kernels}), "cuda": torch.cuda.is_initialized()}))
"""
VENDOR_LIBRARIES = ("triton", "sgl_kernel", "flashinfer", "deep_gemm", "aiter", "torch_musa", "torchada", "mate")


def test_b11_import_and_listing_import_no_vendor_library_and_create_no_context(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    write_distribution(tmp_path, "cuda-hal", {"cuda_by_the_test": "torch_hal_cuda"})
    write_acme(tmp_path)
    # The installed one would claim the same GPUs.
    report = json.loads(run_python(LISTING, TORCH_HAL_PLUGINS="acme,cuda_by_the_test"))
    assert {"acme", "cuda_by_the_test"} <= set(report["plugins"])
    assert not set(report["new"]) & {*VENDOR_LIBRARIES, "acme_kernels", "pydantic", "typer", "rich"}
    assert report["cuda"] is False


def test_b12_without_an_optional_library_every_op_stays_callable() -> None:
    hal.register(Offer(rms_norm_kernel(requires=hal.Requires(library="no_such_library>=1.2"))), "acme")
    with pytest.warns(hal.FallbackWarning, match="library no_such_library is not installed"):
        ops = hal.bind("cpu")
    assert set(ops) == set(declared())
    torch.testing.assert_close(ops.rms_norm(*(arguments := rms_norm_arguments())), hal.ops.rms_norm(*arguments))


def test_discovery_under_another_name_is_the_same_plugin_once(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lib64 link, or metadata that an editable install left stale: the distribution is found twice."""
    write_acme(site)
    (tmp_path / "lib64").symlink_to(site)
    stale = tmp_path / "stale"
    write_distribution(stale, "Acme_HAL", {"acme": "acme_hal"})
    for folder in (tmp_path / "lib64", stale):
        monkeypatch.syspath_prepend(str(folder))
    hal.refresh()
    assert [plugin.state for plugin in plugins.discover().plugins if plugin.name == "acme"] == ["loaded"]


def test_discovery_runs_each_working_entry_point_once_over_refreshes(site: Path) -> None:
    write_acme(site)
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_counter": "imports = []"})
    source = (site / "acme_hal.py").read_text()
    (site / "acme_hal.py").write_text("import acme_counter\nacme_counter.imports.append(__name__)\n" + source)
    for _ in range(3):
        hal.refresh()
    assert sys.modules["acme_counter"].imports == ["acme_hal"]
