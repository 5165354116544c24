"""Verdicts on 8-bit codes and their scales.

What is quantised, v, is taken in float64; e bounds what a kernel that computes it in float32 may be off by, and is 0
where v is an argument. With u = 2⁻²⁴ and s* = max(amax |v|, eps) / quant_max:

    the scale:  within e and 4u of s*; as a power of two, one that some number there is rounded up to
    a code:     between those of (v − e)/s·(1 − 4u) and (v + e)/s·(1 + 4u), s being the scale that was stored

4u is a division, or a product with a reciprocal. Where nothing is rounded nothing is allowed: a tie in units of a
scale that is a power of two goes to the even code, and s* that is a power of two is stored as that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hal.check import ceil_div
from torch_hal.formats import BLOCK, FP8_KINDS, SCALE_LAYOUTS, Fp8Kind, ScaleLayout
from torch_hal.op import declared

from .oracle import Exact, exact
from .verdict import Evidence, Failure, Score, Verdict, within

U = 2.0**-24
ROUNDING = 4 * U
# Beyond the bound of the op that is not quantised: approximate exponentials, divisions and square roots. CUDA's fast
# exponential, for one, is 2 + 1.17·|x| units off, and x beyond −10 gives next to nothing beside a group's largest.
APPROXIMATE = 32 * U
ZERO = torch.zeros((), dtype=torch.float64)
UE8M0_RANGE = (2.0**-126, 2.0**127)


@dataclass(frozen=True)
class Source:
    """What a call quantises: exact values, how far a float32 kernel's may be from them, and where nothing is promised.

    ``unspecified`` is a bool for each row, [..., 1]; a group that holds inf or NaN is unspecified in any case.
    """

    values: Tensor
    errors: Tensor
    unspecified: Tensor
    unquantised: Exact | None = None


def argument(evidence: Evidence) -> Source:
    """The first argument, as it is."""
    return Source(next(iter(evidence.arguments.values())).double(), ZERO, ZERO.bool())


def result_of(name: str, evidence: Evidence) -> Source:
    """The first result of op ``name`` on the call's arguments, in float32."""
    op = declared()[name]
    found = exact(op, {key: evidence.arguments[key] for key in op.signature.parameters})
    values, terms = found.results[0], found.terms[0].expand_as(found.results[0])
    errors = 4 * found.length**0.5 * U * terms + APPROXIMATE * values.abs()
    return Source(values, errors, ZERO.bool(), found)


def masked(evidence: Evidence) -> Source:
    """SwiGLU of each expert's first rows."""
    source = result_of("silu_and_mul", evidence)
    beyond = torch.arange(source.values.shape[1]) >= evidence.arguments["masked_m"].unsqueeze(-1)
    return Source(source.values, source.errors, beyond.unsqueeze(-1))


def normed(name: str, evidence: Evidence) -> Source:
    """The norm ``name``; a row that holds inf or NaN is unspecified."""
    source = result_of(name, evidence)
    rows = evidence.arguments["x"].double()
    if "residual" in evidence.arguments:
        rows = rows + evidence.arguments["residual"].double()
    return Source(source.values, source.errors, ~rows.isfinite().all(-1, keepdim=True), source.unquantised)


def in_groups(source: Callable[[Evidence], Source]) -> Verdict:
    """Groups of consecutive elements of a row (by default one), scales in a layout; results after them are rounded."""

    def verdict(evidence: Evidence) -> Score:
        options = evidence.op.bind(**evidence.arguments)
        before, (codes, stored, *rest) = source(evidence), evidence.got
        size, layout = options.get("group_size", codes.shape[-1]), SCALE_LAYOUTS[options.get("scale_layout", "row_f32")]
        groups = codes.shape[-1] // size
        _check_stored_shape(stored, codes, layout.columns(groups), layout)
        scales = layout.unpack(stored, groups)
        open_ = before.unspecified.expand(*codes.shape[:-1], 1)
        values, got = (x.reshape(*codes.shape[:-1], groups, size) for x in (before.values, _bytes(codes)))
        errors = before.errors.reshape(values.shape) if before.errors.dim() else before.errors
        score = _judged(options, values, errors, got, scales, open_)
        check_layout(stored, layout, groups, open_)
        if rest:
            assert before.unquantised is not None
            score.meet(_also(evidence, before.unquantised))
        return score

    return verdict


def whole(evidence: Evidence) -> Score:
    """One scale for everything."""
    options, before, (codes, scale) = evidence.op.bind(**evidence.arguments), argument(evidence), evidence.got
    if codes.numel() == 0:
        return _scales(options, ZERO.reshape(1, 1), ZERO, scale, ZERO.bool())
    values, got = before.values.reshape(1, -1), _bytes(codes).reshape(1, -1)
    return _judged(options, values, before.errors, got, scale, ZERO.bool())


