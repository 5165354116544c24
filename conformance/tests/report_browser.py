"""Headless Chromium, spoken to over a pipe by its DevTools protocol: no port, no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "these tests look at the report's page in Chromium: install it, on Debian by 'apt-get install chromium'"
VISIBLE = "e => e.checkVisibility({visibilityProperty: true})"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-extensions --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)


class BrowserError(Exception):
    """Chromium is missing, died, or was asked what it does not know."""


class Browser:
    """One Chromium with one page."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number, self._session = to, back, b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while (answer := self._read(deadline)).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BrowserError("Chromium did not answer within a minute")
            if not (more := os.read(self._back, 1 << 20)):
                raise BrowserError("Chromium died")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, fragment: str = "", width: int = 1280, dark: bool = False, script: bool = True) -> None:
        """Load a file, and wait until it is there."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        for address in ("about:blank", path.as_uri() + fragment):  # the blank one, as another fragment loads nothing
            self.events.clear()
            self.send("Page.navigate", url=address)
            self.wait("Page.loadEventFired")

    def wait(self, event: str) -> None:
        deadline = time.monotonic() + 60
        while all(seen.get("method") != event for seen in self.events):
            self.events.append(self._read(deadline))

    def run(self, expression: str) -> Any:
        """What a JavaScript expression is, once its promise is kept."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def press(self, key: str, modifiers: int = 0) -> None:
        code = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = False, most: int = 4000) -> None:
        area: dict[str, Any] = {}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            area = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **area)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    @property
    def complaints(self) -> list[str]:
        """What the console got: exceptions, refused scripts, missing files."""
        found = [e["params"] for e in self.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
        return [json.dumps(entry)[:500] for entry in found]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A Chromium whose profile is in ``folder``. Raises BrowserError where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise BrowserError(MISSING)
    commands, answers = os.pipe(), os.pipe()

    def connect() -> None:  # Chromium reads commands from 3 and answers on 4
        kept = os.dup(commands[0]), os.dup(answers[1])  # numbers beyond 4, so that neither overwrites the other
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    process = subprocess.Popen(
        [program, *FLAGS.split(), f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=connect,
        close_fds=False,
    )
    os.close(commands[0])
    os.close(answers[1])
    try:
        found = Browser(commands[1], answers[0])
        yield found
        with suppress(BrowserError, OSError):
            found._session = ""
            found.send("Browser.close")
    finally:
        os.close(commands[1])
        os.close(answers[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# What tests look at.


def settle(page: Browser) -> None:
    """Until the filter, which waits for the typing to pause, has run."""
    page.run("new Promise(done => setTimeout(done, 150))")


def choose(page: Browser, **values: str) -> None:
    for name, value in values.items():
        page.run(f"document.querySelector('#by-{name}').value = {value!r}")
    page.run("document.querySelector('#filter').dispatchEvent(new Event('input', {bubbles: true}))")
    settle(page)


def shown(page: Browser, query: str, what: str = "e.textContent.trim()") -> list[Any]:
    """Something of each visible element."""
    found: list[Any] = page.run(f"[...document.querySelectorAll({query!r})].filter({VISIBLE}).map(e => {what})")
    return found


def count(page: Browser) -> str:
    return str(page.run("document.querySelector('#count').textContent"))
