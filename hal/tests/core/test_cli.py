"""The command: what it prints for people and machines, its exit codes, and that nothing broken stops it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_hal as hal
from torch_hal.cli import main
from torch_hal.op import declared

from .helpers import Offer, refuse_long, rms_norm_kernel, write_acme, write_distribution

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("ops", "--json")`` -> exit code, what was printed, and what went to stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torch-hal", *arguments])
        capsys.readouterr()
        try:
            code: Any = main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return int(code), out, err

    return run


def as_json(result: tuple[int, str, str]) -> Any:
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def test_help_and_version_name_every_command(cli: Cli) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    assert all(command in out for command in ("devices", "ops", "explain", "doctor"))
    assert cli("--version")[:2] == (0, f"torch-hal {hal.__version__}\n")
    for command in ("devices", "ops", "explain", "doctor"):
        code, out, _ = cli(command, "--help")
        assert code == 0 and "--json" in out and "probe-here" not in out
    assert cli()[0] == 2 and cli("no-such-command")[0] == 2


def test_devices_are_listed_with_their_state(cli: Cli) -> None:
    hal.register(Offer(torch_hal_devices=lambda: [hal.DeviceInfo("acme", "xpu")]), "acme")
    host, acme = as_json(cli("devices", "--json"))
    assert (host["device"], host["vendor"], host["state"]) == ("cpu", "cpu", "probed")
    assert (acme["device"], acme["vendor"], acme["state"], acme["arch"]) == ("xpu:0", "acme", "unprobed", None)
    code, out, _ = cli("devices")
    assert code == 0 and "unprobed" in out and "xpu:0" in out


def test_ops_is_a_list_of_ops_with_family_kernels_and_their_state(cli: Cli) -> None:
    requires = {"foreign": hal.Requires("nvidia"), "absent": hal.Requires(library="no_such_library")}
    hal.register(Offer(*(rms_norm_kernel(n, requires=r) for n, r in requires.items()), rms_norm_kernel("fine")), "acme")
    report = as_json(cli("ops", "--json"))
    assert isinstance(report, list) and {op["name"] for op in report} == set(declared())
    [rms_norm] = [op for op in report if op["name"] == "rms_norm"]
    assert rms_norm["family"] == "norm" and rms_norm["mutates"] == []
    assert [(k["kernel"], k["state"], k["reason"]) for k in rms_norm["kernels"]] == [
        ("foreign", "refused", "no device of vendor nvidia here"),
        ("absent", "refused", "library no_such_library is not installed"),
        ("fine", "unprobed", ""),
        ("native", "ready", ""),
    ]
    code, out, _ = cli("ops")
    assert code == 0 and "no_such_library is not installed" in out and "fused_add_rms_norm_" in out


def test_ops_on_a_device_says_what_selection_would(cli: Cli) -> None:
    hal.register(Offer(rms_norm_kernel()), "acme")
    report = as_json(cli("ops", "--json", "--device", "cpu"))
    [rms_norm] = [op for op in report if op["name"] == "rms_norm"]
    assert [(k["kernel"], k["state"]) for k in rms_norm["kernels"]] == [("acme", "chosen"), ("native", "behind")]


def test_explain_says_which_kernel_and_why_not_the_others(cli: Cli) -> None:
    hal.register(Offer(rms_norm_kernel("fast", dynamic=refuse_long), rms_norm_kernel("slow", 5.0)), "acme")
    report = as_json(cli("explain", "rms_norm", "--json", "-d", "cpu", "--deny", "slow"))
    assert (report["op"], report["device"]) == ("rms_norm", "cpu")
    assert [(k["kernel"], k["state"]) for k in report["kernels"]] == [
        ("fast", "chosen"),
        ("slow", "refused"),
        ("native", "next"),
    ]
    code, out, _ = cli("explain", "rms_norm", "--prefer", "native")
    assert code == 0 and "rms_norm on cpu" in out and "chosen" in out
    assert as_json(cli("explain", "rms_norm", "--json", "--require", "slow"))["kernels"][0]["kernel"] == "slow"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("explain", "rms_nrom"), "torch-hal: no op 'rms_nrom'; see `torch-hal ops`"),
        (("explain", "rms_norm", "--require", "fsat"), "'fsat' matches no kernel; offered are native"),
        (("explain", "rms_norm", "--deny", "native"), "no kernel may serve. native: denied by policy"),
        (("explain", "rms_norm", "--device", "mtia:0"), "no plugin offers devices of type 'mtia'"),
        (("ops", "--device", "nonsense"), "device nonsense: no plugin offers devices of type 'nonsense'"),
    ],
)
def test_our_own_errors_are_one_line_and_exit_code_2(cli: Cli, arguments: tuple[str, ...], error: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("torch-hal: ") and err.count("\n") == 1 and error in err


def test_a_setting_that_cannot_be_read_is_exit_code_2(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HAL_REQUIRE", "rms_norm")
    code, _, err = cli("explain", "rms_norm")
    assert code == 2 and "TORCH_HAL" not in err and "policy: require" in err


def test_doctor_finds_no_problem_where_there_is_none(cli: Cli) -> None:
    hal.register(Offer(rms_norm_kernel()), "acme")
    report = as_json(cli("doctor", "--json", "--load"))
    assert report["problems"] == [] and report["kernels_that_do_not_load"] == []
    assert {"torch_hal", "torch", "python"} <= set(report["versions"])
    states = {plugin["name"]: (plugin["state"], plugin["kernels"]) for plugin in report["plugins"]}
    assert states["acme"] == ("loaded", 1) and states["native"] == ("loaded", len(declared()))
    code, out, _ = cli("doctor")
    assert code == 0 and "No problem found." in out


def test_doctor_names_each_plugin_its_state_and_the_exceptions_text(
    cli: Cli, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_acme(site)
    write_distribution(site, "globex-hal", {"globex": "globex_hal"}, {"globex_hal": "raise OSError('[no] libglobex')"})
    write_distribution(site, "off-hal", {"resting": "off_hal"}, {"off_hal": "raise AssertionError"})
    monkeypatch.setenv("TORCH_HAL_PLUGINS", "-resting")
    with pytest.warns(hal.PluginWarning):
        hal.refresh()
    code, out, _ = cli("doctor", "--json")
    report = json.loads(out)
    plugins = {plugin["name"]: plugin for plugin in report["plugins"]}
    assert code == 1
    assert {name: plugins[name]["state"] for name in ("acme", "globex", "resting", "native")} == {
        "acme": "loaded", "globex": "broken", "resting": "off", "native": "loaded"
    }  # fmt: skip
    assert plugins["globex"]["error"] == "OSError: [no] libglobex"
    assert "globex_hal.py" in plugins["globex"]["detail"] and "Traceback" in plugins["globex"]["detail"]
    assert report["problems"] == ["plugin globex: OSError: [no] libglobex"]
    assert report["variables"] == {"TORCH_HAL_PLUGINS": "-resting"}
    code, out, _ = cli("doctor")
    assert code == 1 and "OSError: [no] libglobex" in out and "1 problem(s)." in out


def test_doctor_loads_every_kernel_when_asked(cli: Cli) -> None:
    def wrong(x: object) -> None: ...

    hal.register(Offer(rms_norm_kernel("gone", run="acme_gone:f"), rms_norm_kernel("wrong", run=wrong)), "acme")
    assert cli("doctor")[0] == 0  # listing loads none
    code, out, _ = cli("doctor", "--load", "--json")
    failures = {failure["kernel"]: failure["error"] for failure in json.loads(out)["kernels_that_do_not_load"]}
    assert code == 1
    assert failures["acme.gone"] == "ModuleNotFoundError: No module named 'acme_gone'"
    assert "takes (x), the op takes (x, weight, eps)" in failures["acme.wrong"]


def test_doctor_reports_devices_that_two_plugins_claim(cli: Cli) -> None:
    for name in ("acme", "globex"):
        hal.register(Offer(torch_hal_devices=lambda name=name: [hal.DeviceInfo(name, "xpu")]), name)
    code, out, _ = cli("doctor", "--json")
    assert code == 1
    assert "plugins 'acme' and 'globex' both claim device xpu:0" in json.loads(out)["problems"][0]
    assert cli("devices")[0] == 2


def test_a_device_that_cannot_be_probed_is_listed_as_broken(cli: Cli) -> None:
    def probe(device: hal.DeviceInfo) -> None:
        raise OSError("device is lost")

    library = hal.Library("torch", probe=lambda device: "no image")
    kernels = [rms_norm_kernel("a", requires=hal.Requires("acme", library=library))]
    hooks: dict[str, Any] = {"torch_hal_devices": lambda: [hal.DeviceInfo("acme", "xpu")], "torch_hal_probe": probe}
    hal.register(Offer(*kernels, **hooks), "acme")
    code, out, _ = cli("doctor", "--json", "--probe-here")
    report = json.loads(out)
    assert code == 1 and report["devices"][1]["state"] == "broken"
    assert report["problems"] == ["device xpu:0: device xpu:0: probing it failed: OSError: device is lost"]
    assert "device is lost" in report["libraries"][-1]["reason"]


def test_a_broken_command_of_another_distribution_stops_no_other(cli: Cli, site: Path) -> None:
    modules = {
        "acme_cli": "import typer\ndef acme_tune(rounds: int = 1) -> None:\n    typer.echo(f'tuned {rounds}')",
        "globex_cli": "raise ImportError('no curses')",
    }
    commands = {"acme-tune": "acme_cli:acme_tune", "globex-tune": "globex_cli:tune"}
    write_distribution(site, "acme-cli", commands, modules, group="torch_hal.commands")
    code, out, err = cli("acme-tune", "--rounds", "3")
    assert (code, out) == (0, "tuned 3\n")
    assert err == "torch-hal: command 'globex-tune' (globex_cli:tune) is left out: ImportError: no curses\n"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)


def test_probing_happens_in_a_process_of_its_own(tmp_path: Path) -> None:
    plugin = """