def in_blocks(evidence: Evidence) -> Score:
    """One scale for each block of 128×128."""
    options, before, (codes, scales) = evidence.op.bind(**evidence.arguments), argument(evidence), evidence.got
    values, got = _blocks(before.values), _blocks(_bytes(codes))
    return _judged(options, values, before.errors, got, scales, ZERO.bool())


def static(evidence: Evidence) -> Score:
    """Codes of a scale that was given; NaN stays, and nothing else becomes it."""
    x, scale = evidence.arguments["x"].double(), evidence.arguments["scale"].double()
    kind = FP8_KINDS[evidence.op.bind(**evidence.arguments)["fp8"]]
    _codes(kind, x, ZERO, _bytes(evidence.got[0]), scale, ZERO.bool())
    return Score()


def requantised(evidence: Evidence) -> Score:
    """Block scales that are the least powers of two, which nothing rounds, and codes for them."""
    codes, scales = evidence.got
    weight, old = evidence.arguments["weight"], evidence.arguments["weight_scale"].double()
    kind = next(kind for kind in FP8_KINDS.values() if kind.dtype == weight.dtype)
    wanted = _power_above(old)
    wrong = (scales.double() != wanted) & ~old.isnan()
    if wrong.any():
        i = _first(wrong)
        raise Failure("scales", f"result 1 at {list(i)}: expected {wanted[i]:.9g}, got {scales[i]:.9g}")
    values, new = weight.double() * spread(old, weight), spread(scales.double(), weight)
    lost = values.isnan() & new.isnan()  # a block is NaN by its codes or by its scale
    _codes(kind, values, ZERO, _bytes(codes), new, lost)
    return Score()


def check_layout(stored: Tensor, layout: ScaleLayout, groups: int, open_: Tensor) -> None:
    """Strides as the layout says, and zeros wherever its storage holds no scale."""
    if stored.numel() == 0 or stored.dim() < 2:
        return
    if not layout.matches(stored):
        raise Failure("layout", f"scales of layout {layout.name}: strides {stored.stride()} are not its own")
    *batch, rows, columns = stored.shape
    if layout.major == "mn":
        padded = ceil_div(rows, layout.alignment) * layout.alignment
        try:
            storage = stored.as_strided((*batch, columns, padded), (*stored.stride()[:-2], padded, 1))
        except RuntimeError:
            raise Failure("padding", f"scales of layout {layout.name}: no memory for {padded} rows a column") from None
        if storage[..., rows:].any():
            raise Failure("padding", f"scales of layout {layout.name}: rows {rows} to {padded - 1} are not zero")
    if layout.power_of_two:
        spare = layout.unpack(stored, columns * layout.per_word)[..., groups:]
        if (spare.isnan() | (spare != 0))[~open_.squeeze(-1)].any():
            raise Failure("padding", f"scales of layout {layout.name}: a word's bytes beyond the groups are not zero")


def _check_stored_shape(stored: Tensor, codes: Tensor, columns: int, layout: ScaleLayout) -> None:
    if stored.shape != (*codes.shape[:-1], columns) or stored.dtype != layout.dtype:
        raise Failure("shape", f"scales of layout {layout.name}: got {stored.dtype} of shape {list(stored.shape)}")


def _judged(
    options: dict[str, Any], values: Tensor, errors: Tensor, got: Tensor, scales: Tensor, open_: Tensor
) -> Score:
    """Groups along the last dim of everything but ``scales``, which has one number for each."""
    open_ = open_ | ~values.isfinite().all(-1)
    score = _scales(options, values, errors, scales, open_)
    scales = torch.where(open_, 1.0, scales.double()).unsqueeze(-1)
    _codes(FP8_KINDS[options["fp8"]], values, errors, got, scales, open_.unsqueeze(-1))
    return score


def _scales(options: dict[str, Any], values: Tensor, errors: Tensor, got: Tensor, open_: Tensor) -> Score:
    kind, eps = FP8_KINDS[options["fp8"]], options.get("quant_eps", options["eps"])
    power = options.get("ue8m0", False) or SCALE_LAYOUTS[options.get("scale_layout", "row_f32")].power_of_two
    if values.numel() == 0:
        return Score()
    magnitude = values.abs()
    sides = (magnitude - errors, magnitude, magnitude + errors) if errors.dim() else (magnitude,) * 3
    low, wanted, high = (side.amax(-1).clamp(min=eps) / kind.quant_max for side in sides)
    rounded = (wanted.float().double() != wanted) | (low != high)
    slack = ROUNDING * (rounded.double() if power else 1.0)
    low, high, s = low * (1 - slack), high * (1 + slack), got.double()
    if power:
        low, wanted, high = map(_power_above, (low, wanted, high))
    wrong = ~((s >= low) & (s <= high)) | (power & (torch.frexp(s).mantissa != 0.5))
    wrong &= ~open_
    if wrong.any():
        i = _first(wrong)
        raise Failure(
            "scales",
            f"the scale at {list(i)}: expected {wanted[i]:.9g}, got {s[i]:.9g}; "
            f"{int(wrong.sum())} of {s.numel()} are wrong",
        )
    if power or open_.all():
        return Score()
    off = torch.where(s > wanted, (s - wanted) / (high - wanted), (wanted - s) / (wanted - low))
    return Score(float(off[~open_].max()))


