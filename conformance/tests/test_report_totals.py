"""What a report counts, and whether it passes."""

from __future__ import annotations

from typing import Any

import pytest
import report_samples as samples

from torch_hal_conformance.report import schema
from torch_hal_conformance.report.schema import OpScope, Report, Totals

ID = "rms_norm/core/n17-d128/float32/contiguous/unit/0"


def totals(*statuses: str, offered: tuple[str, ...] = ("acme.a", "acme.b")) -> Totals:
    """Of one case, one status a kernel; two more cases are of an op that the backend does not offer."""
    cases = [samples.case(ID, kernel, status=status) for kernel, status in zip(offered, statuses, strict=False)]
    scopes = [OpScope(op="rms_norm", offered=offered), OpScope(op="other", falls_to="native")]
    return Totals.of(cases, {"rms_norm": 1, "other": 2}, scopes)


@pytest.mark.parametrize(
    ("statuses", "counted", "declared"),
    [
        (("correct", "correct"), "correct", 1),
        (("correct", "unsupported"), "correct", 1),
        (("unsupported", "unsupported"), "unsupported", 0),
        (("correct", "wrong"), "wrong", 1),
        (("unsupported", "error"), "error", 1),
        (("wrong", "crashed"), "crashed", 1),
        (("correct", "xfailed"), "xfailed", 1),
        (("correct", "xpassed"), "xpassed", 1),
        (("correct",), "not_run", 0),
        (("wrong",), "wrong", 1),
        ((), "not_run", 0),
    ],
)
def test_a_case_counts_once_as_the_worst_of_its_kernels(statuses: tuple[str, ...], counted: str, declared: int) -> None:
    found = totals(*statuses)
    expected = dict.fromkeys(schema.WORST_FIRST, 0) | {counted: 1}
    assert {name: getattr(found, name) for name in schema.WORST_FIRST} == expected
    assert (found.declared, found.native_cases, found.profile_cases) == (declared, 2, 3)


def test_every_case_of_the_profile_is_counted_once() -> None:
    for sample in (samples.good(), samples.mixed(), samples.many(600)):
        found = sample.totals
        parts = [getattr(found, outcome) for outcome in schema.WORST_FIRST]
        assert sum(parts) + found.native_cases == found.profile_cases == sum(sample.profile_ids.values())


def test_results_of_an_op_that_is_not_offered_do_not_count() -> None:
    cases = [samples.case(ID, "native")]
    found = Totals.of(cases, {"rms_norm": 1}, [OpScope(op="rms_norm", falls_to="native")])
    assert (found.correct, found.declared, found.native_cases) == (0, 0, 1)


def test_a_case_too_many_of_one_op_does_not_hide_one_too_few_of_another() -> None:
    cases = [samples.case(ID), samples.case(ID.replace("unit", "tiny"))]
    scopes = [OpScope(op=op, offered=("acme.fast",)) for op in ("rms_norm", "silu_and_mul")]
    assert Totals.of(cases, {"rms_norm": 1, "silu_and_mul": 1}, scopes).not_run == 1


def test_of_two_results_the_worse_counts() -> None:
    cases = [samples.case(ID, status="wrong", check="bound"), samples.case(ID)]
    scopes = [OpScope(op="rms_norm", offered=("acme.fast",))]
    for order in (cases, cases[::-1]):
        assert Totals.of(order, {"rms_norm": 1}, scopes).wrong == 1


# Whether a report passed.


def test_a_backend_that_is_right_passes() -> None:
    assert (samples.good().passed, samples.good().reasons) == (True, ())


def test_whatever_fails_is_a_reason() -> None:
    assert samples.mixed().reasons == (
        "1 case crashed",
        "1 case ended in an error",
        "3 cases wrong",
        "1 case right though listed to fail",
    )


def test_nothing_judged_cannot_pass() -> None:
    assert "no case was judged" in samples.build([], {}).reasons
    refused = [
        samples.case(id, status="unsupported", message="no") for id in samples.ids("core")["core"] if "rms" in id
    ]
    assert samples.build(refused, {"rms_norm": ("acme.fast",)}, "core").reasons == ("the backend takes no case",)


def test_a_case_that_did_not_run_is_a_reason() -> None:
    cases = list(samples.good().cases)[1:]
    offered = {scope.op: scope.offered for scope in samples.good().scopes}
    assert samples.build(cases, offered).reasons == ("1 case of ops that the backend offers did not run",)


def test_a_part_of_the_profile_cannot_pass() -> None:
    assert samples.good(selection="rms_*").reasons == ("only a part of the profile was selected: rms_*",)


def test_core_has_no_expected_failures() -> None:
    def with_one_xfailed(profile: str) -> Report:
        cases = list(samples.good().cases)
        place = next(i for i, case in enumerate(cases) if case.profile == profile)
        cases[place] = cases[place].model_copy(update={"status": "xfailed", "check": "bound", "message": "known"})
        return samples.build(cases, {scope.op: scope.offered for scope in samples.good().scopes})

    assert with_one_xfailed("core").reasons == ("1 case of core listed to fail, which core does not allow",)
    assert with_one_xfailed("deepseek").passed


@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        ({"device": ""}, "device"),
        ({"arch": "Unknown "}, "arch"),
        ({"arch": "none"}, "arch"),
        ({"driver": "none"}, "driver"),
        ({"driver": "", "evidence": "host"}, "driver"),
        ({"cores": 0}, "cores"),
        ({"memory_gib": 0.0}, "memory_gib"),
        ({"libraries": {}}, "libraries"),
        ({"libraries": {"triton": "unknown"}}, "libraries.triton"),
        ({"date": "yesterday"}, "date"),
        ({"date": "2026-11-03T09:41:27"}, "date"),
        ({"source_digest": "unknown"}, "source_digest"),
    ],
)
def test_a_gap_in_the_environment_cannot_pass(changes: dict[str, Any], gap: str) -> None:
    assert samples.environment(**changes).incomplete() == (gap,)
    assert samples.good(**changes).reasons == (f"the environment record says nothing of {gap}",)


def test_a_host_says_that_it_has_no_driver() -> None:
    host = {"driver": "none", "evidence": "host", "libraries": {}, "settings": {}}
    assert samples.environment(**host).incomplete() == ()
