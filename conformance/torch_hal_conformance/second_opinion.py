"""Whether a declaration itself is right: the op's float64 results against an oracle that somebody else wrote."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .oracle import Exact
from .verdict import Failure

LIMIT = 200_000  # elements: second oracles are loops, and a large case says no more than a small one


def check(case: Case, arguments: dict[str, Any], exact: Exact) -> None:
    """Raise Failure("second_oracle") where the two disagree."""
    from . import second

    if case.op not in second.ORACLES or _size([*arguments.values(), *exact.results]) > LIMIT:
        return
    wide = {**arguments, "out_dtype": torch.float64} if "out_dtype" in arguments else arguments
    try:
        second.compare(case.op, wide, exact.results, exact.terms or None)
    except AssertionError as error:
        raise Failure("second_oracle", f"the declaration and the second oracle disagree: {error}") from error


def _size(values: list[Any]) -> int:
    return sum(value.numel() for value in values if isinstance(value, Tensor))
