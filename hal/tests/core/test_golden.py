"""Behaviour 18: a golden table of winners for each device and op, so that no refactoring flips a choice unseen.

After a change that means to: ``UPDATE_GOLDEN=1 python -m pytest hal/tests/core/test_golden.py``, and read the diff.
"""

from __future__ import annotations

import importlib
import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torch_hal as hal
from torch_hal import plugins, selection
from torch_hal.kernel import Kernel, Library
from torch_hal.loading import Loaded
from torch_hal.op import Op, declared

from .helpers import H200

GOLDEN = Path(__file__).with_name("golden_winners.json")
PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
IN_TREE: dict[str, str] = PROJECT["entry-points"][plugins.GROUP]
DEVICES = {
    "cpu": hal.DeviceInfo("cpu", "cpu", arch="x86_64", fp8="e4m3fn", probed=True),
    "nvidia sm_90": H200,
    "nvidia sm_100": replace(H200, name="B200", arch="sm_100"),
}


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The in-tree plugins and no other, every kernel library present and working, no vendor code imported."""
    monkeypatch.setattr(plugins, "_entry_points", dict)
    hal.refresh()
    for name, module in IN_TREE.items():
        hal.register(importlib.import_module(module), name)
    monkeypatch.setattr(Library, "missing", lambda self: None)
    monkeypatch.setattr(selection, "probe_library", lambda library, device: None)
    monkeypatch.setattr(selection, "load_kernel", pretend)


def pretend(kernel: Kernel, op: Op[..., Any]) -> Loaded:
    """The kernel with stand-ins for its code: a choice depends on which parts it has, not on what they do."""
    parts = (op.reference if getattr(kernel, part) else None for part in ("static", "dynamic", "prepare", "plan"))
    return Loaded(kernel, op.reference, *parts)


@pytest.mark.usefixtures("everything")
def test_b18_golden_table_of_winners() -> None:
    table = {
        name: {op: [loaded.kernel.id for loaded in hal.explain(op, device).chain] for op in sorted(declared())}
        for name, device in DEVICES.items()
    }
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(table, indent=1) + "\n")
    assert table == json.loads(GOLDEN.read_text())


@pytest.mark.usefixtures("everything")
def test_b18_no_kernel_of_one_vendor_is_a_candidate_on_another() -> None:
    vendors = {"cpu", "nvidia", "amd", "mthreads"}
    for vendor in vendors:
        device = hal.DeviceInfo(vendor, "cpu" if vendor == "cpu" else "cuda", arch="sm_90", probed=True)
        for op in declared():
            for verdict in hal.explain(op, device).verdicts:
                wanted = verdict.kernel.requires.vendor
                assert wanted in (None, vendor) or (verdict.cause == "device" and not verdict.role), (op, verdict)
