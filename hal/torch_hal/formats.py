"""Number and scale formats. "fp8" alone is never a format: kind, granularity, block and storage belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from .check import ceil_div

BLOCK = 128  # DeepSeek's quantisation block: 1×128 of activations, 128×128 of weights


@dataclass(frozen=True)
class Fp8Kind:
    """One kind of 8-bit float.

    ``quant_max`` is what quantisation maps a group's largest value to, and where casts clamp. On fnuz it is 224, the
    bound that checkpoints and kernels were calibrated with, though the type reaches ``finfo_max`` 240.
    """

    name: str
    dtype: torch.dtype
    quant_max: float
    finfo_max: float
    min_subnormal: float
    negative_zero: bool  # fnuz has none: byte 0x80 is its NaN


FP8_KINDS: Mapping[str, Fp8Kind] = MappingProxyType(
    {
        "e4m3fn": Fp8Kind("e4m3fn", torch.float8_e4m3fn, 448.0, 448.0, 2.0**-9, negative_zero=True),
        "e4m3fnuz": Fp8Kind("e4m3fnuz", torch.float8_e4m3fnuz, 224.0, 240.0, 2.0**-10, negative_zero=False),
    }
)


def to_fp8(x: Tensor, kind: Fp8Kind) -> Tensor:
    """``x`` clamped to ±quant_max, then rounded to the nearest code, ties to even. NaN stays NaN.

    A bare cast is not portable: beyond the largest code it saturates or gives NaN, by torch version and device, and
    compiled casts to fnuz turn negative underflow into 0x80, which is NaN there.
    """
    y = x.clamp(-kind.quant_max, kind.quant_max)
    if not kind.negative_zero:
        y = torch.where(y.abs() <= kind.min_subnormal / 2, 0.0, y)
    return y.to(kind.dtype)


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of a matrix that is quantised in groups along its rows lie in memory.

    The logical scales are [..., M, G]: M rows of G groups; leading dims repeat the layout. Stored, they are a tensor
    [..., M, ⌈G / per_word⌉] whose strides are part of the format.
    """

    name: str
    dtype: torch.dtype  # of the stored tensor: float32, or int32 words that hold UE8M0 exponents
    major: Literal["k", "mn"]  # what runs fastest: the groups of one row (row-major) or the rows (column-major)
    alignment: int = 1  # a column takes M rounded up to this many elements
    per_word: int = 1  # scales in one element

    @property
    def power_of_two(self) -> bool:
        """Whether only powers of two can be stored, so that quantisation must use scales rounded to one."""
        return self.dtype == torch.int32

    def columns(self, groups: int) -> int:
        """Elements that store one row's scales."""
        return ceil_div(groups, self.per_word)

    def matches(self, stored: Tensor) -> bool:
        """Whether the strides of [..., M, columns] are this layout's. A dim of size 1 has no stride to be wrong.

        Row-major, rows may lie apart; column-major, everything lies as `pack` puts it, matrix after matrix: kernels
        reckon where an expert's scales begin.
        """
        rows, columns = stored.shape[-2:]
        if rows == 0:
            return True
        if self.major == "k":
            return columns < 2 or stored.stride(-1) == 1
        column = ceil_div(rows, self.alignment) * self.alignment
        if (rows > 1 and stored.stride(-2) != 1) or (columns > 1 and stored.stride(-1) != column):
            return False
        return stored.dim() == 2 or _dense(stored.shape[:-2], stored.stride()[:-2], column * columns)

    def pack(self, scales: Tensor) -> Tensor:
        """The stored form of ``scales`` [..., M, G] float32; padding bytes are zero.

        Packing UE8M0 keeps the exponent alone: the scales must be powers of two already (see `ceil_to_ue8m0`), and
        what they scale must have been quantised with them. +0 stays 0; any other scale is stored as UE8M0's NaN, 0xFF:
        cut short in silence, it would be up to a factor of two off.
        """
        if self.power_of_two:
            scales = _pack_exponents(scales, self.per_word)
        return scales.contiguous() if self.major == "k" else _column_major(scales, self.alignment)

    def unpack(self, stored: Tensor, groups: int) -> Tensor:
        """The logical scales [..., M, groups] of a stored tensor: a view of float32, a copy of exponents.

        An exponent of 0xFF is NaN; padding's, 0, is zero.
        """
        return _unpack_exponents(stored, groups, self.per_word) if self.power_of_two else stored


SCALE_LAYOUTS: Mapping[str, ScaleLayout] = MappingProxyType(
    {
        # [M, G] row-major float32: Triton, CUTLASS, muDNN
        "row_f32": ScaleLayout("row_f32", torch.float32, "k"),
        # [M, G] column-major float32, no padding: FlashInfer, whose "MN" scales are the dense transpose
        "mn_f32": ScaleLayout("mn_f32", torch.float32, "mn"),
        # [M, G] column-major float32, columns padded to 16 bytes as TMA loads them: DeepGEMM on sm_90
        "mn_f32_tma": ScaleLayout("mn_f32_tma", torch.float32, "mn", alignment=4),
        # [M, ⌈G/4⌉] column-major int32, the lowest byte the first of four exponents: DeepGEMM on sm_100
        "mn_ue8m0": ScaleLayout("mn_ue8m0", torch.int32, "mn", alignment=4, per_word=4),
    }
)


def ceil_to_ue8m0(scales: Tensor) -> Tensor:
    """The least power of two ≥ each positive float32 scale, within UE8M0's finite normal range 2⁻¹²⁶ … 2¹²⁷.

    Works on the bits: ``exp2(ceil(log2(s)))`` is off by a factor of two next to some powers.
    """
    bits = scales.to(torch.float32).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def expand_block_scales(scales: Tensor, rows: int) -> Tensor:
    """One scale for each row and 128 columns [..., rows, G], of scales for 128×128 blocks [..., ⌈rows/128⌉, G].

    What `ScaleLayout.pack` takes, where a kernel wants the weights' scales as the activations' are laid out.
    """
    return scales.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]


def _pack_exponents(scales: Tensor, per_word: int) -> Tensor:
    bits = scales.to(torch.float32).view(torch.int32)
    positive_power = (bits >= 0) & (bits & 0x7FFFFF == 0)
    exponents = torch.where(positive_power, bits >> 23, 0xFF)
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % per_word))
    words = padded.reshape(*scales.shape[:-1], padded.shape[-1] // per_word, per_word)
    return (words << _byte_shifts(per_word, words.device)).sum(-1, dtype=torch.int32)


def _unpack_exponents(words: Tensor, groups: int, per_word: int) -> Tensor:
    exponents = words.unsqueeze(-1) >> _byte_shifts(per_word, words.device) & 0xFF
    bits = torch.where(exponents == 0xFF, 0x7FC00000, exponents << 23)
    return bits.flatten(-2)[..., :groups].view(torch.float32)


def _byte_shifts(per_word: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * per_word, 8, dtype=torch.int32, device=device)


def _dense(shape: Sequence[int], strides: Sequence[int], inner: int) -> bool:
    """Whether blocks of ``inner`` elements lie one after the other, the last dim fastest."""
    expected = inner
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _column_major(x: Tensor, alignment: int) -> Tensor:
    """``x`` [..., M, C] with M contiguous and columns ``alignment``-padded with zeros."""
    *batch, rows, columns = x.shape
    storage = x.new_zeros(*batch, columns, ceil_div(rows, alignment) * alignment)
    storage[..., :rows].copy_(x.transpose(-1, -2))
    return storage.transpose(-1, -2)[..., :rows, :]
