"""The calls of attention and what is around it hold what they promise, and their verdicts find what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_hal.op import declared
from torch_hal_conformance import oracle
from torch_hal_conformance.cases import Case
from torch_hal_conformance.draw import Draw
from torch_hal_conformance.spec import Spec
from torch_hal_conformance.specs import attention, mla_decode
from torch_hal_conformance.verdict import Evidence, Failure

SPECS = {spec.op: spec for spec in (*attention.SPECS, *mla_decode.SPECS)}


def base_case(op: str, regime: str = "unit", seed: int = 0, shape: int = 0, dtype: str = "float32") -> Case:
    return Case(op, "core", SPECS[op].shapes[shape].name, dtype, "contiguous", regime, seed)


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_hal_conformance.cases.specs", lambda: SPECS)


def evidence_of(case: Case, doctor: Callable[[list[Tensor]], object] | None = None) -> Evidence:
    op, arguments = declared()[case.op], case.arguments()
    native = oracle.native(op, arguments)
    got = [x.clone() for x in native]
    if doctor is not None:
        doctor(got)
    return Evidence(op, arguments, got, oracle.exact(op, arguments), native)


def verdict(case: Case, doctor: Callable[[list[Tensor]], object]) -> str:
    with pytest.raises(Failure) as failure:
        case.spec.verdict(evidence_of(case, doctor))
    return failure.value.check


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.op)
def test_every_call_meets_the_contract_and_native_is_right(spec: Spec) -> None:
    for dims in spec.shapes:
        if dims.profile == "core":
            for regime in {dims.regime, *(spec.regimes if dims is spec.shapes[0] else ())}:
                case = Case(spec.op, "core", dims.name, "float32", "contiguous", regime, 0)
                declared()[spec.op].check(**case.arguments())
                spec.verdict(evidence_of(case))


def test_where_one_side_is_empty_the_other_comes_back_as_it_was() -> None:
    case = base_case("merge_state", "b31_padding")
    arguments = case.arguments()
    alone = torch.nonzero(arguments["lse_b"].isinf() & ~arguments["lse_a"].isinf())[0].tolist()

    def one_unit_off(got: list[Tensor]) -> None:
        got[0][tuple(alone)] = got[0][tuple(alone)].nextafter(torch.tensor(math.inf))

    assert verdict(case, one_unit_off) == "alone"

    def lse_one_unit_off(got: list[Tensor]) -> None:
        got[1][tuple(alone)] = got[1][tuple(alone)].nextafter(torch.tensor(math.inf))

    assert verdict(case, lse_one_unit_off) == "alone"


def test_padding_of_a_batch_is_zero_whatever_its_query_holds() -> None:
    case = base_case("mla_decode", "b31_padding")
    arguments = case.arguments()
    empty = int(torch.nonzero(arguments["seq_lens"] == 0)[0])
    assert arguments["q_nope"][empty].isnan().all()
    assert verdict(case, lambda got: got[0][empty].fill_(1e-3)) == "bound"
    assert verdict(case, lambda got: got[0][empty].fill_(torch.nan)) == "nonfinite"
    assert verdict(case, lambda got: got[1][empty].fill_(torch.inf)) == "nonfinite"


@pytest.mark.parametrize("lens", mla_decode.LENGTHS)
@pytest.mark.parametrize("page", [1, 4, 64])
def test_pages_hold_nan_but_for_what_sequences_own(lens: str, page: int) -> None:
    paged = mla_decode.Paged.drawn(Draw("some", torch.float32), lens, page)
    ranks, seen = paged.ranks(), []
    for b, length in enumerate(paged.lengths):
        for j in range(min(length, 300)):
            page_index = int(paged.table[b, j // page])
            assert ranks[page_index, j % page] == j - length + 1
            seen.append((page_index, j % page))
    assert len(seen) == len(set(seen))
    if max(paged.lengths, default=0) <= 300:
        assert int((ranks <= 0).sum()) == sum(paged.lengths)


def test_replays_differ_in_values_alone() -> None:
    for op in ("mha_varlen", "mla_decode", "mla_decode_fp8"):
        first, second = (base_case(op, seed=seed).arguments() for seed in (0, 1))
        for name, value in first.items():
            if isinstance(value, Tensor):
                assert value.shape == second[name].shape
            else:
                assert value == second[name]
    lengths = [base_case("mla_decode", seed=seed).arguments()["seq_lens"].tolist() for seed in range(5)]
    assert len({tuple(lens) for lens in lengths}) > 1
