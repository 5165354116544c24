"""The commands' reports for people: tables that say by words, not by colour alone, what each state is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {
    "chosen": "bold green",
    "ready": "green",
    "loaded": "green",
    "next": "cyan",
    "refused": "yellow",
    "broken": "bold red",
}


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell), style=_STYLES.get(str(cell), "")) for cell in row))
    return table


def devices(console: Console, report: list[dict[str, Any]]) -> None:
    rows = [
        [
            d["device"],
            d["vendor"],
            d["name"],
            d["arch"] or "?",
            _gib(d["memory_total"]),
            d["fp8"] or "",
            d["dist_backend"],
            d["state"],
        ]
        for d in report
    ]
    console.print(_table("Devices", ["device", "vendor", "name", "arch", "memory", "fp8", "groups", "state"], rows))


def ops(console: Console, report: list[dict[str, Any]]) -> None:
    rows = []
    for op in report:
        for i, kernel in enumerate(op["kernels"]):
            first = (op["family"], op["name"]) if i == 0 else ("", "")
            rows.append([*first, kernel["kernel"], kernel["plugin"], kernel["state"], kernel["reason"]])
    console.print(_table("Ops and their kernels", ["family", "op", "kernel", "plugin", "state", "reason"], rows))


def explanation(console: Console, report: Mapping[str, Any]) -> None:
    columns = ("state", "kernel", "plugin", "band", "reason")
    rows = [[kernel[column] for column in columns] for kernel in report["kernels"]]
    console.print(_table(f"{report['op']} on {report['device']}", ["state", "kernel", "plugin", "band", "why"], rows))


def doctor(console: Console, report: Mapping[str, Any]) -> None:
    console.print("  ".join(f"{name} {version}" for name, version in report["versions"].items()))
    for name, value in report["variables"].items():
        console.print(f"{name}={value}", markup=False)
    rows = [
        [p["name"], p["state"], p["kernels"], p["origin"], "\n".join([p["error"], *p["notes"]]).strip()]
        for p in report["plugins"]
    ]
    console.print(_table("Plugins", ["plugin", "state", "kernels", "from", "error and notes"], rows))
    devices(console, report["devices"])
    rows = [[x["name"], x["version"], x["state"], x["reason"]] for x in report["libraries"]]
    console.print(_table("Kernel libraries", ["library", "wanted", "state", "reason"], rows))
    for problem in report["problems"]:
        console.print(Text(f"problem: {problem}", style="bold red"))
    console.print("No problem found." if not report["problems"] else f"{len(report['problems'])} problem(s).")


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.0f} GiB"
