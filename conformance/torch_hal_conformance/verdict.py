"""The verdict on numbers: E, the elementwise bound, and R, the error's size beside that of native torch.

    b = max(r·u_out·|y*|, r·η_out) + 4·√k·u_acc·S + ε·S + 4·u_mid·T
    E:  |y − y*| ≤ b everywhere
    R:  rms(y − y*)² ≤ 1.25²·(max(rms(native − y*), rms(u_out·|y*|/√12))² + rms(u_mid·T)²/6
                              + rms(√k·u_acc·S)²/9 + rms(ε·S)²/9)

r, k, ε, S, T and their types come from the op's declaration: see `torch_hal.op.Op`. √k·u_acc·S is the error of a sum of
k terms of one sign taken one after the other, which a kernel may do where native torch sums pairwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_hal.op import Op

from .memory import same_bits
from .oracle import Exact, is_wide

RATIO = 1.25
ENOUGH = 256  # elements from which an rms says something: fewer scatter too much


class Failure(AssertionError):
    """A kernel is wrong; ``check`` says which check found it."""

    def __init__(self, check: str, message: str, E: float | None = None, R: float | None = None) -> None:
        super().__init__(message)
        self.check, self.E, self.R = check, E, R


@dataclass(frozen=True)
class Evidence:
    """What a verdict is reached on: all on the host, written arguments after the results."""

    op: Op[..., Any]
    arguments: dict[str, Any]  # as they were before the call, in a plain layout
    got: list[Any]
    exact: Exact
    native: list[Any]


@dataclass
class Score:
    """The worst E and R over an op's results; None where nothing is rounded."""

    E: float | None = None
    R: float | None = None

    def meet(self, other: Score) -> None:
        self.E = max((v for v in (self.E, other.E) if v is not None), default=None)
        self.R = max((v for v in (self.R, other.R) if v is not None), default=None)


Verdict = Callable[[Evidence], Score]


def unit_roundoff(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) / 2


def bounded(evidence: Evidence) -> Score:
    """Rounded results within E and R; anything else (ids, codes, counts) to the last bit."""
    score = Score()
    for i, y in enumerate(evidence.got):
        if is_wide(y) and evidence.exact.terms:
            score.meet(within(evidence, i))
        else:
            copied(evidence, i)
    return score


def bitwise(evidence: Evidence) -> Score:
    """Every result to the last bit as native torch has it: copies, codes, ids."""
    for i in range(len(evidence.got)):
        copied(evidence, i)
    return Score()


def copied(evidence: Evidence, i: int) -> None:
    y, expected = evidence.got[i], evidence.native[i]
    if same_bits(y, expected):
        return
    different: Any = torch.nonzero(_words(y) != _words(expected)) if y.shape == expected.shape else []
    where = (
        f"first at {different[0].tolist()}, {len(different)} of {y.numel()}" if len(different) else "of another shape"
    )
    raise Failure("copy", f"result {i}: expected the bits of native torch, got others ({where})")


def _words(x: Tensor) -> Tensor:
    """The bits of each element, as an integer."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def within(evidence: Evidence, i: int) -> Score:
    """E and R of the i-th result."""
    op, exact = evidence.op, evidence.exact
    y, true = evidence.got[i], exact.results[i]
    terms = exact.terms[i].expand_as(true)
    middle, middle_dtype = exact.middles[i], op.intermediate_dtype or y.dtype
    _same_nonfinite(y, true, i)
    finite = y.isfinite()
    y64, true, terms = y.double()[finite], true[finite], terms[finite]
    if true.numel() == 0:
        return Score(0.0)
    u_out, u_acc = unit_roundoff(y.dtype), unit_roundoff(op.accumulates or torch.float32)
    rounds, info = max(op.rounds, 1), torch.finfo(y.dtype)
    rounding = (rounds * u_out * true.abs()).clamp(min=rounds * info.smallest_normal * info.eps / 2)
    summing, blocks = exact.length**0.5 * u_acc * terms, op.block_error * terms
    mid = torch.zeros_like(true)
    if middle is not None:
        mid = unit_roundoff(middle_dtype) * middle.expand_as(exact.results[i])[finite]
    error = (y64 - true).abs()
    excess = error / (rounding + 4 * summing + blocks + 4 * mid)
    E = float(excess.max())
    native = (evidence.native[i].double()[finite] - true).nan_to_num(0.0, 0.0, 0.0)
    floor = max(_rms(native), _rms(u_out * true / 12**0.5), float(info.smallest_normal * info.eps) / 12**0.5)
    allowed = (floor**2 + _rms(mid) ** 2 / 6 + _rms(summing) ** 2 / 9 + _rms(blocks) ** 2 / 9) ** 0.5
    R = _rms(error) / allowed if true.numel() >= ENOUGH else None
    if not E <= 1:
        worst = int(excess.argmax())
        position = torch.nonzero(finite)[worst].tolist()
        raise Failure(
            "bound",
            f"result {i} at {position}: expected {true[worst]:.9g}, got {y64[worst]:.9g}: {E:.3g} times the bound; "
            f"{int((excess > 1).sum())} of {y.numel()} elements are beyond it",
            E,
            R,
        )
    if R is not None and not R <= RATIO:
        raise Failure(
            "rms", f"result {i}: its rms error is {R:.3g} times what native torch's allows for, > {RATIO}", E, R
        )
    return Score(E, R)


def _same_nonfinite(y: Tensor, true: Tensor, i: int) -> None:
    """NaN and ±inf where the oracle has them; a finite result beyond the type's range is an inf of its sign.

    Just beyond the largest number, half a unit of its last place and a kernel's error decide: either will do.
    """
    info = torch.finfo(y.dtype)
    beyond = true.isfinite() & (true.abs() > info.max)
    overflows = beyond & (true.abs() > info.max * (1 + 2 * info.eps))
    unsure = beyond & ~overflows
    kinds = (
        ("NaN", y.isnan(), true.isnan()),
        ("inf", y.isposinf(), true.isposinf() | (overflows & (true > 0))),
        ("-inf", y.isneginf(), true.isneginf() | (overflows & (true < 0))),
    )
    for name, have, want in kinds:
        wrong = (have != want) & ~(unsure & (y.sign() == true.sign()))
        if wrong.any():
            position = torch.nonzero(wrong)[0].tolist()
            raise Failure(
                "nonfinite",
                f"result {i} at {position}: expected {true[tuple(position)].item()}, got {y[tuple(position)].item()}; "
                f"{name} is misplaced at {int(wrong.sum())} of {y.numel()} elements",
            )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