def _codes(kind: Fp8Kind, values: Tensor, errors: Tensor, got: Tensor, scales: Tensor, open_: Tensor) -> None:
    """Raise Failure("codes") unless every byte of ``got`` is a code that ``values`` / ``scales`` may be rounded to."""
    q = (values / scales).clamp(-1e4, 1e4)
    magnitude = (got & 0x7F).int()
    rank = torch.where(got >= 0x80, -magnitude, magnitude)
    nan = got.view(kind.dtype).float().isnan()
    suspects = torch.where(values.isnan(), ~nan, nan | (rank != _ranks(kind, q))) & ~open_
    places = torch.nonzero(suspects, as_tuple=True)  # few, as a rule: only they need bounds
    s, e, quotient = (x.expand_as(q)[places] for x in (scales, errors, q))
    unrounded = (e == 0) & (torch.frexp(s).mantissa == 0.5) & (quotient.float().double() == quotient)
    width = torch.where(unrounded, 0.0, (e / s).clamp(max=1e4) * (1 + ROUNDING) + ROUNDING * quotient.abs())
    low, high = (_ranks(kind, quotient + side) for side in (-width, width))
    wrong = nan[places] | values[places].isnan() | (rank[places] < low) | (rank[places] > high)
    if wrong.any():
        i = tuple(int(place[wrong][0]) for place in places)
        decoded = got.view(kind.dtype).float()[i]
        raise Failure(
            "codes",
            f"the code at {list(i)}: expected {kind.name} of {values[i]:.9g} / {scales.expand_as(values)[i]:.9g} = "
            f"{q[i]:.9g}, got 0x{int(got[i]):02x}, which is {decoded:.9g}; {int(wrong.sum())} of {q.numel()} are wrong",
        )


def _ranks(kind: Fp8Kind, q: Tensor) -> Tensor:
    """The nearest code of each number as its place among the codes of its sign, ties to even; zero is 0."""
    middles, magnitude = _middles(kind), q.abs().contiguous()
    below = torch.searchsorted(middles, magnitude, out_int32=True)
    tie = middles[below.clamp(max=len(middles) - 1)] == magnitude
    rank = torch.where(tie, below + below % 2, below)
    return torch.where(q < 0, -rank, rank)


@functools.cache
def _middles(kind: Fp8Kind) -> Tensor:
    """Half-way between each two neighbours among the codes from 0 to quant_max."""
    codes = torch.arange(0x80, dtype=torch.uint8).view(kind.dtype).double()
    codes = codes[codes <= kind.quant_max]
    return (codes[1:] + codes[:-1]) / 2


def _power_above(s: Tensor) -> Tensor:
    """The least power of two that is not below each number."""
    mantissa = torch.frexp(s).mantissa
    return torch.where((mantissa == 0.5) | (s == 0), s, s / mantissa).clamp(*UE8M0_RANGE)


def _blocks(x: Tensor) -> Tensor:
    """[..., N, K] as blocks [..., ⌈N/128⌉, ⌈K/128⌉, 128·128], zeros where a matrix ends within one."""
    padded = pad(x, (0, -x.shape[-1] % BLOCK, 0, -x.shape[-2] % BLOCK))
    *batch, rows, columns = padded.shape
    blocks = padded.reshape(*batch, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    return blocks.transpose(-3, -2).flatten(-2)


def spread(scales: Tensor, weight: Tensor) -> Tensor:
    """Each element's scale, of one for each block."""
    rows = scales.repeat_interleave(BLOCK, -2)[..., : weight.shape[-2], :]
    return rows.repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.nonzero(wrong)[0])


def _also(evidence: Evidence, unquantised: Exact) -> Score:
    """The rounded sum, third result here and second of the op that does not quantise."""
    op = declared()["fused_add_rms_norm"]
    got, native = [evidence.got[0], evidence.got[2]], [evidence.native[0], evidence.native[2]]
    return within(Evidence(op, evidence.arguments, got, unquantised, native), 1)
