"""Reading safetensors checkpoints: everything is judged from the headers first, then streamed shard by shard."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torch_hal.formats import BLOCK
from torch_hal.ops import block_dequant_fp8

from .errors import CheckpointError
from .headers import Entry, Header, read_header, read_json_file
from .progress import byte_progress
from .weights import SCALE, STORED, Part

INDEX = "model.safetensors.index.json"
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # dtypes that a weight may be stored in -> bytes
_SCALES = {**_FLOATS, "F8_E8M0": 1}
_CODES = {"F8_E4M3": 1}
_RENAMED = {".weight_scale": f".weight{SCALE}"}  # an ending that some tools write -> the released checkpoints'
_COMPUTED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")  # endings of what nothing needs: see `_split_unused`
_SLAB = 2**17  # elements that are dequantised at a time
_SHOWN = 8  # problems that one error message lists

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What loading did: kept by the model as ``model.report``. Of a model on several ranks, what this one did."""

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
            what = "expected a directory, got a file" if self.path.exists() else "no such directory"
            raise CheckpointError(f"{self.path}: {what}")
        self._headers: dict[Path, Header] = {}
        index = self.path / INDEX
        files = self._read_index(index) if os.path.lexists(index) else self._read_all()
        self._stored: dict[str, str] = {}  # a tensor's name -> its name in the file
        for name in files:
            usual = _usual_name(name)
            if usual in self._stored:
                both = " and ".join(sorted([name, self._stored[usual]]))
                raise CheckpointError(f"{usual}: duplicated, {both} are one")
            self._stored[usual] = name
        self.files: dict[str, Path] = {name: files[stored] for name, stored in self._stored.items()}

    def _read_index(self, index: Path) -> dict[str, Path]:
        """Tensor -> file, as the index says; no file is opened yet."""
        names = read_json_file(index, CheckpointError).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{index}: no weight_map of tensors to files")
        for name, file in names.items():
            if not _is_file_name(file):
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

    def entry(self, name: str) -> Entry | None:
        """Where a tensor lies; None if its file lacks it."""
        return self.header(self.files[name]).entries.get(self._stored[name])

    def stored(self, path: Path) -> set[str]:
        """What comes from a file, by the names there: an index may choose another file for a tensor that is in both."""
        return {stored for name, stored in self._stored.items() if self.files[name] == path}

    def check(self, targets: Iterable[tuple[str, Part | None]], num_layers: int) -> None:
        """Raise CheckpointError for every target that is missing, mis-shaped, truncated or of a dtype without use,
        and for every scale that scales nothing."""
        problems = []
        unreadable: dict[Path, str] = {}
        names = set()
        for name, part in targets:
            names.add(name)
            path = self.files.get(name)
            if path is None:
                problems.append(f"{name}: missing")
                continue
            if part is None:
                continue
            if path not in unreadable:
                try:
                    self.header(path)
                except CheckpointError as error:
                    unreadable[path] = str(error)
            if path in unreadable:
                problems.append(f"{name}: {unreadable[path]}")
            elif problem := self._problem(name, path, part):
                problems.append(f"{name}: {path.name}: {problem}")
        for name in _split_unused(self.files.keys() - names, num_layers)[0]:
            if name.endswith(SCALE):
                weight, file = name.removesuffix(SCALE), self.files[name].name
                problems.append(f"{name}: {file}: a scale, but {weight} is no FP8 weight")
        _raise(self.path, list(dict.fromkeys(problems)))

    def _problem(self, name: str, path: Path, part: Part) -> str | None:
        header, entry = self.header(path), self.entry(name)
        if entry is None:
            return f"{INDEX} places it there, the file lacks it"
        dtypes = _CODES if _is_codes(part) else _SCALES if name.endswith(SCALE) else _FLOATS
        if entry.dtype not in dtypes:
            hint = ": FP8, which quantization_config in config.json does not say" if entry.dtype in _CODES else ""
            return f"dtype {entry.dtype}, expected {'one of ' if len(dtypes) > 1 else ''}{', '.join(dtypes)}{hint}"
        if entry.shape != part.whole:
            return f"shape {list(entry.shape)}, expected {list(part.whole)}"
        wanted = math.prod(part.whole) * dtypes[entry.dtype]
        if entry.end - entry.begin != wanted:
            return f"{entry.end - entry.begin} bytes for a tensor of {wanted}"
        if entry.end > header.data_bytes:
            return f"truncated: its bytes end at {entry.end}, the data at {header.data_bytes}"
        return None

    @torch.no_grad()
    def load(self, targets: Iterable[tuple[str, Part | None]], num_layers: int) -> LoadReport:
        """Fill every target with its part of the tensor of its name, one shard at a time, converting dtypes.

        Nothing but the targets and one mapped shard is in memory, and of the shard only what the targets take is
        read. Raises CheckpointError before any data is read for what headers tell, and afterwards for values that are
        not finite.
        """
        targets = list(targets)
        self.check(targets, num_layers)
        started = time.perf_counter()
        # Scales that a part is dequantised with come before it, and perhaps from another shard.
        scales = {id(part.scale) for _, part in targets if part is not None}
        shards: dict[tuple[bool, Path], list[tuple[str, Part]]] = defaultdict(list)
        for name, part in targets:
            if part is not None and part.into.numel():
                shards[id(part.into) not in scales, self.files[name]].append((name, part))
        total = sum(self._bytes(*part) for parts in shards.values() for part in parts)
        with byte_progress(f"Loading {self.path.name}", total) as advance:
            for (_, path), parts in sorted(shards.items(), key=lambda item: item[0][0]):
                parts.sort(key=lambda part: self.header(path).entries[self._stored[part[0]]].begin)
                self._load_shard(path, parts, advance)
        unused, speculative = _split_unused(self.files.keys() - {name for name, _ in targets}, num_layers)
        if unused:
            more = ", …" if len(unused) > _SHOWN else ""
            log.warning("%s: %d tensors are not used: %s%s", self.path, len(unused), ", ".join(unused[:_SHOWN]), more)
        read = {name for parts in shards.values() for name, _ in parts}
        seconds = time.perf_counter() - started
        return LoadReport(len({path for _, path in shards}), len(read), total, seconds, unused, speculative)

    def _bytes(self, name: str, part: Part) -> int:
        """What is read for a part."""
        entry = self.entry(name)
        assert entry is not None
        return (entry.end - entry.begin) * part.into.numel() // max(math.prod(part.whole), 1)

    def _load_shard(self, path: Path, parts: list[tuple[str, Part]], advance: Callable[[int], None]) -> None:
        finite = []
        try:
            with safe_open(path, framework="pt") as shard:
                for name, part in parts:
                    _fill(shard, self._stored[name], part)
                    finite.append(_all_finite(part.into) & _positive(name, part.into))
                    advance(self._bytes(name, part))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error
        bad = [part for part, ok in zip(parts, torch.stack(finite).tolist(), strict=True) if not ok]
        _raise(self.path, [f"{n}: {path.name}: {_fault(n)} in {p.into.dtype}" for n, p in bad])


