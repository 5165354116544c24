"""Reports that cannot be believed, each by the line that says why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import report_samples as samples

from torch_hal_conformance.report.schema import CaseResult, OpScope, Report
from torch_hal_conformance.report.verify import verify

NOW = datetime(2026, 11, 4, tzinfo=UTC)
CORE = "rms_norm/core/n17-d128/float32/contiguous/unit/0"
DEEPSEEK = "rms_norm/deepseek/n64-d7168/float32/contiguous/unit/0"


def problems(report: Report, **changes: Any) -> list[str]:
    values: dict[str, Any] = {"must_pass": samples.ids("full"), "digest": samples.DIGEST, "version": samples.VERSION}
    return verify(report, **{**values, "now": NOW, **changes})


def again(report: Report, cases: list[CaseResult], **changes: Any) -> Report:
    """The report on other results, counted anew."""
    names = ("environment", "profile", "selection", "seeds", "profile_ids", "scopes")
    return Report.of(**{**{name: getattr(report, name) for name in names}, "cases": cases, **changes})


def edited(change: Callable[[CaseResult], dict[str, Any]]) -> Report:
    """A good report, some results edited and everything counted anew."""
    good = samples.good()
    return again(good, [case.model_copy(update=change(case)) for case in good.cases])


def one(id: str, **fields: Any) -> Report:
    return edited(lambda case: fields if case.id == id else {})


@pytest.mark.parametrize("report", [samples.good(), samples.mixed(), samples.good("core"), samples.good("full")])
def test_an_honest_report_is_believed(report: Report) -> None:
    assert problems(report) == []


def test_a_dirty_suite() -> None:
    assert problems(samples.good(), digest="f" * 64) == [
        "dirty suite: suite 0.1.0 as released has source ffffffffffff, the report was made with 9f2b4c71d0aa"
    ]
    assert "dirty suite: the report does not say which source the suite had" in problems(
        samples.good(source_digest="unknown")
    )


def test_another_version() -> None:
    assert problems(samples.good(), digest="f" * 64, version="0.2.0") == [
        "it was made by suite 0.1.0, and this is 0.2.0: verify it with that one"
    ]


def test_missing_must_pass_cases_of_the_profile_and_of_smaller_ones() -> None:
    good = samples.good()
    found = problems(again(good, [case for case in good.cases if case.id not in (CORE, DEEPSEEK)]))
    assert found == [f"rms_norm, kernel acme.fast: 2 must-pass cases are missing: {CORE}, {DEEPSEEK}"]


def test_a_kernel_whose_failing_result_was_taken_out() -> None:
    mixed = samples.mixed()
    found = problems(
        again(mixed, [case for case in mixed.cases if (case.kernel, case.status) != ("acme.vector", "wrong")])
    )
    id = "rms_norm/deepseek/n64-d7168/bfloat16/contiguous/tiny/0"
    assert found == [f"rms_norm, kernel acme.vector: 1 must-pass case is missing: {id}"]


def test_a_profile_made_smaller() -> None:
    good = samples.good()
    smaller = {op: n for op, n in good.profile_ids.items() if op != "tree_verify"}
    scopes = [scope for scope in good.scopes if scope.op != "tree_verify"]
    found = problems(again(good, list(good.cases), profile_ids=smaller, scopes=scopes))
    assert found == [
        "the deepseek profile has other numbers of cases: tree_verify: 8, the report says 0",
        "nothing is said of who answers tree_verify",
    ]


def test_no_must_pass_list() -> None:
    lists = {"core": samples.ids("core")["core"]}
    assert "there is no must-pass list of the deepseek profile" in problems(samples.good(), must_pass=lists)


@pytest.mark.parametrize("name", ["correct", "declared", "profile_cases", "native_cases", "not_run"])
def test_edited_totals(name: str) -> None:
    mixed = samples.mixed()
    more = getattr(mixed.totals, name) + 1
    report = mixed.model_copy(update={"totals": mixed.totals.model_copy(update={name: more})})
    assert problems(report) == [f"edited totals: {name} is said to be {more}, its cases make {more - 1}"]


def test_a_verdict_that_its_cases_contradict() -> None:
    passed = samples.mixed().model_copy(update={"passed": True, "reasons": ()})
    assert problems(passed) == [
        "it says that it passed, its cases say that it did not pass: 1 case crashed; 1 case ended in an error; "
        "3 cases wrong; 1 case right though listed to fail"
    ]
    failed = samples.good().model_copy(update={"passed": False})
    assert problems(failed) == ["it says that it did not pass, its cases say that it passed"]
    for_other_reasons = samples.mixed().model_copy(update={"reasons": ("bad luck",)})
    assert problems(for_other_reasons)[0].startswith("its reasons are 'bad luck', its cases give '1 case crashed; ")


def test_two_results_of_one_case() -> None:
    good = samples.good()
    assert problems(again(good, [*good.cases, good.cases[0]])) == [f"{good.cases[0].id}, kernel acme.fast: two results"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"E": 1.01}, "correct, with E = 1.01: expected 0 to 1"),
        ({"E": float("nan")}, "correct, with E = NaN: expected 0 to 1"),
        ({"E": -0.5}, "correct, with E = -0.5: expected 0 to 1"),
        ({"R": 1.26}, "correct, with R = 1.26: expected 0 to 1.25"),
        ({"R": float("inf")}, "correct, with R = ∞: expected 0 to 1.25"),
        ({"check": "bound"}, "correct, and yet decided against by check 'bound'"),
        ({"ran": "native"}, "correct, though what ran was native"),
        ({"status": "unsupported", "E": None, "R": None}, "unsupported, without a reason"),
        ({"status": "unsupported", "message": "no"}, "unsupported, and yet it has an E or R"),
        ({"status": "wrong"}, "wrong, by no check"),
        ({"status": "crashed"}, "crashed, by no check"),
        ({"status": "wrong", "check": "bound"}, "wrong by check 'bound', with E = "),
        ({"status": "wrong", "check": "rms", "R": 1.25}, "wrong by check 'rms', with R = 1.25, which is right"),
        ({"status": "wrong", "check": "copy", "E": -1.0}, "E = -1 is negative"),
        ({"status": "xfailed", "check": "bound"}, "expected to fail, which core does not allow"),
    ],
)
def test_a_result_that_contradicts_itself(fields: dict[str, Any], told: str) -> None:
    [found] = problems(one(CORE, **fields))
    assert found.startswith(f"{CORE}, kernel acme.fast: {told}")


def test_expected_failures_outside_core_are_allowed() -> None:
    assert problems(one(DEEPSEEK, status="xfailed", check="bound", E=3.0)) == []


def test_an_incomplete_environment() -> None:
    assert problems(samples.good(driver="", cpu="unknown")) == ["the environment record says nothing of driver, cpu"]


def test_a_date_in_the_future() -> None:
    assert problems(samples.good(date="2027-01-01T00:00:00+01:00")) == [
        "its date is in the future: 2027-01-01T00:00:00+01:00"
    ]
    assert problems(samples.good(date="2026-11-04T00:05:00+00:00")) == []  # clocks differ


def test_no_cases() -> None:
    assert problems(samples.build([], {})) == ["it has no cases"]


def test_a_part_of_the_profile() -> None:
    good = samples.good(ops=("rms_norm",))
    report = again(
        good,
        list(good.cases),
        selection="rms_*",
        profile_ids={"rms_norm": good.profile_ids["rms_norm"]},
        scopes=[scope for scope in good.scopes if scope.op == "rms_norm"],
    )
    assert problems(report) == ["it covers only a part of the profile: rms_*"]


def test_ids_that_the_profile_does_not_have() -> None:
    wider = "rms_norm/full/n65537-d7168/float32/contiguous/b26_far/0"
    invented = "rms_norm/core/n1-d1/float32/contiguous/unit/0"
    good = samples.good()
    found = problems(again(good, [*good.cases, samples.case(wider), samples.case(invented)]))
    assert found == [f"2 ids are not in the deepseek profile: {invented}, {wider}"]


def test_a_seed_that_the_report_does_not_name() -> None:
    assert problems(samples.good(seeds=(1, 2))) == ["cases with seeds that the report does not name: 0"]


def test_a_case_that_hides_that_it_must_pass() -> None:
    assert problems(one(CORE, must_pass=False)) == [
        f"1 case is not marked as must-pass, though listed: {CORE}",
    ]


def test_results_of_a_kernel_that_is_not_offered() -> None:
    good = samples.good()
    assert problems(again(good, [*good.cases, samples.case(CORE, "acme.secret")])) == [
        "rms_norm: there are results of kernel acme.secret, which is not said to be offered"
    ]


def test_an_op_with_two_scopes() -> None:
    good = samples.good()
    found = problems(again(good, list(good.cases), scopes=[*good.scopes, OpScope(op="tree_verify", falls_to="native")]))
    assert found == ["tree_verify: two scopes"]
