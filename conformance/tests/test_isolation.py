"""Kernels that reach beyond their call change no other case's result, and lose none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from installed import environment_with, suite

from torch_hal_conformance.report.schema import Report, load


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("unruly")
    environment = environment_with(folder, "unruly", "unruly_backend")
    environment["TORCH_HAL_DENY"] = "silu*=unruly.denied"  # a shell's wish is not the backend's
    options = ("--backend", "unruly", "--report", str(folder / "report"), "--jobs", "1", "--timeout", "30")
    ran = suite(environment, *options)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return load(Path(folder) / "report" / "report.json")


def found(report: Report, kernel: str) -> Counter[tuple[str, str]]:
    return Counter((case.status, case.check) for case in report.cases if case.kernel == f"unruly.{kernel}")


def test_a_right_kernel_among_them_is_right(report: Report) -> None:
    assert set(found(report, "right")) == {("correct", ""), ("unsupported", "")}
    told = {case.message for case in report.cases if case.kernel == "unruly.right"}
    assert told == {"", "does not declare graph_safe"}
    assert len({case.id for case in report.cases}) * 4 == len(report.cases)


def test_a_child_that_comes_back_answers_nothing(report: Report) -> None:
    assert set(found(report, "forks")) <= {("correct", ""), ("unsupported", "")}


def test_an_answer_that_nobody_asked_for_ends_the_process_that_gave_it(report: Report) -> None:
    told = {case.message for case in report.cases if case.kernel == "unruly.writes"}
    assert ("crashed", "crash") in found(report, "writes")
    assert any("nobody asked for" in message for message in told), told


def test_a_policy_of_the_shell_hides_no_kernel(report: Report) -> None:
    assert found(report, "denied")["wrong", "bound"] > 20
