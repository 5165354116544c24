"""The pytest plugin: options, one test an item, a report at the end. Imports no torch before the suite is asked for.

``pytest --pyargs torch_hal_conformance --hal-backend NAME`` judges the backend NAME. Without that option this plugin
does nothing.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .isolation import Judge
    from .report.schema import CaseResult, Report
    from .session import Session

PROPERTY = "torch_hal_result"
RUN = "torch_hal_conformance_run"  # the plugin that holds this process's run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_hal", "torch_hal conformance")
    group.addoption("--hal-backend", metavar="NAME", help="judge this backend: a plugin, or plugin.kernel, or native")
    group.addoption("--hal-device", metavar="DEVICE", help="torch device (default: the backend's first, else cpu)")
    group.addoption("--hal-profile", default="core", choices=("core", "deepseek", "full"), help="default: core")
    group.addoption("--hal-op", default="*", metavar="GLOB", help="ops to judge; a report over a part cannot pass")
    group.addoption("--hal-case", metavar="ID", help="one case, by its id, with or without @kernel")
    group.addoption("--hal-report", metavar="DIR", help="write report.json, report.md and report.html there")
    group.addoption("--hal-timeout", default=300.0, type=_seconds, metavar="SECONDS", help="for one case; default: 300")


def _seconds(text: str) -> float:
    if (seconds := float(text)) > 0:
        return seconds
    raise argparse.ArgumentTypeError(f"{text}: expected more than 0 seconds")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hal-backend") is not None:
        config.pluginmanager.register(Conformance(config), RUN)


class Conformance:
    """One run of the suite."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.results: list[CaseResult] = []
        self.report: Report | None = None
        self.interrupted = False
        self.unwritten = ""  # why there is no report in the folder

    @property
    def folder(self) -> Path | None:
        """Where the report goes."""
        folder = self.config.getoption("--hal-report")
        return None if folder is None else Path(folder)

    @property
    def is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    @functools.cached_property
    def judge(self) -> Judge:
        """The process in which this one's items are judged."""
        from .isolation import Judge

        return Judge(timeout=self.config.getoption("--hal-timeout"))

    @functools.cached_property
    def session(self) -> Session:
        """What is to be judged: found out at the first use, by importing torch."""
        from .session import Session, SessionError

        option = self.config.getoption
        try:
            return Session.of(
                self.judge,
                backend=option("--hal-backend"),
                device=option("--hal-device"),
                profile=option("--hal-profile"),
                op=option("--hal-op"),
                case=option("--hal-case"),
            )
        except SessionError as error:
            raise pytest.UsageError(f"torch_hal_conformance: {error}") from None

    def pytest_sessionstart(self) -> None:
        if not self.is_worker:  # what is wrong is said once, before workers start, and before hours are spent
            if (folder := self.folder) is not None:
                _check_writable(folder)
            _ = self.session

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    def pytest_unconfigure(self) -> None:
        if "judge" in vars(self):
            self.judge.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "hal_item" in metafunc.fixturenames:
            names = self.session.names
            metafunc.parametrize("hal_item", names, ids=names)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Iterator[None]:
        if not self.is_worker:
            self.results += results_of(report)
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.is_worker or self.config.option.collectonly or (exitstatus in (2, 3, 4) and not self.interrupted):
            return
        self.report = self.session.report(self.results, command())
        if (folder := self.folder) is not None:
            from .report import write

            try:
                write(self.report, folder)
            except OSError as error:
                self.unwritten = f"cannot write {folder}: {error.strerror or error}"
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if exitstatus == 0 and not self.report.passed and not (self.session.partial and len(self.report.reasons) == 1):
            session.exitstatus = 1

    def last_lines(self) -> list[str]:
        """The verdict, and where more is to be read."""
        from .session import causes, summary

        if self.report is None:
            return []
        lines = [*causes(self.report), *summary(self.report)]
        if self.interrupted:
            lines.append(f"INTERRUPTED: {len(self.results)} of {len(self.session.names)} were judged")
        if self.folder is not None:
            lines.append(self.unwritten or f"report: {self.folder / 'report.html'}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.report is not None:
            terminalreporter.section("conformance")
            for line in self.last_lines():
                terminalreporter.write_line(line)


def _check_writable(folder: Path) -> None:
    """Raise UsageError if no file can be made in ``folder``, which is made where it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise pytest.UsageError(f"torch_hal_conformance: cannot write {folder}: {error.strerror or error}") from None


def results_of(report: pytest.TestReport) -> list[CaseResult]:
    """What a test that has run says of its item."""
    from .report.schema import CaseResult

    values = [value for name, value in report.user_properties if name == PROPERTY and report.when == "call"]
    return [CaseResult.model_validate_json(str(value)) for value in values]


def command() -> str:
    """How this process was started, for the report."""
    return shlex.join(["pytest" if "pytest" in sys.argv[0] else Path(sys.argv[0]).name, *sys.argv[1:]])
