"""The page in a browser: no network, no foreign script, filtering, sorting, copying."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_browser import Browser, choose, count, settle, shown
from report_samples import NASTY

pytest_plugins = ["report_pages"]


# Network and scripts.


@pytest.mark.parametrize("name", ["mixed", "good", "many", "nasty", "matrix"])
def test_the_page_asks_for_nothing_and_has_no_complaint(chromium: Browser, pages: dict[str, Path], name: str) -> None:
    chromium.open(pages[name])
    settle(chromium)
    assert chromium.requests == [pages[name].as_uri()]
    assert chromium.complaints == []


def test_a_script_that_slipped_in_would_not_run(chromium: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["mixed"].read_text(encoding="utf-8")
    hole = "<script>hacked = 1</script><img src='http://127.0.0.1:9/x' onerror='hacked = 1'>"
    (tmp_path / "hole.html").write_text(text.replace("<main ", f"{hole}<main "), encoding="utf-8")
    chromium.open(tmp_path / "hole.html")
    settle(chromium)
    assert chromium.run("typeof hacked") == "undefined"
    assert len(chromium.complaints) >= 2


def test_hostile_text_is_shown_as_it_is(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["nasty"])
    assert chromium.run("document.querySelectorAll('main b b, img').length") == 0
    message = chromium.run("document.querySelector('.message').textContent")
    assert message == NASTY.replace("\0", "␀")
    assert NASTY in chromium.run("document.querySelector('.cases .note').textContent")


# The filter.


def test_without_a_filter_everything_is_counted(mixed: Browser) -> None:
    assert count(mixed) == "240 results, 6 failures"
    assert len(shown(mixed, "#failures .failure")) == 6
    assert len(shown(mixed, "#matrix tr.op")) == 11
    assert shown(mixed, "#others summary") == ["1 op that it does not offer"]
    assert mixed.run("document.querySelector('#shown').textContent") == "100 of 240 results"


def test_filter_by_typing(mixed: Browser) -> None:
    mixed.run("document.querySelector('#by-text').focus()")
    mixed.type("NORM tiny")
    settle(mixed)
    assert count(mixed) == "6 of 240 results, 1 failure"
    assert shown(mixed, "#matrix tr.op th") == ["rms_norm"]
    assert shown(mixed, "#failures h3") == ["rms_norm"]
    assert shown(mixed, "#failures .failure", "e.dataset.case") == [
        "rms_norm/deepseek/n64-d7168/bfloat16/contiguous/tiny/0@acme.vector"
    ]
    assert shown(mixed, "#kernels tbody tr th") == ["rms_norm", "rms_norm"]
    assert shown(mixed, "#scope tbody tr th") == ["rms_norm"]
    assert not shown(mixed, "#expected")
    assert len(shown(mixed, ".cases tbody tr:not(.note)")) == 6


@pytest.mark.parametrize(
    ("values", "counted", "ops"),
    [
        ({"op": "mla_decode"}, "16 of 240 results, 2 failures", ["mla_decode"]),
        ({"status": "crashed"}, "1 of 240 results, 1 failure", ["moe_align_block_size"]),
        ({"status": "unsupported"}, "11 of 240 results, 0 failures", ["apply_rope", "fp8_gemm"]),
        ({"dtype": "int64"}, "8 of 240 results, 1 failure", ["moe_align_block_size"]),
        ({"status": "wrong", "dtype": "bfloat16"}, "2 of 240 results, 2 failures", ["mla_decode", "rms_norm"]),
        ({"regime": "tiny", "op": "apply_rope"}, "3 of 240 results, 0 failures", ["apply_rope"]),
        ({"op": "tree_verify"}, "0 of 240 results, 0 failures", ["tree_verify"]),
        ({"op": "tree_verify", "status": "correct"}, "0 of 240 results, 0 failures", []),
    ],
)
def test_filter_by_choice(mixed: Browser, values: dict[str, str], counted: str, ops: list[str]) -> None:
    choose(mixed, **values)
    assert count(mixed) == counted
    assert shown(mixed, "#matrix tr.op th") == ops


def test_a_filter_narrows_regimes_and_dtypes(mixed: Browser) -> None:
    mixed.run("[...document.querySelectorAll('button')].find(b => b.textContent === 'Expand all ops').click()")
    assert len(shown(mixed, "#matrix tr.regime")) == 77
    choose(mixed, op="rms_norm", regime="tiny", dtype="bfloat16")
    assert shown(mixed, "#matrix tr.regime th") == ["tiny"]
    assert shown(mixed, "#matrix thead th") == ["Op", "All", "bfloat16"]


def test_the_filter_says_when_no_failure_matches_and_can_be_cleared(mixed: Browser) -> None:
    choose(mixed, status="correct")
    assert shown(mixed, "#failures .none") == ["No failure matches the filter."]
    mixed.run("document.querySelector('#filter [type=reset]').click()")
    settle(mixed)
    assert count(mixed) == "240 results, 6 failures"
    assert not shown(mixed, "#failures .none")


def test_the_count_is_announced(mixed: Browser) -> None:
    assert mixed.run("document.querySelector('#count').ariaLive") == "polite"
    assert mixed.run("document.querySelector('#count').getAttribute('role')") == "status"


# Sorting, more rows, links, copying, colours.


def column(page: Browser, table: str, place: int) -> list[str]:
    return shown(page, f"{table} tbody tr:not(.note) > :nth-child({place})")


def test_kernels_sort_by_figures_with_gaps_last(mixed: Browser) -> None:
    click = "[...document.querySelectorAll('#kernels th button')].find(b => b.textContent === 'Worst E').click()"
    mixed.run(click)
    down = [float(value) for value in column(mixed, "#kernels", 4) if value]
    assert down == sorted(down, reverse=True)
    assert column(mixed, "#kernels", 4)[-2:] == ["", ""]
    assert mixed.run("document.querySelector('#kernels th:nth-child(4)').ariaSort") == "descending"
    mixed.run(click)
    up = [float(value) for value in column(mixed, "#kernels", 4) if value]
    assert up == down[::-1]
    assert column(mixed, "#kernels", 4)[-2:] == ["", ""]


def test_results_sort_by_status_the_worst_first(mixed: Browser) -> None:
    mixed.run("document.querySelector('.cases th button').click()")
    found = column(mixed, ".cases", 1)[:8]
    assert [value.split()[0] for value in found] == ["†", "!", "✗", "✗", "✗", "≠", "~", "✓"]


def test_more_results_on_demand(mixed: Browser) -> None:
    mixed.run("document.querySelector('#more').click()")
    assert mixed.run("document.querySelector('#shown').textContent") == "240 of 240 results"
    assert not shown(mixed, "#more")


def test_a_failing_cell_leads_to_its_failure(mixed: Browser) -> None:
    mixed.run("document.querySelectorAll('.failure').forEach(f => { f.open = false })")
    mixed.run("document.querySelector('#matrix [data-op=rms_norm] .op [data-dtype=bfloat16] a').click()")
    settle(mixed)
    assert shown(mixed, ".failure[open]", "e.dataset.case") == [
        "rms_norm/deepseek/n64-d7168/bfloat16/contiguous/tiny/0@acme.vector"
    ]
    assert mixed.run("document.activeElement.parentElement === document.querySelector('.failure[open]')")


def test_the_command_is_copied(mixed: Browser) -> None:
    mixed.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    mixed.send("Page.bringToFront")
    mixed.run("document.querySelector('.command button').click()")
    settle(mixed)
    assert shown(mixed, ".command button")[0] == "Copied"
    case = "grouped_topk/core/n17-d128/bfloat16/contiguous/b22_capture/0@acme.fast"
    assert mixed.run("navigator.clipboard.readText()") == f"torch-hal conformance --backend acme --case {case}"
    assert mixed.run("document.querySelector('#said').textContent") == "Command copied"


def test_the_reader_may_choose_the_colours(mixed: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert mixed.run(ground) == "rgb(250, 250, 247)"
    mixed.run("document.querySelector('#theme').click()")
    assert mixed.run(ground) == "rgb(20, 23, 26)"
    assert mixed.run("document.querySelector('#theme').textContent") == "Light"
