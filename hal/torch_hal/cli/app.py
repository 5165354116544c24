"""``torch-hal``: what is here, what would run, and why."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

import torch_hal as hal

from . import render, report

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Probe = Annotated[
    bool, typer.Option("--probe", help="Use the devices to learn what listing cannot tell, in a process of its own.")
]
Device = Annotated[str | None, typer.Option("--device", "-d", help="A torch device, e.g. cpu or cuda:0.")]
Here = Annotated[bool, typer.Option("--probe-here", hidden=True)]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"torch-hal {hal.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _show(data: Any, as_json: bool, draw: Any) -> None:
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        console = Console()
        draw(console if console.is_terminal else Console(width=max(console.width, 160)), data)


def _elsewhere() -> None:
    """Run this very command in a process of its own, so that a device context or a crash stays there."""
    arguments = [a if a != "--probe" else "--probe-here" for a in sys.argv[1:]]
    raise typer.Exit(subprocess.run([sys.executable, "-m", "torch_hal", *arguments], check=False).returncode)


@app.command()
def devices(as_json: Json = False, probe: Probe = False, probe_here: Here = False) -> None:
    """List the devices of this machine; no device is used unless you say --probe."""
    if probe:
        _elsewhere()
    _show(report.devices(probe_here), as_json, render.devices)


@app.command()
def ops(as_json: Json = False, device: Device = None) -> None:
    """List every op with its kernels and their state; with --device, as selection would judge them there."""
    _show(report.ops(device), as_json, render.ops)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op's name; see `torch-hal ops`.")],
    as_json: Json = False,
    device: Device = None,
    prefer: Annotated[list[str] | None, typer.Option(help="Kernel to try first; repeatable.")] = None,
    require: Annotated[list[str] | None, typer.Option(help="Kernel that must run; repeatable.")] = None,
    deny: Annotated[list[str] | None, typer.Option(help="Kernel to leave out; repeatable.")] = None,
) -> None:
    """Say which kernel an op would run on a device, and why not the others."""
    wishes = {"prefer": prefer, "require": require, "deny": deny}
    policy = hal.Policy(**{field: {op: tuple(kernels)} for field, kernels in wishes.items() if kernels})
    _show(hal.explain(op, device, policy).to_dict(), as_json, render.explanation)


@app.command()
def doctor(
    as_json: Json = False,
    load: Annotated[bool, typer.Option("--load", help="Import every kernel and check its signature.")] = False,
    probe: Probe = False,
    probe_here: Here = False,
) -> None:
    """Check plugins, devices and kernel libraries; exit code 1 if something is broken."""
    if probe:
        _elsewhere()
    data = report.doctor(load, probe_here)
    _show(data, as_json, render.doctor)
    if data["problems"]:
        raise typer.Exit(1)


def run() -> int:
    """The whole command: commands of other distributions added, our own errors as one line and exit code 2."""
    for entry in importlib.metadata.entry_points(group="torch_hal.commands"):
        if entry.name not in {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}:
            try:
                app.command(entry.name)(entry.load())
            except (Exception, SystemExit) as error:
                reason = f"{type(error).__name__}: {error}"
                typer.echo(f"torch-hal: command '{entry.name}' ({entry.value}) is left out: {reason}", err=True)
    try:
        app(prog_name="torch-hal", standalone_mode=True)
    except hal.HalError as error:
        typer.echo(f"torch-hal: {error}", err=True)
        return 2
    return 0
