"""The types that a report is made of: what strict JSON and UTF-8 can hold."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, WithJsonSchema

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _writable(value: Any) -> Any:
    """Text that UTF-8 has: a library's message may hold half of a surrogate pair."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _read_number(value: Any) -> Any:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _write_number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


Text = Annotated[str, BeforeValidator(_writable)]
Texts = dict[Text, Text]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[
    float,
    BeforeValidator(_read_number),
    PlainSerializer(_write_number, return_type=float | str, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(_NONFINITE)}]}),
]


class Record(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, json_schema_serialization_defaults_required=True
    )


def strict_json(text: str) -> Any:
    """What the text says, without what RFC 8259 forbids or leaves open. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)


def _no_constant(constant: str) -> None:
    raise ValueError(f'{constant} is no number of JSON; expected the string "{constant}"')


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twin = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"{twin!r} stands twice in one object")
    return found


def told(error: ValidationError, name: str, most: int = 3) -> str:
    """A line for each of the first faults: file, field, what was expected and got."""
    lines = []
    for fault in error.errors(include_url=False)[:most]:
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
        what = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        got = "" if fault["type"] in ("missing", "extra_forbidden") else f", got {_short(fault['input'])}"
        lines.append(f"{name}: {field or 'the report'}: {what}{got}")
    if error.error_count() > most:
        lines.append(f"{name}: and {error.error_count() - most} more faults")
    return "\n".join(lines)


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[:most] + "…"
