"""Whether a report can be believed: made by this suite as released, whole, and saying the same thing throughout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from .schema import FAILING, PROFILES, RATIO, CaseResult, Report
from .tables import figure

T = TypeVar("T")
SKEW = timedelta(minutes=10)  # by which another machine's clock may be ahead


def verify(
    report: Report,
    *,
    must_pass: Mapping[str, frozenset[str]],
    digest: str,
    version: str,
    now: datetime | None = None,
) -> list[str]:
    """What speaks against a report, a line each; nothing if it can be believed, even where its backend failed.

    must_pass: profile -> the ids that it has beside those of the smaller profiles, all of them.
    digest, version: of this suite, as released.
    """
    wanted = PROFILES[: PROFILES.index(report.profile) + 1]
    lists = [must_pass[profile] for profile in wanted if profile in must_pass]
    ids = frozenset[str]().union(*lists)
    return [
        *_suite(report, digest, version),
        *(f"there is no must-pass list of the {profile} profile" for profile in wanted if profile not in must_pass),
        *_record(report, now or datetime.now(UTC)),
        *_profile(report, ids),
        *_coverage(report, ids),
        *_scopes(report, ids),
        *_results(report),
        *_sums(report),
    ]


def _suite(report: Report, digest: str, version: str) -> Iterator[str]:
    about = report.environment
    if about.suite_version != version:
        yield f"it was made by suite {about.suite_version or 'unknown'}, and this is {version}: verify it with that one"
    elif about.source_digest in ("", "unknown"):
        yield "dirty suite: the report does not say which source the suite had"
    elif about.source_digest != digest:
        yield (
            f"dirty suite: suite {version} as released has source {digest[:12]}, "
            f"the report was made with {about.source_digest[:12]}"
        )


def _record(report: Report, now: datetime) -> Iterator[str]:
    if gaps := report.environment.incomplete():
        yield f"the environment record says nothing of {', '.join(gaps)}"
    when = report.environment.when
    if when is not None and when > now + SKEW:
        yield f"its date is in the future: {report.environment.date}"
    if report.selection != "*":
        yield f"it covers only a part of the profile: {report.selection}"
    if not report.cases:
        yield "it has no cases"


def _profile(report: Report, ids: frozenset[str]) -> Iterator[str]:
    """The cases that the report says the profile has, and those that it really has."""
    foreign = sorted({case.id for case in report.cases} - ids)
    if foreign:
        yield f"{_many(foreign, 'id')} not in the {report.profile} profile: {_some(foreign)}"
    unmarked = sorted({case.id for case in report.cases if case.id in ids and not case.must_pass})
    if unmarked:
        yield f"{_many(unmarked, 'case')} not marked as must-pass, though listed: {_some(unmarked)}"
    counts = Counter(id.split("/")[0] for id in ids)
    if report.selection == "*" and counts != Counter(report.profile_ids):
        ops = sorted(op for op in {*counts, *report.profile_ids} if counts[op] != report.profile_ids.get(op, 0))
        said = (f"{op}: {counts[op]}, the report says {report.profile_ids.get(op, 0)}" for op in ops)
        yield f"the {report.profile} profile has other numbers of cases: {_some(said)}"
    if seeds := sorted({case.seed for case in report.cases} - set(report.seeds)):
        yield f"cases with seeds that the report does not name: {', '.join(map(str, seeds))}"


def _coverage(report: Report, ids: frozenset[str]) -> Iterator[str]:
    """Every must-pass case of every op that the backend offers, by each of its kernels."""
    of_op: dict[str, set[str]] = {}
    for id in ids:
        of_op.setdefault(id.split("/")[0], set()).add(id)
    had: dict[tuple[str, str], set[str]] = {}
    for case in report.cases:
        had.setdefault((case.op, case.kernel), set()).add(case.id)
    for scope in report.scopes:
        for kernel in scope.offered:
            missing = sorted(of_op.get(scope.op, set()) - had.get((scope.op, kernel), set()))
            if missing:
                yield f"{scope.op}, kernel {kernel}: {_many(missing, 'must-pass case')} missing: {_some(missing)}"


def _scopes(report: Report, ids: frozenset[str]) -> Iterator[str]:
    ops = [scope.op for scope in report.scopes]
    for op in _twice(ops):
        yield f"{op}: two scopes"
    if unsaid := sorted({id.split("/")[0] for id in ids} - set(ops)) if report.selection == "*" else []:
        yield f"nothing is said of who answers {_some(unsaid)}"
    offered = {(scope.op, kernel) for scope in report.scopes for kernel in scope.offered}
    for op, kernel in sorted({(case.op, case.kernel) for case in report.cases} - offered):
        yield f"{op}: there are results of kernel {kernel}, which is not said to be offered"


def _results(report: Report) -> Iterator[str]:
    for id, kernel in _twice((case.id, case.kernel) for case in report.cases):
        yield f"{id}, kernel {kernel}: two results"
    for case in report.cases:
        for wrong in _contradictions(case):
            yield f"{case.id}, kernel {case.kernel}: {wrong}"


def _contradictions(case: CaseResult) -> Iterator[str]:
    limits = (("E", case.E, 1.0, "bound"), ("R", case.R, RATIO, "rms"))
    if case.status == "correct":
        for name, value, limit, _ in limits:
            if value is not None and not 0 <= value <= limit:
                yield f"correct, with {name} = {figure(value)}: expected 0 to {limit:g}"
        if case.check:
            yield f"correct, and yet decided against by check '{case.check}'"
        if case.ran != case.kernel:
            yield f"correct, though what ran was {case.ran or 'nothing'}"
    elif case.status == "unsupported":
        if case.E is not None or case.R is not None:
            yield "unsupported, and yet it has an E or R"
        if not case.message:
            yield "unsupported, without a reason"
    elif case.status == "xfailed" and case.profile == "core":
        yield "expected to fail, which core does not allow"
    if case.status in FAILING and not case.check:
        yield f"{case.status}, by no check"
    for name, value, limit, check in limits:
        if case.status == "wrong" and case.check == check and value is not None and 0 <= value <= limit:
            yield f"wrong by check '{check}', with {name} = {figure(value)}, which is right"
    for name, value, _, _ in limits:
        if case.status != "correct" and value is not None and not math.isnan(value) and value < 0:
            yield f"{name} = {figure(value)} is negative"


def _sums(report: Report) -> Iterator[str]:
    again = Report.of(
        environment=report.environment,
        profile=report.profile,
        selection=report.selection,
        seeds=report.seeds,
        profile_ids=report.profile_ids,
        scopes=report.scopes,
        cases=report.cases,
    )
    for name in type(again.totals).model_fields:
        said, counted = getattr(report.totals, name), getattr(again.totals, name)
        if said != counted:
            yield f"edited totals: {name} is said to be {said}, its cases make {counted}"
    if report.passed != again.passed:
        why = f": {'; '.join(again.reasons)}" if again.reasons else ""
        yield f"it says that it {_passed(report.passed)}, its cases say that it {_passed(again.passed)}{why}"
    elif report.reasons != again.reasons:
        yield f"its reasons are '{'; '.join(report.reasons)}', its cases give '{'; '.join(again.reasons)}'"


def _passed(passed: bool) -> str:
    return "passed" if passed else "did not pass"


def _twice(found: Iterable[T]) -> list[T]:
    return [value for value, number in Counter(found).items() if number > 1]


def _many(found: list[str], noun: str) -> str:
    return f"1 {noun} is" if len(found) == 1 else f"{len(found)} {noun}s are"


def _some(found: Iterable[str], most: int = 3) -> str:
    found = list(found)
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + rest
