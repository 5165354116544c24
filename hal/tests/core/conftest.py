"""Every test of the core leaves the process as it found it: registry, probes, declarations, imported plugins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_hal import detect, plugins, selection
from torch_hal.op import _OPS


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path) -> Iterator[None]:
    caches = (plugins._registered, _OPS, detect._probed, selection._probes)
    saved, current, modules = [dict(cache) for cache in caches], plugins._current, set(sys.modules)
    yield
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
