"""Failures that a backend's author knows of: ``conformance.toml`` in the backend's own package.

    [[xfail]]
    id = "rms_norm/deepseek/M17-D7168/bfloat16/contiguous/unit/0"
    raises = "bound"                    # the check that fails, or the exception's type
    url = "https://example.com/issues/1"
    arch = "sm_90"                      # a pattern of `arch_matches`, or "*"
    expires = 2027-06-30

Strict: an entry that matches no case, is past its date, fails otherwise than it says or does not fail at all fails the
run. Core admits none.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pydantic

from torch_hal.device import DeviceInfo, arch_matches

FILE = "conformance.toml"


class XfailError(Exception):
    """A backend's list of known failures is wrong, and how."""


class Xfail(pydantic.BaseModel):
    """One known failure."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    raises: str = pydantic.Field(min_length=1)
    url: str = pydantic.Field(pattern=r"^https?://\S+$")
    arch: str = pydantic.Field(min_length=1)
    expires: datetime.date
    kernel: str = ""  # of a backend that offers several for the op: the one that fails

    def applies(self, device: DeviceInfo, kernel: str) -> bool:
        here = self.arch == "*" or arch_matches(device.arch, self.arch)
        return here and self.kernel in ("", kernel)


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    xfail: list[Xfail] = []


def load(
    folder: str, cases: Iterable[str], answers: Callable[[str, str], bool], today: datetime.date | None = None
) -> list[Xfail]:
    """The known failures listed in a backend's folder; ``answers``: whether it has a kernel, by op and id.

    Raises XfailError for an entry that is wrong in itself.
    """
    path = Path(folder) / FILE
    entries = read(path, cases, today or datetime.date.today()) if folder and path.exists() else []
    for entry in entries:
        op = entry.id.split("/")[0]
        if not answers(op, entry.kernel):
            whose = f"kernel '{entry.kernel}' for {op}" if entry.kernel else f"kernel for {op}"
            raise XfailError(f"{path}: {entry.id} can never fail: the backend has no {whose}")
    return entries


def read(path: Path, cases: Iterable[str], today: datetime.date) -> list[Xfail]:
    try:
        entries = _File.model_validate(tomllib.loads(path.read_text())).xfail
    except (OSError, ValueError) as error:
        raise XfailError(f"{path}: {_told(error)}") from error
    known = set(cases)
    for entry in entries:
        problem = ""
        if entry.id not in known:
            problem = "is no case of this suite"
        elif entry.id.split("/")[1] == "core":
            problem = "is in core, which admits no xfail"
        elif entry.expires < today:
            problem = f"expired on {entry.expires}"
        if problem:
            raise XfailError(f"{path}: {entry.id} {problem}")
    keys = [(entry.id, entry.kernel, entry.arch) for entry in entries]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise XfailError(f"{path}: {twice[0][0]} is listed twice")
    return entries


def _told(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return str(error)
