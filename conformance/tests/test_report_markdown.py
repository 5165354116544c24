"""Reports as Markdown, and the matrix of several."""

from __future__ import annotations

import pytest
import report_samples as samples

from torch_hal_conformance.report import markdown
from torch_hal_conformance.report.tables import View, duration, figure, labels, largest, percent


def rows(text: str) -> list[list[str]]:
    """The cells of every table."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]


def test_the_summary_says_what_counts() -> None:
    text = markdown.summary(samples.mixed())
    assert text.startswith("# acme 0.3.1 on ACME Accelerator 200\n\n**✗ Not passed** in the deepseek profile:\n")
    found = rows(text)
    assert ["correct ÷ declared", "**96.5 %**", "198 of 205"] in found
    assert ["declared ÷ profile", "**91.5 %**", "205 of 224, 11 unsupported, 8 native"] in found
    assert ["`mla_decode`", "✗ 2 ✓ 14", "", "✗ 1 ✓ 7", "✗ 1 ✓ 7", "", "", "", ""] in found
    assert ["`tree_verify`", "∅ unavailable", *[""] * 7] in found
    assert "6.21 times the error bound" in text
    assert "torch-hal conformance --backend acme --case rms_norm/deepseek/n64-d7168/bfloat16/contiguous/tiny/0@" in text
    assert r"- `sample_top_p`, `acme.sampler`: needs acme\_kernels\>=2.0, installed is 1.8.0" in text
    assert ["driver", "580.95.05"] in found


def test_a_good_report_is_short() -> None:
    text = markdown.summary(samples.good())
    assert "**✓ Passed** the deepseek profile." in text
    assert "Failures" not in text


def test_every_table_has_as_many_cells_in_each_row() -> None:
    text = markdown.summary(samples.mixed())
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(row) for row in rows(block)}) == 1


def test_a_message_stays_text() -> None:
    nasty = "<script>alert(1)</script> | ``` \n# Title\n```js\n[x](javascript:1) `code`"
    case = samples.case("rms_norm/core/a`b/float32/contiguous/unit/0", status="wrong", check="|<b>", message=nasty)
    text = markdown.summary(samples.build([case], {"rms_norm": ("acme.fast",)}))
    outside = text.split("````text")[0] + text.split("\n````\n")[-1]
    assert nasty in text.split("````text\n")[1].split("\n````")[0]
    assert "<" not in outside
    assert "`` rms_norm/core/a`b/float32/contiguous/unit/0 ``" in text


def test_colours_of_a_terminal_are_made_visible() -> None:
    case = samples.case("rms_norm/core/n/float32/contiguous/unit/0", status="error", message="\x1b[31mred\x1b[0m")
    assert "␛[31mred␛[0m" in markdown.summary(samples.build([case], {"rms_norm": ("acme.fast",)}))


def test_many_failures_are_not_all_shown() -> None:
    text = markdown.summary(samples.many(5000, failing=1.0))
    assert len(text) < 100_000
    assert "5010 more are in the report." in text


REPORTS = (
    samples.mixed(),
    samples.good(backend="native", evidence="host"),
    samples.good(ops=("rms_norm",), backend="triton", evidence="interpreted", selection="rms_norm"),
)


def test_the_matrix_in_the_terminal() -> None:
    text = markdown.matrix_text(REPORTS)
    lines = text.splitlines()
    assert lines[0].split() == ["op", "acme", "native", "triton"]
    assert "correct ÷ declared         96.5 % (198/205)  100 % (160/160)   100 % (24/24)" in lines
    assert "passed                     ✗ no              ✓ yes             ✗ no" in lines
    assert "rms_norm                   ✗ 1  ✓ 23         ✓ 24              ✓ 24" in lines
    assert "tree_verify                ∅ unavailable     ○ native          ○ native" in lines
    assert lines[-1].startswith("✓ correct   ✗ wrong   ! error   † crashed")
    assert "? not run" not in text


def test_the_matrix_in_markdown_has_the_same_cells() -> None:
    header, cells = markdown.matrix_rows(REPORTS)
    found = rows(markdown.matrix(REPORTS))
    assert len(found) == len(cells) + 2
    assert found[0] == header
    assert found[2] == ["passed", "✗ no", "✓ yes", "✗ no"]


def test_backends_of_one_name_are_told_apart() -> None:
    assert labels([samples.good(), samples.good(device="Other")]) == ["acme on ACME Accelerator 200", "acme on Other"]
    assert labels([samples.good(), samples.good(evidence="emulated")]) == ["acme (device)", "acme (emulated)"]
    assert [label[-2:] for label in labels([samples.good()] * 2)] == ["#1", "#2"]


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "–"), (0, 5, "0 %"), (5, 5, "100 %"), (99999, 100000, "99.9 %"), (1, 3, "33.3 %"), (1, 5000, "0.0 %")],
)
def test_nothing_short_of_all_is_all(part: int, whole: int, text: str) -> None:
    assert percent(part, whole) == text


def test_figures_and_durations() -> None:
    values = (None, float("nan"), float("inf"), -float("inf"), 0.0, 1.23456, 1e-9)
    assert [figure(value) for value in values] == ["", "NaN", "∞", "−∞", "0", "1.23", "1e-09"]
    times = (None, 0.0, 2e-9, 3.21e-6, 0.5e-3, 0.1239, 12.3, 250.0)
    assert [duration(t) for t in times] == ["", "0 ns", "2 ns", "3.21 µs", "500 µs", "124 ms", "12.3 s", "250 s"]
    assert largest([1.0, None, 3.0]) == 3.0
    assert repr(largest([1.0, float("nan"), 3.0])) == "nan"
    assert largest([None]) is None


def test_cases_without_a_result_show_as_not_run() -> None:
    report = samples.build([], {"rms_norm": ("acme.fast",)})
    assert View(report).tally("rms_norm").text == "? 24"
    assert View(report).state("rms_norm") == "not_run"
    assert View(report).states == ("not_run", "native")
