"""Mixture-of-experts computation: each token through its experts, and the sums that bring them together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..check import FLOAT, FP8, INDEX
from ..contracts import Contracts
from ..formats import BLOCK as BLOCK  # in the declared shapes
from ..formats import expand_block_scales
from ..numerics import narrow, wide
from ..op import PLAIN, op
from ._fp8 import BLOCK_ERROR, matmul_blocks, quantise_blocks
from ._moe import repeats, take, through_experts


def prepare_experts(w13: Tensor, w2: Tensor) -> list[Tensor]:
    """The plain layout: w13 [E, 2I, D] and w2 [E, D, I] as they are."""
    return [w13, w2]


def fused_experts_terms(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = PLAIN
) -> Tensor:
    """Sum of the absolute products of the second GEMM, weighted: the scale of an output's rounding errors."""
    return _through_experts(x, w13, w2.abs(), topk_weights.abs(), topk_ids, lambda hidden: _silu_and_mul(hidden).abs())


def fused_experts_intermediate(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = PLAIN
) -> Tensor:
    """2-norm of the products that the rounded activations enter: how their rounding errors add up."""
    weights = topk_weights.square() * repeats(topk_ids)
    squares = _through_experts(x, w13, w2.square(), weights, topk_ids, lambda hidden: _silu_and_mul(hidden).square())
    return squares.sqrt()


@op(
    shapes={"x": "T D", "w13": "E 2*I D", "w2": "E D I", "topk_weights": "T K", "topk_ids": "T K"},
    dtypes={
        "x": FLOAT,
        "w13": "x",
        "w2": "x",
        "topk_weights": (torch.float32, torch.float64),
        "topk_ids": INDEX,
    },
    where={"K >= 1": "each token has a place for one expert"},
    rounds=2,
    reduces="max(D, I)",
    flops="6 * T * K * D * I",
    traffic="(min(E, T * K) * 3 * I * D + 2 * T * D) * x.element_size() + T * K * (4 + topk_ids.element_size())",
    terms=fused_experts_terms,
    intermediate=fused_experts_intermediate,
    prepare=prepare_experts,
    contracts=Contracts(
        C1_empties="Zero tokens give zero rows. Without experts (E = 0, a rank that has none) every row is zero.",
        C7_sentinels="An id that is -1 or otherwise outside [0, E) contributes exactly 0, whatever its weight.",
        C8_unwritten_rows="Every row is written: a token without any valid id gives zeros.",
        C9_rounding="float32 accumulation; the activation is rounded to x's dtype once, between the GEMMs; experts' "
        "outputs stay float32, are weighted and summed over K in float32, and rounded once.",
        C10_determinism="Terms are summed in the order of K. Other tokens may change a row's last bits (GEMM shapes), "
        "never more: NaN and inf stay in the rows, and with the experts, that hold them.",
        C12_scale_owner="Applies no routed scaling factor: topk_weights carry it.",
        C13_ids="Takes int32 or int64 ids and float32 weights.",
    ),
)
def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, layout: str = PLAIN
) -> Tensor:
    """``Σ_k weight_k · W2_e · (silu(W1_e x) ⊙ W3_e x)`` with ``e = topk_ids[t, k]``: SwiGLU experts.

    x: [T, D]; w13: [E, 2I, D], the gate's (W1's) rows first; w2: [E, D, I], both x's dtype, or as ``prepare`` gave
    them with ``layout``; topk_weights: float32 [T, K], applied after the second GEMM; topk_ids: [T, K], repeats
    count twice. Any strides. Returns [T, D] in x's dtype.
    """
    return narrow(_through_experts(x, w13, w2, topk_weights, topk_ids, _silu_and_mul), x)


@op(
    shapes={"x": "T K D"},
    dtypes={"x": FLOAT},
    reduces="K",
    flops="x.numel()",
    terms=lambda x, scale: wide(x).abs().sum(1) * abs(scale),
    contracts=Contracts(
        C9_rounding="Summed and scaled in float32, rounded once.",
        C10_determinism="A row does not depend on the others.",
        C12_scale_owner="Applies `scale`: 1.0 where the routing weights carry the routed scaling factor already.",
    ),
)
def moe_sum_reduce(x: Tensor, scale: float) -> Tensor:
    """``scale · Σ_k x[t, k]``: a token's expert outputs, weighted before, brought together.

    x: [T, K, D], any strides and any D (no tail is left unwritten). Returns [T, D] in x's dtype; K = 0 gives zeros.
    """
    return narrow(wide(x).sum(1) * scale, x)


