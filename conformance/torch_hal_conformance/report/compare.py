"""What changed between two reports: two runs of one backend, or two backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .schema import FAILING, Outcome, Report, worst
from .tables import WORDS, View, duration, figure, largest, named, percent

# What matters most first: regressions, then what is different, then what is better.
Kind = Literal[
    "broke",
    "new failure",
    "op lost",
    "no longer taken",
    "vanished",
    "other check",
    "larger error",
    "slower",
    "appeared",
    "op gained",
    "newly taken",
    "fixed",
    "smaller error",
    "faster",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
REGRESSIONS: tuple[Kind, ...] = KINDS[:5]
MOST = 20  # lines of a kind in the text
# What counts as a change: by so much as a ratio, and by so much at all. E, of a single element, scatters more than R;
# times, in seconds, are summed over an op's cases, as single calls scatter.
ERRORS = {"E": (2.0, 0.25), "R": (1.25, 0.1)}
TIMES = (1.5, 1e-3)


@dataclass(frozen=True)
class Change:
    kind: Kind
    what: str  # a case's id, or an op
    kernel: str  # empty when two backends are compared, case by case
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """``a`` and ``b`` in short, and everything in which they differ."""

    a: str
    b: str
    differences: tuple[tuple[str, str, str], ...]  # of what was run and where: field, in a, in b
    totals: tuple[tuple[str, int, int], ...]
    shares: tuple[tuple[str, str, str], ...]
    changes: tuple[Change, ...]

    @property
    def regressed(self) -> bool:
        return any(change.kind in REGRESSIONS for change in self.changes)

    def as_dict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "regressed": self.regressed,
            "differences": {name: {"a": a, "b": b} for name, a, b in self.differences},
            "totals": {name: {"a": a, "b": b} for name, a, b in self.totals},
            "changes": [vars(change) for change in self.changes],
        }

    def text(self) -> str:
        lines = [f"A  {self.a}", f"B  {self.b}", ""]
        rows = [*self.shares, *((name, str(a), str(b)) for name, a, b in self.totals if a or b)]
        lines += _aligned([("", "A", "B"), *rows])
        if self.differences:
            lines += [
                "",
                "run differently:",
                *_aligned([(f"  {name}", f"{a} → {b}") for name, a, b in self.differences]),
            ]
        for kind in KINDS:
            found = [change for change in self.changes if change.kind == kind]
            if found:
                lines += ["", f"{kind}: {len(found)}", *map(_line, found[:MOST])]
                lines += [f"  … and {len(found) - MOST} more"] * (len(found) > MOST)
        if not self.changes:
            lines += ["", "no case changed"]
        return "\n".join(line.rstrip() for line in lines) + "\n"


@dataclass(frozen=True)
class Seen:
    """What came of a case, by one kernel or by all of a backend's."""

    outcome: Outcome
    check: str
    E: float | None
    R: float | None
    seconds: float | None

    @property
    def failing(self) -> bool:
        return self.outcome in FAILING

    @property
    def taken(self) -> bool:
        return self.outcome != "unsupported"

    def __str__(self) -> str:
        return WORDS[self.outcome] + (f" ({self.check})" if self.check else "")


Key = tuple[str, str]  # id, kernel


def compare(a: Report, b: Report) -> Comparison:
    """``a`` is the earlier run or the backend to measure by, ``b`` the other."""
    by_kernel = a.environment.backend == b.environment.backend
    before, after = _seen(a, by_kernel), _seen(b, by_kernel)
    ops = list(_op_changes(View(a), View(b)))
    moved = {change.what for change in ops}
    changes = [*ops]
    for key in sorted(before.keys() | after.keys()):
        if key[0].split("/")[0] not in moved:
            changes += _changes(key, before.get(key), after.get(key))
    changes += _times(before, after)
    return Comparison(
        a=f"{named(a)}, {a.environment.date}",
        b=f"{named(b)}, {b.environment.date}",
        differences=tuple(_differences(a, b)),
        totals=tuple((name, getattr(a.totals, name), getattr(b.totals, name)) for name in type(a.totals).model_fields),
        shares=(
            _share("correct ÷ declared", lambda t: (t.correct, t.declared), a, b),
            _share("declared ÷ profile", lambda t: (t.declared, t.profile_cases), a, b),
        ),
        changes=tuple(sorted(changes, key=lambda change: (KINDS.index(change.kind), change.what, change.kernel))),
    )


def _seen(report: Report, by_kernel: bool) -> dict[Key, Seen]:
    found: dict[Key, Seen] = {}
    for case in report.cases:
        key = (case.id, case.kernel if by_kernel else "")
        one = Seen(case.status, case.check, case.E, case.R, case.kernel_seconds)
        found[key] = _both(found[key], one) if key in found else one
    return found


