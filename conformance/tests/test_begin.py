"""Runs that cannot begin end non-zero, with one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import environment_with, suite

DYING = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
RAISING = "raise OSError('libvendor.so: cannot open')\n"
EMPTY = """
import torch_hal as hal
@hal.hookimpl
def torch_hal_kernels():
    yield hal.Kernel("rms_norm", "far", run="nowhere:f", requires=hal.Requires("acme"))
"""


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", ("--backend", "native", "--profile", "everything"), "everything"),
        ("", ("--backend", "native", "--op", "no_such_op"), "no case to judge: 'no_such_op' names none of the ops"),
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
