"""What the command shows while pytest runs the suite: a bar, each failure as it comes, and the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .plugin import PROPERTY, RUN, results_of

if TYPE_CHECKING:
    from .plugin import Conformance
    from .report.schema import CaseResult, Report

IN_FULL = 5


class Bar:
    """A pytest plugin in place of the terminal reporter. On anything but a terminal, a line each tenth of the way."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("collecting", total=None)
        self._total = self._done = self._bad = self._told = 0
        self._broken: list[str] = []
        self._kinds: Counter[tuple[str, ...]] = Counter()
        self.report: Report | None = None

    def pytest_sessionstart(self) -> None:
        self._bar.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._begin(len(ids))

    def _begin(self, total: int) -> None:
        self._total = total or self._total
        self._bar.update(self._task, total=self._total or None, description="judging")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        self._done += report.when == "call"
        for result in results_of(report):
            self._bad += result.failing
            if result.failing:
                self._say(result)
        if report.failed and not any(name == PROPERTY for name, _ in report.user_properties):
            self._broken.append(f"{report.nodeid}: {report.longreprtext}")
        self._bar.update(self._task, completed=self._done, description=f"judging, {self._bad} failed")
        tenth = 10 * self._done // max(self._total, 1)
        if self._bar.disable and tenth > self._told and self._total > 20:
            self._told = tenth
            self.console.print(f"{self._done} of {self._total} judged, {self._bad} failed")

    def _say(self, result: CaseResult) -> None:
        """In full the first few that one check finds in one kernel: the rest is like them, and in the report."""
        kind = (result.id.partition("/")[0], result.kernel, result.status, result.check)
        self._kinds[kind] += 1
        if self._kinds[kind] > IN_FULL:
            return
        self.console.print(f"[bold red]{result.status}[/] ", end="")
        self.console.print(f"{result.id} on {result.kernel}: {result.check}", markup=False)
        self.console.print(f"  {result.message}\n  reproduce: {result.reproduce}", markup=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        result = yield
        self._bar.stop()
        for text in self._broken:
            self.console.print(text, markup=False)
        run: Conformance | None = session.config.pluginmanager.get_plugin(RUN)
        for line in run.last_lines() if run is not None else ():
            self.console.print(line, markup=False)
        self.report = run.report if run is not None else None
        return result
