"""From logits to token ids."""

from __future__ import annotations

import sys
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_hal import OpSet


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses among tokens. Raises ValueError, naming the field, for what cannot mean anything."""

    temperature: float = 0.0  # 0: the likeliest
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"{name}: expected a number, got {value!r}")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name}: expected an integer, got {value!r}")
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature: expected a finite number ≥ 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected 0 < top_p ≤ 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected an integer ≥ 0, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected 0 ≤ min_p ≤ 1, got {self.min_p}")


class Sampler:
    """Chooses for a batch of requests; a request's ids do not depend on what else is in the batch."""

    def __init__(self, ops: OpSet, requests: ListLike[SamplingParams]) -> None:
        self.ops = ops

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=ops.torch_device)

        self.greedy = column([r.temperature == 0 for r in requests], torch.bool)
        self.temperature = column([max(r.temperature, 1e-30) for r in requests], torch.float32)
        self.top_p = column([max(r.top_p, 1e-30) for r in requests], torch.float32)
        self.top_k = column([min(r.top_k, 2**31 - 1) for r in requests], torch.int32)
        self.min_p = column([r.min_p for r in requests], torch.float32)
        self.seeds = column([_int64(r.seed) for r in requests], torch.int64)
        # A filter that nobody asked for is not run.
        self.all_greedy = all(r.temperature == 0 for r in requests)
        self.uses_top_k = any(r.top_k for r in requests)
        self.uses_top_p = any(r.top_p < 1 for r in requests)
        self.uses_min_p = any(r.min_p for r in requests)

    @torch.no_grad()
    def __call__(self, logits_BW: Tensor, offsets_B: Tensor) -> Tensor:
        """Ids int64 [B]. logits float32; offsets int64: the number of the draw within its request."""
        likeliest = logits_BW.argmax(-1)
        if self.all_greedy:
            return likeliest
        # A temperature near zero makes logits overflow: subtract the maximum first, whose own then stays 0.
        shifted = logits_BW - logits_BW.amax(-1, keepdim=True)
        probs = (shifted / self.temperature[:, None]).softmax(-1)
        if self.uses_top_k:
            probs = self.ops.top_k_renorm(probs, self.top_k)
        if self.uses_top_p:
            probs = self.ops.top_p_renorm(probs, self.top_p)
        if self.uses_min_p:
            probs = self.ops.min_p_renorm(probs, self.min_p)
        drawn = self.ops.sample(probs, self.seeds, offsets_B)
        return torch.where(self.greedy, likeliest, drawn.to(torch.int64))


def _int64(seed: int) -> int:
    """The low 64 bits of any integer, as torch's int64."""
    return (seed + 2**63) % 2**64 - 2**63
