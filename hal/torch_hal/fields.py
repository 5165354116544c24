"""Declarations by plugins say at once which of their fields is wrong, not later and elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import PluginError


def check_fields(declaration: Any, what: str, named: Iterable[str] = ()) -> None:
    """Raise PluginError for a field whose value is not of its annotated type, or, if ``named``, is empty."""
    hints = _hints(declaration.__class__)
    for field in dataclasses.fields(declaration):
        value = getattr(declaration, field.name)
        if not _is(value, hints[field.name]):
            raise PluginError(f"{what}: field '{field.name}': expected {field.type}, got {value!r}")
        if field.name in named and not value:
            raise PluginError(f"{what}: field '{field.name}' is empty")


def collect(declaration: Any, name: str, collection: Callable[[Iterable[Any]], Any]) -> None:
    """Turn what was given for a field into its kind of collection. One name alone is a collection of one."""
    value = getattr(declaration, name)
    if isinstance(value, Iterable):
        object.__setattr__(declaration, name, collection([value] if isinstance(value, str) else value))


@functools.cache
def _hints(declaration: Hashable) -> dict[str, Any]:
    return get_type_hints(declaration)


def _is(value: object, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if hint is Any or kind is Callable or hint is int:
        return hint is Any or (callable(value) if kind is Callable else type(value) is int)
    if kind is None:
        return value is None if hint is types.NoneType else isinstance(value, hint)
    if not isinstance(value, kind):
        return False
    if kind is tuple and parts[-1:] != (...,):
        return len(value) == len(parts) and all(map(_is, value, parts))
    if isinstance(value, Mapping):
        return all(_is(key, parts[0]) and _is(item, parts[1]) for key, item in value.items())
    return isinstance(value, Iterable) and all(_is(item, parts[0]) for item in value)
