"""The adapters on the host, over stand-ins of their libraries: shapes, layouts, plans, empties and conversions."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_hal as hal
from torch_hal.formats import SCALE_LAYOUTS
from torch_hal_cuda import libraries
from torch_hal_cuda.alignment import check_aligned
from torch_hal_cuda.kernels import KERNELS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GPU = hal.DeviceInfo("nvidia", "cuda", arch="sm_90")


def test_importing_and_listing_loads_no_kernel_library_and_no_context() -> None:
    code = """
import sys, torch, torch_hal_cuda
assert len(list(torch_hal_cuda.torch_hal_kernels())) >= 5
list(torch_hal_cuda.torch_hal_devices())
libraries = {"sgl_kernel", "deep_gemm", "flashinfer", "flash_mla", "tvm_ffi"}
print(sorted(libraries & {name.partition(".")[0] for name in sys.modules}), torch.cuda.is_initialized())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] False"


def test_adapters_have_their_ops_signatures(sgl_kernel: None, deep_gemm: ModuleType) -> None:
    from torch_hal.loading import load_kernel

    for kernel in KERNELS:
        loaded = load_kernel(kernel, hal.ops.declared()[kernel.op])
        assert loaded.run.__defaults__ == hal.ops.declared()[kernel.op].reference.__defaults__


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,)])
def test_norm(sgl_kernel: None, shape: tuple[int, ...]) -> None:
    from torch_hal_cuda.norm import fused_add_rms_norm_

    x, residual, weight = (torch.randn(s, dtype=BF16) for s in (shape, shape, (64,)))
    expected = hal.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    fused_add_rms_norm_(x, residual, weight, 1e-6)
    torch.testing.assert_close((x, residual), expected, rtol=2**-8, atol=0)


def test_norm_launches_nothing_for_no_rows(sgl_kernel: None) -> None:
    from torch_hal_cuda.norm import fused_add_rms_norm_

    none = torch.empty(0, 64, dtype=BF16)
    fused_add_rms_norm_(none, none.clone(), torch.ones(64, dtype=BF16), 1e-6)  # the stand-in asserts that it has rows


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((5, 256), "row_f32"), ((5, 256), "mn_f32_tma"), ((8, 128), "mn_f32_tma"), ((1, 256), "mn_f32_tma"),
     ((2, 3, 256), "row_f32"), ((256,), "row_f32"), ((0, 256), "row_f32"), ((0, 256), "mn_f32_tma")],
)  # fmt: skip
def test_quant_gives_the_layout_that_is_asked_for(sgl_kernel: None, shape: tuple[int, ...], layout: str) -> None:
    from torch_hal_cuda.quant import per_token_group_quant_fp8

    x = torch.randn(shape, dtype=BF16)
    codes, scale = per_token_group_quant_fp8(x, 128, "e4m3fn", layout)
    expected_codes, expected_scale = hal.ops.per_token_group_quant_fp8(x, 128, "e4m3fn", layout)
    torch.testing.assert_close(codes.float(), expected_codes.float(), rtol=0, atol=0)
    torch.testing.assert_close(scale, expected_scale)
    assert codes.stride() == expected_codes.stride() and scale.shape == expected_scale.shape
    assert scale.numel() == 0 or SCALE_LAYOUTS[layout].matches(scale) if scale.dim() > 1 else scale.is_contiguous()


def test_quant_zeroes_the_padding_rows(sgl_kernel: None) -> None:
    from torch_hal_cuda.quant import per_token_group_quant_fp8

    _, scale = per_token_group_quant_fp8(torch.randn(5, 256, dtype=BF16), 128, "e4m3fn", "mn_f32_tma")
    assert scale.stride() == (1, 8)
    assert scale.as_strided((2, 8), (8, 1))[:, 5:].eq(0).all()


def test_linear(deep_gemm: ModuleType) -> None:
    from torch_hal_cuda.linear import fp8_block_linear, prepare_fp8_block_linear

    x, fused = torch.randn(3, 256).to(FP8), torch.randn(72, 512).to(FP8)
    x_scale, fused_scale = SCALE_LAYOUTS["mn_f32_tma"].pack(torch.rand(3, 2)), torch.rand(1, 4)
    weight, weight_scale = prepare_fp8_block_linear(fused[:, :256], fused_scale[:, :2])
    assert weight.is_contiguous() and weight_scale.is_contiguous()
    assert torch.equal(weight.float(), fused[:, :256].float())
    args = (x, x_scale, weight, weight_scale, BF16, "mn_f32_tma")
    torch.testing.assert_close(fp8_block_linear(*args), hal.ops.fp8_block_linear(*args), rtol=2**-8, atol=1e-3)
    assert fp8_block_linear(x[:0], x_scale[:0], *args[2:]).shape == (0, 72)
    assert deep_gemm.calls == 1


def decode_arguments(lens: list[int], queries: int = 1, heads: int = 3) -> tuple[Any, ...]:
    table = torch.randperm(len(lens) * 3, dtype=torch.int32).view(len(lens), 3)
    cache = torch.randn(len(lens) * 3, 64, 576, dtype=BF16)
    q = torch.randn(len(lens), queries, heads, 576, dtype=BF16)
    return (
        q[..., :512].contiguous(),
        q[..., 512:].contiguous(),
        cache,
        table,
        torch.tensor(lens, dtype=torch.int32),
        0.1,
    )


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("planned", [True, False])
def test_decode_converts_lse_and_plans(sgl_kernel: None, queries: int, planned: bool) -> None:
    from torch_hal_cuda.attention import LAYOUT, mla_decode, plan_mla_decode

    args = decode_arguments([70, 0, 2, 192], queries)
    plan = plan_mla_decode(args[4], [70, 0, 2, 192], 3, queries, 64)
    out, lse = mla_decode(*args, plan[0], LAYOUT) if planned else mla_decode(*args)
    expected_out, expected_lse = hal.ops.mla_decode(*args)
    torch.testing.assert_close(out, expected_out, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse)
    assert lse.shape == (4, queries, 3) and lse.is_contiguous()
    assert (lse[1] == -math.inf).all() and (out[1] == 0).all()