@op(
    shapes={"routed": "T D", "shared": "T D"},
    dtypes={"routed": FLOAT, "shared": "routed"},
    flops="2 * routed.numel()",
    terms=lambda routed, shared, alpha: wide(routed).abs() + wide(shared).abs() * abs(alpha),
    contracts=Contracts(
        C9_rounding="Multiplied and added in float32, rounded once.",
        C10_determinism="Elementwise: equal inputs give bitwise equal results.",
        C12_scale_owner="`alpha` scales the shared expert: 1.0 where the routed part is scaled already, 1 / the routed "
        "scaling factor where the sum will be.",
    ),
)
def shared_expert_add(routed: Tensor, shared: Tensor, alpha: float) -> Tensor:
    """``routed + alpha · shared``: the shared expert joins the routed ones.

    routed, shared: [T, D], one dtype, any strides. Returns that shape and dtype.
    """
    return narrow(wide(routed) + wide(shared) * alpha, routed)


def _through_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    def run(experts: Tensor, tokens: Tensor) -> Tensor:
        hidden = torch.bmm(wide(x[tokens]), wide(w13.index_select(0, experts)).mT)
        activated = narrow(activate(hidden), x)
        return torch.bmm(wide(activated), wide(w2.index_select(0, experts)).mT)

    return through_experts(topk_weights, topk_ids, x, w13.shape[0], run)


