"""The verdicts on routing, on sorting by expert, on grouped products and on experts: each failure is really raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hal.op import declared
from torch_hal_conformance import oracle
from torch_hal_conformance.cases import Case, every_case
from torch_hal_conformance.specs.moe_experts_fp8 import SPECS as EXPERTS
from torch_hal_conformance.verdict import Evidence, Failure
from torch_hal_conformance.verdicts_experts import Experts

ROUTED = "biased_grouped_topk/core/T47-E64-K8-G8-keep4/float32/contiguous/{}/0"
SOFTMAX = "topk_softmax/core/T47-E64-K6/bfloat16/contiguous/{}/0"
ALIGNED = "moe_align_block_size/core/T17-K4-E8-block16/int32/contiguous/unit/0"
SCATTERED = "ep_scatter/core/T17-K4-E6-D72-align16/bfloat16/contiguous/unit/0"
SCATTERED_FP8 = "ep_scatter_fp8/core/T17-K4-E6-D640-align16-row_f32-mn_ue8m0/float8_e4m3fn/contiguous/unit/0"


def evidence(case: Case | str) -> Evidence:
    """What is known of a case when the reference answered; its results may be doctored."""
    case = every_case()[case] if isinstance(case, str) else case
    op, arguments = declared()[case.op], case.arguments()
    results = oracle.native(op, arguments)
    return Evidence(op, arguments, [x.clone() for x in results], oracle.exact(op, arguments), results)


def judge(case: str, doctor: Callable[[list[Any]], Any]) -> None:
    seen = evidence(case)
    doctor(seen.got)
    every_case()[case].spec.verdict(seen)


def swap(x: Tensor, row: int, i: int, j: int) -> None:
    x[row, [i, j]] = x[row, [j, i]]


def tied(ids: Tensor, logits: Tensor) -> tuple[int, int]:
    """A row, and the first of two neighbours in it that are equal."""
    chosen = logits.gather(1, ids.long())
    row, place = torch.nonzero(chosen[:, 1:] == chosen[:, :-1])[0].tolist()
    return row, place


@pytest.mark.parametrize(
    ("check", "doctor"),
    [
        ("ids", lambda got: got[1].select(0, 3).fill_(64)),
        ("ids", lambda got: got[1].select(0, 3).fill_(-1)),
        ("ids", lambda got: got[1].select(0, 3).fill_(5)),
        ("order", lambda got: (swap(got[0], 3, 0, 7), swap(got[1], 3, 0, 7))),
        ("bound", lambda got: got[0].mul_(1.01)),
        ("bound", lambda got: swap(got[0], 3, 0, 7)),
        ("nonfinite", lambda got: got[0].select(0, 3).fill_(torch.nan)),
    ],
)
def test_routing_refuses(check: str, doctor: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(Failure) as failure:
        judge(ROUTED.format("unit"), doctor)
    assert failure.value.check == check


def test_routing_refuses_an_expert_that_is_not_among_the_best() -> None:
    seen = evidence(ROUTED.format("unit"))
    ids = seen.got[1]
    ids[4, -1] = next(i for i in range(64) if i not in ids[4].tolist())
    with pytest.raises(Failure, match="a better expert was left out") as failure:
        every_case()[ROUTED.format("unit")].spec.verdict(seen)
    assert failure.value.check == "indices"


@pytest.mark.parametrize("case", [SOFTMAX.format("ties"), ROUTED.format("ties")])
def test_routing_refuses_a_higher_id_before_an_equal_lower_one(case: str) -> None:
    seen = evidence(case)
    row, place = tied(seen.got[1], seen.arguments["logits"])
    swap(seen.got[1], row, place, place + 1)
    with pytest.raises(Failure) as failure:
        every_case()[case].spec.verdict(seen)
    assert failure.value.check in ("ties", "order")


def test_routing_lets_what_float32_cannot_tell_apart_be_in_either_order() -> None:
    case = every_case()[ROUTED.format("unit")]
    seen = evidence(case)
    arguments = {**seen.arguments, "logits": torch.zeros(2, 64), "bias": torch.linspace(-1, 1, 64)}
    arguments["bias"][8:16] = arguments["bias"][:8] + 2**-24  # two groups, and their experts
    arguments["topk_groups"], arguments["bias"][16:] = 1, -2
    native = oracle.native(seen.op, arguments)
    seen = Evidence(seen.op, arguments, [x.clone() for x in native], oracle.exact(seen.op, arguments), native)
    case.spec.verdict(seen)
    for ids in (native[1] % 8, native[1] % 8 + 8):
        case.spec.verdict(replace(seen, got=[native[0], ids]))
    mixed = native[1].clone()
    mixed[0, 3] = (mixed[0, 3] + 8) % 16  # one expert of the other group: no choice of groups gives that
    with pytest.raises(Failure) as failure:
        case.spec.verdict(replace(seen, got=[native[0], mixed]))
    assert failure.value.check == "indices"


def reversed_runs(sorted_ids: Tensor, padding: int, block: int = 16) -> Tensor:
    """Each block's assignments in the reverse order, its padding still last."""
    blocks = sorted_ids.view(-1, block)
    order = torch.where(blocks == padding, block + torch.arange(block), block - torch.arange(block)).argsort(1)
    return blocks.gather(1, order).flatten()


