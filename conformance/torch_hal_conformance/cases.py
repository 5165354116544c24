"""Cases: every combination that the suite looks at, by a name from which everything follows."""

from __future__ import annotations

import fnmatch
import functools
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .draw import Draw
from .memory import taken
from .spec import PROFILES, Shape, Spec, specs

# What is looked at besides one call's numbers, at the base shape; see `behaviours`.
BEHAVIOURS = ("b19_selection_key", "b20_fusible", "b21_compile", "b22_capture", "b23_replay", "side_stream")
# As many rows as kernels are made for, and more than fit a tile.
ROWS = {"64_rows": 64, "130_rows": 130}
IN_CORE = frozenset({"b21_compile", "b22_capture", "b23_replay"})
SEEDS = 3


@dataclass(frozen=True)
class Case:
    """One case. ``profile`` is the smallest that has it; ``regime``: its values, or the behaviour that is looked at."""

    op: str
    profile: str
    shape: str
    dtype: str
    layout: str
    regime: str
    seed: int

    @property
    def id(self) -> str:
        return f"{self.op}/{self.profile}/{self.shape}/{self.dtype}/{self.layout}/{self.regime}/{self.seed}"

    @property
    def spec(self) -> Spec:
        return specs()[self.op]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def behaviours(self) -> tuple[int, ...]:
        """The numbers of the behaviours that users had to ask for, which this case shows."""
        return (int(self.regime[1:3]),) if self.regime[0] == "b" and self.regime[1:3].isdigit() else ()

    @property
    def structural(self) -> bool:
        """Whether zeros may be the right answer."""
        return self.regime == "b24_empty" or self.regime in self.spec.structural

    def arguments(self, stale: bool = False) -> dict[str, Any]:
        """The call's arguments; ``stale``: those of a like call with other values."""
        shape = next(shape for shape in self.spec.shapes if shape.name == self.shape)
        text = f"{self.op}/{self.shape}/{self.dtype}/{self.regime}/{self.seed}{'/stale' if stale else ''}"
        number = ROWS.get(self.regime)
        draw = Draw(text, self.torch_dtype, self.regime if number is None else "unit")
        arguments = self.spec.arguments(draw, **dict(shape.dims))
        return arguments if number is None else arguments | _tiled(arguments, self.spec.rows, number)


def _tiled(arguments: dict[str, Any], names: tuple[str, ...], number: int) -> dict[str, Any]:
    """The arguments ``names`` with ``number`` rows, which are theirs over and over."""
    index = torch.arange(number) % len(arguments[names[0]])
    return {name: taken(arguments[name], index) for name in names}


def generate(spec: Spec) -> Iterator[Case]:
    """Every case of one op, each once."""
    base = spec.shapes[0]
    assert base.profile == "core", f"the base shape of {spec.op} must be in core"
    for shape in spec.shapes:
        for dtype in shape.dtypes or spec.dtypes:
            yield _case(spec, shape, dtype, "contiguous", shape.regime)
    if spec.ranks:
        return
    for dtype in base.dtypes or spec.dtypes:
        for layout in spec.layouts:
            yield _case(spec, base, dtype, layout, "b25_strides")
        for regime in spec.regimes:
            yield _case(spec, base, dtype, "contiguous", regime)
        for seed in range(1, SEEDS):
            yield _case(spec, base, dtype, "contiguous", "unit", "deepseek", seed)
    narrow = _narrow(base.dtypes or spec.dtypes)
    for regime in ROWS if spec.rows else ():
        yield _case(spec, base, narrow, "contiguous", regime)
    for regime in BEHAVIOURS:
        yield _case(spec, base, narrow, "contiguous", regime, "core" if regime in IN_CORE else "deepseek")
    if spec.layouts:
        yield _case(spec, base, narrow, "far", "b26_far", "full")


def _case(
    spec: Spec, shape: Shape, dtype: str, layout: str, regime: str, profile: str | None = None, seed: int = 0
) -> Case:
    return Case(spec.op, profile or shape.profile, shape.name, dtype, layout, regime, seed)


def _narrow(dtypes: tuple[str, ...]) -> str:
    return "bfloat16" if "bfloat16" in dtypes else dtypes[0]


@functools.cache
def every_case() -> dict[str, Case]:
    """All cases by id, in a stable order."""
    found = [case for _, spec in sorted(specs().items()) for case in generate(spec)]
    by_id = {case.id: case for case in found}
    if len(by_id) != len(found):
        twice = next(case.id for case in found if [c.id for c in found].count(case.id) > 1)
        raise ValueError(f"two cases are called {twice}")
    return by_id


def select(profile: str, op_glob: str = "*") -> list[Case]:
    """The cases of a profile, and of the smaller ones in it, for the ops that the glob names."""
    wanted = PROFILES[: PROFILES.index(profile) + 1]
    return [case for case in every_case().values() if case.profile in wanted and fnmatch.fnmatchcase(case.op, op_glob)]


def must_pass(profile: str) -> frozenset[str]:
    """The ids checked in for a profile alone: what a report must hold of every op that its backend offers."""
    text = (importlib.resources.files(__package__) / "mustpass" / f"{profile}.txt").read_text()
    return frozenset(text.split())