def _silu_and_mul(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def prepare_experts_fp8_block(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> list[Tensor]:
    """The plain layout: codes and scales as they are."""
    return [w13, w13_scale, w2, w2_scale]


def fp8_experts_terms(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    ue8m0: bool = False,
    layout: str = PLAIN,
) -> Tensor:
    """Sum of the absolute products of the second GEMM, weighted: the scale of an output's rounding errors."""

    def multiply(a: Tensor, a_scales: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        return matmul_blocks(wide(a).abs(), a_scales, wide(w).abs(), w_scales.abs())

    weights = (w13, w13_scale, w2, w2_scale)
    return _through_fp8_experts(x, *weights, topk_weights.abs(), topk_ids, ue8m0, multiply)


def fp8_experts_intermediate(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    ue8m0: bool = False,
    layout: str = PLAIN,
) -> Tensor:
    """2-norm of the products that the activation's codes enter: how codes that come out as neighbours add up.

    Below the least normal code the grid is even, and an error no smaller than there.
    """
    least = torch.finfo(w13.dtype).smallest_normal

    def multiply(a: Tensor, a_scales: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        a = wide(a).abs().clamp(min=least)
        return matmul_blocks(a.square(), a_scales.square(), wide(w).square(), w_scales.square())

    weights = (w13, w13_scale, w2, w2_scale)
    squares = topk_weights.square() * repeats(topk_ids)
    return _through_fp8_experts(x, *weights, squares, topk_ids, ue8m0, multiply).sqrt()


@op(
    shapes={
        "x": "T D",
        "w13": "E 2*I D",
        "w13_scale": "E 2*ceil_div(I,BLOCK) ceil_div(D,BLOCK)",
        "w2": "E D I",
        "w2_scale": "E ceil_div(D,BLOCK) ceil_div(I,BLOCK)",
        "topk_weights": "T K",
        "topk_ids": "T K",
    },
    dtypes={
        "x": FLOAT,
        "w13": FP8,
        "w13_scale": torch.float32,
        "w2": "w13",
        "w2_scale": torch.float32,
        "topk_weights": (torch.float32, torch.float64),
        "topk_ids": INDEX,
    },
    where={"K >= 1": "each token has a place for one expert"},
    reduces="max(D, I)",
    flops="6 * T * K * D * I",
    traffic="min(E, T * K) * 3 * I * D + 2 * T * D * x.element_size() + T * K * (4 + topk_ids.element_size())",
    terms=fp8_experts_terms,
    block_error=BLOCK_ERROR,
    intermediate=fp8_experts_intermediate,
    intermediate_dtype=torch.float8_e4m3fn,
    prepare=prepare_experts_fp8_block,
    contracts=Contracts(
        C1_empties="Zero tokens give zero rows. Without experts (E = 0, a rank that has none) every row is zero.",
        C5_fp8_kind="w13 and w2 are of one kind, e4m3fn or e4m3fnuz; x and the activation are quantised to the same.",
        C6_fp8_cast="x and the activation are clamped to ±quant_max before the cast, as `per_token_group_quant_fp8` "
        "does.",
        C7_sentinels="An id that is -1 or otherwise outside [0, E) contributes exactly 0, whatever its weight.",
        C8_unwritten_rows="Every row is written: a token without any valid id gives zeros.",
        C9_rounding="x, in float32, and then the activation, unrounded, become codes. Each block of 128 of a GEMM's "
        "sum is scaled and added in float32. Experts' outputs stay float32, are weighted and summed over K in float32, "
        "and rounded once. A kernel may round gate, up, the activation or an expert's output to x's dtype besides: "
        "that moves some codes to their neighbours, which the bound allows for.",
        C10_determinism="Terms are summed in the order of K. Other tokens may change the last bits of a GEMM's sum, "
        "and by them a code of the activation, never more: NaN and inf stay in the rows that hold them.",
        C12_scale_owner="Applies no routed scaling factor: topk_weights carry it.",
        C13_ids="Takes int32 or int64 ids and float32 weights.",
    ),
)
def fused_experts_fp8_block(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    ue8m0: bool = False,
    layout: str = PLAIN,
) -> Tensor:
    """`fused_experts` on FP8 weights with a scale for every 128×128 block: activations are quantised on the way.

    x and the activation silu(gate) ⊙ up become codes with one scale for each 128 consecutive elements of a row
    (`per_token_group_quant_fp8` with its eps 1e-10; with ``ue8m0``, scales rounded up to powers of two first, as
    checkpoints with ``scale_fmt: ue8m0`` were trained); both GEMMs are as in `fp8_block_linear`.

    x: [T, D] bf16/f16/f32; w13: [E, 2I, D], the gate's rows first, and w2: [E, D, I], one fp8 kind; w13_scale:
    [E, 2⌈I/128⌉, ⌈D/128⌉], the gate's blocks and then up's, each counted from its own first row; w2_scale:
    [E, ⌈D/128⌉, ⌈I/128⌉], both float32 and multiplied with; or the four as ``prepare`` gave them with ``layout``.
    D and I may end in partial blocks, whose group of an activation is shorter too. topk_weights: float32 [T, K],
    applied after the second GEMM; topk_ids: [T, K], repeats count twice. Any strides. Returns [T, D] in x's dtype.
    A row of x with inf or NaN gives an unspecified row.
    """
    weights = (w13, w13_scale, w2, w2_scale)
    return narrow(_through_fp8_experts(x, *weights, topk_weights, topk_ids, ue8m0, matmul_blocks), x)


def _through_fp8_experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    ue8m0: bool,
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The weighted sum over K in `wide`, with ``multiply`` as the second GEMM."""
    # Always in float32: which codes x has is part of the meaning, not an error that an oracle could be free of.
    codes, scales = quantise_blocks(x.to(torch.float32), w13.dtype, ue8m0)

    def run(experts: Tensor, tokens: Tensor) -> Tensor:
        halves = wide(w13_scale[experts]).chunk(2, dim=1)
        w13_scales = torch.cat([expand_block_scales(half, w2.shape[2]) for half in halves], dim=1)
        hidden = matmul_blocks(take(codes, tokens), scales[tokens], take(w13, experts), w13_scales)
        activated, activated_scales = quantise_blocks(_silu_and_mul(hidden), w13.dtype, ue8m0)
        w2_scales = expand_block_scales(wide(w2_scale[experts]), w2.shape[1])
        return multiply(activated, activated_scales, take(w2, experts), w2_scales)

    return through_experts(topk_weights, topk_ids, x, w13.shape[0], run)
