"""What pages, Markdown and terminal show of a report: counts by op, dtype and regime, and figures as text."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .schema import FAILING, WORST_FIRST, CaseResult, OpScope, Outcome, Report, outcomes

SYMBOLS: dict[str, str] = {
    "correct": "✓",
    "wrong": "✗",
    "error": "!",
    "crashed": "†",
    "xpassed": "≠",
    "xfailed": "~",
    "unsupported": "–",
    "not_run": "?",
    "native": "○",
    "unavailable": "∅",
}
WORDS: dict[str, str] = {
    "correct": "correct",
    "wrong": "wrong",
    "error": "error",
    "crashed": "crashed",
    "xpassed": "unexpected pass",
    "xfailed": "expected failure",
    "unsupported": "unsupported",
    "not_run": "not run",
    "native": "falls to native",
    "unavailable": "unavailable",
}
DTYPES = ("float64", "float32", "bfloat16", "float16")  # these first, then the others by name


@dataclass(frozen=True)
class Tally:
    """How many cases of a group came to what."""

    counts: Mapping[Outcome, int]

    @classmethod
    def of(cls, found: Iterable[Outcome]) -> Tally:
        counts = Counter(found)
        return cls({outcome: counts[outcome] for outcome in WORST_FIRST if counts[outcome]})

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def declared(self) -> int:
        return self.total - self.counts.get("unsupported", 0) - self.counts.get("not_run", 0)

    @property
    def correct(self) -> int:
        return self.counts.get("correct", 0)

    @property
    def worst(self) -> str:
        return next(iter(self.counts), "")

    @property
    def text(self) -> str:
        """Such as ``✗ 2  ✓ 10``, the worst first."""
        return "  ".join(f"{SYMBOLS[outcome]} {number}" for outcome, number in self.counts.items())

    @property
    def spoken(self) -> str:
        return ", ".join(f"{number} {WORDS[outcome]}" for outcome, number in self.counts.items())


@dataclass(frozen=True)
class KernelFigures:
    """One kernel's results for one op."""

    op: str
    kernel: str
    tally: Tally
    E: float | None
    R: float | None
    median: float | None  # seconds
    slowest: float | None
    total: float | None
    slowest_case: str


@dataclass(frozen=True)
class Refusal:
    """A reason for which a kernel refused cases, and how many."""

    op: str
    kernel: str
    reason: str
    number: int
    example: str


