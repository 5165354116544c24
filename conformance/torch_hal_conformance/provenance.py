"""Who answered: whether an op's reference ran while a backend's kernel was to run."""

from __future__ import annotations

import types
from typing import Any

from torch_hal.op import declared


class Watch:
    """While it is entered, notes which ops' references run, in whatever thread and however they are reached.

    Each reference's code is replaced by one that notes the op's name and goes on with the original, so that neither a
    captured reference, nor a bound op that falls back, nor a thread that was there before escapes it.
    """

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self._codes: dict[types.FunctionType, types.CodeType] = {}

    def __enter__(self) -> Watch:
        for name, op in declared().items():
            reference: Any = op.reference
            if isinstance(reference, types.FunctionType) and not reference.__code__.co_freevars:
                self._codes[reference] = reference.__code__
                reference.__code__ = _noting(name, reference, self.entered)
        return self

    def __exit__(self, *exception: object) -> None:
        for reference, code in self._codes.items():
            reference.__code__ = code
        self._codes.clear()


def _noting(name: str, reference: types.FunctionType, seen: set[str]) -> types.CodeType:
    """Code that adds ``name`` to ``seen`` and then does what ``reference`` does. It has no names of its own: its one
    constant is the function that does so."""
    original = types.FunctionType(reference.__code__, reference.__globals__, reference.__name__, reference.__defaults__)
    original.__kwdefaults__ = reference.__kwdefaults__

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.add(name)
        return original(*args, **kwargs)

    code = _template.__code__
    return code.replace(co_consts=tuple(note if constant == _PLACE else constant for constant in code.co_consts))


_PLACE = "the function that notes"


def _template(*args: Any, **kwargs: Any) -> Any:
    function: Any = "the function that notes"
    return function(*args, **kwargs)
