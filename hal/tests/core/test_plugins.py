"""Plugins: registering in the process, hooks checked by name, which entry points load, what a registry holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_hal as hal
from torch_hal import plugins
from torch_hal.op import declared

from .helpers import Offer, collected, messages, rms_norm_kernel, state_of, write_acme, write_distribution

PLUGIN = """
from torch_hal import DeviceInfo, Kernel, hookimpl
{body}
"""


def installed(site: Path, body: str, name: str = "acme") -> plugins.Plugin:
    """The discovered plugin whose module has this body."""
    write_distribution(site, f"{name}-hal", {name: f"{name}_hal"}, {f"{name}_hal": PLUGIN.format(body=body)})
    with collected():
        hal.refresh()
    plugin: plugins.Plugin = state_of(name)
    return plugin


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "@hookimpl\ndef torch_hal_kernel(): return []",
            "'torch_hal_kernel' does not exist; did you mean 'torch_hal_kernels'?",
        ),
        ("@hookimpl\ndef torch_hal_prune(): return []", "hook 'torch_hal_prune' does not exist"),
        ("def torch_hal_kernels(): return []", "'torch_hal_kernels' is defined but not marked with @hookimpl"),
        (
            "@hookimpl\ndef torch_hal_kernels(): return []\ndef torch_hal_probe(device): return device",
            "'torch_hal_probe' is defined but not marked",
        ),
        ("@hookimpl\ndef torch_hal_probe(dev): return None", "dev"),
        ("x = 1", "implements no hook"),
    ],
)
def test_a_mistyped_or_unmarked_hook_is_an_error_naming_it(site: Path, body: str, error: str) -> None:
    plugin = installed(site, body)
    assert plugin.state == "broken"
    assert error in plugin.error
    assert "Traceback" in plugin.detail


@pytest.mark.parametrize("name", ["acme-hal", "Acme", "native", "1st", ""])
def test_a_name_that_cannot_be_used_in_policies_and_graphs_is_refused(name: str) -> None:
    with pytest.raises(hal.PluginError, match="is no plugin name"):
        hal.register(Offer(rms_norm_kernel()), name)
    assert name not in [plugin.name for plugin in plugins.discover().plugins]


def test_registering_twice_and_unregistering_nothing_are_errors() -> None:
    hal.register(Offer(rms_norm_kernel()), "acme")
    with pytest.raises(hal.PluginError, match="'acme' is taken"):
        hal.register(Offer(rms_norm_kernel()), "acme")
    hal.unregister("acme")
    with pytest.raises(hal.PluginError, match="no plugin 'acme' was registered"):
        hal.unregister("acme")


def test_a_broken_registration_raises_and_leaves_the_registry_alone() -> None:
    before = plugins.discover()

    def kernels() -> Any:
        yield rms_norm_kernel()
        raise RuntimeError("half-way")

    with pytest.raises(hal.PluginError, match="plugin 'acme': RuntimeError: half-way"):
        hal.register(Offer(torch_hal_kernels=kernels), "acme")
    assert plugins.discover() is before


def test_a_plugin_that_breaks_at_a_later_refresh_goes_with_a_warning_and_can_come_back() -> None:
    working = [True]

    def kernels() -> list[hal.Kernel]:
        return [rms_norm_kernel()] if working[0] else sys.exit("no licence")

    hal.register(Offer(torch_hal_kernels=kernels), "acme")
    bound = hal.bind("cpu")
    working[0] = False
    with pytest.warns(hal.PluginWarning, match="plugin 'acme' .* is left out: SystemExit: no licence"):
        hal.refresh()
    assert (bound.rms_norm.kernel.id, hal.bind("cpu").rms_norm.kernel.id) == ("acme", "native")
    working[0] = True
    hal.refresh()
    assert hal.bind("cpu").rms_norm.kernel.id == "acme"


def test_an_installed_plugin_that_takes_a_registered_name_is_an_error_naming_both(site: Path) -> None:
    hal.register(Offer(rms_norm_kernel()), "acme")
    write_acme(site)
    with pytest.warns(hal.PluginWarning, match=r"registered in this process.*acme-hal 1\.0.*unregister\('acme'\)"):
        registry = hal.refresh()
    assert [kernel.plugin for kernel in registry.kernels if kernel.op == "rms_norm"].count("acme") == 1


def test_an_uninstalled_plugin_is_gone_at_the_next_refresh(site: Path) -> None:
    write_acme(site)
    hal.refresh()
    bound = hal.bind("cpu")
    for path in (site / "acme_hal-1.0.dist-info").iterdir():
        path.unlink()
    (site / "acme_hal-1.0.dist-info").rmdir()
    hal.refresh()
    assert "acme" not in [plugin.name for plugin in plugins.discover().plugins]
    assert (bound.rms_norm.kernel.id, hal.bind("cpu").rms_norm.kernel.id) == ("acme", "native")


@pytest.mark.parametrize(
    ("setting", "loaded"), [("-acme", False), ("globex", False), ("globex,acme", True), (" acme ", True)]
)
def test_a_setting_limits_which_entry_points_load_at_all(
    site: Path, monkeypatch: pytest.MonkeyPatch, setting: str, loaded: bool
) -> None:
    write_acme(site)
    write_distribution(site, "globex-hal", {"globex": "globex_hal"}, {"globex_hal": PLUGIN.format(body=ONE_HOOK)})
    monkeypatch.setenv("TORCH_HAL_PLUGINS", setting)
    hal.refresh()
    assert state_of("acme").state == ("loaded" if loaded else "off")
    assert ("acme_hal" in sys.modules) is loaded
    assert state_of("globex").state == ("off" if setting.strip() == "acme" else "loaded")


ONE_HOOK = "@hookimpl\ndef torch_hal_kernels(): return []"


@pytest.mark.parametrize("setting", ["acem", "-acem", "acme,acem"])
def test_a_setting_that_names_no_plugin_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    write_acme(site)
    monkeypatch.setenv("TORCH_HAL_PLUGINS", setting)
    with pytest.raises(hal.PluginError, match=r"TORCH_HAL_PLUGINS names -?acem; installed plugins are: acme"):
        hal.refresh()


def test_kernels_come_by_plugin_name_and_then_in_yield_order() -> None:
    names = {"globex": ["b", "a"], "acme": ["z", "y"]}
    for plugin, kernels in names.items():
        hal.register(Offer(*(rms_norm_kernel(name) for name in kernels)), plugin)
    ours = [kernel.id for kernel in plugins.discover().kernels if kernel.plugin in names]
    assert ours == ["acme.z", "acme.y", "globex.b", "globex.a"]


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_mute() -> Any:
    raise Mute


MUTE = """
class Mute({base}):
    def __str__(self):
        raise RuntimeError("no text")
