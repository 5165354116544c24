"""``torch-hal``: what is here, what would run, and why."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

import torch_hal as hal

from ..errors import FATAL, describe
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


def _show(report: Callable[[], Any], as_json: bool, draw: Callable[[Console, Any], None]) -> Any:
    """Make a report and print it."""
    with _stdout_kept_clean():
        data = report()
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        console = Console()
        draw(console if console.is_terminal else Console(width=max(console.width, 160)), data)
    return data


@contextlib.contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """What plugins, libraries and their child processes print while they load goes to stderr."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _elsewhere() -> None:
    """Run this very command in a process of its own, so that a device context or a crash stays there."""
    arguments = [a if a != "--probe" else "--probe-here" for a in sys.argv[1:]]
    raise typer.Exit(subprocess.run([sys.executable, "-m", "torch_hal", *arguments], check=False).returncode)


@app.command()
def devices(as_json: Json = False, probe: Probe = False, probe_here: Here = False) -> None:
    """List the devices of this machine; no device is used unless you say --probe."""
    if probe:
        _elsewhere()
    _show(lambda: report.devices(probe_here), as_json, render.devices)


@app.command()
def ops(as_json: Json = False, device: Device = None) -> None:
    """List every op with its kernels and their state; with --device, as selection would judge them there."""
    _show(lambda: report.ops(device), as_json, render.ops)


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
    _show(lambda: hal.explain(op, device, policy).to_dict(), as_json, render.explanation)


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
    if _show(lambda: report.doctor(load, probe_here), as_json, render.doctor)["problems"]:
        raise typer.Exit(1)


def run() -> int:
    """The whole command: our own errors, and output that nobody takes, as one line at most and an exit code."""
    _add_commands()
    try:
        try:
            app(prog_name="torch-hal", standalone_mode=True)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except hal.HalError as error:
        typer.echo(f"torch-hal: {error}", err=True)
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more when it ends
        if error.errno == errno.EPIPE:
            return 1
        typer.echo(f"torch-hal: cannot write: {os.strerror(error.errno)}", err=True)
        return 2
    return 0


def _add_commands() -> None:
    """Commands of other distributions, functions or Typer apps; a broken one stops no other."""
    for entry in importlib.metadata.entry_points(group="torch_hal.commands"):
        if entry.name not in {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}:
            try:
                with _stdout_kept_clean():
                    command = entry.load()
                if isinstance(command, typer.Typer):
                    app.add_typer(command, name=entry.name)
                else:
                    app.command(entry.name)(command)
            except FATAL:
                raise
            except BaseException as error:
                reason = describe(error)
                typer.echo(f"torch-hal: command '{entry.name}' ({entry.value}) is left out: {reason}", err=True)
