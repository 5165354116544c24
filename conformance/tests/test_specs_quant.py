"""The calls of norms, activations, rope and quantisers hold what they promise; verdicts find doctored results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, Fp8Kind, to_fp8
from torch_hal.op import declared
from torch_hal_conformance import oracle
from torch_hal_conformance.cases import Case
from torch_hal_conformance.spec import Spec
from torch_hal_conformance.specs import activation, norm, quant, quant_fused, quant_weights, rope
from torch_hal_conformance.verdict import Evidence, Failure
from torch_hal_conformance.verdicts_quant import _power_above, _ranks

MODULES = (activation, norm, quant, quant_fused, quant_weights, rope)
SPECS: dict[str, Spec] = {spec.op: spec for module in MODULES for spec in module.SPECS}
GROUP = "per_token_group_quant_fp8"
Doctor = Callable[[list[Any]], object]


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_hal_conformance.cases.specs", lambda: SPECS)


def case(op: str, regime: str = "unit", dtype: str | None = None, seed: int = 0, **dims: object) -> Case:
    """At the first shape in which ``dims`` stand, with no option that they do not name."""
    base = dict(SPECS[op].shapes[0].dims)
    shape = next(s for s in SPECS[op].shapes if dict(s.dims) == {**base, **dims})
    return Case(op, "core", shape.name, dtype or SPECS[op].dtypes[0], "contiguous", regime, seed)


def evidence_of(case: Case, doctor: Doctor = lambda got: None) -> Evidence:
    """``doctor`` changes the results of native torch, or puts others into the list."""
    op, arguments = declared()[case.op], case.arguments()
    got = oracle.native(op, arguments)
    doctor(got)
    return Evidence(op, arguments, got, oracle.exact(op, arguments), oracle.native(op, arguments))


def passes(case: Case, doctor: Doctor) -> None:
    case.spec.verdict(evidence_of(case, doctor))


def check(case: Case, doctor: Doctor) -> str:
    with pytest.raises(Failure) as failure:
        case.spec.verdict(evidence_of(case, doctor))
    return failure.value.check


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.op)
def test_every_call_meets_the_contract_and_native_is_right(spec: Spec) -> None:
    for shape in spec.shapes:
        if shape.profile == "core":
            for regime in {shape.regime, *(spec.regimes if shape is spec.shapes[0] else ())}:
                for dtype in shape.dtypes or spec.dtypes:
                    one = Case(spec.op, "core", shape.name, dtype, "contiguous", regime, 0)
                    declared()[spec.op].check(**one.arguments())
                    spec.verdict(evidence_of(one))


@pytest.mark.parametrize("op", [op for op in SPECS if "quant" in op and "dequant" not in op])
def test_a_code_that_is_off_by_one(op: str) -> None:
    assert check(case(op), lambda got: bits(got[0])[0].view(-1)[7].add_(1)) == "codes"


@pytest.mark.parametrize("op", [op for op in SPECS if "_quant" in op and op != "static_quant_fp8"])
def test_a_scale_that_is_off(op: str) -> None:
    assert check(case(op), lambda got: got[1].mul_(1 + 2.0**-13)) == "scales"
    assert check(case(op), lambda got: got[1].fill_(torch.nan)) == "scales"
    assert check(case(op), lambda got: got[1].zero_()) == "scales"


def test_a_float32_rounding_of_the_scale_is_none_of_an_arguments_business() -> None:
    """4u, of the scale and of a code's quotient: a reciprocal instead of a division."""
    passes(case(GROUP), lambda got: got[1].mul_(1 + 2.0**-23))
    assert check(case(GROUP), lambda got: got[1].mul_(1 + 2.0**-21)) == "scales"