def test_a_plan_is_one_flat_tensor_whose_size_ignores_lengths(sgl_kernel: None) -> None:
    from torch_hal_cuda.attention import plan_mla_decode

    plans = [plan_mla_decode(torch.full((4,), n, dtype=torch.int32), [n] * 4, 16, 1, 64) for n in (0, 1, 5000)]
    assert all(len(plan) == 1 and plan[0].dtype == torch.int32 and plan[0].dim() == 1 for plan in plans)
    assert {plan[0].numel() for plan in plans} == {6 * 8 + 5}
    (none,) = plan_mla_decode(torch.empty(0, dtype=torch.int32), [], 16, 1, 64)
    assert none.shape == (0,) and none.dtype == torch.int32


@pytest.mark.parametrize("empty", ["sequences", "queries", "pages", "table"])
def test_decode_of_nothing(sgl_kernel: None, empty: str) -> None:
    from torch_hal_cuda.attention import mla_decode

    q_nope, q_pe, cache, table, lens, scale = decode_arguments([0, 0])
    if empty == "sequences":
        q_nope, q_pe, table, lens = q_nope[:0], q_pe[:0], table[:0], lens[:0]
    if empty == "queries":
        q_nope, q_pe = q_nope[:, :0], q_pe[:, :0]
    cache, table = cache[: 0 if empty == "pages" else None], table[:, : 0 if empty == "table" else None]
    out, lse = mla_decode(q_nope, q_pe, cache, table, lens, scale)
    assert out.shape == q_nope.shape and lse.shape == q_nope.shape[:3] and lse.dtype == torch.float32
    assert out.eq(0).all() and lse.eq(-math.inf).all()


def test_queries_that_are_neighbours_are_not_copied(sgl_kernel: None) -> None:
    from torch_hal_cuda.attention import _joined

    q = torch.randn(2, 1, 4, 576, dtype=BF16)
    joined = _joined(q[..., :512], q[..., 512:])
    assert joined.data_ptr() == q.data_ptr() and torch.equal(joined, q)
    apart = _joined(q[..., :512].clone(), q[..., 512:])
    assert apart.data_ptr() != q.data_ptr() and torch.equal(apart, q)
    swapped = torch.cat([q[..., 512:], q[..., :512]], -1)
    assert torch.equal(_joined(swapped[..., 64:], swapped[..., :64]), q)


def test_all_reduce_by_name() -> None:
    from torch_hal_cuda.collectives import all_reduce

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(3, 4).t()
        out = all_reduce(x, str(dist.group.WORLD.group_name))  # type: ignore[union-attr]
        assert torch.equal(out, x) and out.is_contiguous() and out.data_ptr() != x.data_ptr()
        with pytest.raises(hal.ArgumentError, match="nobody"):
            all_reduce(x, "nobody")
    finally:
        dist.destroy_process_group()


def test_a_tensor_that_would_fault_is_an_error() -> None:
    odd: Tensor = torch.zeros(17, dtype=BF16)[1:]
    check_aligned(x=torch.zeros(16, dtype=BF16))
    with pytest.raises(ValueError, match=r"residual starts at 0x.*start on 16 bytes"):
        check_aligned(x=torch.zeros(16, dtype=BF16), residual=odd)


PROBES = (libraries.sgl_kernel, libraries.flash_mla, libraries.deep_gemm)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
def test_a_probe_without_a_gpu_is_a_reason(probe: libraries.Probe) -> None:
    reason = probe(GPU)
    assert isinstance(reason, str) and probe.__name__.partition("_")[0] in reason.lower()


def test_a_library_for_another_torch_is_a_reason(
    host_cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text('raise ImportError("common_ops.so: undefined symbol: _ZN3")')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    reason = libraries.sgl_kernel(GPU)
    assert reason == "sgl_kernel does not import: ImportError: common_ops.so: undefined symbol: _ZN3"


def test_deep_gemm_serves_one_device_a_process(
    host_cuda: None, deep_gemm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_deep_gemm_device", torch.device("cuda:0"))
    other = libraries.deep_gemm(dataclasses.replace(GPU, index=1))
    assert other == "deep_gemm keeps what it compiles for one device a process, which is cuda:0"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n", None),
        ("#!/bin/sh\necho 'Cuda compilation tools, release 12.1, V12.1.66'\n", "is 12.1, 12.3 or newer is needed"),
        ("#!/bin/sh\necho hello\n", "does not say its version"),
        ("#!/bin/sh\nexit 1\n", "no CUDA compiler at"),
        (None, "no CUDA compiler at"),
    ],
)
def test_the_compiler_that_jit_kernels_need(
    host_cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, reason: str | None
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if script is not None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text(script)
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    found = libraries._compiler()
    assert (found is None) if reason is None else (found is not None and reason in found)
    if reason is not None:
        prefix = "deep_gemm compiles its kernels when they are first called: "
        assert libraries.deep_gemm(GPU) == prefix + str(found)
