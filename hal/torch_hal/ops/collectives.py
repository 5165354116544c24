"""Collectives over a process group, which is named: ``group.group_name`` of any torch.distributed group.

Built on torch's functional collectives, so that they trace into a compiled graph. Every rank of the group calls
with the same dtype and, unless said otherwise, the same shape. Backends (gloo, NCCL, RCCL, MCCL) are the group's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..check import FLOAT
from ..contracts import Contracts
from ..errors import ArgumentError
from ..numerics import narrow, wide
from ..op import op

_collective = torch.ops._c10d_functional

_EMPTY = "Zero rows give zero rows; every rank takes part all the same."
_STRIDES = "Any strides; collectives send packed rows, so that a strided input is packed first."
_MOVED = Contracts(
    C1_empties=_EMPTY,
    C3_strides=_STRIDES,
    C5_fp8_kind="Any: bytes are moved as they are.",
    C9_rounding="None: bits are moved, of any dtype.",
    C10_determinism="Exact.",
    C11_capture="No host sync by the op; capturable where the group's backend is (NCCL, RCCL, MCCL; not gloo).",
    C13_ids="None of its own; ids as payload are moved as they are.",
)
_SUMMED = Contracts(
    C1_empties=_EMPTY,
    C3_strides=_STRIDES,
    C9_rounding="Summed over ranks in float32 and rounded once. A kernel that adds in x's dtype (NCCL does for "
    "bfloat16) rounds up to once a rank.",
    C10_determinism="Every rank that receives an element receives the same bits; the order of ranks in the sum is the "
    "backend's.",
    C11_capture=_MOVED.C11_capture,
)


@op(shapes={"x": "..."}, dtypes={"x": FLOAT}, contracts=_SUMMED)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``, on every rank.

    x: any shape, bf16/f16/f32, equal on all ranks; group: a process group's name. Returns x's shape and dtype, a new
    tensor. ArgumentError if this process knows no such group.
    """
    group_size(group, "all_reduce")
    return narrow(_wait(_collective.all_reduce(wide(x), "sum", group)), x)


@op(shapes={"x": "T ..."}, dtypes={}, rounds=0, accumulates=None, contracts=_MOVED)
def all_gather(x: Tensor, group: str) -> Tensor:
    """Every rank's rows, one rank after the other, on every rank.

    x: [T, ...] of any dtype, T equal on all ranks (pad uneven ones); group: a process group's name.
    Returns [size · T, ...]. ArgumentError if this process knows no such group.
    """
    size = group_size(group, "all_gather")
    return _wait(_collective.all_gather_into_tensor(_payload(x), size, group)).view(x.dtype)


@op(shapes={"x": "T ..."}, dtypes={"x": FLOAT}, contracts=_SUMMED)
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``, of which rank r keeps the r-th of ``size`` equal runs of rows.

    x: [T, ...], bf16/f16/f32, equal on all ranks, T divisible by the group's size; group: a process group's name.
    Returns [T / size, ...] in x's dtype. ArgumentError if T is not divisible or the group is unknown.
    """
    size = group_size(group, "reduce_scatter")
    if x.shape[0] % size != 0:
        raise ArgumentError(
            f"reduce_scatter: argument 'x': expected rows divisible by the {size} ranks of group '{group}', "
            f"got shape {tuple(x.shape)}; pad the rows"
        )
    return narrow(_wait(_collective.reduce_scatter_tensor(wide(x).contiguous(), "sum", size, group)), x)


@op(
    shapes={"x": "T ..."},
    dtypes={},
    where={
        "sum(input_sizes) == T": "input_sizes sum to x's rows",
        "min([0, *input_sizes, *output_sizes]) >= 0": "no size is negative",
    },
    rounds=0,
    accumulates=None,
    contracts=_MOVED,
)
def all_to_all(x: Tensor, output_sizes: list[int], input_sizes: list[int], group: str) -> Tensor:
    """Send the r-th run of rows to rank r, and receive one run from each.

    x: [T, ...] of any dtype, its trailing shape equal on all ranks; input_sizes: how many rows go to each rank;
    output_sizes: how many come from each, which the caller knows or has exchanged before (host numbers: the op asks no
    device). Sizes may differ and be zero. group: a process group's name.
    Returns [sum(output_sizes), ...]. ArgumentError if the sizes are not one a rank, or the group is unknown.
    """
    size = group_size(group, "all_to_all")
    for name, sizes in (("output_sizes", output_sizes), ("input_sizes", input_sizes)):
        if len(sizes) != size:
            raise ArgumentError(
                f"all_to_all: argument '{name}': expected {size} numbers, one for each rank of group '{group}', "
                f"got {sizes}; list every rank, zeros included"
            )
    return _wait(_collective.all_to_all_single(_payload(x), output_sizes, input_sizes, group)).view(x.dtype)


def group_size(group: str, op_name: str) -> int:
    """The number of ranks in the group of that name; ArgumentError, listing the known ones, if there is none."""
    groups = dist.distributed_c10d._world.pg_names if dist.is_available() else {}
    for known, name in groups.items():
        if name == group:
            return known.size()
    names = ", ".join(repr(name) for name in groups.values()) or "none: call torch.distributed.init_process_group first"
    raise ArgumentError(
        f"{op_name}: argument 'group': expected the name of a process group (known: {names}), got {group!r}; "
        f"pass group.group_name"
    )


# What torch.compiler.assume_constant_result would set, without the second that its import of Dynamo takes.
group_size._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _payload(x: Tensor) -> Tensor:
    """Packed rows in a dtype that every backend moves: not all of them know each 8-bit float."""
    return (x.view(torch.uint8) if x.element_size() == 1 else x).contiguous()


def _wait(pending: Tensor) -> Tensor:
    done: Tensor = _collective.wait_tensor(pending)
    return done
