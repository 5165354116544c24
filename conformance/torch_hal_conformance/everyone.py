"""Every backend that can run on this machine, judged one after the other, and the matrix of all of them.

    python -m torch_hal_conformance.everyone [--profile core] [--report DIR] [--jobs N]

Exit code 1 if one of them did not pass; a backend that cannot run here is named with its reason, and counts as neither.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from torch_hal import plugins
from torch_hal.native import NATIVE

from .isolation import Judge
from .report import markdown, write_matrix
from .report.schema import Report, load
from .spec import PROFILES
from .subjects import SubjectError


def backends() -> list[str]:
    """Native torch, and every installed plugin that offers kernels, whether or not they can run here."""
    return [
        NATIVE,
        *(plugin.name for plugin in plugins.discover().plugins if plugin.kernels or plugin.state != "loaded"),
    ]


def judge(backend: str, options: argparse.Namespace) -> Report | str:
    """Its report, or why it cannot be judged here."""
    with Judge() as process:
        try:
            process.find(backend, None)
        except SubjectError as reason:
            return str(reason)
    folder: Path = options.report / backend
    command = [sys.executable, "-m", "torch_hal", "conformance", "--backend", backend, "--profile", options.profile]
    command += ["--report", str(folder), "--op", options.op]
    command += ["--jobs", str(options.jobs)] if options.jobs else []
    code = subprocess.run(command, check=False).returncode
    record = folder / "report.json"
    return load(record) if record.exists() else f"the run ended with exit code {code} and no report"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="core")
    parser.add_argument("--op", default="*", metavar="GLOB")
    parser.add_argument("--report", type=Path, default=Path("conformance-report"), metavar="DIR")
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args(arguments)
    found = {backend: judge(backend, options) for backend in backends()}
    reports = [report for report in found.values() if isinstance(report, Report)]
    print(markdown.matrix_text(reports))
    write_matrix(reports, options.report)
    for reason in found.values():
        if isinstance(reason, str):
            print(f"not judged: {reason}")
    print(f"matrix: {options.report / 'matrix.html'}")
    wrong = [r.environment.backend for r in reports if not r.passed and (options.op == "*" or len(r.reasons) > 1)]
    return 1 if wrong or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
