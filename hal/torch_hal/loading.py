"""Importing a kernel's code, and checking that its signatures are the op's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .errors import PluginError
from .kernel import Kernel, load
from .op import Op, declared
from .twins import load_run


@dataclass(frozen=True, eq=False)
class Loaded:
    """A kernel whose code is imported and whose signatures were checked."""

    kernel: Kernel
    run: Callable[..., Any]
    static: Callable[..., str | None] | None
    dynamic: Callable[..., str | None] | None
    prepare: Callable[..., Any] | None
    plan: Callable[..., Any] | None

    @property
    def refuses(self) -> bool:
        """Whether some call in a layout that the kernel reads may be refused."""
        return self.static is not None or self.dynamic is not None


def load_kernel(kernel: Kernel, op: Op[..., Any]) -> Loaded:
    """Import a kernel's code. Raises PluginError where a signature differs from the op's, naming the difference."""
    companions = [part for part in ("static", "dynamic", "prepare", "plan") if getattr(kernel, part) is not None]
    parts = {"run": load_run(kernel, dict(declared())), **{part: load(getattr(kernel, part)) for part in companions}}
    models = dict.fromkeys(("run", "static", "dynamic"), op.reference) | {"prepare": op.prepare, "plan": op.plan}
    lacking: dict[str, list[inspect.Parameter]] = {}
    for part, function in parts.items():
        model = models[part]
        if model is None:
            raise PluginError(f"{kernel.id}: {op.name} has no {part}, so a kernel cannot declare one")
        lacking[part] = _lacking(kernel, part, function, model)
        if lacking[part]:
            parts[part] = _without(function, len(inspect.signature(model).parameters) - len(lacking[part]))
    if lacking["run"]:
        parts["dynamic"] = _defaults_only(kernel, op, lacking["run"], parts.get("dynamic"))
    return Loaded(kernel, parts["run"], *(parts.get(part) for part in ("static", "dynamic", "prepare", "plan")))


def _lacking(
    kernel: Kernel, part: str, function: Callable[..., Any], model: Callable[..., Any]
) -> list[inspect.Parameter]:
    """The op's trailing defaulted parameters that the function does not have. PluginError for any other difference."""
    try:
        have = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise PluginError(f"{kernel.id}: {part} of {kernel.op} has no signature to check: {error}") from error
    want = list(inspect.signature(model).parameters.values())
    absent = want[len(have) :]
    same_names = [p.name for p in have] == [p.name for p in want[: len(have)]]
    if not all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in have):
        raise PluginError(f"{kernel.id}: {part} of {kernel.op} must take its arguments by position and by name")
    if not same_names or any(p.default is inspect.Parameter.empty for p in absent):
        expected, got = (", ".join(p.name for p in parameters) for parameters in (want, have))
        raise PluginError(f"{kernel.id}: {part} of {kernel.op} takes ({got}), the op takes ({expected})")
    for mine, model_parameter in zip(have, want, strict=False):
        if part == "run" and mine.default != model_parameter.default:  # torch leaves defaulted arguments out of calls
            raise PluginError(
                f"{kernel.id}: run of {kernel.op} must have the op's default for '{mine.name}': {model_parameter}"
            )
    return absent


@functools.cache  # so that every bind gets the same function, and with it the same torch op
def _without(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``function`` of an older contract, called with a newer one's arguments: the trailing ones are dropped."""

    @functools.wraps(function)
    def older(*args: Any) -> Any:
        return function(*args[:count])

    return older


def _defaults_only(
    kernel: Kernel, op: Op[..., Any], lacking: list[inspect.Parameter], dynamic: Callable[..., str | None] | None
) -> Callable[..., str | None]:
    """Refuse values that a kernel of an older contract has no parameter for."""
    defaults = {p.name: p.default for p in lacking}

    def refuse(*args: Any) -> str | None:
        arguments = op.bind(*args)
        for name, default in defaults.items():
            value = arguments[name]
            unplanned = isinstance(value, torch.Tensor) and value.numel() == 0  # the reference's plan: none
            if not unplanned and value != default:
                return f"made for version {kernel.version} of the contract, which has no '{name}'"
        return dynamic(*args) if dynamic is not None else None

    return refuse
