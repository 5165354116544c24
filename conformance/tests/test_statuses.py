"""Each way in which a kernel can go wrong ends in the status, by the check, that says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import environment_with, suite

from torch_hal_conformance.report.schema import CaseResult, Report, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[subprocess.CompletedProcess[str]]:
    environment = environment_with(folder, "odd", "odd_backend")
    yield suite(environment, "--backend", "odd", "--report", str(folder / "report"), "--jobs", "1", "--timeout", "10")


@pytest.fixture(scope="module")
def report(run: subprocess.CompletedProcess[str], folder: Path) -> Report:
    assert run.returncode == 1, run.stdout + run.stderr
    return load(folder / "report" / "report.json")


def results(report: Report, kernel: str) -> list[CaseResult]:
    found = [case for case in report.cases if case.kernel == f"odd.{kernel}"]
    assert found
    return found


def unpromised(case: CaseResult) -> bool:
    """Whether the case looks at something that the kernel does not declare."""
    return "does not declare" in case.message


def count(report: Report, kernel: str) -> Counter[tuple[str, str]]:
    return Counter((case.status, case.check) for case in results(report, kernel))


def test_a_right_kernel_is_right_in_every_case(report: Report) -> None:
    assert set(count(report, "right")) == {("correct", "")}
    assert all(case.ran == "odd.right" for case in results(report, "right"))


def test_two_kernels_of_one_op_are_judged_apart_and_the_worse_one_counts(report: Report) -> None:
    wrong = {case.id for case in results(report, "one_percent") if case.status == "wrong"}
    assert len(wrong) > 30
    assert report.totals.wrong >= len(wrong)


def test_a_crash_takes_its_own_cases_alone(report: Report) -> None:
    crashed = [case for case in results(report, "crash") if case.status == "crashed"]
    assert {case.id.split("/")[2].split("-")[0] for case in crashed} == {"M1"}
    assert all("SIGSEGV" in case.message and "silu_and_mul" in case.message for case in crashed)
    assert len(crashed) < len(results(report, "crash")) / 2
    assert {case.status for case in results(report, "crash") if not unpromised(case)} == {"crashed", "correct"}


def test_a_kernel_that_hangs_is_stopped(report: Report) -> None:
    hung = [case for case in results(report, "hang") if case.status == "crashed"]
    assert hung and all("no answer within 10 s" in case.message for case in hung)


def test_native_torch_that_answers_unseen_is_seen(report: Report) -> None:
    counted = count(report, "sly")
    assert counted["wrong", "provenance"] > 20
    assert {status for status, _ in counted if status != "wrong"} <= {"unsupported", "correct"}
    empties = [case for case in results(report, "sly") if case.status == "correct"]
    assert all("b24_empty" in case.id for case in empties)


def test_a_declared_limit_is_unsupported_with_its_reason(report: Report) -> None:
    refused = [case for case in results(report, "sly") if "/bfloat16/" in case.id and not unpromised(case)]
    assert refused and all(case.status == "unsupported" for case in refused)
    assert all("takes no bfloat16" in case.message for case in refused)


def test_a_refusal_from_inside_a_kernel_comes_too_late(report: Report) -> None:
    assert ("wrong", "refusal") in count(report, "late")
    assert {case.status for case in results(report, "late") if not unpromised(case)} == {"wrong"}


def test_an_exception_is_an_error_by_its_type(report: Report) -> None:
    found = {(case.status, case.check) for case in results(report, "raises") if not unpromised(case)}
    assert found == {("error", "RuntimeError")}


def test_a_kernel_that_cannot_be_bound_fails_in_every_case(report: Report) -> None:
    assert set(count(report, "broken")) == {("error", "broken")}
    assert "takes (k), the op takes" in results(report, "broken")[0].message


def test_what_is_unavailable_refused_and_native_are_three_things(report: Report) -> None:
    scopes = {scope.op: scope for scope in report.scopes}
    assert "no_such_library is not installed" in scopes["rope"].unavailable["odd.elsewhere"]
    assert scopes["rope"].falls_to == "native" and not scopes["rope"].offered
    assert scopes["mla_decode"].falls_to == "native" and not scopes["mla_decode"].unavailable
    assert scopes["rms_norm"].offered == ("odd.right", "odd.one_percent")
    assert set(count(report, "shy")) == {("unsupported", "")}
    totals = report.totals
    assert totals.profile_cases == totals.declared + totals.unsupported + totals.native_cases + totals.not_run
    assert totals.not_run == 0 and totals.native_cases > totals.declared


def test_each_failure_is_told_with_the_command_that_repeats_it(
    report: Report, run: subprocess.CompletedProcess[str], folder: Path
) -> None:
    failing = [case for case in report.cases if case.failing]
    assert len(failing) > 100 and not report.passed
    for case in failing:
        assert f"--case {case.id}@{case.kernel}" in case.reproduce or f"'{case.id}@{case.kernel}'" in case.reproduce
    assert sum(case.reproduce in run.stdout for case in failing) > 10  # a few of each kind, the others in the report
    assert "failures by cause:" in run.stdout
    again = suite(environment_with(folder, "odd", "odd_backend"), *failing[-1].reproduce.split()[2:])
    assert again.returncode == 1 and failing[-1].id in again.stdout


def test_pytest_gives_the_same_result_as_the_command(report: Report, folder: Path) -> None:
    options = ["--hal-backend", "odd", "--hal-op", "moe_sum_reduce", "--hal-report", str(folder / "pytest")]
    program = [sys.executable, "-m", "pytest", "-p", "torch_hal_conformance.plugin", "-p", "no:cacheprovider", "-q"]
    ran = subprocess.run(
        [*program, "--pyargs", "torch_hal_conformance", "-c", "/dev/null", "--rootdir", str(folder), *options],
        env=environment_with(folder, "odd", "odd_backend"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout
    theirs = load(folder / "pytest" / "report.json")
    assert outcomes(theirs.cases) == outcomes(case for case in report.cases if case.op == "moe_sum_reduce")


def outcomes(cases: object) -> list[tuple[str, ...]]:
    numbers = [case.model_dump(mode="json") for case in cases]  # type: ignore[attr-defined]
    return [tuple(json.dumps(n[k]) for k in ("id", "kernel", "status", "check", "message", "E", "R")) for n in numbers]