import os
from dataclasses import replace
from torch_hal import DeviceInfo, hookimpl

@hookimpl
def torch_hal_devices():
    return [DeviceInfo("acme", "xpu")]

@hookimpl
def torch_hal_probe(device):
    return replace(device, name=f"probed by {os.getpid()} of {os.getppid()}", probed=True)
"""
    write_distribution(tmp_path, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": plugin})
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code = "import os, sys; from torch_hal.cli import main; print(os.getpid(), flush=True); sys.exit(main())"
    done = run("-c", code, "devices", "--json", "--probe", PYTHONPATH=path)
    pid, _, out = done.stdout.partition("\n")
    assert done.returncode == 0, done.stderr
    [device] = [d for d in json.loads(out) if d["vendor"] == "acme"]
    assert device["state"] == "probed" and device["name"].endswith(f" of {pid}")


@pytest.mark.parametrize("coloured", [True, False])
def test_colour_is_never_needed_and_can_be_turned_off(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, coloured: bool
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "" if coloured else "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, _ = cli("explain", "rms_norm")
    assert code == 0 and "chosen" in out
    assert bool(re.search(r"\x1b\[(\d+;)*[349]\d[;m]", out)) is coloured


def run_in(shell: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell command in which ``$hal`` is the command."""
    path = os.pathsep.join(filter(None, sys.path))
    variables = {"hal": f"{sys.executable} -m torch_hal", "PYTHONPATH": path, **variables}
    return run("-c", f"import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', {shell!r}]))", **variables)


