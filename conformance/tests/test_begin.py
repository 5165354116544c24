"""Runs that cannot begin end non-zero, with one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from installed import environment_with, suite

from torch_hal_conformance.report.schema import load

DYING = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
RAISING = "raise OSError('libvendor.so: cannot open')\n"
EMPTY = """
import torch_hal as hal
@hal.hookimpl
def torch_hal_kernels():
    yield hal.Kernel("rms_norm", "far", run="nowhere:f", requires=hal.Requires("acme"))
"""
OFFERS = EMPTY.replace('"nowhere:f", requires=hal.Requires("acme")', '"math:sqrt"')
CASE = "rms_norm/core/M17-D512/float32/contiguous/unit/0"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", ("--backend", "native", "--profile", "everything"), "everything"),
        ("", ("--backend", "native", "--op", "no_such_op"), "no case to judge: no op 'no_such_op'"),
        ("", ("--backend", "native", "--op", "rms_nrom"), "did you mean 'rms_norm'?"),
        (
            OFFERS,
            ("--backend", "bad", "--op", "rope"),
            "does not offer rope, so native torch answers; it offers rms_norm",
        ),
        (OFFERS, ("--backend", "bad", "--op", "ro*"), "'ro*' names none of the ops of backend 'bad': rms_norm"),
        (OFFERS, ("--backend", "bad.near"), "backend 'bad' has no kernel 'near'; it has far"),
        ("", ("--backend", "native", "--case", f"{CASE}@near"), "has no kernel 'near' for rms_norm; it has native"),
        ("", ("--backend", "native", "--jobs", "0"), "greater than or equal to 1"),
        ("", ("--backend", "native", "--timeout", "0"), "greater than or equal to 0.1"),
        ("", ("--backend", "native", "--report", "/dev/null/report"), "cannot write /dev/null/report: "),
        ("", ("--backend", "native", "--case", "a/b"), "no case 'a/b'"),
        ("", ("--backend", "nativ"), "no backend 'nativ': did you mean 'native'?"),
        ("", ("--backend", "native", "--device", "cuda:7"), "cuda"),
        (DYING, ("--backend", "bad"), "cannot be loaded: the process died of SIGKILL"),
        (RAISING, ("--backend", "bad"), "is broken: OSError: libvendor.so: cannot open"),
        (EMPTY, ("--backend", "bad"), "offers no kernel on cpu: made for acme, the device is"),
    ],
)
def test_a_run_that_cannot_begin(tmp_path: Path, source: str, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "bad_backend.py").write_text(source or EMPTY)
    ran = suite(environment_with(tmp_path, "bad", "bad_backend"), *options)
    told = " ".join((ran.stdout + ran.stderr).split())
    assert ran.returncode == 2, told
    assert message in told, told
    assert "Traceback" not in told


def test_an_interrupted_run_says_so_and_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    environment, folder = environment_with(tmp_path, "idle", "bad_backend"), tmp_path / "report"
    options = ["--backend", "native", "--op", "*quant*", "--jobs", "1", "--report", str(folder)]
    program = [sys.executable, "-m", "torch_hal_conformance.command", *options]
    folder.mkdir()
    (folder / "report.json").write_text("of an earlier run")
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        told = run.stdout.readline()  # that some have been judged
        os.killpg(run.pid, signal.SIGINT)
        told += run.stdout.read()
    assert run.returncode == 130, told
    assert "INTERRUPTED: " in told and "NOT PASSED: " in told, told
    report = load(folder / "report.json")
    assert not report.passed and report.totals.correct > 0


def test_pytest_alone_says_whom_to_name(tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "torch_hal_conformance.plugin",
        "--pyargs",
        "torch_hal_conformance",
    ]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "say whom to judge: --hal-backend NAME" in ran.stdout
