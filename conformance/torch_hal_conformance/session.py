"""One run: which items, what becomes of each, and the report on all."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from torch_hal.op import declared

from . import xfails
from .cases import Case, every_case, must_pass, select
from .environment import environment
from .isolation import Judge
from .report.schema import CaseResult, OpScope, Profile, Report, Totals
from .spec import PROFILES
from .subjects import Subject, SubjectError


class SessionError(Exception):
    """The run cannot begin, and why: one line."""


@dataclass(frozen=True)
class Session:
    """A backend on a device and the cases of a profile for the ops that it offers."""

    subject: Subject
    profile: Profile
    op: str
    cases: tuple[Case, ...]  # of the profile, whoever offers the op
    only: str | None = None  # one item or case
    known: tuple[xfails.Xfail, ...] = field(default=())

    @classmethod
    def of(
        cls, judge: Judge, backend: str, device: str | None, profile: Profile, op: str = "*", case: str | None = None
    ) -> Session:
        """Raises SessionError."""
        try:
            every_case()
        except Exception as error:
            raise SessionError(f"the suite itself is broken: {type(error).__name__}: {error}") from error
        if case is not None:
            wanted = case.partition("@")[0]
            if wanted not in every_case():
                raise SessionError(f"no case '{wanted}'; ids are op/profile/shape/dtype/layout/regime/seed")
            found = every_case()[wanted]
            profile, op = cast(Profile, found.profile), found.op
        try:
            subject = judge.find(backend, device)
            known = xfails.load(subject.folder, every_case(), subject.answers)
        except (SubjectError, xfails.XfailError) as error:
            raise SessionError(str(error)) from error
        if subject.notes:
            raise SessionError(f"backend '{backend}' {'; '.join(subject.notes)}")
        chosen = tuple(select(profile, op))
        session = cls(subject, profile, op, chosen, case, tuple(known))
        if not session.items:
            raise SessionError(f"no case to judge: {_nothing(subject, op, case)}")
        return session

    @property
    def partial(self) -> bool:
        return self.op != "*" or self.only is not None

    @functools.cached_property
    def items(self) -> dict[str, tuple[Case, str]]:
        """``case@kernel`` -> both, for every kernel that must answer for itself."""
        found = {
            f"{case.id}@{kernel}": (case, kernel)
            for case in self.cases
            for kernel in self.subject.declared.get(case.op, ())
        }
        if self.only is not None:
            found = {name: item for name, item in found.items() if self.only in (name, name.partition("@")[0])}
        return found

    @property
    def names(self) -> list[str]:
        return list(self.items)

    def judge(self, name: str, judge: Judge) -> CaseResult:
        """The result of one item, with what the backend's list of known failures makes of it."""
        case, kernel = self.items[name]
        if why := self.subject.broken.get(case.op, {}).get(kernel):
            result = CaseResult(id=case.id, kernel=kernel, status="error", check="broken", message=why, seconds=0.0)
        else:
            result = judge(case.id, kernel, str(self.subject.device))
        result = _expected(
            result, [x for x in self.known if x.id == case.id and x.applies(self.subject.device, kernel)]
        )
        good = result.status in ("correct", "unsupported", "xfailed")
        return result.model_copy(
            update={
                "must_pass": case.id in _all_must_pass(),
                "behaviours": case.behaviours,
                "structural": case.structural,
                "reproduce": "" if good else self.reproduce(name),
            }
        )

    def reproduce(self, name: str) -> str:
        """The command that runs one item alone."""
        parts = ["torch-hal", "conformance", "--backend", self.subject.backend, "--case", name]
        return shlex.join([*parts, "--device", str(self.subject.device)])

    def report(self, results: list[CaseResult], command: str) -> Report:
        scopes = tuple(self._scope(op) for op in sorted({case.op for case in self.cases}))
        counts = dict(Counter(case.op for case in self.cases if self.only is None or case.id in self.only))
        return Report.of(
            environment=environment(self.subject, command),
            profile=self.profile,
            seeds=tuple(sorted({case.seed for case in self.cases})),
            selection=self.only or self.op,
            profile_ids=counts,
            scopes=scopes,
            cases=results,
        )

    def _scope(self, op: str) -> OpScope:
        offered = self.subject.declared.get(op, ())
        return OpScope(
            op=op,
            offered=offered,
            unavailable=self.subject.unavailable.get(op, {}),
            falls_to="" if offered else "native",
        )