def test_output_that_nobody_takes_is_no_traceback() -> None:
    full = run_in("$hal ops --json > /dev/full")
    assert (full.returncode, full.stderr) == (2, "torch-hal: cannot write: No space left on device\n")
    read_a_byte = run_in("set -o pipefail; $hal ops --json | head -c1")
    assert read_a_byte.returncode in (0, 1) and (read_a_byte.stdout, read_a_byte.stderr) == ("[", "")
    read_nothing = run_in("set -o pipefail; $hal ops --json | exec true")
    assert (read_nothing.returncode, read_nothing.stderr) == (1, "")
    closed = run_in("$hal ops --json >&-")
    assert closed.returncode in (0, 2) and "Traceback" not in closed.stderr


def test_what_a_plugin_prints_does_not_reach_the_report(tmp_path: Path) -> None:
    plugin = """
import os
from torch_hal import hookimpl
print("printed at import")
os.system("echo printed by a child")

@hookimpl
def torch_hal_kernels():
    print("printed by a hook")
    return []
"""
    write_distribution(tmp_path, "acme-hal", {"acme": "acme_hal"}, {"acme_hal": plugin})
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run("-m", "torch_hal", "doctor", "--json", PYTHONPATH=path)
    assert "acme" in [plugin["name"] for plugin in json.loads(done.stdout)["plugins"]]
    assert all(f"printed {where}" in done.stderr for where in ("at import", "by a child", "by a hook"))


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("TORCH_HAL_PLUGINS", "acem", "TORCH_HAL_PLUGINS names acem; installed plugins are: acme"),
        ("TORCH_HAL_REQUIRE", "rms_norm", "policy: require: Value error, 'rms_norm': expected"),
        ("TORCH_HAL_REQUIRE", "rms_norm=fsat", "policy.require['rms_norm']: 'fsat' matches no kernel"),
        ("TORCH_HAL_POLICY", "no_such.toml", "TORCH_HAL_POLICY=no_such.toml: [Errno 2] No such file"),
    ],
)
def test_doctor_reports_settings_that_cannot_be_followed_and_goes_on(
    cli: Cli, site: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    write_acme(site)
    monkeypatch.setenv(variable, value)
    code, out, _ = cli("doctor", "--json")
    report = json.loads(out)
    assert code == 1 and len(report["problems"]) == 1 and problem in report["problems"][0]
    assert [d["device"] for d in report["devices"]] == ["cpu"]
    assert {"acme", "native"} <= {p["name"] for p in report["plugins"]}


def test_doctor_reports_plugins_that_cannot_list_their_devices(cli: Cli) -> None:
    hal.register(Offer(torch_hal_devices=lambda: [hal.DeviceInfo("acme", "xpu", name=b"A")]), "acme")  # type: ignore[arg-type]
    code, out, _ = cli("doctor", "--json", "--load")
    [problem] = json.loads(out)["problems"]
    assert code == 1 and "plugin 'acme' could not list its devices" in problem and "field 'name'" in problem


def test_without_the_cli_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from torch_hal.cli import main; sys.exit(main())"
    done = run("-c", code, "devices")
    assert done.returncode == 2
    assert done.stderr == "torch-hal: the command needs typer: pip install 'torch-hal[cli]'\n"
