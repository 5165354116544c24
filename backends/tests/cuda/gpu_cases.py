"""The kernels that `check_on_gpu` runs: how to make their arguments, and the corner cases of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import Case, excess, refused, runner, seeded
from torch import Tensor

import torch_hal as hal
from torch_hal.formats import SCALE_LAYOUTS
from torch_hal.runtime import Runtime

Corner = Iterator[tuple[str, bool, str]]
BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def within(case: Case, ops: hal.OpSet, *args: Any) -> tuple[bool, str]:
    """Whether a call is right, and by how much of the bound it misses."""
    worst = excess(case, args, runner(hal.ops.declared()[case.op], getattr(ops, case.op))(*args))
    return worst <= 1, f"{worst:.2f} of the bound"


# sgl_kernel: fused_add_rms_norm_, and the functional form that copies for it


def norm_arguments(
    ops: hal.OpSet, seed: int, shape: tuple[int, ...] = (96, 7168), dtype: torch.dtype = BF16
) -> tuple[Any, ...]:
    normal = seeded(seed, ops.torch_device)
    return normal(*shape).to(dtype), normal(*shape).to(dtype), normal(shape[-1]).to(dtype), 1e-6


def norm_corners(ops: hal.OpSet) -> Corner:
    norm = ops.fused_add_rms_norm_
    for shape in ((1, 7168), (5, 63), (2, 3, 576), (100,), (3, 24576)):
        yield f"shape {shape}", *within(NORM, ops, *norm_arguments(ops, 1, shape))
    for dtype in (F16, F32):
        yield f"{dtype}", *within(NORM, ops, *norm_arguments(ops, 1, (7, 2048), dtype))
    empty = norm_arguments(ops, 1, (0, 7168))
    norm(*empty)
    Runtime(ops.device).synchronize()
    torch.zeros(1, device=ops.torch_device)  # a failed empty launch shows in the call after it
    yield "no rows", True, "nothing launched, nothing failed later"
    x, residual, weight, eps = norm_arguments(ops, 1, (8, 1152))
    yield "sliced rows refused", *refused(norm, x[:, :576], residual[:, :576], weight[:576], eps, text="contiguous")
    yield "float32 weight refused", *refused(norm, x, residual, weight.float(), eps, text="its bytes")
    shifted = torch.zeros(8 * 1152 + 1, dtype=BF16, device=ops.torch_device)[1:].view(8, 1152)
    yield "odd offset refused", *refused(norm, shifted, residual, weight, eps, text="16 bytes")
    functional = hal.bind(ops.torch_device, hal.Policy(require={"fused_add_rms_norm": "sgl_kernel"}))
    x_before, residual_before = x.clone(), residual.clone()
    norm_out, total = functional.fused_add_rms_norm(x, residual, weight, eps)
    norm(x, residual, weight, eps)
    copied = torch.equal(norm_out, x) and torch.equal(total, residual) and not torch.equal(norm_out, x_before)
    yield "functional form copies", copied and not torch.equal(total, residual_before), "equal to the twin's results"


NORM = Case("fused_add_rms_norm_", "sgl_kernel", norm_arguments, norm_corners)


# sgl_kernel: per_token_group_quant_fp8


def quant_arguments(ops: hal.OpSet, seed: int, rows: int = 37, layout: str = "mn_f32_tma") -> tuple[Any, ...]:
    normal = seeded(seed, ops.torch_device)
    x = (normal(rows, 7168) * normal(rows, 1).exp()).to(BF16)
    x[:, :128] = 0
    return x, 128, "e4m3fn", layout, 1e-10


def quant_corners(ops: hal.OpSet) -> Corner:
    quant = ops.per_token_group_quant_fp8
    for rows, layout in ((64, "row_f32"), (1, "mn_f32_tma"), (1, "row_f32"), (4096, "mn_f32_tma")):
        yield f"{rows} rows, {layout}", *within(QUANT, ops, *quant_arguments(ops, 1, rows, layout))
    x, *rest = quant_arguments(ops, 1)
    codes, scale = quant(x, *rest)
    yield "scales lie as named", SCALE_LAYOUTS["mn_f32_tma"].matches(scale), f"strides {scale.stride()}"
    yield "padding rows are zero", not scale.as_strided((56, 40), (40, 1))[:, 37:].any(), "3 of 40"
    yield "zero groups", not codes[:, :128].float().any() and bool((scale[:, 0] > 0).all()), "codes 0, scale eps / 448"
    codes, scale = quant(x[:0], *rest)
    yield "no rows", codes.shape == (0, 7168) and scale.shape == (0, 56), f"{tuple(codes.shape)}, {tuple(scale.shape)}"
    yield "other eps refused", *refused(quant, x, 128, "e4m3fn", "row_f32", 1e-4, text="eps")
    yield "packed scales refused", *refused(quant, x, 128, "e4m3fn", "mn_ue8m0", text="mn_ue8m0")
    yield "sliced rows refused", *refused(quant, x[:, :3584], *rest, text="contiguous")


QUANT = Case("per_token_group_quant_fp8", "sgl_kernel", quant_arguments, quant_corners)


# DeepGEMM: fp8_block_linear


def linear_arguments(ops: hal.OpSet, seed: int, m: int = 64, n: int = 2112, k: int = 7168) -> tuple[Any, ...]:
    normal = seeded(seed, ops.torch_device)
    x, weight = normal(m, k).to(FP8), normal(n, k).to(FP8)
    x_scale, weight_scale = normal(m, -(-k // 128)).exp(), normal(-(-n // 128), -(-k // 128)).exp()
    (weight, weight_scale), layout = ops.fp8_block_linear.prepare(weight, weight_scale)
    scales = ops.fp8_block_linear.formats["x_scale_layout"]
    return x, SCALE_LAYOUTS[scales].pack(x_scale), weight, weight_scale, BF16, scales, layout


def linear_corners(ops: hal.OpSet) -> Corner:
    linear = ops.fp8_block_linear
    for m, n, k in ((1, 576, 7168), (3, 7168, 2048), (130, 8, 16), (33, 72, 144), (7, 1000, 192), (65, 328, 1040)):
        yield f"M {m}, N {n}, K {k}", *within(LINEAR, ops, *linear_arguments(ops, 1, m, n, k))
    x, x_scale, weight, weight_scale, out_dtype, scales, layout = linear_arguments(ops, 2, 64, 256, 512)
    none = linear(x[:0], SCALE_LAYOUTS[scales].pack(x_scale[:0]), weight, weight_scale, out_dtype, scales, layout)
    yield "no rows", none.shape == (0, 256), f"{tuple(none.shape)}"
    wider = torch.zeros(64, 1024, device=ops.torch_device).to(FP8)
    wider[:, 128:640] = x
    sliced = (wider[:, 128:640], x_scale, weight, weight_scale, out_dtype, scales, layout)
    yield "rows of a wider matrix", *within(LINEAR, ops, *sliced)
    poisoned = x.clone()
    poisoned.view(torch.uint8)[5, 7] = 0x7F
    out = linear(poisoned, x_scale, weight, weight_scale, out_dtype, scales, layout)
    yield "NaN stays in its row", bool(out[5].isnan().all()) and int(out.isnan().any(1).sum()) == 1, "1 row of 64"
    many, many_scale, *same = linear_arguments(ops, 4, 4096, 2112, 7168)
    rows = linear(many, many_scale, *same)
    few = [linear(many[:m], SCALE_LAYOUTS[scales].pack(many_scale[:m]), *same) for m in (1, 33, 130)]
    yield "a row ignores the others", all(torch.equal(y, rows[: y.shape[0]]) for y in few), "of 4096, alone or with 32"
    row_major = x_scale.contiguous()
    tail = (weight, weight_scale, out_dtype)
    yield "row-major scales refused", *refused(linear, x, row_major, *tail, "row_f32", text="mn_f32_tma")
    wrong = refused(linear, x, row_major, *tail, scales, error=hal.ArgumentError, text="strides")
    yield "mislabelled scales refused", *wrong
    yield "float16 result refused", *refused(linear, x, x_scale, weight, weight_scale, F16, scales, text="bfloat16")
    yield "N = 100 refused", *refused(linear, *linear_arguments(ops, 1, 64, 100, 256), text="N % 8")
    fused = torch.zeros(2, 8, device=ops.torch_device)
    fused[:, 2:6] = weight_scale
    slice_ = (x, x_scale, weight, fused[:, 2:6], out_dtype, scales)
    yield "sliced weight scales refused", *refused(linear, *slice_, text="prepare")
    (dense, dense_scale), _ = linear.prepare(weight, fused[:, 2:6])
    yield "and prepared", *within(LINEAR, ops, x, x_scale, dense, dense_scale, out_dtype, scales, layout)
    quantised = ops.per_token_group_quant_fp8(seeded(3, ops.torch_device)(64, 512).to(BF16), 128, "e4m3fn", scales)
    yield "after the quantiser", *within(LINEAR, ops, *quantised, *tail, scales, layout)


LINEAR = Case("fp8_block_linear", "deep_gemm", linear_arguments, linear_corners, inner=2.0**-14)


# FlashMLA: mla_decode

_PAGES, _TABLE = 200, 40


def decode_arguments(
    ops: hal.OpSet, seed: int, lens: list[int] | None = None, heads: int = 16, queries: int = 1,
    dtype: torch.dtype = BF16, fill: float = math.nan, beyond: int = 2**30,
) -> tuple[Any, ...]:  # fmt: skip
    """The cache is ``fill`` wherever no sequence has a token; page tables hold ``beyond`` past a sequence's pages."""
    device, normal = ops.torch_device, seeded(seed, ops.torch_device)
    if lens is None:
        lens = [[0, 1, 64, 65, 2000], [2560, 0, 63, 128, 7], [5, 700, 0, 2, 1999]][seed % 3]
    cache = torch.full((_PAGES, 64, 576), fill, dtype=dtype, device=device)
    table = torch.full((len(lens), _TABLE), beyond, dtype=torch.int32, device=device)
    free = iter(torch.randperm(_PAGES, generator=torch.Generator().manual_seed(seed)).tolist())
    for row, length in zip(table, lens, strict=True):
        for place in range(-(-length // 64)):
            row[place] = page = next(free)
            tokens = min(64, length - place * 64)
            cache[page, :tokens] = normal(tokens, 576).to(dtype)
    q = normal(len(lens), queries, heads, 576).to(dtype)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    (plan,), layout = ops.mla_decode.plan(seq_lens, lens, heads, queries, 64)
    return q[..., :512].contiguous(), q[..., 512:].contiguous(), cache, table, seq_lens, 0.1352, plan, layout


def decode_corners(ops: hal.OpSet) -> Corner:
    decode = ops.mla_decode
    for heads, queries in ((128, 1), (128, 2), (16, 4), (1, 1), (20, 3), (200, 1)):
        args = decode_arguments(ops, 1, [0, 1, 64, 65, 1500], heads, queries)
        yield f"{heads} heads, {queries} queries", *within(DECODE, ops, *args)
    half = replace(DECODE, inner=2.0**-11)
    yield "float16", *within(half, ops, *decode_arguments(ops, 1, dtype=F16))
    yield "infinite padding", *within(DECODE, ops, *decode_arguments(ops, 1, fill=math.inf, beyond=-1))
    yield "all empty", *within(DECODE, ops, *decode_arguments(ops, 1, [0, 0, 0]))
    q_nope, q_pe, cache, table, seq_lens, scale, plan, _ = args = decode_arguments(ops, 2)
    out, lse = decode(*args)
    yield "no plan", torch.equal(decode(*args[:6])[0], out), "planned in the call, equal"
    q = torch.cat([q_nope, q_pe], -1)
    joined = decode(q[..., :512], q[..., 512:], *args[2:])
    yield "slices of one query", torch.equal(joined[0], out) and torch.equal(joined[1], lse), "no copy, equal"
    pool = torch.zeros(_PAGES, 3, 64, 576, dtype=BF16, device=ops.torch_device)
    pool[:, 1] = cache
    yield "one layer of a pool", torch.equal(decode(q_nope, q_pe, pool[:, 1], *args[3:])[0], out), "equal"
    none = decode(q_nope[:0], q_pe[:0], cache, table[:0], seq_lens[:0], scale)
    yield "no sequences", none[0].shape == (0, 1, 16, 512) and none[1].shape == (0, 1, 16), f"{tuple(none[0].shape)}"
    sizes = {
        ops.mla_decode.plan(torch.full_like(seq_lens, n), [n] * 5, 16, 1, 64).tensors[0].numel() for n in (0, 1, 2560)
    }
    yield "a plan's size", len(sizes) == 1, f"{sizes} numbers, whatever the lengths"
    planning = Runtime(ops.device).capture(lambda: decode(*args[:6]))
    fresh = decode_arguments(ops, 3)
    for old, new in zip(args[:5], fresh[:5], strict=True):
        old.copy_(new)
    planning.replay()
    yield "plan captured too", excess(DECODE, fresh, planning.results) <= 1, "a graph that plans for itself"
    wrong = refused(decode, *args[:6], plan, "another", error=hal.ArgumentError, text="layout 'another'")
    yield "another's plan refused", *wrong
    yield "scale 0 refused", *refused(decode, *args[:5], 0.0, text="-inf")
    halves = cache.view(2 * _PAGES, 32, 576)
    yield "pages of 32 refused", *refused(decode, q_nope, q_pe, halves, table, seq_lens, scale, text="pages of 64")
    wide = [x.float() for x in (q_nope, q_pe, cache)]
    yield "float32 refused", *refused(decode, *wide, table, seq_lens, scale, text="bfloat16")


DECODE = Case("mla_decode", "flash_mla", decode_arguments, decode_corners, inner=2.0**-8)


# NCCL: all_reduce


def reduce_arguments(ops: hal.OpSet, seed: int) -> tuple[Any, ...]:
    return seeded(seed, ops.torch_device)(64, 7168).to(BF16), str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def reduce_corners(ops: hal.OpSet) -> Corner:
    x, group = reduce_arguments(ops, 1)
    out = ops.all_reduce(x, group)
    yield "a new tensor", out.data_ptr() != x.data_ptr(), f"{dist.get_world_size()} ranks"
    yield "no rows", ops.all_reduce(x[:0], group).shape == (0, 7168), "(0, 7168)"
    strided: Tensor = ops.all_reduce(x.t(), group)
    yield "strided", torch.equal(strided, out.t()), f"strides {strided.stride()}"
    yield "unknown group", *refused(ops.all_reduce, x, "no such group", error=hal.ArgumentError, text="no such group")
    gloo = dist.new_group(backend="gloo")
    yield "a gloo group refused", *refused(ops.all_reduce, x, gloo.group_name, text="gloo")


REDUCE = Case("all_reduce", "nccl", reduce_arguments, reduce_corners)

CASES = (NORM, QUANT, LINEAR, DECODE, REDUCE)
