"""Second oracles agree with their ops' references: on samples all of part A, at edges routing, experts and products."""

from __future__ import annotations

import math
from typing import Any

import pytest
import samples_dense
import samples_grouped
import samples_moe
import torch
from torch import Generator, Tensor, tensor

from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, to_fp8
from torch_hal.op import declared
from torch_hal_conformance.oracle import exact
from torch_hal_conformance.second import compare, experts, grouped, permute, routing, sampling

SAMPLES = {**samples_dense.SAMPLES, **samples_grouped.SAMPLES, **samples_moe.SAMPLES}
MINE = sorted(name for module in (experts, grouped, permute, routing, sampling) for name in module.ORACLES)
SAMPLED = [name for name in MINE if name in SAMPLES]
NAN, INF = math.nan, math.inf


def check(name: str, **arguments: Any) -> None:
    """The op's reference in float64 and its second oracle agree on the arguments' bits."""
    op = declared()[name]
    op.check(**arguments)
    arguments = op.bind(**arguments)
    oracle = exact(op, arguments)
    compare(name, arguments, oracle.results, [*oracle.terms, *[None] * (len(oracle.results) - len(oracle.terms))])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


def codes(*shape: int, kind: str = "e4m3fn", seed: int = 0) -> Tensor:
    return to_fp8(normal(*shape, seed=seed) * 100, FP8_KINDS[kind])


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_on_the_samples(name: str, dtype: torch.dtype, size: int) -> None:
    for seed in range(3):
        check(name, **SAMPLES[name](Generator().manual_seed(seed), dtype, size))


# --- routing

ROWS = {
    "ties": torch.zeros(2, 16),
    "two_values": (normal(40, 16) > 0).float(),
    "few_values": (normal(40, 16) * 2).round() / 2,
    "some_minus_inf": normal(9, 16).masked_fill(normal(9, 16, seed=1) > 0.5, -INF),
    "only_one_finite": torch.full((3, 16), -INF).index_fill_(1, tensor([11]), 0.5),
    "all_minus_inf": torch.full((2, 16), -INF),
    "underflow": normal(9, 16) * 1000,
    "saturation": normal(9, 16) * 30,
    "all_low": normal(9, 16) - 48,  # sigmoids of about 1e-21, beside which 1e-20 matters
    "nan": normal(4, 16).index_fill_(1, tensor([5]), NAN),
    "two_nans": normal(4, 16).index_fill_(1, tensor([5, 12]), NAN),
    "plus_inf": normal(4, 16).index_fill_(1, tensor([5]), INF),
    "no_tokens": torch.zeros(0, 16),
}
GROUPS = [(1, 4, 1), (4, 4, 2), (8, 4, 2), (8, 4, 4), (1, 1, 1), (16, 1, 1), (3, 8, 4)]  # top_k, groups, kept groups


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_at_edges(rows: str, renormalize: bool) -> None:
    logits = ROWS[rows]
    for top_k in (1, 4, 16):
        check("topk_softmax", logits=logits, top_k=top_k, renormalize=renormalize)
    for top_k, num_groups, topk_groups in GROUPS:
        limits = {"top_k": top_k, "num_groups": num_groups, "topk_groups": topk_groups, "renormalize": renormalize}
        check("grouped_topk", logits=logits, scale=16.0, **limits)
        for bias in (torch.zeros(16), torch.full((16,), -5.0), (normal(16) * 4).round() - 2, normal(16)):
            check("biased_grouped_topk", logits=logits, bias=bias, scale=2.5, **limits)


def test_routing_by_a_bias_with_nan() -> None:
    bias = normal(16).index_fill_(0, tensor([6]), NAN)
    limits = {"top_k": 4, "num_groups": 4, "topk_groups": 2, "scale": 2.5}
    for renormalize in (False, True):
        check("biased_grouped_topk", logits=normal(5, 16), bias=bias, renormalize=renormalize, **limits)