def _both(a: Seen, b: Seen) -> Seen:
    """Two kernels of one backend: the worse outcome, the larger error, the shorter time."""
    outcome = worst((a.outcome, b.outcome))
    times = [time for time in (a.seconds, b.seconds) if time is not None]
    check = a.check if outcome == a.outcome else b.check
    return Seen(outcome, check, largest((a.E, b.E)), largest((a.R, b.R)), min(times, default=None))


def _op_changes(a: View, b: View) -> Iterator[Change]:
    """Ops that only one of both offers: one change, not one for each case."""
    for op in sorted({*a.own} ^ {*b.own}):
        kind: Kind = "op lost" if a.offers(op) else "op gained"
        yield Change(kind, op, "", _answered(a, op), _answered(b, op))


def _answered(view: View, op: str) -> str:
    if view.offers(op):
        return f"{', '.join(view.scopes[op].offered)} in {view.report.profile_ids.get(op, 0)} cases"
    state = view.state(op)
    return WORDS[state] if state else "not part of the run"


def _changes(key: Key, a: Seen | None, b: Seen | None) -> Iterator[Change]:
    if a is None or b is None:
        if b is not None:
            yield Change("new failure" if b.failing else "appeared", *key, "–", str(b))
        elif a is not None:
            yield Change("vanished", *key, str(a), "–")
    elif kind := _kind(a, b):
        yield Change(kind, *key, str(a), str(b))
    else:
        for name, x, y in (("E", a.E, b.E), ("R", a.R, b.R)):
            if grew := _grew(x, y, *ERRORS[name]):
                error: Kind = "larger error" if grew > 0 else "smaller error"
                yield Change(error, *key, f"{name} = {figure(x)}", f"{name} = {figure(y)}")


def _kind(a: Seen, b: Seen) -> Kind | None:
    """What the outcome's change is, if it changed."""
    if a.outcome == b.outcome:
        return "other check" if a.check != b.check else None
    if not b.taken:
        return "no longer taken"  # of a failure too: to refuse is not to mend
    if b.outcome == "correct":
        return "fixed" if a.taken else "newly taken"
    if not a.taken and not b.failing:
        return "newly taken"
    if a.failing:
        return "other check"
    return "broke"


def _grew(a: float | None, b: float | None, ratio: float, least: float) -> int:
    """1 or −1 where an error became a good deal larger or smaller."""
    if a is None or b is None:
        return 0
    if math.isnan(a) or math.isnan(b):
        return int(math.isnan(b)) - int(math.isnan(a))
    if a == b or abs(b - a) < least or max(a, b) < ratio * min(a, b):
        return 0
    return 1 if b > a else -1


def _times(before: dict[Key, Seen], after: dict[Key, Seen]) -> Iterator[Change]:
    """Kernels whose calls, over the cases that both runs timed, took a good deal longer or shorter."""
    pairs: dict[Key, list[tuple[float, float]]] = {}
    for key in before.keys() & after.keys():
        x, y = before[key].seconds, after[key].seconds
        if x is not None and y is not None:
            pairs.setdefault((key[0].split("/")[0], key[1]), []).append((x, y))
    for group, times in pairs.items():
        x, y = (math.fsum(column) for column in zip(*times, strict=True))
        if grew := _grew(x, y, *TIMES):
            yield Change("slower" if grew > 0 else "faster", *group, duration(x), duration(y))


def _differences(a: Report, b: Report) -> Iterator[tuple[str, str, str]]:
    x, y = _facts(a), _facts(b)
    for name in dict.fromkeys([*x, *y]):
        if x.get(name) != y.get(name):
            yield name, x.get(name, "–"), y.get(name, "–")


def _facts(report: Report) -> dict[str, str]:
    """What was run and where, but for when."""
    about = report.environment
    skipped = ("date", "command", "libraries", "settings")
    facts = {"profile": report.profile, "selection": report.selection, "seeds": ", ".join(map(str, report.seeds))}
    facts |= {name: str(getattr(about, name)) for name in type(about).model_fields if name not in skipped}
    return facts | about.libraries | about.settings


def _share(name: str, of: Callable[[Any], tuple[int, int]], a: Report, b: Report) -> tuple[str, str, str]:
    return name, percent(*of(a.totals)), percent(*of(b.totals))


def _line(change: Change) -> str:
    by = f" by {change.kernel}" if change.kernel else ""
    return f"  {change.what}{by}: {change.before} → {change.after}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
