"""A report as Markdown, and several as one matrix, as Markdown and for the terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from .schema import CaseResult, Report
from .tables import SYMBOLS, WORDS, View, duration, figure, labels, named, percent, visible

MOST = 30  # failures in full; a job summary holds 1 MiB
WHOLE = 5  # rows of the matrix that say something of the whole, before the ops


def summary(report: Report) -> str:
    """The report: figures, op × dtype, failures, what is not the backend's own, environment."""
    view = View(report)
    parts = [
        f"# {inline(named(report))}",
        _verdict(report),
        _figures(report),
        *_failures("Failures", view.failures),
        "## Op × dtype",
        _op_by_dtype(view),
        *_failures("Expected failures", view.expected_failures),
        *_scope(view),
        "## Environment",
        _environment(report),
    ]
    return visible("\n\n".join(parts) + "\n")


def matrix(reports: Sequence[Report]) -> str:
    """Op × backend, as Markdown."""
    header, rows = matrix_rows(reports)
    return _table([inline(cell) for cell in header], [[inline(cell) for cell in row] for row in rows]) + "\n"


def matrix_text(reports: Sequence[Report]) -> str:
    """Op × backend, for the terminal."""
    header, rows = matrix_rows(reports)
    widths = [max(map(_width, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["─" * width for width in widths], *rows]
    text = [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    used = [state for state, symbol in SYMBOLS.items() if any(symbol in cell for row in rows for cell in row[1:])]
    legend = "   ".join(f"{SYMBOLS[state]} {WORDS[state]}" for state in used)
    return "\n".join(line.rstrip() for line in (*text, "", legend)) + "\n"


def matrix_rows(reports: Sequence[Report]) -> tuple[list[str], list[list[str]]]:
    """The matrix's header and rows: what holds of the whole, then each op."""
    views = [View(report) for report in reports]
    totals = [report.totals for report in reports]
    rows = [
        ["passed", *("✓ yes" if report.passed else "✗ no" for report in reports)],
        [
            "profile",
            *(report.profile + ("" if report.selection == "*" else f", {report.selection}") for report in reports),
        ],
        ["evidence", *(report.environment.evidence for report in reports)],
        ["correct ÷ declared", *(f"{percent(t.correct, t.declared)} ({t.correct}/{t.declared})" for t in totals)],
        [
            "declared ÷ profile",
            *(f"{percent(t.declared, t.profile_cases)} ({t.declared}/{t.profile_cases})" for t in totals),
        ],
    ]
    for op in sorted({op for view in views for op in view.ops}):
        rows.append([op, *(cell(view, op) for view in views)])
    return ["op", *labels(reports)], rows


def _share(part: int, whole: int) -> str:
    return f"{percent(part, whole)} ({part}/{whole})"


def cell(view: View, op: str) -> str:
    """An op in one word: its own cases by outcome, or who answers instead."""
    state = view.state(op)
    if view.offers(op):
        return view.tally(op).text
    return f"{SYMBOLS[state]} {'native' if state == 'native' else WORDS[state]}" if state else ""


def inline(text: str) -> str:
    """Text that stays itself within a line or a table's cell."""
    text = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", text).replace("\\<", "&lt;").replace("\\&", "&amp;")


def code(text: str) -> str:
    """Code within a line: fenced by more backticks than it has in a row. Not for tables, if it has a bar."""
    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _block(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _verdict(report: Report) -> str:
    if report.passed:
        return f"**{SYMBOLS['correct']} Passed** the {report.profile} profile."
    reasons = "\n".join(f"- {inline(reason)}" for reason in report.reasons)
    return f"**{SYMBOLS['wrong']} Not passed** in the {report.profile} profile:\n\n{reasons}"


def _figures(report: Report) -> str:
    t = report.totals
    others = ((t.unsupported, "unsupported"), (t.native_cases, "native"), (t.not_run, "not run"))
    rest = "".join(f", {number} {what}" for number, what in others if number)
    rows = [
        ["correct ÷ declared", f"**{percent(t.correct, t.declared)}**", f"{t.correct} of {t.declared}"],
        [
            "declared ÷ profile",
            f"**{percent(t.declared, t.profile_cases)}**",
            f"{t.declared} of {t.profile_cases}{rest}",
        ],
    ]
    return _table(["figure", "", "cases"], rows)


def _op_by_dtype(view: View) -> str:
    rows = []
    for op in view.ops:
        if view.offers(op):
            rows.append([code(op), inline(view.tally(op).text), *(inline(view.tally(op, d).text) for d in view.dtypes)])
        else:
            rows.append([code(op), inline(cell(view, op)), *("" for _ in view.dtypes)])
    legend = ", ".join(f"{symbol} {WORDS[state]}" for state, symbol in SYMBOLS.items())
    return _table(["op", "all", *map(inline, view.dtypes)], rows) + f"\n\n{inline(legend)}"


def _failures(title: str, cases: list[CaseResult]) -> list[str]:
    if not cases:
        return []
    parts = [f"## {title}: {len(cases)}"]
    for case in cases[:MOST]:
        about = [case.check, *(f"{name} = {figure(value)}" for name, value in (("E", case.E), ("R", case.R)) if value)]
        parts.append(f"### {SYMBOLS[case.status]} {code(case.id)}")
        parts.append(f"{WORDS[case.status]}: {inline(', '.join(filter(None, [case.kernel, *about])))}")
        parts += [_block(text) for text in (case.message[:2000], case.reproduce) if text]
    if len(cases) > MOST:
        parts.append(f"{len(cases) - MOST} more are in the report.")
    return parts


def _scope(view: View) -> list[str]:
    refusals = [f"- {code(r.op)}, {code(r.kernel)}: {inline(r.reason)} ({r.number} cases)" for r in view.refusals]
    missing = [
        f"- {code(scope.op)}, {code(kernel)}: {inline(why)}"
        for scope in view.report.scopes
        for kernel, why in scope.unavailable.items()
    ]
    found = [("Unsupported", refusals), ("Declared, but unavailable here", missing)]
    return [text for title, lines in found if lines for text in (f"## {title}", "\n".join(lines))]


def _environment(report: Report) -> str:
    about = report.environment
    values = {name: getattr(about, name) for name in type(about).model_fields if name not in ("libraries", "settings")}
    values |= about.libraries | about.settings
    values["seeds"] = ", ".join(map(str, report.seeds))
    values["time in kernels"] = duration(sum(case.kernel_seconds or 0 for case in report.cases))
    return _table(["", ""], [[inline(name), inline(str(value))] for name, value in values.items()])


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    """Columns of a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
