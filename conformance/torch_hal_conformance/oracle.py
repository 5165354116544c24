"""What a call should give: the op in float64 on the very bits that the backend received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_hal.op import Op


@dataclass(frozen=True)
class Exact:
    """Results in float64 (codes and ids in their own types), each one's absolute terms and rounded intermediates.

    The arguments that the op writes follow its results.
    """

    results: list[Any]
    terms: list[Any]
    middles: list[Any]
    length: int


def is_wide(x: Any) -> bool:
    """Whether x is a floating-point tensor of more than 8 bits: 8-bit codes stay as they are."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments in memory of their own, strides kept."""

    def copy(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)

    result: dict[str, Any] = tree_map_only(Tensor, copy, arguments)
    return result


def leaves(value: Any) -> list[Any]:
    return [] if value is None else list(tree_leaves(value))


def outputs(op: Op[..., Any], results: Any, arguments: dict[str, Any]) -> list[Any]:
    """The results, and after them the arguments that the op writes."""
    return leaves(results) + [arguments[name] for name in op.mutates]


def native(op: Op[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """What the reference gives in the arguments' own types."""
    arguments = copied(arguments)
    return outputs(op, op.reference(**arguments), arguments)


def exact(op: Op[..., Any], arguments: dict[str, Any]) -> Exact:
    """The op in float64; the arguments are those of a plain call, on the host."""
    length = max(op.longest_sum(**arguments), 1)
    wide: dict[str, Any] = tree_map_only(Tensor, lambda x: x.double() if is_wide(x) else x, copied(arguments))
    if "out_dtype" in wide:
        wide["out_dtype"] = torch.float64
    terms = leaves(op.terms(**wide)) if op.terms else []
    middles = leaves(op.intermediate(**wide)) if op.intermediate else []
    results = outputs(op, op.reference(**wide), wide)
    return Exact(results, terms, middles or [None] * len(results), length)
