"""What the user wants of selection: from code, ``TORCH_HAL_*`` variables or a TOML file, read once at bind."""

from __future__ import annotations

import difflib
import fnmatch
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from .errors import FallbackWarning, PolicyError, Unsupported
from .kernel import Kernel

PREFIX = "TORCH_HAL_"
FILE_SETTING = "TORCH_HAL_POLICY"
OTHER_SETTINGS = {FILE_SETTING, "TORCH_HAL_PLUGINS", "TORCH_HAL_DEVICE"}


class Policy(pydantic.BaseModel):
    """How kernels are chosen. Keys of the first three are op globs; values, globs too, name kernels or plugins.

    A field that is set in code beats its ``TORCH_HAL_<FIELD>`` variable, which beats the TOML file that
    ``TORCH_HAL_POLICY`` names.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    prefer: Mapping[str, tuple[str, ...]] = {}  # soft: tried first, in this order; not met -> one warning
    require: Mapping[str, tuple[str, ...]] = {}  # strict: one of these or `Unsupported`
    deny: Mapping[str, tuple[str, ...]] = {}
    pinned: Mapping[str, tuple[str, ...]] = {}  # op -> exactly these kernels, in this order: see `Manifest.pin`
    deterministic: bool = False  # only kernels that declare Trait.DETERMINISTIC
    graph_safe: bool = False  # only kernels that declare Trait.GRAPH_SAFE
    validation: bool = True  # check every call's arguments
    fallback: Literal["warn", "error"] = "warn"
    trace: bool = False  # record which kernel ran with which shapes, label profiler ranges

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise PolicyError(f"policy: {problems}") from None

    @pydantic.field_validator("prefer", "require", "deny", "pinned", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        """Accept ``{"rms_norm": "acme"}`` and the variables' ``rms_norm=acme,native; moe_*=triton``."""
        if isinstance(value, str):
            rules: dict[str, tuple[str, ...]] = {}
            for glob, kernels in (_rule(part) for part in value.split(";") if part.strip()):
                rules[glob] = rules.get(glob, ()) + kernels
            value = rules
        if isinstance(value, Mapping):
            return {k: (v,) if isinstance(v, str) else v for k, v in value.items()}
        return value

    def matching(self, rules: Mapping[str, tuple[str, ...]], op: str) -> list[str]:
        """The kernel patterns that ``rules`` hold for ``op``, in the order written."""
        return [pattern for glob, patterns in rules.items() if fnmatch.fnmatchcase(op, glob) for pattern in patterns]

    def check_patterns(self, ops: Iterable[str], kernels: Iterable[Kernel], absent: Mapping[str, str]) -> None:
        """Raise PolicyError for a pattern that matches nothing: it is a typing error, not a wish.

        absent: plugins that were not loaded, and why. A pattern may name one; requiring nothing else is Unsupported.
        """
        ops, kernels = list(ops), list(kernels)
        for field in ("prefer", "require", "deny", "pinned"):
            for glob, patterns in getattr(self, field).items():
                rule = f"policy.{field}['{glob}']"
                matched = fnmatch.filter(ops, glob)
                if not matched:
                    raise PolicyError(f"policy.{field}: '{glob}' matches no op; see `torch-hal ops`")
                offered = [k for k in kernels if k.op in matched]
                unmet = [p for p in patterns if not any(names(p, k) for k in offered)]
                gone = {p: name for p in unmet for name in absent if fnmatch.fnmatchcase(name, p.partition(".")[0])}
                if unknown := [p for p in unmet if p not in gone]:
                    ids = ", ".join(sorted({k.id for k in offered}))
                    raise PolicyError(f"{rule}: '{unknown[0]}' matches no kernel; offered are {ids}")
                if not patterns:
                    raise PolicyError(f"{rule}: names no kernel")
                for pattern in patterns:
                    _check_unambiguous(rule, pattern, offered)
                if field == "prefer" and gone:
                    self._report_absent(rule, {name: absent[name] for name in gone.values()})
                if (field == "require" and len(unmet) == len(patterns)) or (field == "pinned" and unmet):
                    why = "; ".join(f"plugin {name}: {absent[name]}" for name in dict.fromkeys(gone.values()))
                    raise Unsupported(f"{rule}: {', '.join(patterns)} cannot serve. {why}")

    def _report_absent(self, rule: str, absent: Mapping[str, str]) -> None:
        message = f"{rule} is not met: " + "; ".join(f"plugin {name}: {why}" for name, why in absent.items())
        if self.fallback == "error":
            raise Unsupported(f"{message} (policy.fallback is 'error')")
        warnings.warn(message, FallbackWarning, stacklevel=5)


def _check_unambiguous(rule: str, pattern: str, kernels: Iterable[Kernel]) -> None:
    """A bare name must not mean one plugin and, by accident, another plugin's kernel."""
    by_plugin = [k.id for k in kernels if k.plugin == pattern]
    by_name = [f"{k.plugin}.{k.name}" for k in kernels if k.name == pattern and k.plugin != pattern]
    if by_plugin and by_name:
        raise PolicyError(f"{rule}: '{pattern}' is a plugin and also {by_name[0]}; write '{pattern}.*' or that")


def names(pattern: str, kernel: Kernel) -> bool:
    """Whether a policy's pattern means this kernel: by name, plugin, or both."""
    return any(
        fnmatch.fnmatchcase(text, pattern) for text in (kernel.name, kernel.plugin, f"{kernel.plugin}.{kernel.name}")
    )


def resolve(policy: Policy | None, environ: Mapping[str, str] | None = None) -> Policy:
    """The policy in force: code over variables over file."""
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError(f"policy: expected a Policy, got {type(policy).__name__}")
    environ = os.environ if environ is None else environ
    known = {PREFIX + field.upper() for field in Policy.model_fields} | OTHER_SETTINGS
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in known):
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise PolicyError(f"variable {name} means nothing; {hint}")
    merged: dict[str, Any] = {}
    if path := environ.get(FILE_SETTING):
        merged |= _read(Path(path))
    for field in Policy.model_fields:
        if (value := environ.get(PREFIX + field.upper())) is not None:
            merged[field] = value
    if policy is not None:
        merged |= {field: getattr(policy, field) for field in policy.model_fields_set}
    return Policy(**merged)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # not there, not TOML, not text
        raise PolicyError(f"{FILE_SETTING}={path}: {error}") from error


def _rule(text: str) -> tuple[str, tuple[str, ...]]:
    glob, equals, kernels = text.partition("=")
    if not equals or not glob.strip() or not kernels.strip():
        raise ValueError(f"{text.strip()!r}: expected 'op_glob=kernel,kernel; ...'")
    return glob.strip(), tuple(k.strip() for k in kernels.split(",") if k.strip())
