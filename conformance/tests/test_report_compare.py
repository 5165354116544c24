"""What changed between two reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
import report_samples as samples

from torch_hal_conformance.report.compare import KINDS, REGRESSIONS, Change, compare
from torch_hal_conformance.report.schema import CaseResult, Report

ID = "rms_norm/core/n17-d128/float32/contiguous/unit/0"
OTHER = "rms_norm/core/n17-d128/float16/contiguous/unit/0"


def run(*cases: CaseResult, **changes: Any) -> Report:
    return samples.build(list(cases), {"rms_norm": tuple({case.kernel: None for case in cases})}, "core", **changes)


def one(**fields: Any) -> CaseResult:
    return samples.case(ID, **({"E": 0.5, "R": 1.0, "kernel_seconds": 0.01} | fields))


def changes(a: Report, b: Report) -> list[tuple[str, str, str]]:
    return [(change.kind, change.before, change.after) for change in compare(a, b).changes]


def test_a_report_is_like_itself() -> None:
    found = compare(samples.mixed(), samples.mixed())
    assert (found.differences, found.changes, found.regressed) == ((), (), False)
    assert "no case changed" in found.text()


WRONG: dict[str, Any] = {"status": "wrong", "check": "bound"}
REFUSED: dict[str, Any] = {"status": "unsupported", "message": "no"}
XFAILED: dict[str, Any] = {"status": "xfailed", "check": "bound"}


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({}, WRONG, ("broke", "correct", "wrong (bound)")),
        (REFUSED, WRONG, ("broke", "unsupported", "wrong (bound)")),
        (XFAILED, WRONG, ("broke", "expected failure (bound)", "wrong (bound)")),
        ({}, XFAILED, ("broke", "correct", "expected failure (bound)")),
        ({}, REFUSED, ("no longer taken", "correct", "unsupported")),
        (WRONG, REFUSED, ("no longer taken", "wrong (bound)", "unsupported")),
        (WRONG, {}, ("fixed", "wrong (bound)", "correct")),
        (XFAILED, {}, ("fixed", "expected failure (bound)", "correct")),
        (REFUSED, {}, ("newly taken", "unsupported", "correct")),
        (REFUSED, XFAILED, ("newly taken", "unsupported", "expected failure (bound)")),
        (WRONG, WRONG | {"check": "rms"}, ("other check", "wrong (bound)", "wrong (rms)")),
        (WRONG, {"status": "crashed", "check": "crash"}, ("other check", "wrong (bound)", "crashed (crash)")),
        (WRONG, XFAILED, ("other check", "wrong (bound)", "expected failure (bound)")),
        ({}, {"R": 1.24}, None),
        ({"R": 0.9}, {"R": 1.2}, ("larger error", "R = 0.9", "R = 1.2")),
        ({"R": 1.2}, {"R": 0.9}, ("smaller error", "R = 1.2", "R = 0.9")),
        ({"R": 0.01}, {"R": 0.05}, None),
        ({"E": 0.3}, {"E": 0.55}, None),
        ({"E": 0.2}, {"E": 0.9}, ("larger error", "E = 0.2", "E = 0.9")),
        (WRONG, WRONG | {"E": float("nan")}, ("larger error", "E = 0.5", "E = NaN")),
        (WRONG | {"E": float("inf")}, WRONG | {"E": float("inf")}, None),
        (WRONG | {"E": float("nan")}, WRONG | {"E": float("nan")}, None),
        ({}, {"kernel_seconds": 0.014}, None),
        ({}, {"kernel_seconds": 0.02}, ("slower", "10 ms", "20 ms")),
        ({}, {"kernel_seconds": 0.005}, ("faster", "10 ms", "5 ms")),
        ({"kernel_seconds": 1e-5}, {"kernel_seconds": 9e-4}, None),
    ],
)
def test_what_becomes_of_a_case(
    before: dict[str, Any], after: dict[str, Any], change: tuple[str, str, str] | None
) -> None:
    assert changes(run(one(**before)), run(one(**after))) == ([change] if change else [])


def test_cases_that_come_and_go() -> None:
    good, bad = samples.case(OTHER, kernel_seconds=None), samples.case(OTHER, **WRONG)
    assert changes(run(one()), run(one(), good)) == [("appeared", "–", "correct")]
    assert changes(run(one()), run(one(), bad)) == [("new failure", "–", "wrong (bound)")]
    assert changes(run(one(), good), run(one())) == [("vanished", "correct", "–")]


def test_an_op_that_is_no_longer_offered_is_one_change() -> None:
    a, b = samples.good(), samples.good(ops=tuple(samples.OPS)[:7])
    found = compare(a, b)
    assert found.changes == (Change("op lost", "rms_norm", "", "acme.fast in 24 cases", "falls to native"),)
    assert found.regressed
    assert compare(b, a).changes == (Change("op gained", "rms_norm", "", "falls to native", "acme.fast in 24 cases"),)
    assert not compare(b, a).regressed


def test_two_backends_are_compared_case_by_case() -> None:
    a = run(one(kernel="acme.fast"), one(kernel="acme.slow", **WRONG, E=3.0))
    b = run(one(kernel="other.only"), backend="other")
    [change, *_] = compare(a, b).changes
    assert change == Change("fixed", ID, "", "wrong (bound)", "correct")
    assert ("backend", "acme", "other") in compare(a, b).differences


def test_kernels_of_one_backend_are_compared_each() -> None:
    a = run(one(kernel="acme.a"), one(kernel="acme.b"))
    b = run(one(kernel="acme.a"), one(kernel="acme.b", **WRONG))
    assert compare(a, b).changes == (Change("broke", ID, "acme.b", "correct", "wrong (bound)"),)


def test_regressions_come_first() -> None:
    a, b = samples.good(ops=tuple(samples.OPS)[:11]), samples.mixed()
    kinds = [change.kind for change in compare(a, b).changes]
    assert kinds == sorted(kinds, key=KINDS.index)
    assert kinds[0] == "broke"
    assert kinds[-1] not in REGRESSIONS
    text = compare(a, b).text()
    assert text.index("broke: 6") < text.index("no longer taken: 11") < text.index("appeared: 23")
    assert (
        "  mla_decode/deepseek/n64-d7168/bfloat16/contiguous/mean_shifted/0 by acme.fast: correct → wrong (bound)"
        in text
    )
    assert "… and 3 more" in text


def test_what_was_run_differently() -> None:
    b = samples.good(
        torch="2.14.0",
        date="2026-12-01T00:00:00+00:00",
        libraries={"triton": "3.8.0"},
        settings={},
        selection="rms_norm",
    )
    assert compare(samples.good(), b).differences == (
        ("selection", "*", "rms_norm"),
        ("torch", "2.13.0+cu130", "2.14.0"),
        ("acme_kernels", "1.8.0", "–"),
        ("numpy", "2.4.6", "–"),
        ("triton", "3.7.0", "3.8.0"),
        ("TORCH_HAL_LOG", "1", "–"),
    )


def test_the_dict_is_json() -> None:
    found = compare(samples.good(), samples.mixed()).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["regressed"] is True
    assert found["totals"]["wrong"] == {"a": 0, "b": 3}
    assert found["changes"][0].keys() == {"kind", "what", "kernel", "before", "after"}
