"""Judging in a process of its own: what it answers, or how it died."""

from __future__ import annotations

import contextlib
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

PARTING = 3.0  # seconds that a process has to end by itself
KEPT = ("TORCH_HAL_PLUGINS", "TORCH_HAL_DEVICE")
TIMEOUT = 300.0  # seconds for one case: the largest on a slow machine take a tenth
STARTUP = 300.0  # seconds until a process answers at all, and knows its backend: it imports torch


@dataclass
class Judge:
    """A worker process, started when first needed and again after each death. Use as a context manager."""

    timeout: float = TIMEOUT
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _stderr: IO[bytes] | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)  # of the last wish
    _read: bytes = field(default=b"", init=False)  # of the next answer

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # it ends by itself, and tidies up, unless a kernel holds it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PARTING)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and whatever kernels started
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._stderr):
                if pipe is not None:
                    pipe.close()
        self._process = self._stderr = None
        self._read = b""

    def __call__(self, case: str, kernel: str, device: str) -> CaseResult:
        """The result of one item; "crashed" if the process dies or does not answer in time."""
        start = time.monotonic()
        answer, cause = self._ask({"case": case, "kernel": kernel, "device": device}, self.timeout)
        result = None
        if answer is not None:
            try:
                result = CaseResult.model_validate_json(answer)
            except ValueError as error:
                cause = f"the process gave an answer that is none: {str(error).splitlines()[0]}"
            if result is not None and (result.id, result.kernel) != (case, kernel):
                cause, result = f"the process answered for {result.id} on {result.kernel}", None
        if result is not None:
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
            self._number += 1
            process.stdin.write(json.dumps({"number": self._number, "wish": wish}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None, _how(process)
        line, cause = self._line(process, timeout)
        prefix = f"{self._number} ".encode()
        if line is not None and not line.startswith(prefix):
            return None, "the process gave an answer that nobody asked for"
        return (line.removeprefix(prefix) if line is not None else None), cause

    def _line(self, process: subprocess.Popen[bytes], timeout: float) -> tuple[bytes | None, str]:
        """The next line that the process writes, or why there is none in time."""
        assert process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None, f"no answer within {timeout:g} s: the process was stopped"
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return None, _how(process)
                self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line, ""

    def _start(self) -> subprocess.Popen[bytes]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        # What a shell asks of selection is not the backend's: a kernel that was denied would not be judged.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_HAL_") or k in KEPT}
        environment["PYTHONFAULTHANDLER"] = "1"
        # Its share of the cores: processes whose threads wait for one another's take five times as long.
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the suite, which ends the process, and its children, itself
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
