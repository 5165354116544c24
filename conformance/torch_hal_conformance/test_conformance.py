"""The suite as pytest collects it: one test for each case and kernel of the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from torch_hal_conformance.plugin import PROPERTY, RUN

if TYPE_CHECKING:
    from torch_hal_conformance.plugin import Conformance


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.pluginmanager.get_plugin(RUN) is None:
        pytest.fail("torch_hal_conformance: say whom to judge: --hal-backend NAME", pytrace=False)


def test_case(hal_item: str, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> None:
    """Correct, or declared as not taken (see the report's figures), or a failure that the backend lists."""
    run: Conformance | None = pytestconfig.pluginmanager.get_plugin(RUN)
    assert run is not None
    result = run.session.judge(hal_item, run.judge)
    record_property(PROPERTY, result.model_dump_json())
    if result.status == "xfailed":
        pytest.xfail(result.message)
    if result.status not in ("correct", "unsupported"):
        what = f"{result.id} on {result.kernel}: {result.status}, {result.check}\n{result.message}"
        pytest.fail(f"{what}\nreproduce: {result.reproduce}", pytrace=False)
