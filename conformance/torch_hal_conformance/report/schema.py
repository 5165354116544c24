"""What a report is. ``python -m torch_hal_conformance.report.schema`` prints it as JSON Schema.

A report is strict JSON (RFC 8259). E and R may be NaN or infinite, which JSON has no numbers for: they are written as
the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from .fields import Count, Number, Record, Seconds, Text, Texts, strict_json, told

SCHEMA_VERSION = 1
RATIO = 1.25  # the largest R that is correct; the largest E is 1

Profile = Literal["core", "deepseek", "full"]
PROFILES: tuple[Profile, ...] = ("core", "deepseek", "full")  # each holds the ones before it
Status = Literal["correct", "wrong", "error", "crashed", "unsupported", "xfailed", "xpassed"]
Outcome = Literal["correct", "wrong", "error", "crashed", "unsupported", "xfailed", "xpassed", "not_run"]
Evidence = Literal["host", "device", "interpreted", "emulated", "cross-compiled"]

# What becomes of a case that several kernels answered is the first of these that one of them got.
WORST_FIRST: tuple[Outcome, ...] = (
    *("crashed", "error", "wrong", "xpassed"),
    *("not_run", "xfailed", "correct", "unsupported"),
)
FAILING: frozenset[str] = frozenset(WORST_FIRST[:4])


class CaseResult(Record):
    """What one kernel did in one case."""

    id: Text = Field(description="op/profile/shape/dtype/layout/regime/seed")
    kernel: Text = Field(min_length=1)
    status: Status
    check: Text = Field(default="", description="what decided, such as bound or provenance; empty when correct")
    message: Text = Field(default="", description="the failure, or why the kernel refuses")
    E: Number | None = Field(default=None, description="largest error in units of its bound: more than 1 is wrong")
    R: Number | None = Field(default=None, description="rms error beside that of native torch: more than 1.25 is wrong")
    seconds: Seconds
    kernel_seconds: Seconds | None = None
    ran: Text = Field(default="", description="what was seen to run")
    behaviours: tuple[Count, ...] = ()
    must_pass: bool = False
    structural: bool = False
    reproduce: Text = Field(default="", description="command that runs this case alone, where it failed")

    @field_validator("id")
    @classmethod
    def _has_seven_parts(cls, value: str) -> str:
        parts = value.split("/")
        if len(parts) != 7 or not all(parts) or parts[1] not in PROFILES or not _is_seed(parts[6]):
            raise ValueError("expected op/profile/shape/dtype/layout/regime/seed")
        return value

    @property
    def op(self) -> str:
        return self.id.split("/")[0]

    @property
    def profile(self) -> str:
        return self.id.split("/")[1]

    @property
    def shape(self) -> str:
        return self.id.split("/")[2]

    @property
    def dtype(self) -> str:
        return self.id.split("/")[3]

    @property
    def layout(self) -> str:
        return self.id.split("/")[4]

    @property
    def regime(self) -> str:
        return self.id.split("/")[5]

    @property
    def seed(self) -> int:
        return int(self.id.split("/")[6])

    @property
    def failing(self) -> bool:
        return self.status in FAILING


def _is_seed(text: str) -> bool:
    return text.isascii() and text.isdigit()


class OpScope(Record):
    """Which of an op's kernels the backend brings, and who answers where none of them may."""

    op: Text = Field(min_length=1)
    offered: tuple[Text, ...] = Field(default=(), description="kernels that must answer for themselves here")
    unavailable: Texts = Field(default={}, description="declared, but not usable here: kernel -> why")
    falls_to: Literal["", "native"] = ""


