"""What the dense ops' tests share: the error bound against a float64 result, and what tracing must preserve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

UNIT_ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.bfloat16, torch.float16, torch.float32)}
MIDDLE_ROUNDOFF = {**UNIT_ROUNDOFF, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).eps / 2}
DTYPES = tuple(UNIT_ROUNDOFF)


def assert_within(
    actual: Tensor,
    exact: Tensor,
    terms: Tensor,
    length: int = 1,
    rounds: int = 1,
    middle: Tensor | None = None,
    middle_dtype: torch.dtype | None = None,
) -> None:
    """|y − y*| ≤ max(r·u_out·|y*|, r·η_out) + 4·√k·u_acc·S + 4·u_mid·T, for k float32 terms whose absolute values sum
    to S, and intermediates rounded to y's dtype, or to ``middle_dtype``, whose contributions have the 2-norm T.
    """
    assert exact.dtype == torch.float64 and actual.shape == exact.shape
    info = torch.finfo(actual.dtype)
    half_subnormal = info.smallest_normal * info.eps / 2
    rounding = (rounds * UNIT_ROUNDOFF[actual.dtype] * exact.abs()).clamp(min=rounds * half_subnormal)
    bound = rounding + 4 * length**0.5 * UNIT_ROUNDOFF[torch.float32] * terms
    if middle is not None:
        bound += 4 * MIDDLE_ROUNDOFF[middle_dtype or actual.dtype] * middle
    excess = (actual.double() - exact).abs() / bound
    assert excess.isfinite().all() and (excess <= 1).all(), f"{excess.max().item():.3g} times the bound"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_traces(op: Any, *args: Any, **kwargs: Any) -> None:
    """The reference compiles whole with the same result, and on fake tensors gives its shapes, dtypes and strides."""
    torch._dynamo.reset()
    results = tree_leaves(op.reference(*args, **kwargs))
    compiled = torch.compile(op.reference, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(results, tree_leaves(compiled(*args, **kwargs)), strict=True):
        assert same_bits(eager, traced)
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        fakes = tree_leaves(op.reference(*fake_args, **fake_kwargs))
    for eager, fake in zip(results, fakes, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (eager.shape, eager.dtype, eager.stride())
