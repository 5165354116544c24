"""The parts that all blocks are made of: weights in the layout their kernel wants, norms, and the gated MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hal import OpSet

from .config import Config

Targets = Iterator[tuple[str, Tensor]]  # a checkpoint tensor's name -> where it goes, often a part of a fused weight


@dataclass(frozen=True)
class Build:
    """What layers are built from."""

    config: Config
    ops: OpSet
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def wide(self, *shape: int) -> Tensor:
        """For weights that stay in float32, whatever the model's dtype (float64 in a float64 model)."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.empty(shape, dtype=dtype, device=self.device)

    def like(self, width: int) -> Tensor:
        """A token's activations without storage: what ops are specialised for."""
        return torch.empty((1, width), dtype=self.dtype, device="meta")


class Linear:
    """``x · weightᵀ``. `prepare` hands the loaded weight to the chosen kernel, which may lay it out anew."""

    def __init__(self, build: Build, outputs: int, inputs: int) -> None:
        self.ops, self.x_like = build.ops, build.like(inputs)
        self.weight = build.empty(outputs, inputs)

    def prepare(self) -> None:
        (self.weight,), self.layout = self.ops.linear.prepare(self.weight)
        self.run = self.ops.linear.specialize(self.x_like, self.weight, self.layout)

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight, self.layout)  # type: ignore[no-any-return]


class Norm:
    """RMSNorm with a learned weight."""

    def __init__(self, build: Build, width: int, eps: float) -> None:
        self.weight, self.eps = build.empty(width), eps
        self.run = build.ops.rms_norm.specialize(build.like(width), self.weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight, self.eps)  # type: ignore[no-any-return]


class ResidualNorm:
    """One step of the residual stream: take in a block's output, and norm the sum for the next block."""

    def __init__(self, build: Build, width: int, eps: float) -> None:
        self.norm = Norm(build, width, eps)
        self.add_norm = build.ops.fused_add_rms_norm_.specialize(
            build.like(width), build.like(width), self.norm.weight, eps
        )

    @property
    def weight(self) -> Tensor:
        return self.norm.weight

    def __call__(self, block_TD: Tensor | None, residual_TD: Tensor) -> Tensor:
        """block_TD: the block's output, overwritten; None before the first block. residual_TD: updated in place."""
        if block_TD is None:
            return self.norm(residual_TD)
        self.add_norm(block_TD, residual_TD, self.norm.weight, self.norm.eps)
        return block_TD


class MLP:
    """SwiGLU: ``down(silu(gate(x)) · up(x))``, gate and up in one weight, gate first."""

    def __init__(self, build: Build, intermediate: int) -> None:
        hidden = build.config.hidden_size
        self.gate_up = Linear(build, 2 * intermediate, hidden)
        self.down = Linear(build, hidden, intermediate)
        self.silu_and_mul = build.ops.silu_and_mul.specialize(build.like(2 * intermediate))

    def targets(self, prefix: str) -> Targets:
        gate, up = self.gate_up.weight.chunk(2)
        yield f"{prefix}.gate_proj.weight", gate
        yield f"{prefix}.up_proj.weight", up
        yield f"{prefix}.down_proj.weight", self.down.weight

    def prepare(self) -> None:
        self.gate_up.prepare()
        self.down.prepare()

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(self.silu_and_mul(self.gate_up(x_TD)))
