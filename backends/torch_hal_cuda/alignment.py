"""The one thing that refusals cannot see in a compiled graph: where in memory a tensor starts."""

from __future__ import annotations

from torch import Tensor


def check_aligned(**tensors: Tensor) -> None:
    """Raise before a kernel that loads 16 bytes at a time faults, which would take the whole context with it."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} starts at {tensor.data_ptr():#x}: this kernel takes tensors that start on 16 bytes"
            )