def _nothing(subject: Subject, op: str, case: str | None) -> str:
    """Why an op, a glob of ops or a case of them names nothing that the backend offers."""
    offered, who = list(subject.declared), f"backend '{subject.backend}'"
    if case is not None and op in offered:
        kernel, kernels = case.partition("@")[2], ", ".join(subject.declared[op])
        return f"{who} has no kernel '{kernel}' for {op}; it has {kernels}"
    some = ", ".join(offered[:5]) + (f" and {len(offered) - 5} more" if len(offered) > 5 else "")
    if op in declared():
        return f"{who} does not offer {op}, so native torch answers; it offers {some}"
    if not fnmatch.filter(declared(), op):
        close = difflib.get_close_matches(op, declared(), 1)
        return f"no op '{op}'" + (f": did you mean '{close[0]}'?" if close else "; `torch-hal ops` lists them")
    return f"'{op}' names none of the ops of {who}: {some}"


def _expected(result: CaseResult, entries: list[xfails.Xfail]) -> CaseResult:
    if not entries:
        return result
    entry = entries[0]
    if result.status in ("correct", "unsupported"):
        message = f"is listed as a known failure ({entry.url}), but does not fail: remove the entry"
        return result.model_copy(update={"status": "xpassed", "check": "xfail", "message": message})
    if result.check != entry.raises:
        message = (
            f"is listed to fail by '{entry.raises}' ({entry.url}), but failed by '{result.check}': {result.message}"
        )
        return result.model_copy(update={"message": message})
    return result.model_copy(update={"status": "xfailed", "message": f"known: {entry.url}: {result.message}"})


@functools.cache
def _all_must_pass() -> frozenset[str]:
    return frozenset().union(*(must_pass(profile) for profile in PROFILES))


def causes(report: Report) -> list[str]:
    """What failures have in common, one line for each kernel and check, the most frequent first."""
    found = Counter((r.id.partition("/")[0], r.kernel, r.status, r.check) for r in report.cases if r.failing)
    if sum(found.values()) < 2:
        return []
    lines = [
        f"  {n:5} × {op} on {kernel}: {status}, {check}" for (op, kernel, status, check), n in found.most_common(20)
    ]
    more = len(found) - len(lines)
    return ["failures by cause:", *lines, *([f"  … and {more} causes more, in the report"] if more > 0 else [])]


def summary(report: Report) -> list[str]:
    """What a person wants to read at the end of a run."""
    totals: Totals = report.totals
    if "/" in report.selection:
        return [line for result in report.cases for line in _one(result) if not result.failing]  # those were told
    lines = [
        f"{report.environment.backend} on {report.environment.device} ({report.environment.evidence}), "
        f"profile {report.profile}" + ("" if report.selection == "*" else f", only {report.selection}"),
        f"correct ÷ declared   {totals.correct} / {totals.declared}",
        f"declared ÷ profile   {totals.declared} / {totals.profile_cases}",
    ]
    rest = {k: getattr(totals, k) for k in ("wrong", "error", "crashed", "unsupported", "xfailed", "xpassed")}
    lines.append(", ".join(f"{n} {k}" for k, n in rest.items() if n) or "nothing failed")
    if totals.native_cases:
        lines.append(f"{totals.native_cases} cases are of ops that it does not offer: native torch answers those")
    lines.append(_verdict(report))
    return lines


def _verdict(report: Report) -> str:
    if report.passed:
        return "PASSED"
    if report.selection != "*" and len(report.reasons) == 1:
        return f"PARTIAL: nothing failed, and only a part of the profile was judged: {report.selection}"
    return "NOT PASSED: " + "; ".join(report.reasons)


def _one(result: CaseResult) -> list[str]:
    """One result, where a single case was asked for."""
    figures = "".join(f", {k} = {v:.3g}" for k, v in (("E", result.E), ("R", result.R)) if v is not None)
    lines = [f"{result.status}: {result.id} on {result.kernel}{figures}"]
    return [*lines, *([f"  {result.message}"] if result.message else [])]