"""


@pytest.mark.parametrize("body", ["raise Mute", "@hookimpl\ndef torch_hal_kernels(): raise Mute"])
@pytest.mark.parametrize("base", ["Exception", "BaseException"])
def test_any_exception_is_isolated_and_described(site: Path, base: str, body: str) -> None:
    plugin = installed(site, MUTE.format(base=base) + body)
    assert plugin.state == "broken" and plugin.error == "Mute (whose text raised RuntimeError)"
    assert "acme_hal" in plugin.detail
    assert hal.bind("cpu").rms_norm.kernel.id == "native"


def test_a_skip_of_pytests_is_isolated_and_a_message_takes_one_line(site: Path) -> None:
    plugin = installed(site, "import pytest\npytest.skip('no\\n  driver', allow_module_level=True)")
    assert (plugin.state, plugin.error) == ("broken", "Skipped: no driver")


@pytest.mark.parametrize("fatal", ["KeyboardInterrupt", "GeneratorExit", "MemoryError"])
def test_what_is_not_the_plugins_own_is_not_caught_and_leaves_nothing_behind(site: Path, fatal: str) -> None:
    body = """
import torch
from torch_hal import op

@op(shapes={"x": "T D"}, dtypes={})
def acme_interrupted(x: torch.Tensor) -> torch.Tensor:
    return x

