"""The verdicts on filters and draws: each failure is really raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hal.op import declared
from torch_hal.ops.sampling import uniform
from torch_hal_conformance import oracle
from torch_hal_conformance.cases import every_case
from torch_hal_conformance.draw_uniform import offset_of
from torch_hal_conformance.verdict import Evidence, Failure

FILTER = "top_p_renorm/core/B37-V1000/float32/contiguous/{}/0"
DRAW = "sample/core/B37-V1000/float32/contiguous/{}/0"
MANY = "sample/core/B4096-V24/float32/contiguous/distribution/0"
MASK = "apply_token_bitmask/core/B17-V1000-int32/bfloat16/contiguous/specials/0"


def judge(case: str, doctor: Callable[[list[Any], dict[str, Any]], Any]) -> None:
    op, arguments = declared()[every_case()[case].op], every_case()[case].arguments()
    native = oracle.native(op, arguments)
    got = [x.clone() for x in native]
    doctor(got, arguments)
    every_case()[case].spec.verdict(Evidence(op, arguments, got, oracle.exact(op, arguments), native))


def at_filtered(got: list[Any], arguments: dict[str, Any], changed: Tensor) -> None:
    """The result where top_p filters becomes ``changed``."""
    got[0].copy_(torch.where((arguments["top_p"] < 1)[:, None], changed, got[0]))


@pytest.mark.parametrize(
    ("case", "check", "doctor"),
    [
        (FILTER.format("unit"), "identity", lambda got, a: got[0].mul_(1 + 2**-20)),
        (FILTER.format("unit"), "bound", lambda got, a: at_filtered(got, a, got[0] * 1.01)),
        (FILTER.format("boundary"), "bound", lambda got, a: at_filtered(got, a, got[0].clamp(min=1e-4))),
        (DRAW.format("unit"), "ids", lambda got, a: got[0].fill_(1000)),
        (DRAW.format("unit"), "ids", lambda got, a: got[0].fill_(-1)),
        (DRAW.format("unit"), "draw", lambda got, a: got[0].copy_(a["probs"].argmax(-1))),
        (DRAW.format("edges"), "support", lambda got, a: got[0].add_(1).remainder_(1000)),
        (DRAW.format("b34_seeds"), "seed", lambda got, a: got[0].select(0, 0).add_(1).remainder_(1000)),
        (MANY, "distribution", lambda got, a: got[0].copy_(torch.arange(4096) % 24)),
        (MASK, "copy", lambda got, a: got[0].masked_fill_(got[0].isnan(), 0.0)),
    ],
)
def test_refuses(case: str, check: str, doctor: Callable[[list[Any], dict[str, Any]], Any]) -> None:
    judge(case, lambda got, arguments: None)
    with pytest.raises(Failure) as failure:
        judge(case, doctor)
    assert failure.value.check == check


def test_draws_of_another_generator_pass_the_chi_square_test() -> None:
    def doctor(got: list[Any], arguments: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        got[0].copy_(torch.multinomial(arguments["probs"], 1, generator=generator)[:, 0])

    with pytest.raises(Failure) as failure:
        judge(MANY, doctor)
    assert failure.value.check == "draw"


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_an_offset_is_found_for_any_uniform_number(seed: int) -> None:
    for wanted in (0, 1, 2**52, 2**53 - 1):
        offset = offset_of(wanted, seed, 5)
        assert uniform(torch.tensor([seed]), torch.tensor([offset])).item() == wanted * 2.0**-53
