"""A backend whose kernels get between the suite and the process that judges them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import torch_hal as hal

if "worker" not in Path(sys.argv[0]).name:
    os._exit(3)  # only the process that judges may load a backend


def right(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype).contiguous()


def forks(x: Tensor) -> Tensor:
    os.fork()  # both come back
    return right(x)


def writes(x: Tensor) -> Tensor:
    for number in os.listdir("/proc/self/fd") if x.shape == (33, 22) else ():
        if os.readlink(f"/proc/self/fd/{number}").startswith("pipe:") and int(number) > 2:
            os.write(int(number), b"0 nonsense\n")
    return right(x)


def denied(x: Tensor) -> Tensor:
    return torch.zeros_like(right(x))


@hal.hookimpl
def torch_hal_kernels() -> Iterator[hal.Kernel]:
    for run in (right, forks, writes, denied):
        yield hal.Kernel("silu_and_mul", run.__name__, run=run)
