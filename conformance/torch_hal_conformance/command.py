"""``torch-hal conformance``: the suite from the command line, and what its reports are good for afterwards."""

from __future__ import annotations

import enum
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from .report.schema import Report, ReportError, dump, load

app = typer.Typer(add_completion=False, help="Judge a backend, and read the reports.")

MOST_JOBS = 8  # unless told otherwise: each is two processes that import torch


class ProfileName(enum.StrEnum):
    core = "core"
    deepseek = "deepseek"
    full = "full"


Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.callback(invoke_without_command=True)
def conformance(
    context: typer.Context,
    backend: Annotated[str | None, typer.Option(help="A plugin, plugin.kernel, or native.")] = None,
    device: Annotated[str | None, typer.Option("--device", "-d", help="Default: the backend's first, or cpu.")] = None,
    profile: Annotated[ProfileName, typer.Option(help="Each holds the ones before.")] = ProfileName.core,
    op: Annotated[str, typer.Option(metavar="GLOB", help="Ops; of a part of a profile the best is PARTIAL.")] = "*",
    case: Annotated[str | None, typer.Option(help="One case by its id, with or without @kernel.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write report.json, report.md and report.html there.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help=f"Processes; default: one a core, at most {MOST_JOBS}.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one case.")] = 300.0,
    maxfail: Annotated[int | None, typer.Option(min=1, help="Stop after so many failures: not passed.")] = None,
    as_json: Json = False,
) -> None:
    """Judge a backend: run every case of a profile for the ops that it offers.

    Exit code 0: PASSED, or PARTIAL where --op or --case names a part and nothing failed in it. 1: not passed.
    2: the run could not begin, or its report not be written. 130: interrupted.
    """
    if context.invoked_subcommand is not None:
        return
    if backend is None:
        raise typer.BadParameter("say whom to judge: --backend NAME", param_hint="--backend")
    options: dict[str, Any] = {
        "--hal-backend": backend,
        "--hal-device": device,
        "--hal-profile": profile.value,
        "--hal-op": op,
    }
    options |= {"--hal-case": case, "--hal-report": report, "--hal-timeout": timeout}
    raise typer.Exit(run_pytest(options | {"--maxfail": maxfail}, jobs, as_json))


def run_pytest(options: dict[str, Any], jobs: int | None, as_json: bool = False) -> int:
    """Run the suite in this process as pytest would; its exit code as the command promises."""
    import pytest
    from rich.console import Console

    from .progress import Bar

    if jobs is None:
        jobs = 1 if options["--hal-case"] else min(os.cpu_count() or 1, MOST_JOBS)
    here = Path(__file__).parent
    arguments = ["-p", f"{__package__}.plugin", "-c", str(here / "pytest.ini"), "--rootdir", str(here)]
    arguments += ["-p", "no:cacheprovider", "-p", "no:terminal", str(here / "test_conformance.py")]
    arguments += [f"{name}={value}" for name, value in options.items() if value is not None]
    arguments += ["-n", str(jobs)] if jobs > 1 else []
    signal.signal(signal.SIGTERM, _interrupt)
    bar = Bar(Console(stderr=as_json, highlight=False, soft_wrap=True))
    code = pytest.main(arguments, plugins=[bar])
    if as_json and bar.report is not None:
        typer.echo(dump(bar.report))
    if code == pytest.ExitCode.INTERRUPTED:
        return 130
    return 2 if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED) else int(code)


def _interrupt(number: int, frame: Any) -> None:
    """SIGTERM ends a run as Ctrl-C does: with what is known until then."""
    raise KeyboardInterrupt


@app.command("verify")
def verify_report(path: Annotated[Path, typer.Argument(metavar="REPORT.JSON")], as_json: Json = False) -> None:
    """Check that a report is whole, unedited, and of this very suite; exit code 1 if it is not."""
    from . import __version__
    from .cases import must_pass
    from .environment import source_digest
    from .report.verify import verify
    from .spec import PROFILES

    report = _load(path)
    problems = verify(
        report,
        must_pass={profile: must_pass(profile) for profile in PROFILES},
        digest=source_digest(),
        version=__version__,
    )
    if as_json:
        typer.echo(json.dumps({"report": str(path), "problems": problems}, indent=2))
    else:
        for problem in problems:
            typer.echo(problem)
        typer.echo(f"{path}: {f'{len(problems)} problem(s)' if problems else 'verified'}")
    raise typer.Exit(1 if problems else 0)


@app.command("compare")
def compare_reports(
    a: Annotated[Path, typer.Argument(metavar="A.JSON")],
    b: Annotated[Path, typer.Argument(metavar="B.JSON")],
    as_json: Json = False,
) -> None:
    """Say what changed from one report to another, what got worse first; exit code 1 if something did.

    Worse is what no longer passes, or is no longer there. Another check, a larger error or a longer time is told, and
    decides nothing.
    """
    from .report.compare import compare

    comparison = compare(_load(a), _load(b))
    typer.echo(json.dumps(comparison.as_dict(), indent=2) if as_json else comparison.text())
    raise typer.Exit(1 if comparison.regressed else 0)


def _load(path: Path) -> Report:
    try:
        return load(path)
    except ReportError as error:
        typer.echo(f"torch-hal: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app(prog_name="torch-hal conformance")