raise """
    write_distribution(site, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": PLUGIN.format(body=body + fatal)})
    with pytest.raises(BaseException) as raised:
        hal.refresh()
    assert type(raised.value).__name__ == fatal
    assert "acme_interrupted" not in declared()


@pytest.mark.parametrize("call", ["bind('cpu')", "devices()", "explain('rms_norm')", "refresh()"])
@pytest.mark.parametrize("place", ["{}", "@hookimpl\ndef torch_hal_kernels(): {}"])
def test_a_plugin_that_binds_while_plugins_load_is_told_so(site: Path, place: str, call: str) -> None:
    plugin = installed(site, "import torch_hal\n" + place.format(f"torch_hal.{call}"))
    assert "PluginError: plugins are being loaded: do not bind" in plugin.error
    with pytest.raises(hal.PluginError, match="plugins are being loaded"):
        hal.register(Offer(torch_hal_kernels=lambda: [hal.bind("cpu").rms_norm.kernel]), "globex")
    assert hal.bind("cpu").rms_norm.kernel.id == "native"


def listing(devices: Callable[[], Any]) -> list[str]:
    hal.register(Offer(torch_hal_devices=devices), "acme")
    return [str(device) for device in hal.devices()]


def raise_driver_error() -> None:
    raise OSError("driver not loaded")


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (raise_driver_error, "OSError: driver not loaded"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: ["cuda:0"], "torch_hal_devices gave 'cuda:0', expected a DeviceInfo"),
        (lambda: 5, "'int' object is not iterable"),
        (lambda: [hal.DeviceInfo("acme", "xpu", -1)], "an index from 0 up"),
        (lambda: [hal.DeviceInfo("acme", "xpu")] * 2, "names xpu:0 twice"),
        (lambda: [hal.DeviceInfo("acme", "cpu")], r"claims the host.*unregister\('acme'\)"),
        (lambda: [str(d) for d in hal.devices()], "torch_hal_devices binds, or lists devices, itself"),
        (lambda: raise_mute(), r"Mute \(whose text raised RuntimeError\)"),
    ],
)
def test_a_plugin_that_cannot_list_its_devices_has_none_and_is_named(devices: Callable[[], Any], reason: str) -> None:
    with pytest.warns(hal.PluginWarning, match=f"plugin 'acme' could not list its devices.*{reason}"):
        found = listing(devices)
    assert found == ["cpu"]
    with collected():
        assert hal.bind("cpu").device.vendor == "cpu"
        assert hal.bind().device.vendor == "cpu"


def test_a_hook_that_returns_none_offers_nothing_and_is_noted() -> None:
    hal.register(Offer(torch_hal_kernels=lambda: None, torch_hal_devices=lambda: None), "acme")
    assert state_of("acme").kernels == ()
    assert "torch_hal_kernels returned None" in state_of("acme").notes[0]
    hal.register(Offer(torch_hal_kernels=lambda: ()), "globex")
    assert state_of("globex").notes == ()
    assert listing_of_the_host() == ["cpu"]


def listing_of_the_host() -> list[str]:
    return [str(device) for device in hal.devices() if device.type == "cpu"]


def test_a_plugin_may_declare_an_op_of_its_own(site: Path) -> None:
    body = """
import torch
from torch_hal import op

@op(shapes={"x": "T D"}, dtypes={"x": torch.float32})
def acme_twice(x: torch.Tensor, times: int = 2) -> torch.Tensor:
    return x * times

@hookimpl
def torch_hal_kernels():
    yield Kernel("acme_twice", "fast", run="acme_hal:fast", band=20)

def fast(x, times=2):
    return x * times + 100
"""
    assert installed(site, body).notes == ()
    assert "acme_twice" in declared()
    import torch

    ops = hal.bind("cpu")
    assert ops.acme_twice(torch.ones(1, 1)).item() == 102
    with pytest.raises(hal.ArgumentError, match="acme_twice: argument 'x'"):
        ops.acme_twice(torch.ones(1))


@pytest.mark.parametrize(
    ("signature", "shapes", "error"),
    [("x: torch.Tensor", "{'x': 'T 2*I'}", "I is no dimension"), ("x: object", "{}", "unsupported type")],
)
def test_an_op_that_no_set_could_bind_fails_its_plugin_and_no_bind(
    site: Path, signature: str, shapes: str, error: str
) -> None:
    body = f"""
import torch
from torch_hal import op

@op(shapes={shapes}, dtypes={{}})
def acme_wrong({signature}) -> torch.Tensor:
    return x

@hookimpl
def torch_hal_kernels():
    yield Kernel("acme_wrong", "acme", run="acme_hal:run")

def run(x):
    return x
"""
    plugin = installed(site, body)
    assert plugin.state == "broken" and error in plugin.error
    assert "acme_wrong" not in declared()
    assert hal.bind("cpu").device.type == "cpu"


def test_each_broken_plugin_gives_one_warning_a_refresh(site: Path) -> None:
    for name in ("acme", "globex"):
        write_distribution(site, f"{name}-hal", {name: f"{name}_hal"}, {f"{name}_hal": "raise OSError('gone')"})
    with collected() as caught:
        hal.refresh()
        hal.bind("cpu")
        hal.devices()
    assert len(messages(caught, hal.PluginWarning)) == 2
