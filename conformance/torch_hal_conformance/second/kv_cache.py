"""Second oracles of the paged caches: a loop over the named slots, and 8-bit rows byte by byte.

Tiles that a contract lets hold anything have scale 0 and codes 0, in the oracles' results and in canonical ones; NaN
is one pattern in both.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .convert import Array, Canonical, Codes, Oracle, decode_byte, encode, encode_number
from .quant import quantised

# How many codes share a scale. Without scales all of a row are codes, latent and rotated part; with them the scales
# follow the latent codes as float32, and the rotated part is bfloat16, the upper half of a float32.
TILE: Mapping[str, int] = {"flat": 0, "ds_mla": 128}


def named(slots: Array, cache: Array) -> Iterator[tuple[int, int, int]]:
    """(token, page, offset in the page) of each slot that the cache [pages, page_size, …] has."""
    pages, page_size = cache.shape[:2]
    for token, slot in enumerate(slots):
        if 0 <= slot < pages * page_size:
            yield token, int(slot) // page_size, int(slot) % page_size


def bfloat16_bytes(value: float) -> bytes:
    """The nearest bfloat16, half-way the even one: 8 significant bits, exponents of a float32; low byte first."""
    if math.isnan(value):
        return b"\xc0\x7f"
    if value != 0 and math.isfinite(value):
        _, exponent = math.frexp(value)  # |value| < 2^exponent
        unit = 2.0 ** max(exponent - 8, -133)
        rounded = round(abs(value) / unit) * unit
        value = math.copysign(rounded if rounded < 2.0**128 else math.inf, value)
    return struct.pack("<f", value)[2:]


def bfloat16(pair: bytes) -> float:
    """What two bytes mean."""
    number: float = struct.unpack("<f", b"\0\0" + pair)[0]
    return number


def stored_row(latent: Array, rotated: Array, kv_format: str, kind: str, eps: float) -> bytes:
    """The bytes of one token."""
    tile = TILE[kv_format]
    if tile == 0:
        return encode(np.array([*latent, *rotated]), kind).bits.tobytes()
    codes, scales = b"", b""
    for start in range(0, len(latent), tile):
        tile_bits, scale = quantised(latent[start : start + tile], kind, eps, ue8m0=False)
        codes, scales = codes + tile_bits.tobytes(), scales + struct.pack("<f", scale)
    return codes + scales + b"".join(bfloat16_bytes(float(value)) for value in rotated)


def meant_row(row: bytes, kv_lora_rank: int, kv_format: str, kind: str) -> tuple[Array, Array]:
    """(c_kv, k_pe) that the bytes of one token mean."""
    tile = TILE[kv_format]
    if tile == 0:
        values = np.array([decode_byte(byte, kind) for byte in row])
        return values[:kv_lora_rank], values[kv_lora_rank:]
    latent = np.zeros(kv_lora_rank)
    end = kv_lora_rank + 4 * (kv_lora_rank // tile)
    for i in range(kv_lora_rank):
        start = kv_lora_rank + 4 * (i // tile)
        latent[i] = decode_byte(row[i], kind) * struct.unpack("<f", row[start : start + 4])[0]
    return latent, np.array([bfloat16(row[i : i + 2]) for i in range(end, len(row), 2)])


def meant(cache: Codes, kv_lora_rank: int, kv_format: str) -> tuple[Array, Array]:
    """What all rows of a cache mean: c_kv [pages, page_size, L] and k_pe [pages, page_size, R]."""
    pages, page_size, width = cache.bits.shape
    rope_dim = len(meant_row(bytes(width), kv_lora_rank, kv_format, cache.kind)[1])
    c_kv, k_pe = np.zeros((pages, page_size, kv_lora_rank)), np.zeros((pages, page_size, rope_dim))
    for row in np.ndindex(pages, page_size):
        c_kv[row], k_pe[row] = meant_row(cache.bits[row].tobytes(), kv_lora_rank, kv_format, cache.kind)
    return c_kv, k_pe


def mha_kv_store(k_cache: Array, v_cache: Array, slots: Array, k: Array, v: Array) -> list[Any]:
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    for token, page, offset in named(slots, k_cache):
        k_cache[page, offset] = k[token]
        v_cache[page, offset] = v[token]
    return [k_cache, v_cache]


def mla_kv_store(cache: Array, slots: Array, c_kv: Array, k_pe: Array) -> list[Any]:
    cache = cache.copy()
    for token, page, offset in named(slots, cache):
        cache[page, offset] = [*c_kv[token], *k_pe[token]]
    return [cache]


def mla_kv_gather(cache: Array, slots: Array, kv_lora_rank: int) -> list[Any]:
    c_kv = np.zeros((len(slots), kv_lora_rank))
    k_pe = np.zeros((len(slots), cache.shape[2] - kv_lora_rank))
    for token, page, offset in named(slots, cache):
        c_kv[token] = cache[page, offset, :kv_lora_rank]
        k_pe[token] = cache[page, offset, kv_lora_rank:]
    return [c_kv, k_pe]


def mla_kv_store_fp8(
    cache: Codes, slots: Array, c_kv: Array, k_pe: Array, kv_format: str, eps: float = 1e-10
) -> list[Any]:
    bits = cache.bits.copy()
    for token, page, offset in named(slots, bits):
        bits[page, offset] = list(stored_row(c_kv[token], k_pe[token], kv_format, cache.kind, eps))
    return [Codes(bits, cache.kind)]


def mla_kv_gather_fp8(cache: Codes, slots: Array, kv_lora_rank: int, kv_format: str, out_dtype: str) -> list[Any]:
    return mla_kv_gather(np.concatenate(meant(cache, kv_lora_rank, kv_format), axis=-1), slots, kv_lora_rank)


def _canonical_store(arguments: Mapping[str, Any], results: list[Any]) -> list[Any]:
    """Every written row with its open tiles cleared, and with one pattern for NaN."""
    (cache,) = results
    bits, tile = cache.bits.copy(), TILE[arguments["kv_format"]]
    for token, page, offset in named(arguments["slots"], bits):
        row, latent = bits[page, offset], arguments["c_kv"][token]  # row is a view, and written
        if tile == 0:
            row[np.isnan(Codes(row, cache.kind).decode())] = encode_number(math.nan, cache.kind)
            continue
        for start in range(0, len(latent), tile):
            if not np.isfinite(latent[start : start + tile]).all():
                scale = len(latent) + 4 * (start // tile)
                row[start : start + tile] = row[scale : scale + 4] = 0
        for i in range(len(latent) + 4 * (len(latent) // tile), len(row), 2):
            if math.isnan(bfloat16(row[i : i + 2].tobytes())):
                row[i : i + 2] = list(bfloat16_bytes(math.nan))
    return [Codes(bits, cache.kind)]


ORACLES: dict[str, Oracle] = {
    "mha_kv_store": mha_kv_store,
    "mla_kv_store": mla_kv_store,
    "mla_kv_gather": mla_kv_gather,
    "mla_kv_store_fp8": mla_kv_store_fp8,
    "mla_kv_gather_fp8": mla_kv_gather_fp8,
}
CANONICAL: dict[str, Canonical] = {"mla_kv_store_fp8": _canonical_store}
