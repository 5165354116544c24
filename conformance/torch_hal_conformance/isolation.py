"""Judging in a process of its own: what it answers, or how it died."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, Any

from .report.schema import CaseResult
from .subjects import Subject, SubjectError

TIMEOUT = 300.0  # seconds for one case: the largest on a slow machine take a tenth
STARTUP = 300.0  # seconds until a process answers at all, and knows its backend: it imports torch


@dataclass
class Judge:
    """A worker process, started when first needed and again after each death. Use as a context manager."""

    timeout: float = TIMEOUT
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _stderr: IO[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._stderr):
                if pipe is not None:
                    pipe.close()
        self._process = self._stderr = None

    def __call__(self, case: str, kernel: str, device: str) -> CaseResult:
        """The result of one item; "crashed" if the process dies or does not answer in time."""
        start = time.monotonic()
        answer, cause = self._ask({"case": case, "kernel": kernel, "device": device}, self.timeout)
        if answer is not None:
            result = CaseResult.model_validate_json(answer)
            if result.status == "error" and not device.startswith("cpu"):
                self.close()  # a device remembers errors, and hands them to whoever comes next
            return result
        told = self._last_words()
        self.close()
        return CaseResult(
            id=case,
            kernel=kernel,
            status="crashed",
            check="crash",
            message=f"{cause}{told}",
            seconds=time.monotonic() - start,
        )

    def find(self, backend: str, device: str | None) -> Subject:
        """Who is to be judged. Raises SubjectError, also where loading the backend takes the process with it."""
        answer, cause = self._ask({"backend": backend, "device": device}, STARTUP)
        if answer is None:
            told = self._last_words()
            self.close()
            raise SubjectError(f"backend '{backend}' cannot be loaded: {cause}{told}")
        if error := json.loads(answer).get("error"):
            raise SubjectError(str(error))
        return Subject.from_json(answer.decode())

    def _ask(self, wish: dict[str, Any], timeout: float) -> tuple[bytes | None, str]:
        process = self._process or self._start()
        if self._process is None:
            self._process = process
            if (cause := self._line(process, STARTUP)[1]) or process.poll() is not None:
                return None, cause or _how(process)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(wish).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None, _how(process)
        return self._line(process, timeout)

    def _line(self, process: subprocess.Popen[bytes], timeout: float) -> tuple[bytes | None, str]:
        """The next line that the process writes, or why there is none."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                return None, f"no answer within {timeout:g} s: the process was stopped"
        answer = process.stdout.readline()
        return (answer, "") if answer.endswith(b"\n") else (None, _how(process))

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )

    def _last_words(self, lines: int = 8) -> str:
        """What the process wrote to stderr at last, from where Python says that it dies, if it does."""
        if self._stderr is None:
            return ""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4000))
        text = self._stderr.read().decode(errors="replace").strip()
        fatal = text.rfind("Fatal Python error")
        words = text[fatal:].splitlines()[:lines] if fatal >= 0 else text.splitlines()[-lines:]
        return "".join(f"\n  | {line}" for line in words)


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
