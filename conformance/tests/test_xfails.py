from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from installed import environment_with, suite

from torch_hal_conformance.cases import select
from torch_hal_conformance.report.schema import load
from torch_hal_conformance.xfails import XfailError, read

TODAY = datetime.date(2026, 12, 1)
CASE = "rms_norm/deepseek/M17-D7168/bfloat16/contiguous/unit/0"
CASES = {CASE, "rms_norm/core/M17-D512/bfloat16/contiguous/unit/0"}
ENTRY = {"id": CASE, "raises": "bound", "url": "https://example.com/1", "arch": "*", "expires": "2027-06-30"}


def write(folder: Path, *entries: dict[str, str]) -> Path:
    lines = []
    for entry in entries:
        lines += ["[[xfail]]", *(f"{k} = {v if k == 'expires' else repr(v)}" for k, v in entry.items())]
    (path := folder / "conformance.toml").write_text("\n".join(lines).replace("'", '"'))
    return path


def test_an_entry_that_holds(tmp_path: Path) -> None:
    [entry] = read(write(tmp_path, ENTRY), CASES, TODAY)
    assert (entry.id, entry.raises, entry.expires) == (CASE, "bound", datetime.date(2027, 6, 30))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "rms_norm/deepseek/M18/x/y/z/0"}, "is no case of this suite"),
        ({"id": "rms_norm/core/M17-D512/bfloat16/contiguous/unit/0"}, "core, which admits no xfail"),
        ({"expires": "2026-11-30"}, "expired on 2026-11-30"),
        ({"url": "somewhere"}, "url"),
        ({"raises": ""}, "raises"),
        ({"why": "because"}, "why"),
    ],
)
def test_entries_that_are_refused_by_name(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(XfailError, match=message):
        read(write(tmp_path, {**ENTRY, **change}), CASES, TODAY)


def test_lists_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(XfailError, match="listed twice"):
        read(write(tmp_path, ENTRY, ENTRY), CASES, TODAY)
    (tmp_path / "conformance.toml").write_text("[[xfail]")
    with pytest.raises(XfailError, match=r"conformance.toml: "):
        read(tmp_path / "conformance.toml", CASES, TODAY)


BACKEND = """
from __future__ import annotations
import torch_hal as hal

def rms_norm(x, weight, eps):
    wide = x.float()
    y = wide * (wide * wide).mean(-1, keepdim=True).add(eps).rsqrt() * weight.float()
    return (y * (1.05 if x.shape[-1] == 7168 else 1)).to(x.dtype).contiguous()

@hal.hookimpl
def torch_hal_kernels():
    yield hal.Kernel("rms_norm", "listed", run=rms_norm)
"""


def test_known_failures_are_strict(tmp_path: Path) -> None:
    """One fails as listed, one fails otherwise than listed, one does not fail; those not listed are failures."""
    package = tmp_path / "listed_backend"
    package.mkdir()
    (package / "__init__.py").write_text(BACKEND)
    like = {dtype: CASE.replace("bfloat16", dtype) for dtype in ("bfloat16", "float16", "float32")}
    fine = next(c.id for c in select("deepseek", "rms_norm") if c.profile == "deepseek" and "M5-D5120/bfloat16" in c.id)
    write(
        package,
        {**ENTRY, "id": like["bfloat16"], "expires": "2999-01-01"},
        {**ENTRY, "id": like["float16"], "expires": "2999-01-01", "raises": "RuntimeError"},
        {**ENTRY, "id": fine, "expires": "2999-01-01"},
        {**ENTRY, "id": like["float32"], "expires": "2999-01-01", "arch": "sm_90"},
    )
    environment = environment_with(tmp_path, "listed", "listed_backend")
    options = ("--backend", "listed", "--profile", "deepseek", "--jobs", "1", "--report", str(tmp_path / "report"))
    ran = suite(environment, *options)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = {case.id: case for case in load(tmp_path / "report" / "report.json").cases}
    assert found[like["bfloat16"]].status == "xfailed"
    assert (
        found[like["float16"]].status == "wrong"
        and "listed to fail by 'RuntimeError'" in found[like["float16"]].message
    )
    assert found[fine].status == "xpassed" and "remove the entry" in found[fine].message
    assert found[like["float32"]].status == "wrong"
