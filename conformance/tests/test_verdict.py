"""Each way out of the verdict on numbers, on results that were made wrong on purpose."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hal.op import declared
from torch_hal_conformance import oracle
from torch_hal_conformance.verdict import Evidence, Failure, bitwise, bounded

RMS_NORM = declared()["rms_norm"]


def evidence(got: Tensor | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Evidence:
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    arguments = {"x": x, "weight": torch.ones(512, dtype=dtype), "eps": 1e-6, **changes}
    native = oracle.native(RMS_NORM, arguments)
    return Evidence(RMS_NORM, arguments, [native[0] if got is None else got], oracle.exact(RMS_NORM, arguments), native)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_torch_is_right_and_its_score_says_how_well(dtype: torch.dtype) -> None:
    score = bounded(evidence(dtype=dtype))
    assert score.E is not None and 0 < score.E <= 1
    assert score.R is not None and 0 < score.R <= 1.001


def test_one_element_beyond_its_bound() -> None:
    y = evidence().native[0].clone()
    y[3, 7] *= 1.02
    with pytest.raises(Failure, match=r"result 0 at \[3, 7\].*1 of 16384") as failure:
        bounded(evidence(y))
    assert failure.value.check == "bound" and failure.value.E is not None and failure.value.E > 1


def test_errors_that_are_each_small_and_together_too_large() -> None:
    exact = evidence().exact.results[0]
    toward_zero = exact.to(torch.bfloat16)
    over = toward_zero.double().abs() > exact.abs()
    bits = toward_zero.view(torch.int16)
    truncated = torch.where(over, bits - 1, bits).view(torch.bfloat16)
    with pytest.raises(Failure) as failure:
        bounded(evidence(truncated))
    assert failure.value.check in ("bound", "rms")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_must_be_where_the_oracle_has_it(value: float) -> None:
    y = evidence().native[0].clone()
    y[0, 0] = value
    with pytest.raises(Failure, match=r"result 0 at \[0, 0\]") as failure:
        bounded(evidence(y))
    assert failure.value.check == "nonfinite"


def test_nan_is_no_wildcard() -> None:
    x = torch.ones(32, 512, dtype=torch.bfloat16)
    x[2] = math.nan
    assert bounded(evidence(x=x)).E is not None
    finite = torch.ones(32, 512, dtype=torch.bfloat16)
    with pytest.raises(Failure, match=r"expected nan, got 1"):
        bounded(evidence(finite, x=x))


def test_copies_are_compared_to_the_bit() -> None:
    made = evidence()
    assert bitwise(made).E is None
    y = made.native[0].clone()
    y.view(torch.int16)[5, 6] ^= 1
    with pytest.raises(Failure, match=r"first at \[5, 6\], 1 of 16384"):
        bitwise(evidence(y))
    zeros = made.native[0].clone().zero_()
    with pytest.raises(Failure):
        bitwise(evidence(zeros))
