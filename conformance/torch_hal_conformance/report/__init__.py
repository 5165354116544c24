"""What a run leaves behind. `schema` says what a report is; the rest reads reports. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from .schema import Report


def write(report: Report, folder: Path) -> None:
    """``report.json``, ``report.md`` and ``report.html`` in ``folder``, which is made where it does not exist."""
    from . import markdown, schema

    # The record first: whatever becomes of the pages, they can be made from it.
    _put(folder / "report.json", schema.dump(report))
    _put(folder / "report.md", markdown.summary(report))
    _put(folder / "report.html", _html().page(report))


def write_matrix(reports: Sequence[Report], folder: Path) -> None:
    """``matrix.md`` and ``matrix.html``: op × backend."""
    from . import markdown

    _put(folder / "matrix.md", markdown.matrix(reports))
    _put(folder / "matrix.html", _html().matrix(reports))


def _html() -> ModuleType:
    try:
        from . import html
    except ModuleNotFoundError as missing:
        from .schema import ReportError

        raise ReportError(
            f"the HTML page needs {missing.name}, which is not installed: pip install 'torch-hal[conformance]'"
        ) from missing
    return html


def _put(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