class Environment(Record):
    """Everything that a result depends on. A record with a gap cannot pass: see `incomplete`."""

    suite_version: Text
    source_digest: Text = Field(description="digest of the suite's own source")
    torch_hal: Text
    backend: Text
    backend_version: Text
    backend_distribution: Text
    device: Text
    device_type: Text
    arch: Text
    driver: Text = Field(description='"none" where there is no device to drive')
    evidence: Evidence
    torch: Text
    python: Text
    libraries: Texts = Field(description="library -> version")
    os: Text
    cpu: Text
    cores: Count
    memory_gib: float = Field(ge=0, allow_inf_nan=False)
    date: Text = Field(description="ISO 8601 with an offset from UTC")
    command: Text
    settings: Texts = Field(description="the TORCH_HAL_* variables that were set")

    def incomplete(self) -> tuple[str, ...]:
        """The fields that say nothing, as ``libraries.triton`` within a mapping."""
        values = {k: v for k, v in self.__dict__.items() if isinstance(v, str)}
        values |= {f"libraries.{k}": v for k, v in self.libraries.items()}
        missing = [k for k, v in values.items() if v.strip().casefold() in ("", "unknown", "none") and k != "driver"]
        # Only a device that was really used has a driver; that another has none must still be said.
        silent = ("", "unknown", "none") if self.evidence == "device" else ("", "unknown")
        if self.driver.strip().casefold() in silent:
            missing.append("driver")
        missing += [name for name in ("cores", "memory_gib") if not getattr(self, name)]
        if self.evidence == "device" and not self.libraries:
            missing.append("libraries")
        if "date" not in missing and self.when is None:
            missing.append("date")
        return tuple(name for name in dict.fromkeys([*type(self).model_fields, *values]) if name in missing)

    @property
    def when(self) -> datetime | None:
        """The date, if it is one."""
        try:
            date = datetime.fromisoformat(self.date)
        except ValueError:
            return None
        return date if date.tzinfo else None


class Totals(Record):
    """Numbers of cases. All but ``declared``, which sums those that some kernel takes, add up to ``profile_cases``."""

    profile_cases: Count
    declared: Count
    correct: Count
    wrong: Count
    error: Count
    crashed: Count
    unsupported: Count = Field(description="every kernel of the backend refuses them")
    xfailed: Count
    xpassed: Count
    native_cases: Count = Field(description="of ops that the backend does not offer")
    not_run: Count = Field(description="of ops that it offers, without a result of each kernel")

    @classmethod
    def of(cls, cases: Iterable[CaseResult], profile_ids: Mapping[str, int], scopes: Iterable[OpScope]) -> Totals:
        """Count. ``profile_ids``: how many cases the selected part of the profile has of each op."""
        offered = {scope.op: scope.offered for scope in scopes if scope.offered}
        seen = outcomes((case for case in cases if case.op in offered), offered)
        counts = Counter(seen.values())
        ours = sum(number for op, number in profile_ids.items() if op in offered)
        of_op = Counter(id.split("/")[0] for id in seen)
        counts["not_run"] += sum(max(0, number - of_op[op]) for op, number in profile_ids.items() if op in offered)
        return cls(
            profile_cases=sum(profile_ids.values()),
            declared=sum(n for outcome, n in counts.items() if outcome not in ("unsupported", "not_run")),
            native_cases=sum(profile_ids.values()) - ours,
            **{outcome: counts[outcome] for outcome in WORST_FIRST},
        )


def outcomes(cases: Iterable[CaseResult], offered: Mapping[str, tuple[str, ...]]) -> dict[str, Outcome]:
    """What became of each case, over the kernels that were to answer it."""
    kernels: dict[str, dict[str, Outcome]] = {}
    for case in cases:
        of_case = kernels.setdefault(case.id, dict.fromkeys(offered.get(case.op, ()), "not_run"))
        before = of_case.get(case.kernel, "unsupported")
        of_case[case.kernel] = case.status if before == "not_run" else worst((before, case.status))
    return {id: worst(of_case.values()) for id, of_case in kernels.items()}


def worst(found: Iterable[Outcome]) -> Outcome:
    return min(found, key=WORST_FIRST.index)