def test_routing_of_deepseek_v3() -> None:
    for bias in (normal(256) / 10, torch.full((256,), -1.5)):
        logits = normal(6, 256, seed=3).to(torch.bfloat16)
        limits = {"top_k": 8, "num_groups": 8, "topk_groups": 4, "renormalize": True, "scale": 2.5}
        check("biased_grouped_topk", logits=logits, bias=bias, **limits)


# --- sorting by expert

IDS = {
    "spread": torch.randint(-1, 6, (11, 3), generator=Generator().manual_seed(0)),
    "one_expert": torch.full((7, 3), 4),
    "nobody": torch.full((5, 2), -1),
    "out_of_range": tensor([[6, 2], [-7, 2**31 - 1], [0, 5]]),
    "one_choice": tensor([[0], [5], [5], [-1]]),
    "no_tokens": torch.zeros(0, 3, dtype=torch.int64),
    "no_choices": torch.zeros(4, 0, dtype=torch.int64),
    "strided": torch.arange(-1, 23).reshape(6, 4).T % 6,
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorting_at_edges(ids: str, dtype: torch.dtype) -> None:
    topk_ids = IDS[ids].to(dtype)
    x = normal(len(topk_ids), 5)
    for num_experts in (6, 1, 0):
        for rows in (1, 4, 7, 128):
            check("moe_align_block_size", topk_ids=topk_ids, num_experts=num_experts, block_size=rows)
            check("ep_scatter", x=x, topk_ids=topk_ids, num_experts=num_experts, alignment=rows)


@pytest.mark.parametrize("x_layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("width", [128, 700])
def test_scattering_codes_and_scales(x_layout: str, layout: str, width: int) -> None:
    """Powers of two and others, the least and the greatest, and every code there is."""
    topk_ids = IDS["spread"].to(torch.int32)
    groups = -(-width // 128)
    exponents = torch.randint(-126, 128, (11, groups), generator=Generator().manual_seed(1))
    scales = torch.ldexp(torch.ones(11, groups), exponents)
    scales[3:6] *= 1.0 if x_layout == "mn_ue8m0" else 1.25
    stored = SCALE_LAYOUTS[x_layout].pack(scales)
    for kind in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        x = (torch.arange(11 * width) % 256).to(torch.uint8).reshape(11, width).view(kind)
        layouts = {"x_scale_layout": x_layout, "scale_layout": layout}
        check("ep_scatter_fp8", x=x, x_scale=stored, topk_ids=topk_ids, num_experts=6, alignment=4, **layouts)


def test_gathering_at_edges() -> None:
    rows = normal(6, 4)
    rows[5] = NAN  # nobody names it
    index = tensor([[0, 1, 2], [-1, 3, -1], [-1, -1, -1], [6, 4, -9], [2, 2, 2]], dtype=torch.int32)
    weights = torch.rand(5, 3, generator=Generator().manual_seed(0))
    weights[index < 0] = NAN
    check("ep_gather", rows=rows, output_index=index, topk_weights=weights)
    rows[3, 1], rows[4, 0] = INF, -INF
    check("ep_gather", rows=rows, output_index=index, topk_weights=weights)
    check("ep_gather", rows=rows[:0], output_index=index, topk_weights=weights)
    check("ep_gather", rows=rows, output_index=index[:, :0], topk_weights=weights[:, :0])


# --- experts

EXPERT_IDS = {
    "one_expert": torch.full((4, 2), 2),
    "nobody": torch.full((4, 2), -1),
    "repeats": tensor([[1, 1], [2, 0], [0, 0], [-1, 2]]),
    "out_of_range": tensor([[3, 1], [-5, 2], [2**31 - 1, 0], [0, 1]]),
    "one_choice": tensor([[0], [2], [2], [-1]]),
    "no_tokens": torch.zeros(0, 2, dtype=torch.int64),
}


def experts_call(ids: str, hidden: int, inter: int) -> dict[str, Any]:
    topk_ids = EXPERT_IDS[ids].to(torch.int32)
    weights = torch.rand(topk_ids.shape, generator=Generator().manual_seed(0))
    weights[(topk_ids < 0) | (topk_ids > 2)] = NAN
    return {"x": normal(len(topk_ids), hidden), "topk_weights": weights, "topk_ids": topk_ids}


@pytest.mark.parametrize("ids", EXPERT_IDS)
def test_experts_at_edges(ids: str) -> None:
    w13, w2 = normal(3, 2 * 10, 12, seed=1), normal(3, 12, 10, seed=2)
    call = experts_call(ids, 12, 10)
    check("fused_experts", **call, w13=w13, w2=w2)
    check("fused_experts", **call, w13=w13[:0], w2=w2[:0])
    call["x"][:1, 3] = NAN
    w13[2, 1], w2[0, 4, 4] = INF, NAN
    check("fused_experts", **call, w13=w13, w2=w2)


def fp8_call(ids: str, kind: str, hidden: int, inter: int) -> dict[str, Any]:
    blocks, halves = -(-hidden // 128), -(-inter // 128)
    return {
        **experts_call(ids, hidden, inter),
        "w13": codes(3, 2 * inter, hidden, kind=kind, seed=1),
        "w13_scale": torch.rand(3, 2 * halves, blocks, generator=Generator().manual_seed(3)) / 100,
        "w2": codes(3, hidden, inter, kind=kind, seed=2),
        "w2_scale": torch.rand(3, blocks, halves, generator=Generator().manual_seed(4)) / 100,
    }


@pytest.mark.parametrize("ids", EXPERT_IDS)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_fp8_experts_at_edges(ids: str, ue8m0: bool) -> None:
    call = fp8_call(ids, "e4m3fn", 136, 72)
    check("fused_experts_fp8_block", **call, ue8m0=ue8m0)
    nobody = {name: call[name][:0] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    check("fused_experts_fp8_block", **{**call, **nobody}, ue8m0=ue8m0)


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_fp8_experts_on_special_rows(kind: str, ue8m0: bool) -> None:
    """Zeros, a block that eps bounds, a scale that is a power of two already, half-way values; partial blocks."""
    call = fp8_call("repeats", kind, 200, 136)
    call["x"][0, :30] = 0.0
    call["x"][1, :128] *= 1e-12
    call["x"][2] = 3 * 2.0**-16  # three times the least code, if the scale is 2⁻⁷
    call["x"][2, ::50] = FP8_KINDS[kind].quant_max * 2.0**-7
    call["w13"].view(torch.uint8)[..., ::50] = 0  # so that the small ones are seen
    call["x"][3] = (torch.arange(200) % 57).float() / 16
    call["x"][3, 7::100] = 28.0
    check("fused_experts_fp8_block", **call, ue8m0=ue8m0)
    check("fused_experts_fp8_block", **{**call, "x": call["x"] * 0.0}, ue8m0=ue8m0)


@pytest.mark.parametrize(("small", "large"), [(1e-11, 1e10), (1e-6, 1.0)])
def test_fp8_experts_below_eps(small: float, large: float) -> None:
    """First of x, then of the activation, no group reaches eps."""
    call = fp8_call("repeats", "e4m3fn", 200, 136)
    call["x"] *= small
    call["w13_scale"] *= large
    for ue8m0 in (False, True):
        check("fused_experts_fp8_block", **call, ue8m0=ue8m0)


def test_sums_of_outputs() -> None:
    check("moe_sum_reduce", x=normal(3, 0, 5), scale=2.5)
    check("moe_sum_reduce", x=normal(5, 3, 4).transpose(0, 2), scale=-1.0)
    x = normal(2, 3, 4)
    x[0, 1, 2], x[1, 0, 0], x[1, 2, 0], x[1, 1, 3] = NAN, INF, -INF, INF
    check("moe_sum_reduce", x=x, scale=2.5)
    check("shared_expert_add", routed=x[:, 0], shared=x[:, 1], alpha=0.4)
    check("shared_expert_add", routed=normal(4, 6).T, shared=normal(6, 8)[:, ::2], alpha=0.0)


# --- products


def test_products_at_edges() -> None:
    for x in (normal(8), normal(2, 0, 8), normal(2, 3, 8).transpose(0, 1), normal(4, 16)[:, ::2]):
        check("linear", x=x, weight=normal(5, 8, seed=1))
    check("linear", x=normal(3, 0), weight=normal(5, 0))
    check("router_gemm", x=normal(3, 0).bfloat16(), weight=normal(5, 0))
    x = normal(3, 8)
    x[0, 0], x[1, 1] = NAN, INF
    check("linear", x=x, weight=normal(5, 8, seed=1))
    check("router_gemm", x=x.bfloat16(), weight=normal(5, 8, seed=1).bfloat16())
    check("absorbed_bmm", x=normal(3, 2, 8), weight=normal(2, 6, 8, seed=1).mT)
    check("absorbed_bmm", x=normal(0, 2, 8), weight=normal(2, 8, 6))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_fp8_products(layout: str, kind: str, rows: int) -> None:
    """Distinct scales, more than one word of exponents along K, partial blocks along both, a NaN code."""
    columns, reduced = 200, 600
    exponents = torch.randint(-9, 3, (rows, 5), generator=Generator().manual_seed(1))
    x, weight = codes(rows, reduced, kind=kind), codes(3, columns, reduced, kind=kind, seed=1)
    x.view(torch.uint8)[1:2, 3] = 0x80 if kind == "e4m3fnuz" else 0xFF
    packed = SCALE_LAYOUTS[layout].pack(torch.ldexp(torch.ones(rows, 5), exponents))
    weight_scale = torch.rand(3, 2, 5, generator=Generator().manual_seed(2))
    call = {"x": x, "x_scale": packed, "out_dtype": torch.bfloat16, "x_scale_layout": layout}
    check("fp8_block_linear", **call, weight=weight[1], weight_scale=weight_scale[1])
    m_indices = tensor([2, 2, -1, 0, -1], dtype=torch.int32)[:rows]
    groups = {"weight": weight, "weight_scale": weight_scale, "m_indices": m_indices, "alignment": 1}
    check("fp8_grouped_linear_contiguous", **call, **groups)
    scales = torch.rand(3, rows, 5, generator=Generator().manual_seed(3))
    call["x_scale"] = SCALE_LAYOUTS[layout].pack(torch.exp2(torch.floor(torch.log2(scales + 0.01))))
    call["x"] = codes(3, rows, reduced, kind=kind)
    groups = {"weight": weight, "weight_scale": weight_scale, "expected_m": 1}
    masked_m = tensor([rows, 0, rows // 2], dtype=torch.int32)
    check("fp8_grouped_linear_masked", **call, **groups, masked_m=masked_m)


@pytest.mark.parametrize(
    ("alignment", "m_indices"),
    [
        (1, [3, 0, -1, 0, 2, -7]),
        (3, [1, 1, -1, 2, 2, 2]),
        (2, [-1, -1, -1, -1, -1, -1]),
        (6, [1, 1, 1, 1, 1, 1]),
        (3, [1, 0, 1, 4, 4, 4]),  # the caller's errors: two experts in a run, and no expert
        (4, []),
    ],
)
def test_contiguous_groups_at_edges(alignment: int, m_indices: list[int]) -> None:
    x = normal(len(m_indices), 8)
    for row, expert in enumerate(m_indices):
        if expert < 0:
            x[row] = NAN  # padding reaches no other row
    ids = tensor(m_indices, dtype=torch.int32)
    check("grouped_linear_contiguous", x=x, weight=normal(4, 5, 8), m_indices=ids, alignment=alignment)


def test_masked_groups_at_edges() -> None:
    x = normal(3, 4, 8)
    x[0, 2:] = NAN
    x[1] = INF
    masked_m = tensor([2, 0, 4], dtype=torch.int32)
    check("grouped_linear_masked", x=x, weight=normal(3, 5, 8), masked_m=masked_m, expected_m=0)
    check("grouped_linear_masked", x=x[:0], weight=normal(0, 5, 8), masked_m=masked_m[:0], expected_m=9)
    check("grouped_linear_masked", x=x[:, :0], weight=normal(3, 5, 8), masked_m=masked_m * 0, expected_m=9)
