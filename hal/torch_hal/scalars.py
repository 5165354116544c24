"""The arguments of an op that are no tensors: which test says that one is of its declared type."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any

import torch


def is_int(x: object) -> bool:
    """An integer of any kind that schemas carry; a bool is none."""
    return isinstance(x, (numbers.Integral, torch.SymInt)) and not isinstance(x, bool)


def is_float(x: object) -> bool:
    """A real number, integers included; a bool is none, nor is a tensor of one element."""
    return isinstance(x, (numbers.Real, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool)


# annotation -> (source of the test, with a fast way out for what is passed most; what it is called)
_TESTS: dict[Any, tuple[str, str]] = {
    int: ("(type({0}) is int or _is_int({0}))", "an int"),
    float: ("(type({0}) is float or _is_float({0}))", "a float"),
    bool: ("({0} is True or {0} is False)", "a bool"),
    str: ("(type({0}) is str or isinstance({0}, str))", "a str"),
    torch.dtype: ("isinstance({0}, _dtype)", "a torch.dtype"),
    list[int]: ("isinstance({0}, (list, tuple))", "a list of ints"),
}

NAMESPACE: Mapping[str, Any] = {"_is_int": is_int, "_is_float": is_float, "_dtype": torch.dtype}


def scalar_tests(signature: inspect.Signature) -> dict[str, tuple[str, str]]:
    """Argument -> (source of its test, what it must be), for the arguments that are no tensors."""
    found = {name: _TESTS.get(p.annotation) for name, p in signature.parameters.items()}
    return {name: (test[0].format(name), test[1]) for name, test in found.items() if test is not None}
