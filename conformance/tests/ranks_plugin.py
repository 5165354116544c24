"""Collectives that do what no backend should, on some ranks or on all: a plugin for `test_ranks`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import torch_hal as hal
from torch_hal_conformance.mutants.collectives import other


def right(x: Tensor, group: str) -> Tensor:
    return other("all_gather")(x, group)  # type: ignore[no-any-return]


def dies(x: Tensor, group: str) -> Tensor:
    if dist.get_rank() == 1:
        faulthandler.disable()
        print("the driver has gone away", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(x, group)


def raises(x: Tensor, group: str) -> Tensor:
    if dist.get_rank() == 1:
        raise ValueError("no room for the other ranks")
    return right(x, group)


def dies_of_the_dead(x: Tensor, group: str) -> Tensor:
    try:
        return right(x, group)
    except RuntimeError:
        os._exit(3)


def two_dims(x: Tensor, group: str) -> str | None:
    return None if x.dim() == 2 else f"wants two dims, got {x.dim()}"


def first_rank_only(x: Tensor, group: str) -> str | None:
    return "only the first rank" if dist.is_initialized() and dist.get_rank() else None


def uninitialised(x: Tensor, group: str) -> Tensor:
    """Forgets to gather: memory as it was allocated."""
    return torch.empty(x.shape[0] * dist.get_world_size(), *x.shape[1:], dtype=x.dtype)


@hal.hookimpl
def torch_hal_kernels() -> Iterator[hal.Kernel]:
    for run in (right, dies, raises, dies_of_the_dead, uninitialised):
        yield hal.Kernel("all_gather", run.__name__, run=run)
    yield hal.Kernel("all_gather", "two_dims", run=right, dynamic=two_dims)
    yield hal.Kernel("all_gather", "first_rank_only", run=right, dynamic=first_rank_only)
