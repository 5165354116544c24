"""Rows of an 8-bit latent cache, byte by byte from the formats' definitions."""

from __future__ import annotations

import struct

import numpy as np
import torch
from fp8_codec import decode, encode
from torch import Tensor

DTYPE = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
QUANT_MAX = {"e4m3fn": np.float32(448), "e4m3fnuz": np.float32(224)}
FORMATS = ["flat", "ds_mla"]
ROW_BYTES = {"flat": lambda rank, rope: rank + rope, "ds_mla": lambda rank, rope: rank + rank // 32 + 2 * rope}


def bfloat16_bytes(value: float) -> bytes:
    """The upper half of a float32, rounded to nearest, ties to even."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (word + 0x7FFF + (word >> 16 & 1)) >> 16)


def row_by_loop(c_kv: Tensor, k_pe: Tensor, kv_format: str, kind: str, eps: float = 1e-10) -> list[int]:
    """The bytes of one token's row."""
    latent, rope = ([np.float32(v) for v in x.float().tolist()] for x in (c_kv, k_pe))
    if kv_format == "flat":
        return [encode(float(v), kind) for v in latent + rope]
    codes, scales = [], b""
    for first in range(0, len(latent), 128):
        tile = latent[first : first + 128]
        scale = max(max(abs(v) for v in tile), np.float32(eps)) / QUANT_MAX[kind]
        codes += [encode(float(v / scale), kind) for v in tile]
        scales += struct.pack("<f", scale)
    return [*codes, *scales, *b"".join(bfloat16_bytes(float(v)) for v in rope)]


def meaning_by_loop(row: list[int], rank: int, kv_format: str, kind: str) -> list[float]:
    """The L + R numbers that the bytes of a row mean, exactly."""
    if kv_format == "flat":
        return [decode(code, kind) for code in row]
    end = rank + rank // 32
    scales = struct.unpack(f"<{rank // 128}f", bytes(row[rank:end]))
    rope = [struct.unpack("<f", bytes([0, 0, *row[i : i + 2]]))[0] for i in range(end, len(row), 2)]
    return [decode(code, kind) * scales[i // 128] for i, code in enumerate(row[:rank])] + rope


def cache_of(pages: int, page_size: int, row_bytes: int, kind: str, byte: int = 0xFF) -> Tensor:
    """One layer of a pool, hence strided, every byte the same. 0xFF is NaN, as a code of fn, a scale and a bfloat16."""
    pool = torch.full((pages, 3, page_size, row_bytes), byte, dtype=torch.uint8)
    return pool.view(DTYPE[kind])[:, 1]