class Report(Record):
    """One run over one backend."""

    schema_version: Literal[1] = 1
    environment: Environment
    profile: Profile
    selection: Text = Field(description='which ops, as a glob; all but "*" are a part, which cannot pass')
    seeds: tuple[Count, ...]
    profile_ids: dict[Text, Count] = Field(description="op -> number of its cases in the selected part of the profile")
    scopes: tuple[OpScope, ...]
    cases: tuple[CaseResult, ...]
    totals: Totals
    passed: bool
    reasons: tuple[Text, ...] = Field(description="why it did not pass")

    @classmethod
    def of(
        cls,
        *,
        environment: Environment,
        profile: Profile,
        seeds: tuple[int, ...],
        profile_ids: Mapping[str, int],
        scopes: Iterable[OpScope],
        cases: Iterable[CaseResult],
        selection: str = "*",
    ) -> Report:
        """The report on these results: in a stable order, counted, and passed or not."""
        scopes = tuple(sorted(scopes, key=lambda scope: scope.op))
        cases = tuple(sorted(cases, key=lambda case: (case.id, case.kernel)))
        totals = Totals.of(cases, profile_ids, scopes)
        reasons = reasons_against(environment, selection, cases, totals)
        return cls(
            environment=environment,
            profile=profile,
            selection=selection,
            seeds=seeds,
            profile_ids=dict(sorted(profile_ids.items())),
            scopes=scopes,
            cases=cases,
            totals=totals,
            passed=not reasons,
            reasons=reasons,
        )


def reasons_against(
    environment: Environment, selection: str, cases: Iterable[CaseResult], totals: Totals
) -> tuple[str, ...]:
    """Why results do not pass; none if they do."""
    what = {
        "crashed": "crashed",
        "error": "ended in an error",
        "wrong": "wrong",
        "xpassed": "right though listed to fail",
    }
    found = [f"{n} {_cases(n)} {said}" for outcome, said in what.items() if (n := getattr(totals, outcome))]
    if totals.not_run:
        found.append(f"{totals.not_run} {_cases(totals.not_run)} of ops that the backend offers did not run")
    if expected := len({case.id for case in cases if case.status == "xfailed" and case.profile == "core"}):
        found.append(f"{expected} {_cases(expected)} of core listed to fail, which core does not allow")
    if not totals.declared:
        found.append("no case was judged" if not totals.unsupported else "the backend takes no case")
    if selection != "*":
        found.append(f"only a part of the profile was selected: {selection}")
    if gaps := environment.incomplete():
        found.append(f"the environment record says nothing of {', '.join(gaps)}")
    return tuple(found)


def _cases(number: int) -> str:
    return "case" if number == 1 else "cases"


class ReportError(ValueError):
    """A file is no report: which file, which field, and what is wrong with it."""


def dump(report: Report) -> str:
    """The report as strict JSON, one case a line, so that a line-wise diff says something."""
    values = report.model_dump(mode="json")
    lines = [
        f'"{name}": {_spread(value) if name in ("cases", "scopes") else _json(value)}' for name, value in values.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _spread(values: list[Any]) -> str:
    return "[\n" + ",\n".join(map(_json, values)) + "\n]" if values else "[]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def load(path: str | Path) -> Report:
    """The report in a file. Raises ReportError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return loads(text, str(path))


def loads(text: str, name: str = "report") -> Report:
    """The report in a text; ``name`` is what errors call it."""
    try:
        found = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{name}: not strict JSON: {error}") from error
    if not isinstance(found, dict) or "schema_version" not in found:
        raise ReportError(f"{name}: not a report of the conformance suite: expected an object with a schema_version")
    if found["schema_version"] != SCHEMA_VERSION:
        raise ReportError(
            f"{name}: schema_version: expected {SCHEMA_VERSION}, got {found['schema_version']!r}: "
            "read it with the version of torch_hal_conformance that wrote it"
        )
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        raise ReportError(told(error, name)) from error


def json_schema() -> dict[str, Any]:
    schema = Report.model_json_schema(mode="serialization") | {"title": "Conformance report"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(json_schema_text(), end="")
