"""The calls of the paged caches hold what they promise, and the verdict on 8-bit rows finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_hal.formats import FP8_KINDS, to_fp8
from torch_hal.op import declared
from torch_hal_conformance import oracle
from torch_hal_conformance.cases import Case
from torch_hal_conformance.draw import Draw
from torch_hal_conformance.spec import Spec
from torch_hal_conformance.specs import kv_cache, kv_cache_fp8
from torch_hal_conformance.verdict import Evidence, Failure
from torch_hal_conformance.verdicts_kv import check_codes

SPECS = {spec.op: spec for spec in (*kv_cache.SPECS, *kv_cache_fp8.SPECS)}
L, R, SCALES = 512, 64, 16  # of a row of ds_mla: codes, then SCALES bytes, then R times two
Doctor = Callable[[Tensor], object]


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_hal_conformance.cases.specs", lambda: SPECS)


def case(op: str, regime: str = "unit", dtype: str = "float32", kv_format: str = "ds_mla") -> Case:
    shapes = [
        s for s in SPECS[op].shapes if dict(s.dims).get("kv_format", kv_format) == kv_format and s.profile == "core"
    ]
    return Case(op, "core", shapes[0].name, dtype, "contiguous", regime, 0)


def evidence_of(case: Case, doctor: Doctor | None = None) -> Evidence:
    """``doctor`` changes the bytes of the rows that the slots name, in the slots' order."""
    op, arguments = declared()[case.op], case.arguments()
    native = oracle.native(op, arguments)
    got = [x.clone() for x in native]
    if doctor is not None:
        rows = got[0].view(torch.uint8).flatten(0, 1)
        slots = arguments["slots"].long()
        named = rows[slots]
        doctor(named)
        rows[slots] = named
    return Evidence(op, arguments, got, oracle.exact(op, arguments), native)


def check(case: Case, doctor: Doctor) -> str:
    with pytest.raises(Failure) as failure:
        case.spec.verdict(evidence_of(case, doctor))
    return failure.value.check


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.op)
def test_every_call_meets_the_contract_and_native_is_right(spec: Spec) -> None:
    for dims in spec.shapes:
        if dims.profile == "core":
            for regime in {dims.regime, *(spec.regimes if dims is spec.shapes[0] else ())}:
                one = Case(spec.op, "core", dims.name, "bfloat16", "contiguous", regime, 0)
                declared()[spec.op].check(**one.arguments())
                spec.verdict(evidence_of(one))


def test_a_code_that_is_off_by_one() -> None:
    store = case("mla_kv_store_fp8")
    assert check(store, lambda rows: rows[3, 7].add_(1)) == "codes"
    assert check(case("mla_kv_store_fp8", kv_format="flat"), lambda rows: rows[3, L + 7].add_(1)) == "codes"


def test_a_scale_that_is_off() -> None:
    def enlarge(rows: Tensor) -> None:
        scales = rows[:, L : L + SCALES].contiguous().view(torch.float32) * 1.000001
        rows[:, L : L + SCALES] = scales.view(torch.uint8)

    assert check(case("mla_kv_store_fp8"), enlarge) == "scales"
    assert check(case("mla_kv_store_fp8"), lambda rows: rows[:, L : L + SCALES].fill_(0xFF)) == "scales"


def test_a_rotated_part_that_is_cut_off() -> None:
    def cut(rows: Tensor) -> None:
        rows[:, L + SCALES :: 2] -= 1

    assert check(case("mla_kv_store_fp8"), cut) == "rotated"


def test_a_slot_that_nobody_names() -> None:
    store = case("mla_kv_store_fp8")
    evidence = evidence_of(store)
    unnamed = next(slot for slot in range(128) if slot not in evidence.arguments["slots"].tolist())
    evidence.got[0].view(torch.uint8).flatten(0, 1)[unnamed, 0] ^= 1
    with pytest.raises(Failure, match=f"slot {unnamed} was written") as failure:
        store.spec.verdict(evidence)
    assert failure.value.check == "slots"


def test_a_tile_with_nan_may_hold_anything_but_its_neighbours_may_not() -> None:
    store = case("mla_kv_store_fp8", "nan")
    evidence = evidence_of(store)
    assert evidence.arguments["c_kv"][0, 5].isnan()

    def fill(rows: Tensor) -> None:
        rows[0, :128] = 0x11
        rows[0, L : L + 4] = 0x77

    store.spec.verdict(evidence_of(store, fill))
    assert check(store, lambda rows: rows[0, 128:256].fill_(0x11)) == "codes"


def test_without_scales_nan_stays_and_no_other_number_becomes_it() -> None:
    store = case("mla_kv_store_fp8", "nan", kv_format="flat")
    assert check(store, lambda rows: rows[0, 5].fill_(0x7E)) == "codes"
    assert check(store, lambda rows: rows[0, 6].fill_(0x7F)) == "codes"


def test_a_tie_goes_to_the_even_code_where_nothing_was_rounded_before() -> None:
    kind = FP8_KINDS["e4m3fn"]
    halfway = torch.tensor([[17.0]])  # between 16 and 18
    even, odd = (to_fp8(torch.tensor([[x]]), kind).view(torch.uint8) for x in (16.0, 18.0))
    check_codes(even, even, halfway, kind)
    with pytest.raises(Failure):
        check_codes(odd, even, halfway, kind)
    check_codes(odd, even, halfway, kind, unsure=2.0**-21)
    with pytest.raises(Failure):
        check_codes(odd, even, halfway * (1 - 2.0**-20), kind, unsure=2.0**-21)


def test_a_saturated_code_is_the_largest_that_quantisation_uses() -> None:
    kind = FP8_KINDS["e4m3fnuz"]
    largest, beyond = (torch.tensor([[x]]).to(kind.dtype).view(torch.uint8) for x in (224.0, 240.0))
    with pytest.raises(Failure):
        check_codes(beyond, largest, torch.tensor([[1000.0]]).double(), kind, unsure=2.0**-21)


@pytest.mark.parametrize("regime", ["unit", "b32_sentinels", "all_skipped", "repeated"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_slots_are_what_the_regime_says(regime: str, index: str) -> None:
    slots = kv_cache.named_slots(Draw("some", torch.float32, regime), 17, 128, index)
    valid = slots[(slots >= 0) & (slots < 128)].tolist()
    assert slots.dtype == kv_cache.INDEX[index] and len(slots) == 17
    assert (len(set(valid)) == len(valid)) == (regime != "repeated")
    if regime == "unit":
        assert {0, 127} <= set(valid) and len(valid) == 17
    if regime == "b32_sentinels":
        assert 0 < len(valid) < 17 and not {0, 1, 127} & set(valid)
    if regime == "all_skipped":
        assert not valid
