"""Random arguments: everything that a case's arguments are made of follows from its name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torch_hal.formats import FP8_KINDS, to_fp8


def _zero_groups(x: Tensor) -> Tensor:
    """Every other row's first half, and the whole last row, are zero."""
    x = x.clone()
    if x.numel():
        x[::2, ..., : x.shape[-1] // 2] = 0
        x[-1] = 0
    return x


# Regime -> what it makes of standard normal values. A regime that is not here has them as they are.
VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tiny": lambda x: x * 1e-3,  # squares of about 1e-6, beside which an eps of that size matters
    "shifted": lambda x: x + 8,  # sums without cancellation
    "saturating": lambda x: x * torch.logspace(-3, 4, max(x.shape[-1], 1)),  # seven decades in each row
    "zeros": torch.zeros_like,
    "b28_zero_groups": _zero_groups,
}


class Draw:
    """A source of tensors on the host, seeded by a text; ``regime`` decides how `values` are distributed."""

    def __init__(self, text: str, dtype: torch.dtype, regime: str = "unit") -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        self.dtype = dtype
        self.regime = regime

    @property
    def wide(self) -> torch.dtype:
        """The dtype of weights, probabilities and lse beside tensors of ``dtype``: float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The data of the case, as its regime has them."""
        x, change = self._normal(*shape), VALUES.get(self.regime)
        return (x if change is None else change(x)).to(dtype or self.dtype)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal values whatever the regime: weights, and what is there beside the data."""
        return (self._normal(*shape) * scale + shift).to(dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """low ≤ i < high."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def permutation(self, n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(dtype)

    def codes(self, *shape: int, fp8: str = "e4m3fn", scale: float = 100.0) -> Tensor:
        """8-bit floats that use their range."""
        return to_fp8(self._normal(*shape) * scale, FP8_KINDS[fp8])

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)
