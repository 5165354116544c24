"""Reports as records: strict JSON and back, and honest errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from hypothesis import configuration, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from torch_hal_conformance.report import schema, write, write_matrix
from torch_hal_conformance.report.schema import CaseResult, OpScope, Report, ReportError, dump, load, loads

# Hypothesis remembers what it knows of the interpreter: not beside the tests, where pytest would come upon it.
configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir(), "torch_hal_conformance-hypothesis"))

ID = "rms_norm/core/n17-d128/float32/contiguous/unit/0"

texts = st.text(st.characters(codec="utf-8"), max_size=40)
words = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=12)
numbers = st.none() | st.floats()
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
ids = st.builds(
    "{}/{}/{}/{}/{}/{}/{}".format,
    words,
    st.sampled_from(schema.PROFILES),
    *[words] * 4,
    st.integers(0, 10**6),
)
results = st.builds(
    CaseResult,
    id=ids,
    kernel=words,
    status=st.sampled_from(["correct", "wrong", "error", "crashed", "unsupported", "xfailed", "xpassed"]),
    check=texts,
    message=texts,
    E=numbers,
    R=numbers,
    seconds=seconds,
    kernel_seconds=st.none() | seconds,
    ran=texts,
    behaviours=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    must_pass=st.booleans(),
    structural=st.booleans(),
    reproduce=texts,
)


def report(cases: list[CaseResult]) -> Report:
    ops = sorted({case.op for case in cases})
    return Report.of(
        environment=samples.ENVIRONMENT,
        profile="full",
        seeds=(0,),
        profile_ids=dict.fromkeys(ops, 3),
        scopes=[OpScope(op=op, offered=("acme.fast",)) for op in ops],
        cases=cases,
    )


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN is itself and 0 is not −0."""
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def no_constant(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(results, max_size=4))
def test_a_report_survives_strict_json(cases: list[CaseResult]) -> None:
    before = report(cases)
    text = dump(before)
    json.loads(text, parse_constant=no_constant)
    assert same(loads(text).model_dump(), before.model_dump())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_every_number_survives(value: float) -> None:
    [case] = loads(dump(report([samples.case(ID, E=value, R=value)]))).cases
    assert repr(case.E) == repr(case.R) == repr(value)


def test_half_a_surrogate_pair_in_a_message_is_written_visibly() -> None:
    [case] = loads(dump(report([samples.case(ID, message="file \udcff not found")]))).cases
    assert case.message == r"file \udcff not found"


def test_a_case_is_one_line() -> None:
    lines = dump(samples.mixed()).splitlines()
    assert sum(line.startswith('{"id": ') for line in lines) == len(samples.mixed().cases)


def test_the_order_of_the_results_does_not_matter() -> None:
    cases = list(samples.mixed().cases)
    assert dump(report(cases[::-1])) == dump(report(cases))


def test_write_leaves_the_record_and_its_pages(tmp_path: Path) -> None:
    write(samples.mixed(), tmp_path / "new" / "folder")
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["report.html", "report.json", "report.md"]
    assert load(tmp_path / "new" / "folder" / "report.json") == samples.mixed()


