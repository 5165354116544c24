"""A function with an op's own signature, which kernels must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hal.op import Op


def like_op(op: Op[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which takes the op's arguments by position, under the op's signature."""
    scope: dict[str, Any] = {"_function": function}
    names = ", ".join(op.signature.parameters)
    exec(f"def {op.name}({names}):\n    return _function({names})", scope)
    made: Any = scope[op.name]
    made.__defaults__ = op.reference.__defaults__
    return made  # type: ignore[no-any-return]