def test_nan_in_place_of_a_number_and_the_reverse() -> None:
    def put_nan(got: list[Any]) -> None:
        bits(got[0])[2, 3] = 0x7F

    assert check(case(GROUP), put_nan) == "codes"
    assert check(case("static_quant_fp8"), put_nan) == "codes"
    assert check(case("static_quant_fp8", "nonfinite"), lambda got: bits(got[0])[0, 1].fill_(0x7E)) == "codes"
    assert check(case(GROUP, "b29_fnuz"), lambda got: bits(got[0])[0, 1].fill_(0x80)) == "codes"


@pytest.mark.parametrize(
    ("op", "options"),
    [(GROUP, {}), (GROUP, {"ue8m0": True}), ("per_token_quant_fp8", {}), ("per_tensor_quant_fp8", {}),
     ("static_quant_fp8", {}), ("block_quant_fp8", {}), ("block_requant_ue8m0_fp8", {})],
)  # fmt: skip
def test_ties_go_to_the_even_code(op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def away_from_zero(got: list[Any]) -> None:
        for module in ("quant", "quant_weights"):
            monkeypatch.setattr(f"torch_hal.ops.{module}.to_fp8", lambda x, kind: to_fp8(x * (1 + 2.0**-22), kind))
        got[:] = oracle.native(declared()[op], one.arguments())
        monkeypatch.undo()
        monkeypatch.setattr("torch_hal_conformance.cases.specs", lambda: SPECS)

    one = case(op, "ties", **options)
    assert check(one, away_from_zero) == "codes"


def test_a_scale_that_is_a_power_of_two_is_not_doubled() -> None:
    """As exp2(ceil(log2(s))) does where log2 is a little too large."""

    def double(got: list[Any]) -> None:
        got[1][3, 2] *= 2

    assert check(case(GROUP, "ties", ue8m0=True), double) == "scales"
    assert check(case(GROUP, "b27_scales", ue8m0=True), double) == "scales"
    assert check(case(GROUP, "b27_scales", ue8m0=True), lambda got: got[1].mul_(1 + 2.0**-23)) == "scales"


@pytest.mark.parametrize("layout", [name for name in SCALE_LAYOUTS if name != "row_f32"])
def test_scales_lie_as_the_layout_says(layout: str) -> None:
    def by_rows(got: list[Any]) -> None:
        got[1] = got[1].contiguous()

    def other_rows(got: list[Any]) -> None:
        got[1][:] = got[1].roll(1, 0)

    one = case(GROUP, "b27_scales", "bfloat16", layout=layout)
    assert check(one, by_rows) == "layout"
    assert check(one, other_rows) == "scales"


@pytest.mark.parametrize("layout", ["mn_f32_tma", "mn_ue8m0"])
def test_padding_is_there_and_zero(layout: str) -> None:
    def fill(got: list[Any]) -> None:
        got[1].as_strided((got[1].shape[1], 20), (20, 1))[0, 18] = 1

    def cut(got: list[Any]) -> None:
        stored = got[1]
        columns = stored.shape[1]
        got[1] = (
            torch.empty((columns - 1) * 20 + 17, dtype=stored.dtype).as_strided(stored.shape, (1, 20)).copy_(stored)
        )

    one = case(GROUP, "b27_scales", "bfloat16", layout=layout)
    assert check(one, fill) == "padding"
    assert check(one, cut) == "padding"


def test_bytes_of_a_word_beyond_the_groups_are_zero() -> None:
    one = case(GROUP, "b27_scales", "bfloat16", layout="mn_ue8m0")  # 5 groups, in two words
    assert check(one, lambda got: got[1][:, 1].add_(1 << 16)) == "padding"
    assert check(one, lambda got: got[1][:, 1].add_(1)) == "scales"


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_rows_beyond_masked_m_may_hold_anything(layout: str) -> None:
    options: dict[str, Any] = {} if layout == "row_f32" else {"layout": layout}
    one = case("masked_silu_and_mul_quant_fp8", "b27_scales", "bfloat16", **options)
    masked_m = one.arguments()["masked_m"]
    beyond = torch.arange(9) >= masked_m[:, None]
    assert (masked_m == 0).any() and (masked_m == 9).any()

    def spoil(got: list[Any]) -> None:
        bits(got[0])[beyond] = 0x7F
        got[1][beyond] = torch.nan if got[1].is_floating_point() else -1

    passes(one, spoil)


def test_groups_that_hold_nan_or_inf_may_hold_anything() -> None:
    one = case(GROUP, "nonfinite")
    bad = ~one.arguments()["x"].reshape(17, 5, 128).isfinite().all(-1)
    assert bad.any() and not bad.all(1).any()

    def spoil(got: list[Any]) -> None:
        got[1][bad] = 7.0

    passes(one, spoil)
    assert check(one, lambda got: got[1].fill_(7.0)) == "scales"


def test_a_row_that_counts_is_not_unspecified() -> None:
    one = case("masked_silu_and_mul_quant_fp8")
    expert = int(one.arguments()["masked_m"].argmax())
    assert check(one, lambda got: got[1][expert, 8].fill_(1.0)) == "scales"


def test_the_sum_beside_the_codes_is_looked_at() -> None:
    assert check(case("fused_add_rms_norm_quant_fp8"), lambda got: got[2].mul_(1.01)) == "bound"


def test_requantised_scales_are_exact() -> None:
    one = case("block_requant_ue8m0_fp8")
    assert check(one, lambda got: got[1].mul_(2)) == "scales"
    assert check(case("block_requant_ue8m0_fp8", "b28_zero_groups"), lambda got: got[1].clamp_(min=1e-9)) == "scales"


def test_a_scale_of_nothing_is_that_of_zeros() -> None:
    empty = next(s for s in SPECS["per_tensor_quant_fp8"].shapes if s.regime == "b24_empty")
    one = Case("per_tensor_quant_fp8", "core", empty.name, "float32", "contiguous", "b24_empty", 0)
    assert check(one, lambda got: got[1].zero_()) == "scales"


def test_scales_of_another_shape_or_type() -> None:
    def transpose(got: list[Any]) -> None:
        got[1] = got[1].T.contiguous()

    def widen(got: list[Any]) -> None:
        got[1] = got[1].double()

    assert check(case(GROUP), transpose) == "shape"
    assert check(case(GROUP), widen) == "shape"


@pytest.mark.parametrize("regime", ["b35_partial_rotary", "b35_partial_rotary_halves"])
def test_what_is_not_rotated_is_a_copy(regime: str) -> None:
    def touch(got: list[Any]) -> None:
        got[1][..., -1] *= 1 + 2.0**-23

    assert check(case("rope", regime), touch) == "copy"
    assert check(case("rope", regime), lambda got: got[1][..., 0].mul_(1.001)) == "bound"


@pytest.mark.parametrize("kind", FP8_KINDS.values(), ids=lambda kind: kind.name)
def test_ranks_are_the_codes(kind: Fp8Kind) -> None:
    """Every code is its own nearest, and the half-way numbers go to the even ones."""
    codes = torch.arange(0x80, dtype=torch.uint8).view(kind.dtype).double()
    codes = codes[codes <= kind.quant_max]
    place = torch.arange(len(codes), dtype=torch.int32)
    assert torch.equal(_ranks(kind, codes), place) and torch.equal(_ranks(kind, -codes), -place)
    middles = (codes[1:] + codes[:-1]) / 2
    assert torch.equal(_ranks(kind, middles), place[:-1] + place[:-1] % 2)
    assert _ranks(kind, torch.tensor([1e4, -1e4]).double()).tolist() == [len(codes) - 1, 1 - len(codes)]


def test_the_power_above() -> None:
    s = torch.tensor([1.0, 1.0 + 2.0**-52, 0.75, 2.0**-7, 0.0, 2.0**-140, 2.0**-126], dtype=torch.float64)
    expected = [1.0, 2.0, 1.0, 2.0**-7, 2.0**-126, 2.0**-126, 2.0**-126]
    assert _power_above(s).tolist() == expected
