"""Collectives through NCCL, by process-group name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torch_hal.ops.collectives import group_size


def all_reduce(x: Tensor, group: str) -> Tensor:
    group_size(group, "all_reduce")  # the error for a group that does not exist
    out = x.clone(memory_format=torch.contiguous_format)
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = False  # on the current stream: no hop to a side stream and back
    work = _resolve_process_group(group).allreduce([out], options)
    if work is not None:
        work.wait()
    return out
