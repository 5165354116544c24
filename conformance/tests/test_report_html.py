"""The page as text: whole in itself, with everything escaped, in colours that can be read."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import report_samples as samples
from report_samples import NASTY, nasty

from torch_hal_conformance.report import html
from torch_hal_conformance.report.tables import SYMBOLS, WORDS


class Elements(HTMLParser):
    """Names, attributes and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data


PAGES = {
    "mixed": lambda: html.page(samples.mixed()),
    "nasty": lambda: html.page(nasty()),
    "empty": lambda: html.page(samples.build([], {})),
    "matrix": lambda: html.matrix([samples.mixed(), samples.good(), nasty()]),
}


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return PAGES[request.param]()


def test_a_page_is_whole_in_itself(page: str) -> None:
    for tag, attributes in Elements(page).found:
        assert tag not in ("iframe", "object", "embed", "base", "img", "source", "video")
        for name in ("src", "srcset", "poster", "action", "data"):
            assert name not in attributes, f"<{tag} {name}>"
        if "href" in attributes:
            assert re.match(r"#|data:,$", attributes["href"] or ""), f"<{tag} href={attributes['href']}>"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_nothing_runs_but_the_page_itself(page: str) -> None:
    found = Elements(page)
    assert [attributes for tag, attributes in found.found if tag == "script" and attributes not in ({},)] in (
        [],
        [{"type": "application/json", "id": "data"}],
    )
    handlers = [
        name for _, attributes in found.found for name in attributes if name.startswith("on") or name == "style"
    ]
    assert handlers == []
    [policy] = [a["content"] or "" for tag, a in found.found if tag == "meta" and a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "<img" not in page


def test_hostile_text_is_text() -> None:
    page = html.page(nasty())
    assert "<b>bold" not in page
    assert "{{ 7" in page
    data = json.loads(next(text for text in Elements(page).scripts if text.startswith("{")))
    assert NASTY in data["texts"]["message"]["values"]


def test_the_page_says_what_counts() -> None:
    page = html.page(samples.mixed())
    for text in ("Not passed", "96.5 %", "198 of 205", "91.5 %", "6.21 times the error bound", "580.95.05"):
        assert text in page
    assert "needs acme_kernels&gt;=2.0, installed is 1.8.0" in page


def test_five_thousand_cases_are_compact() -> None:
    assert len(html.page(samples.many(5000))) < 1_200_000
    assert len(html.page(samples.many(5000, failing=1.0))) < 1_600_000


def test_when_nearly_everything_fails_every_op_shows_some() -> None:
    page = html.page(samples.many(5000, failing=1.0))
    assert "384 of them in full, some of each op; all 5,040 are among the results below." in page
    assert page.count('<div class="group"') == 48


def test_a_huge_message_is_cut() -> None:
    id = "rms_norm/core/n17-d128/float32/contiguous/unit/0"
    report = samples.build(
        [samples.case(id, status="error", check="E", message="x" * 10**6)], {"rms_norm": ("acme.fast",)}
    )
    assert len(html.page(report)) < 200_000
    assert "… and 996000 more characters in report.json" in html.page(report)


# Colours, from the style sheet.


def colours(scheme: int) -> dict[str, str]:
    """Name -> colour in the light (0) or the dark (1) scheme."""
    style = html._read("page.css")
    return {name: pair[scheme] for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_what_it_is_said_to_be() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read(scheme: int) -> None:
    found = colours(scheme)
    text = [(state, f"{state}-tint") for state in SYMBOLS]
    text += [(ink, ground) for ink in ("ink", "muted", "accent", "correct", "wrong") for ground in ("page", "card")]
    for ink, ground in text:
        assert contrast(found[ink], found[ground]) >= 4.5, f"{ink} on {ground}"
    shapes = [(state if state != "correct" else "fill", "card") for state in SYMBOLS]
    shapes += [("edge", "page"), ("edge", "card"), ("accent", "page")]  # of fields, and of what has the focus
    for ink, ground in shapes:
        assert contrast(found[ink], found[ground]) >= 3, f"{ink} on {ground}"


def test_every_state_has_a_symbol_and_a_word_of_its_own() -> None:
    assert len(set(SYMBOLS.values())) == len(SYMBOLS) == len(set(WORDS.values()))
    assert SYMBOLS.keys() == WORDS.keys()
