"""The browser and the pages that are looked at in it, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import report_samples as samples
from report_browser import Browser, BrowserError, browser

from torch_hal_conformance.report import html


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        with browser(tmp_path_factory.mktemp("chromium")) as found:
            yield found
    except BrowserError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "mixed": html.page(samples.mixed()),
        "good": html.page(samples.good()),
        "many": html.page(samples.many(5000)),
        "nasty": html.page(samples.nasty()),
        "matrix": html.matrix([samples.mixed(), samples.good(backend="native"), samples.nasty()]),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def mixed(chromium: Browser, pages: dict[str, Path]) -> Browser:
    chromium.open(pages["mixed"])
    return chromium
