"""A stand-in for the CUDA runtime and for sgl_kernel's ops, so that the adapters themselves run on the host."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

PARTS = 6  # partitions of the multiprocessors that the stand-in scheduler plans for

_SCHEMAS = (
    "fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, bool enable_pdl) -> ()",
    "sgl_per_token_group_quant_8bit_v2(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size,"
    " float eps, float fp8_min, float fp8_max, bool scale_ue8m0, bool fuse_silu_and_mul, Tensor? masked_m) -> ()",
    "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, bool is_fp8_kvcache,"
    " int? topk) -> Tensor[]",
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table,"
    " float softmax_scale, bool is_causal, Tensor? tile_scheduler_metadata, Tensor? num_splits)"
    " -> (Tensor, Tensor, Tensor?, Tensor?)",
)


def _fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    assert x.dim() == 2 and x.is_contiguous() and residual.is_contiguous() and x.shape[0] > 0
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float())


def _group_quant(
    x: Tensor, codes: Tensor, scales: Tensor, group: int, eps: float, low: float, high: float,
    ue8m0: bool, fused: bool, masked_m: Tensor | None,
) -> None:  # fmt: skip
    assert x.is_contiguous() and codes.is_contiguous() and scales.dim() == 2 and x.numel() > 0
    groups = x.float().unflatten(-1, (-1, group))
    scales.copy_(groups.abs().amax(-1).clamp(min=eps) / high)
    codes.copy_((groups / scales[..., None]).clamp(low, high).flatten(-2).to(codes.dtype))


def _metadata(lens: Tensor, rows: int, kv_heads: int, heads: int | None, fp8: bool, topk: int | None) -> list[Tensor]:
    schedule = torch.arange(PARTS * 8, dtype=torch.int32).view(PARTS, 8) + rows
    return [schedule, torch.arange(lens.shape[0] + 1, dtype=torch.int32) - 100]


def _dense_decode(
    q: Tensor, cache: Tensor, value_dim: int, lens: Tensor, table: Tensor, scale: float, causal: bool,
    schedule: Tensor | None, splits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """FlashMLA's own conventions: lse [B, H, s], +inf where nothing was attended to, and a mask times the scale."""
    assert schedule is not None and splits is not None
    batch, queries, heads, _ = q.shape
    assert torch.equal(schedule, _metadata(lens, queries * heads, 1, heads, False, None)[0])
    assert torch.equal(splits, torch.arange(batch + 1, dtype=torch.int32) - 100)
    out, lse = q.new_zeros(batch, queries, heads, value_dim), torch.full((batch, heads, queries), math.inf)
    for b, length in enumerate(lens.tolist()):
        pages = cache[table[b, : -(-length // 64)].long(), :, 0]
        keys = pages.reshape(-1, q.shape[-1])[:length].float()
        for i in range(queries):
            if (seen := length - queries + i + 1) > 0:
                scores = q[b, i].float() @ keys[:seen].T * scale
                out[b, i] = (scores.softmax(-1) @ keys[:seen, :value_dim]).to(q.dtype)
                lse[b, :, i] = scores.logsumexp(-1)
    return out, lse, schedule, splits


@pytest.fixture
def host_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a CUDA device current does nothing."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


@pytest.fixture
def sgl_kernel(host_cuda: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``sgl_kernel`` with the ops that the adapters use, on the host; gone again afterwards."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema, function in zip(_SCHEMAS, (_fused_add_rmsnorm, _group_quant, _metadata, _dense_decode), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    package = types.ModuleType("sgl_kernel")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", types.ModuleType("sgl_kernel.flash_mla"))
    yield
    library._destroy()
    _forget("torch_hal_cuda.norm", "torch_hal_cuda.quant", "torch_hal_cuda.attention")


@pytest.fixture
def deep_gemm(host_cuda: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """``deep_gemm`` on the host; ``calls`` counts."""

    def fp8_gemm_nt(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> None:
        package.calls += 1  # type: ignore[attr-defined]
        (x, x_scale), (w, w_scale) = a, b
        rows, depth = w.shape
        wide_x = x.float() * x_scale.repeat_interleave(128, 1)[:, :depth]
        wide_w = w.float() * w_scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :depth]
        out.copy_(wide_x @ wide_w.T)

    package = types.ModuleType("deep_gemm")
    package.fp8_gemm_nt, package.calls = fp8_gemm_nt, 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    yield package
    _forget("torch_hal_cuda.linear")


def _forget(*modules: str) -> None:
    for name in modules:
        sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        if child in vars(sys.modules.get(parent, types.ModuleType(""))):
            delattr(sys.modules[parent], child)
