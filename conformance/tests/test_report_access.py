"""The page for everybody: by keyboard, in any colours and sizes, without JavaScript."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from report_browser import Browser, BrowserError, browser, count, shown

from torch_hal_conformance.report.tables import SYMBOLS

pytest_plugins = ["report_pages"]


# Keyboard.


def walk(page: Browser, steps: int) -> list[dict[str, Any]]:
    """What has the focus after each Tab."""
    found = []
    for _ in range(steps):
        page.press("Tab")
        found.append(
            page.run(
                """(() => { const e = document.activeElement, style = getComputedStyle(e);
                const box = e.getBoundingClientRect(), centre = [box.x + box.width / 2, box.y + box.height / 2];
                return {tag: e.tagName, text: e.textContent.trim().slice(0, 40), id: e.id,
                  outline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
                  seen: box.height > innerHeight || document.elementsFromPoint(...centre).includes(e)} })()"""
            )
        )
    return found


def test_everything_is_reached_by_tab_and_shows_that_it_has_the_focus(mixed: Browser) -> None:
    found = walk(mixed, 45)
    assert found[0]["text"] == "Skip to the results"
    assert [step["id"] for step in found[1:8]] == [
        *("theme", "by-text", "by-op", "by-status", "by-dtype", "by-regime"),
        "",
    ]
    assert found[7]["text"] == "Clear"
    for step in found:
        assert step["outline"], f"no outline: {step}"
        assert step["seen"], f"out of sight: {step}"
    reached = [(step["tag"], step["text"]) for step in found]
    assert ("BUTTON", "apply_rope") in reached
    assert ("BUTTON", "Copy") in reached
    assert any(tag == "SUMMARY" for tag, _ in reached)
    assert any(tag == "A" and "wrong" in text for tag, text in reached)


@pytest.mark.parametrize("key", ["Enter", " "])
def test_an_op_opens_by_key(mixed: Browser, key: str) -> None:
    mixed.run("document.querySelector('#matrix tbody button').focus()")
    mixed.press(key)
    assert len(shown(mixed, "#matrix tr.regime")) == 7
    assert mixed.run("document.activeElement.ariaExpanded") == "true"
    mixed.press(key)
    assert not shown(mixed, "#matrix tr.regime")


def test_failures_close_and_tables_sort_by_key(mixed: Browser) -> None:
    mixed.run("document.querySelector('.failure summary').focus()")
    mixed.press("Enter")
    assert len(shown(mixed, "#failures .failure[open]")) == 5
    mixed.run("document.querySelector('#kernels th button').focus()")
    mixed.press(" ")
    assert mixed.run("document.querySelector('#kernels th').ariaSort") == "ascending"
    assert mixed.run("document.activeElement.tagName") == "BUTTON"


def test_every_control_has_a_name_and_every_heading_its_scope(mixed: Browser) -> None:
    tree = mixed.send("Accessibility.getFullAXTree")["nodes"]
    controls = ("button", "searchbox", "combobox", "link", "region", "table")
    for node in tree:
        if not node.get("ignored") and node["role"]["value"] in controls:
            assert node.get("name", {}).get("value"), node
    assert mixed.run("document.documentElement.lang") == "en"
    assert mixed.run("document.querySelectorAll('th:not([scope])').length") == 0
    assert mixed.run("[...document.querySelectorAll('[id]')].map(e => e.id)") == mixed.run(
        "[...new Set([...document.querySelectorAll('[id]')].map(e => e.id))]"
    )
    levels = mixed.run("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_where_no_chromium_is_installed_the_tests_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BrowserError, match="install it, on Debian by 'apt-get install chromium'"), browser(tmp_path):
        pass


# Colours.

CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = (colour) => {
    const [r, g, b] = [...rgba(colour)].map(value => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
  };
  const found = {}, walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, ink = getComputedStyle(e).color;
    if (!walker.currentNode.textContent.trim() || e.closest("script, .spoken, option")) continue;
    if (!e.checkVisibility({visibilityProperty: true})) continue;
    const [a, b] = [luminance(ink), luminance(ground(e))].sort((x, y) => x - y);
    found[`${e.tagName}.${e.className} ${ink} on ${ground(e)}`] = (b + 0.05) / (a + 0.05);
  }
  return found;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["mixed", "matrix"])
def test_all_text_can_be_read(chromium: Browser, pages: dict[str, Path], name: str, dark: bool) -> None:
    chromium.open(pages[name], dark=dark)
    chromium.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    chromium.run("document.querySelectorAll('tbody').forEach(b => { b.classList.add('open') })")
    ratios = chromium.run(CONTRAST)
    assert len(ratios) > 10
    assert {what: round(ratio, 2) for what, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("name", ["mixed", "matrix"])
def test_colour_is_never_alone(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    chromium.open(pages[name])
    cells = chromium.run("[...document.querySelectorAll('.cell')].map(e => [e.className, e.textContent.trim()])")
    coloured = [(style.split()[1], text) for style, text in cells if len(style.split()) > 1]
    assert len(coloured) > 20
    for state, text in coloured:
        assert text.startswith(SYMBOLS[state]), (state, text)
    marked = "[...document.querySelectorAll('.mark, .swatch')]"
    for state, text in chromium.run(f"{marked}.map(e => [e.classList[1], e.textContent.trim()])"):
        assert text.startswith(SYMBOLS[state]), (state, text)
    assert chromium.run("document.querySelectorAll('rect').length") == chromium.run(
        "document.querySelectorAll('.legend li').length"
    )


# Sizes, and readers without JavaScript.


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("name", ["mixed", "matrix"])
def test_no_page_is_wider_than_its_window(chromium: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    chromium.open(pages[name], width=width)
    assert chromium.run("document.documentElement.scrollWidth") <= width


def test_five_thousand_cases_stay_quick(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["many"])
    assert count(chromium) == "5,040 results, 113 failures"
    assert chromium.run("document.querySelectorAll('.cases tbody tr').length") <= 200
    took = chromium.run(
        """(async () => { const field = document.querySelector("#by-text"), start = performance.now();
        field.value = "rms"; field.dispatchEvent(new Event("input", {bubbles: true}));
        await new Promise(done => setTimeout(done, 80)); await new Promise(requestAnimationFrame);
        return performance.now() - start; })()"""
    )
    assert re.match(r"420 of 5,040 results", count(chromium))
    assert took < 2000  # milliseconds; about 100 on a machine that does nothing else


def test_without_javascript_everything_can_be_read(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["mixed"], script=False)
    tree = chromium.send("DOMSnapshot.captureSnapshot", computedStyles=[])  # no script may look, so the browser does
    strings = tree["strings"]
    seen = " ".join(strings[i] for i in tree["documents"][0]["layout"]["text"] if i >= 0)
    for text in (
        "Not passed",
        "96.5",
        "b25_strides",
        "6.21 times the error bound",
        "torch-hal",
        "580.95.05",
        "needs contiguous",
    ):
        assert text in seen
    assert "report.json has them all" in seen
    for control in ("Clear", "Show more", "Copy", "Expand"):
        assert control not in seen