def test_aligning_lets_assignments_come_in_any_order() -> None:
    padding = every_case()[ALIGNED].arguments()["topk_ids"].numel()
    judge(ALIGNED, lambda got: got[0].copy_(reversed_runs(got[0], padding)))


@pytest.mark.parametrize(
    ("check", "doctor"),
    [
        ("count", lambda got: got[2].sub_(1)),
        ("experts", lambda got: got[1].add_(1)),
        ("padding", lambda got: got[0].copy_(got[0].view(-1, 16).flip(1).flatten())),
        ("padding", lambda got: got[0].select(0, -1).fill_(0)),
        ("assignments", lambda got: got[0].copy_(torch.where(got[0] < 8, 7 - got[0], got[0]))),
    ],
)
def test_aligning_refuses(check: str, doctor: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(Failure) as failure:
        judge(ALIGNED, doctor)
    assert failure.value.check == check


@pytest.mark.parametrize("case", [SCATTERED, SCATTERED_FP8])
def test_scattering_lets_rows_of_an_expert_come_in_any_order(case: str) -> None:
    seen = evidence(case)
    owned = seen.got[-2] >= 0
    most = int(seen.got[-2][owned].mode().values)
    one, other = torch.nonzero(seen.got[-2] == most)[:2, 0].tolist()
    for carried in seen.got[:-2]:
        raw = carried.view(torch.uint8) if carried.element_size() == 1 else carried
        raw[[one, other]] = raw[[other, one]]
        raw[~owned] = 77
    told = seen.got[-1].clone()
    seen.got[-1][told == one], seen.got[-1][told == other] = other, one
    every_case()[case].spec.verdict(seen)


@pytest.mark.parametrize(
    ("case", "check", "doctor"),
    [
        (SCATTERED, "experts", lambda got: got[1].clamp_(min=0)),
        (SCATTERED, "nobody", lambda got: got[2].clamp_(min=0)),
        (SCATTERED, "slots", lambda got: got[2].copy_(torch.where(got[2] >= 0, got[2] + 1, -1))),
        (SCATTERED, "slots", lambda got: got[2].copy_(torch.where(got[2] >= 0, 0, -1))),
        (SCATTERED, "slots", lambda got: got[2].copy_(torch.where(got[2] >= 0, got[2] + 10**6, -1))),
        (SCATTERED, "rows", lambda got: got[0].copy_(got[0].roll(1, 1))),
        (SCATTERED_FP8, "rows", lambda got: got[0].view(torch.uint8).bitwise_xor_(0x80)),
        (SCATTERED_FP8, "scales", lambda got: got[1].add_(1)),
    ],
)
def test_scattering_refuses(case: str, check: str, doctor: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(Failure) as failure:
        judge(case, doctor)
    assert failure.value.check == check


@pytest.mark.parametrize("op", ["grouped_linear_contiguous", "grouped_linear_masked"])
def test_grouped_products_let_padding_hold_anything_and_nothing_else(op: str) -> None:
    case = next(case for case in every_case().values() if case.op == op)
    seen = evidence(case)
    rows = seen.got[0].flatten(0, -2)
    if op == "grouped_linear_contiguous":
        used = seen.arguments["m_indices"] >= 0
    else:
        used = (torch.arange(seen.got[0].shape[1]) < seen.arguments["masked_m"][:, None]).flatten()
    rows[~used] = torch.nan
    case.spec.verdict(seen)
    rows[torch.nonzero(used)[0, 0]] = torch.nan
    with pytest.raises(Failure) as failure:
        case.spec.verdict(seen)
    assert failure.value.check == "nonfinite"


def test_experts_that_quantise_exactly_are_judged_without_the_bound_of_neighbouring_codes() -> None:
    [spec] = EXPERTS
    cases = [c for c in every_case().values() if c.op == spec.op and c.profile == "core" and c.layout == "contiguous"]
    regimes = {True: set[str](), False: set[str]()}
    for case in cases:
        if case.regime in ("unit", "exact", "b29_fnuz"):
            named = declared()[spec.op].bind(**case.arguments())
            found = Experts(**{name: named[name] for name in Experts.__dataclass_fields__}).exact_outputs()
            regimes[found is not None].add(case.regime)
    assert regimes == {True: {"exact", "b29_fnuz"}, False: {"unit"}}
    case = next(case for case in cases if case.regime == "exact" and case.dtype == "bfloat16")
    seen = evidence(case)
    case.spec.verdict(seen)
    with pytest.raises(Failure) as failure:
        case.spec.verdict(replace(seen, got=[(seen.got[0].float() * 1.01).bfloat16()]))
    assert failure.value.check in ("rms", "bound")
