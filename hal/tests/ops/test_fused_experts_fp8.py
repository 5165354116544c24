"""FP8 experts against the formula, assignment by assignment: codes, scales, partial blocks, sentinels; and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bounds import DTYPES, UNIT_ROUNDOFF, assert_traces
from fp8_experts_formula import experts
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, to_fp8
from torch_hal.ops import (
    ep_gather,
    ep_scatter_fp8,
    fp8_grouped_linear_contiguous,
    fp8_grouped_linear_masked,
    fused_experts,
    fused_experts_fp8_block,
    per_token_group_quant_fp8,
    silu_and_mul,
)


def make(
    tokens: int = 4,
    top_k: int = 2,
    hidden: int = 256,
    inter: int = 192,
    num_experts: int = 3,
    kind: str = "e4m3fn",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Scales all of which differ, by up to four times; gate and up are about 1."""
    g = torch.Generator().manual_seed(tokens * 100 + top_k * 10 + inter)

    def codes(*shape: int) -> Tensor:
        return to_fp8(torch.randn(*shape, generator=g) * 40, FP8_KINDS[kind])

    def scales(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=g) * 1.5 + 0.5) / 640

    d, i = -(-hidden // 128), -(-inter // 128)
    return {
        "x": torch.randn(tokens, hidden, generator=g).to(dtype),
        "w13": codes(num_experts, 2 * inter, hidden),
        "w13_scale": scales(num_experts, 2 * i, d),
        "w2": codes(num_experts, hidden, inter),
        "w2_scale": scales(num_experts, d, i),
        "topk_weights": torch.rand(tokens, top_k, generator=g) + 0.25,
        "topk_ids": torch.randint(0, num_experts, (tokens, top_k), generator=g).to(torch.int32),
    }


def assert_formula(got: Tensor, call: dict[str, Any], **options: Any) -> None:
    exact, slack = experts(**call, **options)
    assert got.shape == exact.shape and got.dtype == call["x"].dtype and got.is_contiguous()
    rounding = UNIT_ROUNDOFF[got.dtype] * exact.abs()
    assert ((got.double() - exact).abs() <= rounding + slack).all()
    assert exact.count_nonzero() == 0 or (slack.norm() < 0.01 * exact.norm())


# tokens, K, D, I: one expert a token, partial blocks of both dims, less than a block, V2-Lite's 1408 on two ranks.
SHAPES = [(4, 2, 256, 192), (3, 1, 128, 128), (2, 3, 320, 64), (1, 2, 64, 704), (7, 2, 128, 320)]


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("tokens, top_k, hidden, inter", SHAPES)
def test_the_formula(tokens: int, top_k: int, hidden: int, inter: int, ue8m0: bool) -> None:
    call = make(tokens, top_k, hidden, inter)
    assert_formula(fused_experts_fp8_block(**call, ue8m0=ue8m0), call, ue8m0=ue8m0)


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_and_dtype(kind: str, dtype: torch.dtype) -> None:
    call = make(kind=kind, dtype=dtype)
    assert_formula(fused_experts_fp8_block(**call), call)


def test_gate_and_up_have_blocks_of_their_own() -> None:
    """With I = 192, up's first row starts a block, though row 192 of w13 would be in the middle of one."""
    call = make()
    before = fused_experts_fp8_block(**call)
    call["w13_scale"][:, 2:] *= 2  # up's two
    torch.testing.assert_close(fused_experts_fp8_block(**call), 2 * before, rtol=0, atol=0)
    call["w13_scale"][:, 2:] /= 2
    call["w13_scale"][:, :2] = 0  # gate's two
    assert not fused_experts_fp8_block(**call).any()


def test_activations_are_quantised() -> None:
    """Far from `fused_experts` on the weights' values: by more than the formula leaves open."""
    call = make()
    exact, slack = experts(**call)
    rows = {"w13": torch.tensor([0] * 128 + [1] * 64 + [2] * 128 + [3] * 64), "w2": torch.arange(256) // 128}
    values = []
    for name in rows:
        codes, scale = call[name].float(), call[f"{name}_scale"]
        values.append(codes * scale[:, rows[name]][:, :, torch.arange(codes.shape[2]) // 128])
    plain = fused_experts(call["x"], *values, call["topk_weights"], call["topk_ids"])
    error = (plain - exact).norm() / exact.norm()
    assert 0.01 < error < 0.1 and ((plain - exact).abs() > slack).double().mean() > 0.9


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("top_k", [1, 3])
def test_ids_out_of_range_contribute_exactly_nothing(top_k: int, id_dtype: torch.dtype) -> None:
    call = make(6, top_k, 128, 64)
    ids, weights = call["topk_ids"].to(id_dtype), call["topk_weights"]
    outside = torch.tensor([-1, 3, 1000, torch.iinfo(id_dtype).min, torch.iinfo(id_dtype).max], dtype=id_dtype)
    ids[:5, 0], weights[:5, 0] = outside, torch.nan
    ids[1] = -1
    call["topk_ids"] = ids
    got = fused_experts_fp8_block(**call)
    assert not got[1].any()
    assert_formula(got, call)
    nobody = fused_experts_fp8_block(**{**call, "topk_ids": torch.full_like(ids, -1)})
    assert not nobody.any() and nobody.shape == (6, 128)


def test_one_expert_a_token_takes_no_path_of_its_own() -> None:
    """Upstream's lost the scale, and its twin read memory that nobody had written (sglang#40187, #36309)."""
    call = make(5, 1)
    once = fused_experts_fp8_block(**call)
    scaled = fused_experts_fp8_block(**{**call, "topk_weights": 2 * call["topk_weights"]})
    assert torch.equal(scaled, 2 * once) and once.all()


@pytest.mark.parametrize("load", ["uneven", "one expert", "the last alone"])
def test_every_spread_of_the_load(load: str) -> None:
    call = make(9, 2, 128, 64, num_experts=4)
    spread = {"uneven": torch.arange(18) % 9 % 3, "one expert": torch.ones(18), "the last alone": torch.full((18,), 3)}
    call["topk_ids"] = spread[load].view(9, 2).to(torch.int32)
    assert_formula(fused_experts_fp8_block(**call), call)


def test_poison_stays_with_its_token_and_its_expert() -> None:
    call = make(6, 2)
    call["topk_ids"].clamp_(max=1)
    clean = fused_experts_fp8_block(**call)
    call["topk_ids"][0, 1] = 2
    call["w13"].view(torch.uint8)[2] = call["w2"].view(torch.uint8)[2] = 0x7F  # NaN
    call["x"][1, 3] = torch.nan
    got = fused_experts_fp8_block(**call)
    assert got[0].isnan().all()
    torch.testing.assert_close(got[2:], clean[2:])


def test_zero_rows_and_tiny_values() -> None:
    call = make(3)
    call["x"][0] = 0
    call["x"][1] *= 1e-30
    got = fused_experts_fp8_block(**call)
    assert not got[:2].any() and got[2].all()


def test_neither_tokens_nor_experts() -> None:
    assert fused_experts_fp8_block(**make(0, dtype=torch.bfloat16)).shape == (0, 256)
    call = make(3)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        call[name] = call[name][:0]
    got = fused_experts_fp8_block(**{**call, "topk_ids": torch.full((3, 2), -1)})
    assert torch.equal(got, torch.zeros(3, 256))


def test_prepare_keeps_the_plain_layout() -> None:
    weights = list(make().values())[1:5]
    assert fused_experts_fp8_block.prepare is not None
    prepared = fused_experts_fp8_block.prepare(*weights)
    assert all(a is b for a, b in zip(prepared, weights, strict=True))


def test_float64_makes_it_an_oracle() -> None:
    """Of activations: x's codes are what float32 arithmetic gives, in the oracle too."""
    call = make(dtype=torch.bfloat16)
    wide = {k: v.double() if v.is_floating_point() and v.element_size() > 1 else v for k, v in call.items()}
    got, (exact, slack) = fused_experts_fp8_block.reference(**wide), experts(**call)
    assert got.dtype == torch.float64 and ((got - exact).abs() <= slack).all()


@pytest.mark.parametrize("form", ["contiguous", "masked"])
def test_apart_it_is_scatter_two_grouped_gemms_and_gather(form: str) -> None:
    """With NaN in every row that the contract lets kernels leave unwritten."""
    call = make(7, 3, 256, 128)
    call["topk_ids"][2], call["topk_ids"][4, 1] = -1, -1
    codes, scale = per_token_group_quant_fp8(call["x"], 128)
    alignment = 32  # no expert has more rows, so that they are the masked form's M too
    rows, row_scale, m_indices, index = ep_scatter_fp8(codes, scale, call["topk_ids"], 3, alignment)
    assert torch.equal(m_indices[:96:32].sort().values, torch.tensor([0, 1, 2], dtype=torch.int32))
    padding = (m_indices[:96] < 0)[:, None]

    def gemm(x: Tensor, x_scale: Tensor, name: str) -> Tensor:
        weights = call[name], call[f"{name}_scale"]
        if form == "contiguous":
            y = fp8_grouped_linear_contiguous(x, x_scale, *weights, m_indices[:96], alignment, torch.float32)
        else:
            used = (m_indices[:96].view(3, 32) >= 0).sum(1, dtype=torch.int32)
            blocks = x.view(3, 32, -1), x_scale.view(3, 32, -1)
            y = fp8_grouped_linear_masked(*blocks, *weights, used, 5, torch.float32).flatten(0, 1)
        return y.masked_fill(padding, torch.nan)

    gate_up = gemm(rows[:96], row_scale[:96].masked_fill(padding, torch.nan), "w13")
    outputs = gemm(*per_token_group_quant_fp8(silu_and_mul(gate_up), 128), "w2")
    got = ep_gather(outputs, index, call["topk_weights"])
    assert_formula(got, call)
    assert_formula(fused_experts_fp8_block(**call), call)


def test_traces() -> None:
    assert_traces(fused_experts_fp8_block, **make(2, 1, 128, 64, dtype=torch.bfloat16))
    assert_traces(fused_experts_fp8_block, **make(1, 1, 128, 64), ue8m0=True)


CALL = make()


def changed(**change: Any) -> Callable[[], Tensor]:
    return lambda: fused_experts_fp8_block(**{**CALL, **change})


@pytest.mark.parametrize(
    "call, message",
    [
        (
            changed(w13_scale=CALL["w13_scale"][:, :3]),
            r"'w13_scale'.*2\*ceil_div\(I,BLOCK\) = 4.*got shape \(3, 3, 2\)",
        ),
        (changed(w2_scale=CALL["w2_scale"][..., :1]), r"'w2_scale'.*ceil_div\(I,BLOCK\) = 2.*got shape \(3, 2, 1\)"),
        (changed(w13=CALL["w13"][:, :-2]), r"'w13'.*2\*I = 384.*got shape \(3, 382, 256\)"),
        (changed(w2=CALL["w2"][:2]), r"'w2'.*E = 3.*got shape \(2, 256, 192\)"),
        (changed(w13=CALL["w13"].to(torch.bfloat16)), r"'w13': expected torch.float8_e4m3fn or .*got torch.bfloat16"),
        (changed(w2=CALL["w2"].view(torch.float8_e4m3fnuz)), r"'w2': expected torch.float8_e4m3fn, got .*e4m3fnuz"),
        (changed(w2_scale=CALL["w2_scale"].half()), r"'w2_scale': expected torch.float32, got torch.float16"),
        (changed(topk_weights=CALL["topk_weights"].bfloat16()), r"'topk_weights'.*float32.*got torch.bfloat16"),
        (changed(topk_ids=CALL["topk_ids"].to(torch.int16)), r"'topk_ids'.*int32 or torch.int64, got torch.int16"),
        (changed(topk_ids=CALL["topk_ids"][:2]), r"'topk_ids'.*T = 4.*got shape \(2, 2\)"),
        (changed(topk_weights=torch.ones(4, 0), topk_ids=torch.ones(4, 0).int()), r"place for one expert.*K=0"),
    ],
)
def test_errors_name_op_argument_expected_and_got(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"fused_experts_fp8_block: argument .*{message}"):
        call()
