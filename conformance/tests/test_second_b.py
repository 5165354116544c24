"""The second oracles of norms, rope, quantisation, attention and caches against the ops' declarations, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import samples_attention
import samples_dense
import torch
from torch import Generator, Tensor

from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS
from torch_hal.kv_formats import KV_FORMATS
from torch_hal.op import declared
from torch_hal_conformance.oracle import copied, exact, native
from torch_hal_conformance.second import ORACLES, activation_norm, attention, compare, kv_cache, quant, rope, to_numpy

MODULES = (activation_norm, attention, kv_cache, quant, rope)
OPS = sorted(name for module in MODULES for name in module.ORACLES)
SAMPLES = {**samples_dense.SAMPLES, **samples_attention.SAMPLES}
LAYOUTS = [(layout, ue8m0) for layout in SCALE_LAYOUTS for ue8m0 in (False, True)]
INF, NAN = math.inf, math.nan


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def agree(op: str, **arguments: Any) -> None:
    """The declaration in float64 and the second oracle give the same."""
    result = exact(declared()[op], arguments)
    compare(op, arguments, result.results, result.terms or None)


def agree_in_float32(op: str, **arguments: Any) -> None:
    """The declaration and the second oracle, both in float32, give the same codes and scales, to the last bit."""
    results = native(declared()[op], arguments)
    named = {name: to_numpy(value) for name, value in arguments.items()}
    is_float = {name for name, value in named.items() if isinstance(value, np.ndarray) and value.dtype.kind == "f"}
    second = ORACLES[op](
        **{name: value.astype(np.float32) if name in is_float else value for name, value in named.items()}
    )
    assert len(results) == len(second)
    for first, other in zip((to_numpy(result) for result in results), second, strict=True):
        bits = [value.bits if hasattr(value, "bits") else value for value in (first, other)]
        assert np.array_equal(*bits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 6])
@pytest.mark.parametrize("op", OPS)
def test_samples(op: str, size: int, dtype: torch.dtype) -> None:
    agree(op, **SAMPLES[op](seeded(size), dtype, size))


def test_every_op_has_an_oracle_of_its_arguments() -> None:
    assert len(OPS) == 30
    for op in OPS:
        arguments = SAMPLES[op](seeded(7), torch.float32, 2)
        before = {name: to_numpy(value) for name, value in copied(arguments).items()}
        ORACLES[op](**{name: to_numpy(value) for name, value in arguments.items()})
        for name, value in arguments.items():  # the oracle leaves its arguments alone
            np.testing.assert_equal(bits_of(to_numpy(value)), bits_of(before[name]))


def bits_of(value: Any) -> Any:
    return getattr(value, "bits", value)


# Activations and norms


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations_at_the_edges(op: str) -> None:
    gates = torch.tensor([0.0, -0.0, 1e-30, 0.7, -0.7, 6.0, -6.0, 40.0, -40.0, 800.0, -800.0, 1e30, INF, -INF, NAN])
    for up in (1.0, -3.0, 0.0, INF, NAN):
        agree(op, x=torch.cat([gates, torch.full_like(gates, up)]))
    agree(op, x=normal(2, 3, 8))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
def test_norms_at_the_edges(eps: float) -> None:
    x = normal(8, 16)
    x[1] = 0
    x[2, 3], x[3, 4], x[4, 5] = INF, -INF, NAN
    x[5] *= 1e-20
    x[6] *= 1e15
    residual = normal(8, 16, seed=1)
    residual[1], residual[2, 3], residual[7, 0] = 0, -INF, NAN
    weight = normal(16, seed=2)
    agree("rms_norm", x=x, weight=weight, eps=eps)
    agree("rms_norm", x=x[0], weight=weight, eps=eps)
    agree("rms_norm", x=x[:, None].bfloat16(), weight=weight, eps=eps)
    for op in ("fused_add_rms_norm", "fused_add_rms_norm_"):
        agree(op, x=x, residual=residual, weight=weight, eps=eps)


# Rope


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [0, 2, 6, 8])
def test_rope(rotated: int, interleaved: bool) -> None:
    angles = normal(11, rotated // 2)
    cache = torch.cat([angles.cos(), 1.5 * angles.sin()], -1)
    positions = torch.tensor([10, 0, 3, 3, 7], dtype=torch.int32)
    q, k = normal(5, 3, 8), normal(5, 2, 8, seed=1)
    q[1, 2, 0], q[2, 0, 7], k[0, 1, 1] = INF, NAN, -INF
    agree("rope", q=q, k=k, positions=positions, cos_sin_cache=cache, interleaved=interleaved)


# Quantisation: of x itself, then of what an op makes of it


def edges(rows: int, columns: int, part: int) -> Tensor:
    """Rows of zeros, far below eps, over seven decades, of ties and of exact powers; parts with inf and with NaN."""
    x = normal(max(rows, 12), columns)
    x[1] = 0
    x[2, :part] = 0
    x[3] *= 1e-14
    x[4] *= torch.logspace(-3, 4, columns)
    ties = (torch.arange(16, 32) / 16).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(16)
    x[5] = ties.repeat(columns)[:columns]
    x[6] = x[5] * 2.0 ** -torch.arange(columns).remainder(15)
    x[5:7, ::part] = 448.0
    x[7, ::part] = 448.0 * (1 + 2.0**-22)
    x[8, 0], x[9, -1], x[10, columns // 2] = INF, NAN, -INF
    x[11] = -0.0
    return x[:rows]


@pytest.mark.parametrize("fp8", FP8_KINDS)
@pytest.mark.parametrize(("scale_layout", "ue8m0"), LAYOUTS)
@pytest.mark.parametrize("group_size", [1, 16, 32])
def test_group_quantisation(group_size: int, scale_layout: str, ue8m0: bool, fp8: str) -> None:
    x = edges(12, 160, group_size)
    options = {"group_size": group_size, "fp8": fp8, "scale_layout": scale_layout, "ue8m0": ue8m0}
    agree("per_token_group_quant_fp8", x=x, **options)
    agree("per_token_group_quant_fp8", x=x.view(3, 4, 160), eps=1e-4, **options)
    agree("silu_and_mul_quant_fp8", x=edges(12, 320, group_size), **options)
    agree("masked_silu_and_mul_quant_fp8", x=edges(12, 320, group_size).view(4, 3, 320), masked_m=MASKED, **options)
    agree("masked_silu_and_mul_quant_fp8", x=normal(0, 3, 320), masked_m=MASKED[:0], **options)
    weight, residual = normal(160, seed=1), normal(12, 160, seed=2)
    agree("rms_norm_quant_fp8", x=x, weight=weight, eps=1e-6, **options)
    agree("fused_add_rms_norm_quant_fp8", x=x, residual=residual, weight=weight, eps=1e-6, quant_eps=0.1, **options)


MASKED = torch.tensor([2, 0, 3, 1], dtype=torch.int32)


@pytest.mark.parametrize("fp8", FP8_KINDS)
def test_one_scale(fp8: str) -> None:
    x = edges(12, 96, 96)
    agree("per_token_quant_fp8", x=x, fp8=fp8)
    agree("per_token_quant_fp8", x=x[4], fp8=fp8, eps=1.0)
    agree("per_token_quant_fp8", x=x.view(3, 4, 96)[:0], fp8=fp8)
    for part in (*x, x[:8], x[:0], x[0, 0], x[8:]):
        agree("per_tensor_quant_fp8", x=part, fp8=fp8)
    for scale in (1.0, 0.01, 3e-5, 1e30):
        agree("static_quant_fp8", x=x, scale=torch.tensor([scale]), fp8=fp8)


@pytest.mark.parametrize("fp8", FP8_KINDS)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_block_quantisation(ue8m0: bool, fp8: str) -> None:
    for shape in ((130, 200), (2, 1, 129), (0, 128), (3, 0), (0, 4, 4)):
        weight = normal(*shape)
        agree("block_quant_fp8", weight=weight, fp8=fp8, ue8m0=ue8m0)
    weight = edges(12, 300, 128).repeat(12, 1)
    agree("block_quant_fp8", weight=weight, fp8=fp8, ue8m0=ue8m0, eps=1e-4)


def test_quantisation_in_float32() -> None:
    """Where no sum is in the way the codes are those of float32 division, not merely near them."""
    x = torch.cat([edges(8, 256, 32), 7 * torch.randint(1, 300, (40, 256), generator=seeded(3)) / 3, normal(40, 256)])
    for fp8, ue8m0 in itertools.product(FP8_KINDS, (False, True)):
        agree_in_float32("per_token_group_quant_fp8", x=x, group_size=32, fp8=fp8, ue8m0=ue8m0)
        agree_in_float32("block_quant_fp8", weight=x, fp8=fp8, ue8m0=ue8m0)
        agree_in_float32("per_token_quant_fp8", x=x, fp8=fp8)
        agree_in_float32("per_tensor_quant_fp8", x=x, fp8=fp8)
        agree_in_float32("static_quant_fp8", x=x, scale=torch.tensor([0.01]), fp8=fp8)


# Codes


def every_code(fp8: str) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FP8_KINDS[fp8].dtype)


@pytest.mark.parametrize("fp8", FP8_KINDS)
def test_block_scales(fp8: str) -> None:
    scales = torch.tensor(
        [1.0, 0.25, 3e-3, 0.0, 1e-40, 2.0**-126, 2.0**127, 3e38, NAN, 1.1, 2.0**-10 * (1 + 2**-23), INF]
    )
    weight = every_code(fp8).view(1, 2, 128).repeat(12, 1, 1)
    agree("block_dequant_fp8", weight=weight, weight_scale=scales.view(12, 1, 1), out_dtype=torch.bfloat16)
    agree("block_requant_ue8m0_fp8", weight=weight, weight_scale=scales.view(12, 1, 1))
    ragged = every_code(fp8).repeat(129).view(129, 256)[:, 20:220]
    agree("block_dequant_fp8", weight=ragged, weight_scale=normal(2, 2), out_dtype=torch.float32)
    agree("block_requant_ue8m0_fp8", weight=ragged, weight_scale=normal(2, 2).abs())


@pytest.mark.parametrize("to", FP8_KINDS)
@pytest.mark.parametrize("fp8", FP8_KINDS)
def test_kinds(fp8: str, to: str) -> None:
    agree("convert_kind_fp8", codes=every_code(fp8), scale=torch.tensor([0.0, 1.0, 1e-30, NAN]), fp8=to)


# Caches


SLOTS = torch.tensor([5, -1, 0, 12, 11, -(2**31), 2**31 - 1, 3])  # 12 slots, four of them named


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pages", [0, 3])
def test_caches(pages: int, ids: torch.dtype) -> None:
    slots = SLOTS.to(ids)
    cache = normal(pages, 4, 10)
    cache[1:2, 1:] = NAN
    c_kv, k_pe = normal(8, 6, seed=1), normal(8, 4, seed=2)
    c_kv[0, 0], k_pe[2, 1] = NAN, INF
    agree("mla_kv_store", cache=cache, slots=slots, c_kv=c_kv, k_pe=k_pe)
    agree("mla_kv_gather", cache=cache, slots=slots.repeat(2), kv_lora_rank=6)
    agree("mla_kv_gather", cache=cache, slots=slots, kv_lora_rank=10)
    heads = {"k_cache": normal(pages, 4, 2, 3), "v_cache": normal(pages, 4, 2, 5)}
    agree("mha_kv_store", **heads, slots=slots, k=normal(8, 2, 3, seed=3), v=normal(8, 2, 5, seed=4))


@pytest.mark.parametrize("fp8", FP8_KINDS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("pages", [0, 3])
def test_caches_of_codes(pages: int, kv_format: str, fp8: str) -> None:
    width = KV_FORMATS[kv_format].row_bytes(256, 6)
    cache = torch.randint(256, (pages, 4, width), dtype=torch.uint8, generator=seeded(1)).view(FP8_KINDS[fp8].dtype)
    tokens = {"slots": SLOTS, "c_kv": edges(8, 256, 128), "k_pe": edges(8, 6, 3), "kv_format": kv_format}
    agree("mla_kv_store_fp8", cache=cache, **tokens)
    agree("mla_kv_store_fp8", cache=cache, **{**tokens, "c_kv": edges(12, 256, 128)[4:]}, eps=1e-4)
    agree("mla_kv_store_fp8", cache=cache, **{**tokens, "k_pe": torch.full((8, 6), NAN)})
    agree("mla_kv_store_fp8", cache=cache, **{**tokens, "k_pe": torch.full((8, 6), 3.4e38)})
    agree_in_float32("mla_kv_store_fp8", cache=cache, **tokens)
    for dtype in (torch.bfloat16, torch.float32):
        agree("mla_kv_gather_fp8", cache=cache, slots=SLOTS, kv_lora_rank=256, kv_format=kv_format, out_dtype=dtype)


# Attention


def varlen(queries: list[int], keys: list[int], heads: int = 2) -> dict[str, Any]:
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (queries, keys))
    q, k, v = (
        normal(sum(queries) + 2, heads, 6),
        normal(sum(keys) + 1, heads, 6, seed=1),
        normal(sum(keys) + 1, heads, 4),
    )
    q[sum(queries) :], k[sum(keys) :], v[sum(keys) :] = NAN, NAN, INF
    longest = {"max_q": max(queries, default=0), "max_k": max(keys, default=0)}
    return {"q": q, "k": k, "v": v, "cu_q": cu_q, "cu_k": cu_k, "scale": 0.7, **longest}


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal: bool) -> None:
    for queries, keys in (([3, 4, 0, 1, 2], [5, 2, 3, 1, 0]), ([], []), ([0], [0]), ([1], [1]), ([4], [1])):
        agree("mha_varlen", **varlen(queries, keys), causal=causal)
    for tensor, value in itertools.product("qkv", (NAN, INF, -INF)):
        arguments = varlen([2, 3, 2], [2, 3, 4])
        arguments[tensor][3, 1, 2] = value  # the second sequence's; the others must not hear of it
        agree("mha_varlen", **arguments, causal=causal)
    arguments = varlen([3], [4])
    arguments["q"] *= 300  # scores of thousands, of which one decides
    agree("mha_varlen", **arguments, causal=causal)


def decoding(lens: list[int], queries: int, page_size: int) -> dict[str, Any]:
    """Pages in no order; NaN in rows past the lengths; entries that name no page past a sequence's own."""
    per_sequence = -(-max(lens, default=0) // page_size) + 1
    pages = len(lens) * per_sequence
    table = torch.randperm(pages, generator=seeded(0)).view(len(lens), per_sequence).to(torch.int32)
    cache = torch.full((pages, page_size, 260), NAN)
    for b, length in enumerate(lens):
        for j in range(length):
            cache[table[b, j // page_size], j % page_size] = normal(260, seed=100 * b + j)
        table[b, -(-length // page_size) :] = (-1, 1 << 30, pages)[b % 3]
    q = normal(len(lens), queries, 2, 260)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return {
        "q_nope": q[..., :256],
        "q_pe": q[..., 256:],
        "cache": cache,
        "page_table": table,
        "seq_lens": seq_lens,
        "scale": 0.1,
    }


@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_decoding(page_size: int, queries: int) -> None:
    for lens in ([4, 0, 9, 1, 2], [], [0, 0], [1]):
        agree("mla_decode", **decoding(lens, queries, page_size))


@pytest.mark.parametrize("fp8", FP8_KINDS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_decoding_of_codes(kv_format: str, fp8: str) -> None:
    for lens, queries in (([4, 0, 9, 1], 2), ([], 1), ([0], 1), ([5, 1], 3)):
        arguments = decoding(lens, queries, 4)
        rows = arguments["cache"].flatten(0, 1)
        codes = torch.zeros(*arguments["cache"].shape[:2], KV_FORMATS[kv_format].row_bytes(256, 4), dtype=torch.uint8)
        codes = codes.view(FP8_KINDS[fp8].dtype)
        declared()["mla_kv_store_fp8"](codes, torch.arange(len(rows)), rows[:, :256], rows[:, 256:], kv_format)
        agree("mla_decode_fp8", **{**arguments, "cache": codes}, kv_format=kv_format)


def test_merging() -> None:
    """Each pair of these lse, with NaN in the outputs of empty sides."""
    lses = torch.tensor([0.0, -2.5, 90.0, -800.0, 1e6, INF, -INF])
    lse_a, lse_b = lses.repeat_interleave(7).view(7, 7), lses.repeat(7).view(7, 7)
    out_a, out_b = normal(7, 7, 4), normal(7, 7, 4, seed=1)
    out_a[lse_a.isinf()], out_b[lse_b.isinf()] = NAN, INF
    agree("merge_state", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def test_concatenation() -> None:
    agree("concat_mla_k", k_nope=torch.tensor([[[NAN, 1.0], [2.0, -INF]]]), k_pe=torch.tensor([[[3.0, -0.0, NAN]]]))
    agree("concat_mla_absorb_q", q_nope=normal(2, 3, 2, 4), q_pe=normal(2, 3, 2, 1))
