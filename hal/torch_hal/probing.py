"""Whether a kernel library works on a device: asked once a process, and again after a refresh."""

from __future__ import annotations

from .device import DeviceInfo
from .errors import FATAL, describe
from .kernel import Library, load
from .lock import LOCK, no_return

_answers: dict[tuple[Library, str, str, int], str | None] = {}


def probe_library(library: Library, device: DeviceInfo) -> str | None:
    """Why ``library`` does not work on ``device``; None if it does."""
    key = (library, device.vendor, device.type, device.index)
    with LOCK:
        if key not in _answers:
            try:
                with no_return(key, f"the probe of {library.name} binds or explains what waits for it"):
                    answer = load(library.probe)(device) if library.probe is not None else None
                _answers[key] = None if answer is None else str(answer) or "its probe gave no reason"
            except FATAL:
                raise
            except BaseException as error:
                _answers[key] = f"probing {library.name} raised {describe(error)}"
        return _answers[key]


def forget() -> None:
    """Ask again next time: something may have been installed or mended."""
    with LOCK:
        _answers.clear()