class View:
    """A report, counted."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.scopes: dict[str, OpScope] = {scope.op: scope for scope in report.scopes}

    @cached_property
    def outcomes(self) -> dict[str, Outcome]:
        return outcomes(self.report.cases, {op: scope.offered for op, scope in self.scopes.items()})

    @cached_property
    def ops(self) -> tuple[str, ...]:
        return tuple(sorted({*self.scopes, *self.report.profile_ids, *(case.op for case in self.report.cases)}))

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The ops that the backend offers itself."""
        return tuple(op for op in self.ops if self.offers(op))

    @cached_property
    def others(self) -> tuple[str, ...]:
        return tuple(op for op in self.ops if not self.offers(op))

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({id.split("/")[3] for id in self.outcomes}, key=_dtype_order))

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The states that occur, in the order of their legend."""
        found = {*map(self.state, self.others), *(outcome for op in self.own for outcome in self.tally(op).counts)}
        return tuple(state for state in SYMBOLS if state in found)

    def offers(self, op: str) -> bool:
        return op in self.scopes and bool(self.scopes[op].offered)

    def regimes(self, op: str) -> tuple[str, ...]:
        return tuple(regime for row, regime in self._by_regime if row == op)

    def tally(self, op: str, dtype: str = "", regime: str = "") -> Tally:
        """The cases of an op, or those of a dtype, of a regime, or of both."""
        if regime:
            return self._by_regime.get((op, regime), {}).get(dtype, Tally({}))
        return self._by_op.get(op, {}).get(dtype, Tally({}))

    def state(self, op: str) -> str:
        """The worst outcome of an op that the backend offers; else ``native``, ``unavailable``, or nothing."""
        if self.offers(op):
            return self.tally(op).worst or "not_run"
        scope = self.scopes.get(op)
        if scope is None:
            return ""
        return "unavailable" if scope.unavailable else scope.falls_to

    @cached_property
    def _by_op(self) -> dict[str, dict[str, Tally]]:
        found: dict[str, dict[str, list[Outcome]]] = {}
        for id, outcome in self.outcomes.items():
            parts = id.split("/")
            for dtype in ("", parts[3]):
                found.setdefault(parts[0], {}).setdefault(dtype, []).append(outcome)
        for op in self.own:  # cases without any result have no id here
            missing = self.report.profile_ids.get(op, 0) - len(found.get(op, {}).get("", []))
            found.setdefault(op, {}).setdefault("", []).extend(["not_run"] * missing)
        return {op: {dtype: Tally.of(all) for dtype, all in row.items()} for op, row in found.items()}

    @cached_property
    def _by_regime(self) -> dict[tuple[str, str], dict[str, Tally]]:
        found: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
        for id, outcome in sorted(self.outcomes.items(), key=lambda item: _regime_order(item[0].split("/")[5])):
            parts = id.split("/")
            for dtype in ("", parts[3]):
                found.setdefault((parts[0], parts[5]), {}).setdefault(dtype, []).append(outcome)
        return {key: {dtype: Tally.of(all) for dtype, all in row.items()} for key, row in found.items()}

    @cached_property
    def failures(self) -> list[CaseResult]:
        """The worst first within each op."""
        return self._with_status(lambda case: case.status in FAILING)

    @cached_property
    def expected_failures(self) -> list[CaseResult]:
        return self._with_status(lambda case: case.status == "xfailed")

    def _with_status(self, wanted: Callable[[CaseResult], bool]) -> list[CaseResult]:
        found = [case for case in self.report.cases if wanted(case)]
        return sorted(found, key=lambda case: (case.op, WORST_FIRST.index(case.status), case.id, case.kernel))

    @cached_property
    def kernels(self) -> list[KernelFigures]:
        found: dict[tuple[str, str], list[CaseResult]] = {}
        for case in self.report.cases:
            found.setdefault((case.op, case.kernel), []).append(case)
        return [_figures(op, kernel, cases) for (op, kernel), cases in sorted(found.items())]

    @cached_property
    def refusals(self) -> list[Refusal]:
        found: dict[tuple[str, str, str], list[str]] = {}
        for case in self.report.cases:
            if case.status == "unsupported":
                found.setdefault((case.op, case.kernel, case.message), []).append(case.id)
        return [Refusal(*key, len(ids), ids[0]) for key, ids in sorted(found.items())]


def _dtype_order(dtype: str) -> tuple[int, str]:
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


def _regime_order(regime: str) -> tuple[bool, bool, str]:
    """Plain values, special values, then behaviours by their numbers."""
    return (regime != "unit", regime[0] == "b" and regime[1:3].isdigit(), regime)


def _figures(op: str, kernel: str, cases: list[CaseResult]) -> KernelFigures:
    times = {case.id: case.kernel_seconds for case in cases if case.kernel_seconds is not None}
    return KernelFigures(
        op,
        kernel,
        Tally.of(case.status for case in cases),
        largest(case.E for case in cases),
        largest(case.R for case in cases),
        statistics.median(times.values()) if times else None,
        max(times.values(), default=None),
        sum(times.values()) if times else None,
        max(times, key=times.__getitem__, default=""),
    )


def largest(values: Iterable[float | None]) -> float | None:
    """The worst of these: NaN, if there is one."""
    found = [value for value in values if value is not None]
    return next((value for value in found if math.isnan(value)), max(found, default=None))


def percent(part: int, whole: int) -> str:
    """Rounded down: nothing short of all is 100 %."""
    if not whole:
        return "–"
    tenths = part * 1000 // whole
    return f"{tenths // 10} %" if part in (0, whole) else f"{tenths // 10}.{tenths % 10} %"


def figure(value: float | None) -> str:
    """An E or R as text."""
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.3g}" if value else "0"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def visible(text: str) -> str:
    """Text whose control characters, as of a terminal's colours, can be seen."""
    return text.translate({code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"})


def named(report: Report) -> str:
    """What the report is of, on one line."""
    about = report.environment
    return f"{about.backend} {about.backend_version} on {about.device}"


def labels(reports: Iterable[Report]) -> list[str]:
    """A short name for each report that tells it from the others."""
    abouts = [report.environment for report in reports]
    for spell in (
        lambda e: e.backend,
        lambda e: f"{e.backend} ({e.evidence})",
        lambda e: f"{e.backend} on {e.device}",
        lambda e: f"{e.backend} {e.backend_version} on {e.device}, {e.date}",
    ):
        found = [spell(about) for about in abouts]
        if len(set(found)) == len(found):
            return found
    return [f"{name} #{i}" for i, name in enumerate(found, 1)]
