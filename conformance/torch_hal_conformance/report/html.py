"""A report as one page of HTML, and several as one matrix: no network, no dependency, readable without JavaScript."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from .schema import RATIO, WORST_FIRST, CaseResult, Report
from .tables import SYMBOLS, WORDS, View, duration, figure, labels, named, percent, visible

MOST_FAILURES = 400  # in full; the table of cases has all
OPEN_FAILURES = 20
LONGEST = 4000  # characters of a message in full, and in the table:
LONGEST_IN_TABLE = 300
FIELDS = {"os": "OS", "cpu": "CPU", "memory_gib": "memory, GiB", "torch_hal": "torch_hal"}  # others: their own names
RECORDED = ("suite_version", "source_digest", "torch_hal", "torch", "device", "driver", "os", "date")


def page(report: Report) -> str:
    """The whole report."""
    view = View(report)
    return _render(
        "page.html",
        title=named(report),
        report=report,
        view=view,
        bar=_bar(report),
        record=_record(report),
        failures=(failures := _spread(view.failures)),
        expected=_spread(view.expected_failures),
        first_failures=_first_of(failures),
        data=_embed(_cases(report.cases)),
    )


def matrix(reports: Sequence[Report]) -> str:
    """Op × backend."""
    views = [View(report) for report in reports]
    ops = sorted({op for view in views for op in view.ops})
    columns = list(zip(labels(reports), views, strict=True))
    records = [(_named(name), [str(getattr(report.environment, name)) for report in reports]) for name in RECORDED]
    found = {state for view in views for state in view.states}
    return _render(
        "matrix.html",
        title="Conformance of several backends",
        columns=columns,
        ops=ops,
        states=[state for state in SYMBOLS if state in found],
        records=records,
    )


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_read),
    )
    environment.filters |= {
        "duration": duration,
        "figure": figure,
        "shorten": _shorten,
        "breakable": _breakable,
        "words": _words,
    }
    environment.globals |= {"symbols": SYMBOLS, "words": WORDS, "percent": percent, "open_failures": OPEN_FAILURES}
    environment.globals |= {"ratio": RATIO}
    return environment


def _read(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _render(template: str, **values: Any) -> str:
    style, early, script = _read("page.css"), 'document.documentElement.classList.add("js")', _read("page.js")
    # Nothing may be fetched, and no script may run but these two, whatever a message says.
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(early)}' '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    blocks = {"style": Markup(style), "early": Markup(early), "script": Markup(script), "policy": policy}
    return visible(_templates().get_template(template).render(**values, **blocks))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _shorten(text: str, longest: int = LONGEST) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]}\n… and {len(text) - longest} more characters in report.json"


def _breakable(name: str, after: str = "/") -> Markup:
    """A name that may break after each slash, or underscore."""
    return (Markup.escape(after) + Markup("<wbr>")).join(name.split(after))


def _words(command: str) -> Markup:
    """A command that breaks between its words, unless one is longer than a line."""
    return Markup(" ").join(Markup('<span class="w">{}</span>').format(word) for word in command.split(" "))


def _record(report: Report) -> list[tuple[str, str]]:
    about = report.environment
    fields = [name for name in type(about).model_fields if name not in ("libraries", "settings")]
    values = [(_named(name), str(getattr(about, name))) for name in fields]
    return [*values, *about.libraries.items(), *about.settings.items(), ("seeds", ", ".join(map(str, report.seeds)))]


def _named(field: str) -> str:
    return FIELDS.get(field, field.replace("_", " "))


def _bar(report: Report) -> list[tuple[str, int, float, float]]:
    """The profile as parts of a bar: (state, cases, start, width), in thousandths."""
    totals = report.totals
    states = ("correct", "xfailed", "xpassed", "wrong", "error", "crashed", "not_run", "unsupported")
    counts = [(state, getattr(totals, state)) for state in states] + [("native", totals.native_cases)]
    whole = max(1, sum(number for _, number in counts))
    parts, start = [], 0.0
    for state, number in counts:
        if number:
            width = 1000 * number / whole
            parts.append((state, number, round(start, 2), round(max(width, 3), 2)))  # one case among thousands shows
            start += width
    return parts


def _spread(cases: list[CaseResult]) -> list[CaseResult]:
    """As many as are shown in full, from every op the first ones."""
    of_op: dict[str, list[CaseResult]] = {}
    for case in cases:
        of_op.setdefault(case.op, []).append(case)
    most = len(cases) if len(cases) <= MOST_FAILURES else max(1, MOST_FAILURES // len(of_op))
    return [case for of_one in of_op.values() for case in of_one[:most]]


def _first_of(failures: list[CaseResult]) -> dict[tuple[str, str, str], int]:
    """(op, dtype, regime) -> the first failure there, by its place; dtype or regime may be empty for any."""
    found: dict[tuple[str, str, str], int] = {}
    for i, case in enumerate(failures):
        for dtype in ("", case.dtype):
            for regime in ("", case.regime):
                found.setdefault((case.op, dtype, regime), i)
    return found


def _cases(cases: Sequence[CaseResult]) -> dict[str, Any]:
    """Every case, by columns: texts as numbers of a table that holds each once."""
    texts: dict[str, Callable[[CaseResult], str]] = {
        "op": lambda case: case.op,
        "profile": lambda case: case.profile,
        "shape": lambda case: case.shape,
        "dtype": lambda case: case.dtype,
        "layout": lambda case: case.layout,
        "regime": lambda case: case.regime,
        "kernel": lambda case: case.kernel,
        "status": lambda case: case.status,
        "check": lambda case: case.check,
        "message": lambda case: _shorten(case.message, LONGEST_IN_TABLE),
    }
    columns = {name: _interned(map(read, cases)) for name, read in texts.items()}
    numbers = {
        "seed": [case.seed for case in cases],
        "E": [_short(case.E) for case in cases],
        "R": [_short(case.R) for case in cases],
        "time": [_short(case.kernel_seconds, 4) for case in cases],
    }
    return {"texts": columns, "numbers": numbers, "symbols": SYMBOLS, "words": WORDS, "worst_first": WORST_FIRST}


def _interned(values: Iterable[str]) -> dict[str, list[Any]]:
    places: dict[str, int] = {}
    return {"at": [places.setdefault(value, len(places)) for value in values], "values": list(places)}


def _short(value: float | None, digits: int = 3) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.{digits}g}")
    return figure(value)


def _embed(values: Any) -> Markup:
    """JSON that no text in it can end."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
