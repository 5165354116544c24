from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_hal.op import declared
from torch_hal_conformance.cases import BEHAVIOURS, every_case, must_pass, select
from torch_hal_conformance.memory import same_bits
from torch_hal_conformance.must_pass_lists import text
from torch_hal_conformance.spec import PROFILES, specs

OWED = {*range(24, 33), 34, 35, 19, 20, 21, 22, 23}


def test_every_op_has_a_spec_and_every_spec_an_op() -> None:
    assert set(specs()) == set(declared())


@pytest.mark.parametrize("profile", PROFILES)
def test_must_pass_lists_are_those_of_the_cases(profile: str) -> None:
    """If this fails: ``python -m torch_hal_conformance.must_pass_lists``, and look at the diff."""
    assert must_pass(profile) == frozenset(text(profile).split())


def test_profiles_hold_one_another() -> None:
    core, deepseek, full = ({case.id for case in select(profile)} for profile in PROFILES)
    assert core < deepseek < full == set(every_case())
    assert {case.op for case in select("core")} == set(declared())


def test_every_behaviour_that_the_suite_owes_has_cases_by_its_number() -> None:
    shown = {number for case in every_case().values() for number in case.behaviours}
    assert shown == OWED


@pytest.mark.parametrize("op", sorted(declared()))
def test_arguments_follow_from_the_name_alone_and_meet_the_contract(op: str) -> None:
    for case in select("core", op):
        if case.spec.ranks:
            assert len(case.arguments()["ranks"]) in case.spec.ranks
            continue
        first, second, stale = case.arguments(), case.arguments(), case.arguments(stale=True)
        declared()[op].check(**first)
        assert first.keys() == second.keys()
        assert all(_equal(first[k], second[k]) for k in first)
        assert any(not _equal(first[k], stale[k]) for k in first) or case.structural or not _elements(first)


def _equal(a: object, b: object) -> bool:
    return same_bits(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def _elements(arguments: dict[str, object]) -> int:
    return sum(x.numel() for x in arguments.values() if isinstance(x, Tensor) and x.dtype != torch.int32)


@pytest.mark.parametrize("op", sorted(specs()))
def test_core_varies_what_a_kernel_could_have_built_in(op: str) -> None:
    """Numbers, names and switches take two values at least, unless there is one alone that the op accepts."""
    seen: dict[str, set[object]] = {}
    for case in select("core", op):
        if case.layout == "contiguous" and case.regime not in BEHAVIOURS and not specs()[op].ranks:
            for name, value in declared()[op].bind(**case.arguments()).items():
                if isinstance(value, (bool, int, float, str)):
                    seen.setdefault(name, set()).add(value)
    single = {name: values for name, values in seen.items() if len(values) == 1 and name != "layout"}
    assert not single, f"core has one value alone: {single}"


@pytest.mark.parametrize("op", sorted(op for op, spec in specs().items() if spec.rows))
def test_core_has_more_rows_than_a_tile_and_a_number_that_kernels_are_made_for(op: str) -> None:
    lengths = {len(case.arguments()[specs()[op].rows[0]]) for case in select("core", op)}
    assert max(lengths) > 64, sorted(lengths)
    assert any(n >= 4 and n & (n - 1) == 0 for n in lengths), sorted(lengths)