def test_several_reports_are_one_matrix(tmp_path: Path) -> None:
    write_matrix([samples.mixed(), samples.good(backend="native")], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["matrix.html", "matrix.md"]


def test_without_jinja2_the_record_is_written_and_one_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "torch_hal_conformance.report.html", raising=False)
    monkeypatch.delattr("torch_hal_conformance.report.html", raising=False)
    with pytest.raises(ReportError, match=r"^the HTML page needs jinja2, .*: pip install 'torch-hal\[conformance\]'$"):
        write(samples.mixed(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_reports_import_no_torch() -> None:
    code = (
        "import sys; from torch_hal_conformance.report import compare, html, markdown, schema, verify; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_largest_ratio_is_that_of_the_verdict() -> None:
    from torch_hal_conformance import verdict

    assert schema.RATIO == verdict.RATIO


def test_the_checked_in_schema_is_current() -> None:
    checked_in = Path(schema.__file__).with_name("schema.json").read_text(encoding="utf-8")
    assert checked_in == schema.json_schema_text(), (
        "run python -m torch_hal_conformance.report.schema > conformance/torch_hal_conformance/report/schema.json"
    )


def test_the_module_prints_the_schema() -> None:
    command = [sys.executable, "-W", "error", "-m", "torch_hal_conformance.report.schema"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")
    assert (done.stdout, done.stderr) == (schema.json_schema_text(), "")


def changed(**changes: Any) -> str:
    """A good report's text with other values at dotted places; None removes."""
    values = json.loads(dump(samples.good("core", ("rms_norm",))))
    for place, value in changes.items():
        *path, last = place.split("__")
        inner = values
        for name in path:
            inner = inner[int(name) if name.isdigit() else name]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "report.json: not strict JSON: Expecting value"),
        ("[" * 100_000, "report.json: not strict JSON: "),
        ("[]", "report.json: not a report of the conformance suite: expected an object with a schema_version"),
        ('{"schema_version": 2}', "report.json: schema_version: expected 1, got 2: read it with the version"),
        ('{"schema_version": NaN}', 'NaN is no number of JSON; expected the string "NaN"'),
        ('{"schema_version": 1, "schema_version": 1}', "'schema_version' stands twice in one object"),
        (changed(cases__3__status="skipped"), "report.json: cases[3].status: expected 'correct', 'wrong', "),
        (changed(cases__3__status="skipped"), "got 'skipped'"),
        (
            changed(cases__0__id="rms_norm/unit"),
            "cases[0].id: expected op/profile/shape/dtype/layout/regime/seed, got",
        ),
        (changed(cases__0__seconds="NaN"), "report.json: cases[0].seconds: expected a valid number, got 'NaN'"),
        (changed(cases__0__E="much"), "cases[0].E: expected a valid number, got 'much'"),
        (changed(cases__0__must_pass=1), "cases[0].must_pass: expected a valid boolean, got 1"),
        (changed(cases__0__speed=7), "report.json: cases[0].speed: Extra inputs are not permitted"),
        (changed(environment__driver=None), "report.json: environment.driver: Field required"),
        (changed(environment__evidence="hearsay"), "environment.evidence: expected 'host', 'device', "),
        (changed(totals__correct=-1), "totals.correct: expected greater than or equal to 0, got -1"),
    ],
)
def test_what_is_no_report_says_where_and_why(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError) as failure:
        load(path)
    message = str(failure.value).replace(f"{tmp_path}/", "")
    assert told in message
    assert len(message.splitlines()) <= 4


def test_many_faults_are_a_few_lines() -> None:
    with pytest.raises(ReportError) as failure:
        loads(changed(**{f"cases__{i}__status": "?" for i in range(9)}), "a.json")
    assert str(failure.value).splitlines()[-1] == "a.json: and 6 more faults"


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"none\.json: cannot be read: No such file or directory$"):
        load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match=r"binary\.json: cannot be read: 'utf-8' codec"):
        load(tmp_path / "binary.json")


@pytest.mark.parametrize(
    "id",
    [
        "",
        "a/b",
        "op/core/s/d/l/r/x",
        "op/core/s/d/l/r/-1",
        "op/core/s/d/l/r/²",
        "op/huge/s/d/l/r/0",
        "op/core//d/l/r/0",
    ],
)
def test_a_malformed_id_is_refused(id: str) -> None:
    with pytest.raises(ValidationError, match="expected op/profile/shape/dtype/layout/regime/seed"):
        CaseResult(id=id, kernel="acme.fast", status="correct", seconds=0.0)


def test_the_parts_of_an_id() -> None:
    case = samples.case(ID)
    parts = (case.op, case.profile, case.shape, case.dtype, case.layout, case.regime, case.seed)
    assert parts == ("rms_norm", "core", "n17-d128", "float32", "contiguous", "unit", 0)
