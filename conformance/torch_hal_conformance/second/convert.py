"""What every second oracle starts and ends with: torch values as NumPy ones, codes and scales by their definitions.

Nothing here is taken from torch_hal. Floats of more than 8 bits become float64, which holds all of them exactly; codes
of 8-bit floats stay bytes with the name of their format; integers become int64. Strides are gone.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Oracle = Callable[..., Any]
Canonical = Callable[[Mapping[str, Any], list[Any]], list[Any]]

RELATIVE = 1e-9  # float64 sums of the lengths met here differ by 1e-13 at most; a wrong formula by far more
TINY = float(np.finfo(np.float64).smallest_normal)  # below it float64 itself loses digits


class Fp8Format(NamedTuple):
    """The definition of an 8-bit float: a sign, ``exponent`` and ``mantissa`` bits, and a bias."""

    exponent: int
    mantissa: int
    bias: int
    family: str  # which codes are special: "ieee" (inf and NaN), "fn" (NaN alone), "fnuz" (one NaN, no −0)
    quant_max: float  # what quantisation maps the largest value of a group to


FP8_FORMATS: Mapping[str, Fp8Format] = {
    "e4m3fn": Fp8Format(4, 3, 7, "fn", 448.0),
    "e4m3fnuz": Fp8Format(4, 3, 8, "fnuz", 224.0),
    "e5m2": Fp8Format(5, 2, 15, "ieee", 57344.0),
    "e5m2fnuz": Fp8Format(5, 2, 16, "fnuz", 57344.0),
}


def decode_byte(byte: int, kind: str) -> float:
    """The number that one code stands for."""
    exponent_bits, mantissa_bits, bias, family, _ = FP8_FORMATS[kind]
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = byte & ((1 << mantissa_bits) - 1)
    all_ones = (1 << exponent_bits) - 1
    if family == "fnuz" and byte == 0x80:
        return math.nan
    if family == "fn" and byte & 0x7F == 0x7F:
        return math.nan
    if family == "ieee" and exponent == all_ones:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1.0 + fraction) * 2.0 ** (exponent - bias)


def encode_number(value: float, kind: str) -> int:
    """The code nearest to a number clamped to ±quant_max; half-way, the even code. NaN gives the format's NaN."""
    family = FP8_FORMATS[kind].family
    if math.isnan(value):
        return 0x80 if family == "fnuz" else 0x7F
    magnitude = min(abs(value), FP8_FORMATS[kind].quant_max)
    table = _magnitudes(kind)
    above = bisect.bisect_left(table, magnitude)
    below = max(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    negative = math.copysign(1.0, value) < 0
    if negative and code == 0 and family == "fnuz":
        return 0  # there is no −0: its byte is NaN
    return code | 0x80 if negative else code


@functools.cache
def _magnitudes(kind: str) -> tuple[float, ...]:
    """The finite values of the codes without sign, which ascend with the code."""
    return tuple(value for value in (decode_byte(byte, kind) for byte in range(0x80)) if math.isfinite(value))


@functools.cache
def _values(kind: str) -> Array:
    return np.array([decode_byte(byte, kind) for byte in range(0x100)])


@dataclass(frozen=True, eq=False)
class Codes:
    """An array of 8-bit floats, as bytes."""

    bits: Array
    kind: str

    def decode(self) -> Array:
        """What the codes stand for, in float64. Exact."""
        decoded: Array = _values(self.kind)[self.bits]
        return decoded


def encode(values: Array, kind: str) -> Codes:
    """Each number's nearest code, see `encode_number`."""
    bits = [encode_number(float(value), kind) for value in values.reshape(-1)]
    return Codes(np.array(bits, dtype=np.uint8).reshape(values.shape), kind)


def to_numpy(value: Any) -> Any:
    """A tensor as an array or as `Codes`, a dtype as its name (``"bfloat16"``), anything else as it is."""
    if isinstance(value, torch.dtype):
        return _name(value)
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    kind = _name(tensor.dtype).removeprefix("float8_")
    if kind in FP8_FORMATS:
        return Codes(tensor.contiguous().view(torch.uint8).numpy().copy(), kind)
    if tensor.dtype == torch.bool:
        return tensor.numpy().copy()
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64).numpy().copy()
    return tensor.to(torch.int64).numpy().copy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unpack_scales(stored: Array, layout: str, groups: int) -> Array:
    """The scales [..., M, groups] in float64 of what `to_numpy` made of a stored tensor [..., M, columns].

    ``row_f32``, ``mn_f32`` and ``mn_f32_tma`` differ in strides alone. ``mn_ue8m0`` holds four biased exponents a
    word, the lowest byte first: byte b stands for 2^(b − 127), 0xFF for NaN, and 0, which fills the last word, for 0.
    """
    if layout in ("row_f32", "mn_f32", "mn_f32_tma"):
        if stored.shape[-1] != groups:
            raise ValueError(f"scales of layout '{layout}': expected {groups} columns, got shape {stored.shape}")
        return stored.astype(np.float64)
    if layout != "mn_ue8m0":
        raise ValueError(f"scale layout: expected row_f32, mn_f32, mn_f32_tma or mn_ue8m0, got '{layout}'")
    if stored.shape[-1] != -(-groups // 4):
        raise ValueError(f"scales of layout 'mn_ue8m0': expected ⌈{groups}/4⌉ columns, got shape {stored.shape}")
    scales = np.zeros((*stored.shape[:-1], groups))
    for group in range(groups):
        byte = stored[..., group // 4] % 2**32 // 256 ** (group % 4) % 256
        power = np.ldexp(1.0, byte - 127)
        scales[..., group] = np.where(byte == 0, 0.0, np.where(byte == 0xFF, np.nan, power))
    return scales


def as_stored(scales: Array, layout: str) -> Array:
    """What `unpack_scales` gives of scales that were stored so: exponents hold powers of two, or else NaN."""
    if layout != "mn_ue8m0":
        return scales
    kept = np.full(scales.shape, np.nan)
    for position, scale in np.ndenumerate(scales):
        mantissa, exponent = math.frexp(scale)  # scale = mantissa · 2^exponent, 0.5 ≤ |mantissa| < 1
        if scale == 0 or (mantissa == 0.5 and -126 <= exponent - 1 <= 127):
            kept[position] = scale
    return kept


def agree(op: str, results: Sequence[Any], second: Sequence[Any], scales: Sequence[Array | None] | None = None) -> None:
    """Raise AssertionError, naming op, result, position and both values, where two oracles' results differ.

    Both are lists of what `to_numpy` gives. Floats may differ by `RELATIVE` times the sum of their absolute values, or
    times the result's entry of ``scales``, the sums of absolute terms, where that is finite. All else must be equal.
    """
    if len(results) != len(second):
        raise AssertionError(f"{op}: the oracle gives {len(results)} results, the second oracle {len(second)}")
    for index, (first, other) in enumerate(zip(results, second, strict=True)):
        scale = scales[index] if scales is not None else None
        _agree_on_one(f"{op}: result {index}", first, other, scale)


def _agree_on_one(what: str, first: Any, second: Any, scale: Array | None) -> None:
    kinds = [value.kind if isinstance(value, Codes) else _sort(value) for value in (first, second)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"{what}: the oracle gives {kinds[0]}, the second oracle {kinds[1]}")
    a, b = (value.bits if isinstance(value, Codes) else np.asarray(value) for value in (first, second))
    if a.shape != b.shape:
        raise AssertionError(f"{what}: the oracle's shape is {a.shape}, the second oracle's {b.shape}")
    differs = _floats_differ(a, b, scale) if kinds[0] == "float" else a != b
    if differs.any():
        position = tuple(int(i) for i in np.argwhere(differs)[0])
        count = f"{int(differs.sum())} of {differs.size} elements differ, first"
        raise AssertionError(f"{what}: {count} {position}: the oracle says {a[position]}, the second {b[position]}")


def _sort(value: Any) -> str:
    names = {"f": "float", "b": "bool", "i": "int", "u": "int"}
    return names.get(np.asarray(value).dtype.kind, str(np.asarray(value).dtype))


def _floats_differ(a: Array, b: Array, scale: Array | None) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.abs(a) + np.abs(b)
        terms = values if scale is None else np.where(np.isfinite(scale), np.abs(scale), values)
        close = np.abs(a - b) <= RELATIVE * terms + TINY
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    differs: Array = ~(same | (finite & close))
    return differs
