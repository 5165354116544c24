"""The headers of safetensors files: an 8-byte length, a JSON table (tensor -> dtype, shape, byte range), the bytes."""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch_hal import HalError

from .errors import CheckpointError

_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """Where a file says that a tensor lies."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A safetensors file's table of contents, and how many bytes of data follow it."""

    entries: Mapping[str, Entry]
    data_bytes: int


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises CheckpointError naming the file."""
    try:
        size = file_size(path, CheckpointError)
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                hint = " (a Git LFS pointer, not the file itself)" if start == b"version " else ""
                raise CheckpointError(f"{path}: not a safetensors file, or cut within its header{hint}")
            table = read_json(file.read(length), path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    table.pop("__metadata__", None)
    return Header({name: _entry(name, value, path) for name, value in table.items()}, size - 8 - length)


def _entry(name: str, value: Any, path: Path) -> Entry:
    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: malformed header: {name}: {what}, got {value!r:.200}")

    if not isinstance(value, dict):
        raise refuse("expected an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str):
        raise refuse("dtype: expected text")
    if not _are_counts(shape):
        raise refuse("shape: expected a list of integers ≥ 0")
    if not (_are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise refuse("data_offsets: expected two integers, 0 ≤ begin ≤ end")
    return Entry(dtype, tuple(shape), *offsets)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def file_size(path: Path, error: type[HalError]) -> int:
    """Bytes of what must be an ordinary file: opening a pipe would wait for a writer. Raises ``error`` and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if stat.S_ISDIR(status.st_mode) else "a device or pipe"
        raise error(f"{path}: expected a file, got {what}")
    return status.st_size


def read_json_file(path: Path, error: type[HalError]) -> dict[str, Any]:
    """The JSON object in a file, in which no key comes twice. Raises ``error``, naming the file."""
    try:
        file_size(path, error)
        data = path.read_bytes()
    except (OSError, ValueError) as problem:  # ValueError: a name that no file can have
        if isinstance(problem, error):
            raise
        raise error(f"{path}: {getattr(problem, 'strerror', None) or problem}") from problem
    return read_json(data, path, error)


def read_json(data: bytes, path: Path, error: type[HalError] = CheckpointError) -> dict[str, Any]:
    """``data``, read from ``path``, as a JSON object in which no key comes twice. Raises ``error``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            raise error(f"{next(k for k in keys if keys.count(k) > 1)}: named twice in {path}")
        return result

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except RecursionError:
        raise error(f"{path}: not JSON that can be read: nested too deeply") from None
    except ValueError as problem:
        if isinstance(problem, error):
            raise
        raise error(f"{path}: not JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise error(f"{path}: not a JSON object")
    return value