def _is_file_name(name: Any) -> bool:
    """Whether a file of a directory can have that name."""
    try:
        return isinstance(name, str) and Path(name).name == name not in ("", "..") and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _fill(shard: Any, name: str, part: Part) -> None:
    """Read a part into its place, and dequantise if it says so."""
    if part.scale is None:
        part.into.copy_(_window(shard, name, part, part.begin))
        return
    # From the first row and column of the first blocks on, as the scales are.
    skipped = tuple(b % BLOCK for b in part.begin[-2:])
    begin = (*part.begin[:-2], *(b - skip for b, skip in zip(part.begin[-2:], skipped, strict=True)))
    _dequantize(part.into, _window(shard, name, part, begin), part.scale, *skipped)


def _dequantize(into: Tensor, codes: Tensor, scale: Tensor, row: int, column: int) -> None:
    """What is at ``row``, ``column`` of the codes and beyond; some rows at a time, for memory's sake."""
    if codes.dim() > 2:
        for matrix in zip(into, codes, scale, strict=True):
            _dequantize(*matrix, row, column)
        return
    blocks = max(_SLAB // BLOCK // codes.shape[1], 1)
    for some_codes, some_scale in zip(torch.split(codes, blocks * BLOCK), torch.split(scale, blocks), strict=True):
        values = block_dequant_fp8(some_codes.to(into.device), some_scale.to(into.device), into.dtype)[row:, column:]
        into[: len(values)].copy_(values)
        into, row = into[len(values) :], 0


def _window(shard: Any, name: str, part: Part, begin: tuple[int, ...]) -> Tensor:
    """What is stored from ``begin`` to the part's end; the bytes of nothing else are touched."""
    window = [slice(b, p + n) for b, p, n in zip(begin, part.begin, part.into.shape, strict=True)]
    if all(s.start == 0 and s.stop == n for s, n in zip(window, part.whole, strict=True)):
        return shard.get_tensor(name)  # type: ignore[no-any-return]
    return shard.get_slice(name)[tuple(window)]  # type: ignore[no-any-return]


def _is_codes(part: Part) -> bool:
    return part.scale is not None or part.into.dtype == STORED


def _all_finite(x: Tensor) -> Tensor:
    """A bool on x's device, without a copy of x. Codes have no infinities, and two NaNs: 0x7F and 0xFF."""
    if x.dtype == STORED:
        return (x.view(torch.int8).amax() != 0x7F) & (x.view(torch.uint8).amax() != 0xFF)
    return torch.isfinite(torch.stack(torch.aminmax(x))).all()


def _positive(name: str, x: Tensor) -> Tensor | bool:
    """Whether scales are scales; what is no scale may have any sign."""
    return bool(x.numel() == 0) or (x > 0).all() if name.endswith(SCALE) and x.is_floating_point() else True


def _fault(name: str) -> str:
    return "values that are not finite" + (", or scales that are not positive," if name.endswith(SCALE) else "")


def _usual_name(name: str) -> str:
    for ending, usual in _RENAMED.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + usual
    return name


def _split_unused(names: Iterable[str], num_layers: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tensors that nobody needs, tensors of layers past the last, which are for multi-token prediction).

    Rotary frequencies, which old checkpoints store, are computed from the config instead, and scales for a cache in
    8 bits from what is cached: they count as neither.
    """
    unused, speculative = [], []
    for name in sorted(names):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= num_layers:
            speculative.append(name)
        elif not name.endswith(_COMPUTED):
            unused.append(name)
    return tuple(unused), tuple(speculative)


def _raise(path: Path, problems: list[str]) -> None:
    if problems:
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{path}: cannot be loaded:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
