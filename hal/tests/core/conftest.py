"""Every test of the core begins without plugins and leaves the process as it found it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest

from torch_hal import detect, plugins, probing
from torch_hal.op import _OPS


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path) -> Iterator[None]:
    """No plugin but what the test brings; afterwards registry, probes, declarations and modules as they were."""
    caches = (plugins._registered, _OPS, detect._probed, probing._answers)
    saved, current, modules = [dict(cache) for cache in caches], plugins._current, set(sys.modules)
    entry_points: Any = importlib.metadata.entry_points

    def of_others(**selected: str) -> EntryPoints:
        found: EntryPoints = entry_points(**selected)
        return EntryPoints(entry for entry in found if entry.dist is None or entry.dist.name != "torch-hal")

    importlib.metadata.entry_points = of_others  # type: ignore[assignment]
    plugins._current = None
    yield
    importlib.metadata.entry_points = entry_points
    for cache, before in zip(caches, saved, strict=True):
        cache.clear()
        cache.update(before)
    plugins._current = current
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on this process's path, to write throw-away distributions into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder
