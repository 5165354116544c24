"""Weights and plans in a kernel's own layout."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .errors import PluginError, Unsupported
from .fallback import Fallback
from .kernel import Kernel
from .loading import Loaded
from .op import PLAIN, Op
from .specialize import static_refusal


class Prepared(NamedTuple):
    """Weights or a plan in a named layout: pass the tensors where the op takes them, and ``layout`` along."""

    tensors: list[Tensor]
    layout: str


def prepare(op: Op[..., Any], chain: Sequence[Loaded], fallback: Fallback, *weights: Any, **call: Any) -> Prepared:
    """``weights`` (by position or name) as a kernel of ``chain`` wants them.

    Which kernel: the first; or, given the other arguments of a call (on ``meta`` if you like), the first that takes
    such calls on weights so prepared. Raises Unsupported, with every reason, where none does.
    """
    assert op.prepare is not None
    signature = inspect.signature(op.prepare)
    named = {name: call.pop(name) for name in list(call) if name in signature.parameters}
    bound = signature.bind(*weights, **named)
    refused: list[tuple[Kernel, str]] = []
    for loaded in chain:
        layout = loaded.kernel.layout if loaded.prepare else PLAIN
        result = (loaded.prepare or op.prepare)(*bound.arguments.values())
        laid = prepared(f"prepare of {loaded.kernel.id} for {op.name}", result, layout, len(signature.parameters))
        if not call:
            return laid
        arguments = op.bind(**call, **dict(zip(signature.parameters, laid.tensors, strict=True)), layout=layout)
        if (reason := static_refusal(op, loaded, arguments, fallback)) is None:
            return laid
        refused.append((loaded.kernel, reason))
    reasons = "; ".join(f"{kernel.id}: {why}" for kernel, why in refused)
    raise Unsupported(f"{op.name} on {fallback.device}: no bound kernel takes such weights. {reasons}")


def prepared(what: str, result: Any, layout: str, count: int) -> Prepared:
    """A kernel's answer, if it is what was asked for."""
    tensors = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(tensors) != count or not all(isinstance(tensor, Tensor) for tensor in tensors):
        got = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise PluginError(f"{what} gave ({got}), expected {count} tensor(s)")
    return Prepared(tensors, layout)
