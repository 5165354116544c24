"""Reading safetensors checkpoints: everything is judged from the headers first, then streamed shard by shard.

A file is an 8-byte length, a JSON header (tensor -> dtype, shape, byte range) and the bytes.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError
from .progress import byte_progress

INDEX = "model.safetensors.index.json"
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # dtypes that a weight may be stored in -> bytes
_MAX_HEADER = 100_000_000  # the format's own limit
_SHOWN = 8  # problems that one error message lists

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class LoadReport:
    """What loading did: kept by the model as ``model.report``."""

    files: int
    tensors: int
    bytes: int
    seconds: float
    unused: tuple[str, ...]  # in the checkpoint, needed by nobody
    speculative: tuple[str, ...] = field(default=())  # multi-token-prediction layers, which only speculation needs


class Checkpoint:
    """The tensors of one directory, by name. Opening reads the index or, without one, every file's header."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such directory")
        self._headers: dict[Path, Header] = {}
        index = self.path / INDEX
        self.files: dict[str, Path] = self._read_index(index) if index.is_file() else self._read_all()

    def _read_index(self, index: Path) -> dict[str, Path]:
        """Tensor -> file, as the index says; no file is opened yet."""
        try:
            weight_map = _json(index.read_bytes(), index)["weight_map"]
            names = dict(weight_map.items())
        except (KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index}: no weight_map of tensors to files") from None
        for name, file in names.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{name}: {index.name} places it in {file!r}, which is no file of this directory")
        return {name: self.path / file for name, file in names.items()}

    def _read_all(self) -> dict[str, Path]:
        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.path}: no {INDEX} and no *.safetensors file")
        files: dict[str, Path] = {}
        for path in paths:
            for name in self.header(path).entries:
                if name in files:
                    both = f"{files[name].name} and {path.name}"
                    raise CheckpointError(f"{name}: duplicated, in {both}, with no {INDEX} to choose")
                files[name] = path
        return files

    def header(self, path: Path) -> Header:
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]

    def check(self, targets: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError for every target that is missing, mis-shaped, truncated or of a dtype without use."""
        problems = []
        unreadable: dict[Path, str] = {}
        for name, target in targets.items():
            path = self.files.get(name)
            if path is None:
                problems.append(f"{name}: missing")
                continue
            if path not in unreadable:
                try:
                    self.header(path)
                except CheckpointError as error:
                    unreadable[path] = str(error)
            if path in unreadable:
                problems.append(f"{name}: {unreadable[path]}")
            elif problem := self._problem(name, path, target):
                problems.append(f"{name}: {path.name}: {problem}")
        _raise(self.path, problems)

    def _problem(self, name: str, path: Path, target: Tensor) -> str | None:
        header = self.header(path)
        entry = header.entries.get(name)
        if entry is None:
            return f"{INDEX} places it there, the file lacks it"
        if entry.dtype not in _FLOATS:
            return f"dtype {entry.dtype}, expected one of {', '.join(_FLOATS)}"
        if entry.shape != tuple(target.shape):
            return f"shape {list(entry.shape)}, expected {list(target.shape)}"
        wanted = target.numel() * _FLOATS[entry.dtype]
        if entry.end - entry.begin != wanted:
            return f"{entry.end - entry.begin} bytes for a tensor of {wanted}"
        if entry.end > header.data_bytes:
            return f"truncated: its bytes end at {entry.end}, the data at {header.data_bytes}"
        return None

    @torch.no_grad()
    def load(self, targets: Mapping[str, Tensor], num_layers: int) -> LoadReport:
        """Fill every target with the tensor of its name, one shard at a time, converting to the target's dtype.

        Nothing but the targets and one mapped shard is in memory. Raises CheckpointError before any data is read
        for what headers tell, and afterwards for values that are not finite.
        """
        self.check(targets)
        started = time.perf_counter()
        shards: dict[Path, list[str]] = defaultdict(list)
        for name in targets:
            shards[self.files[name]].append(name)
        sizes = {path: sum(self._bytes(path, name) for name in names) for path, names in shards.items()}
        with byte_progress(f"Loading {self.path.name}", sum(sizes.values())) as advance:
            for path, names in shards.items():
                names.sort(key=lambda name: self.header(path).entries[name].begin)
                self._load_shard(path, names, targets, advance)
        unused, speculative = _split_unused(self.files.keys() - targets.keys(), num_layers)
        if unused:
            more = ", …" if len(unused) > _SHOWN else ""
            log.warning("%s: %d tensors are not used: %s%s", self.path, len(unused), ", ".join(unused[:_SHOWN]), more)
        seconds = time.perf_counter() - started
        return LoadReport(len(shards), len(targets), sum(sizes.values()), seconds, unused, speculative)

    def _bytes(self, path: Path, name: str) -> int:
        entry = self.header(path).entries[name]
        return entry.end - entry.begin

    def _load_shard(self, path: Path, names: list[str], targets: Mapping[str, Tensor], advance: Any) -> None:
        finite = []
        try:
            with safe_open(path, framework="pt") as shard:
                for name in names:
                    targets[name].copy_(shard.get_tensor(name))
                    finite.append(torch.isfinite(targets[name]).all())
                    advance(self._bytes(path, name))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error
        bad = [name for name, ok in zip(names, torch.stack(finite).tolist(), strict=True) if not ok]
        _raise(self.path, [f"{n}: {path.name}: values that are not finite in {targets[n].dtype}" for n in bad])


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises CheckpointError naming the file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                hint = " (a Git LFS pointer, not the file itself)" if start == b"version " else ""
                raise CheckpointError(f"{path}: not a safetensors file, or cut within its header{hint}")
            table = _json(file.read(length), path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    table.pop("__metadata__", None)
    try:
        entries = {
            name: Entry(e["dtype"], tuple(e["shape"]), *map(int, e["data_offsets"])) for name, e in table.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: malformed header: {error}") from error
    return Header(entries, size - 8 - length)


def _json(data: bytes, path: Path) -> dict[str, Any]:
    """``data`` as a JSON object in which no key comes twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            raise CheckpointError(f"{next(k for k in keys if keys.count(k) > 1)}: named twice in {path}")
        return result

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _split_unused(names: Iterable[str], num_layers: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tensors that nobody needs, tensors of layers past the last, which are for multi-token prediction).

    Rotary frequencies, which old checkpoints store, are computed from the config instead and count as neither.
    """
    unused, speculative = [], []
    for name in sorted(names):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= num_layers:
            speculative.append(name)
        elif not name.endswith("rotary_emb.inv_freq"):
            unused.append(name)
    return tuple(unused), tuple(speculative)


def _raise(path: Path, problems: list[str]) -> None:
    if problems:
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{path}: cannot be loaded:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
