"""Second oracles: each op's meaning once more, from the formula, by someone who had not read the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import activation_norm, attention, experts, grouped, kv_cache, permute, quant, rope, routing, sampling
from .convert import Canonical, Codes, Oracle, agree, to_numpy, unpack_scales

__all__ = ["CANONICAL", "ORACLES", "Codes", "Oracle", "agree", "compare", "to_numpy", "unpack_scales"]

_MODULES = (activation_norm, attention, experts, grouped, kv_cache, permute, quant, rope, routing, sampling)

ORACLES: Mapping[str, Oracle] = {name: oracle for module in _MODULES for name, oracle in module.ORACLES.items()}

# Where a contract leaves something open: any valid result, given the arguments, in the one form that the oracle gives.
CANONICAL: Mapping[str, Canonical] = {
    name: canonical for module in _MODULES for name, canonical in getattr(module, "CANONICAL", {}).items()
}


def compare(op: str, arguments: Mapping[str, Any], results: list[Any], scales: list[Any] | None = None) -> None:
    """Raise AssertionError where the op's second oracle does not agree with ``results``.

    arguments: of the call, as they were before it; results: flat, and after them the arguments that the op wrote;
    scales: each result's sums of absolute terms, or None (see `agree`). Tensors or what `to_numpy` makes of them.
    """
    named = {name: to_numpy(value) for name, value in arguments.items()}
    found = [to_numpy(result) for result in results]
    if op in CANONICAL:
        found = CANONICAL[op](named, found)
    with np.errstate(invalid="ignore", over="ignore"):  # inf − inf is NaN, and meant so
        second = ORACLES[op](**named)
    agree(op, found, second, None if scales is None else [to_numpy(scale) for scale in scales])
