"""Who answered: whether an op's reference ran while a backend's kernel was to run."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

from torch_hal.op import Op


class Watch:
    """While it is entered, notes whether any of this process's threads runs the op's reference, however it is reached.

    It looks for the function's code, so that neither a captured reference nor a bound op that falls back escapes it.
    """

    def __init__(self, op: Op[..., Any]) -> None:
        self._code: CodeType = op.reference.__code__
        self.entered = False

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is self._code:
            self.entered = True

    def __enter__(self) -> Watch:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
