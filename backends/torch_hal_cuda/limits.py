"""What each kernel cannot do: refusals, functions of shapes, dtypes and strides that import no kernel library.

They return None, or the reason as a person should read it. Where a limit is not in a library's own checks it was
found in its source or on the device: unchecked, it would be a wrong result or a fault, not an error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
_NORM_WIDTH = 24576  # a row's float32 sums, in the 99 KB of shared memory that every arch since sm_80 has


def _offset(x: Tensor) -> int:
    """Bytes by which ``x`` starts past a 16-byte boundary, where CUDA's allocations begin.

    Dynamo cannot trace the question, so that in a compiled graph the adapter asks it of the real tensor.
    """
    return 0 if torch.compiler.is_compiling() else x.storage_offset() * x.element_size() % 16


def _rows(name: str, x: Tensor) -> str | None:
    """Refuse rows that a bulk copy cannot fetch: they must be dense and start on 16 bytes, as CUDA allocations do."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return f"{name} has strides {x.stride()}: rows must be dense"
    size = x.element_size()
    for step, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True):
        if extent > 1 and step * size % 16:
            return f"{name} has strides {x.stride()}: rows must start on 16 bytes"
    if _offset(x):
        return f"{name} has offset {x.storage_offset()}: rows must start on 16 bytes"
    return None


# sgl_kernel: fused_add_rms_norm_


def fused_add_rms_norm_static(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> str | None:
    if x.dtype not in (*HALF, torch.float32):
        return f"x is {x.dtype}: takes bfloat16, float16 and float32"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype}: the kernel would read its bytes as {x.dtype}"
    if x.shape[-1] > _NORM_WIDTH:
        return f"D = {x.shape[-1]}: keeps a row of at most {_NORM_WIDTH} in shared memory"
    return None


def fused_add_rms_norm_dynamic(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> str | None:
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}: takes contiguous tensors"
        if _offset(tensor):
            return f"{name} has offset {tensor.storage_offset()}: must start on 16 bytes"
    if x.numel() >= 2**32:
        return f"{x.numel()} elements: offsets are 32-bit"
    return None


# sgl_kernel: per_token_group_quant_fp8


def group_quant_static(
    x: Tensor,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> str | None:
    if x.dtype not in HALF:
        return f"x is {x.dtype}: takes bfloat16 and float16"
    if fp8 != "e4m3fn":
        return f"fp8 = {fp8!r}: makes e4m3fn"
    if group_size not in (16, 32, 64, 128):
        return f"group_size = {group_size}: takes 16, 32, 64 and 128"
    if eps != 1e-10:
        return f"eps = {eps}: built with 1e-10"
    if scale_layout not in ("row_f32", "mn_f32_tma"):
        return f"scale_layout = {scale_layout!r}: writes row_f32 and mn_f32_tma"
    if ue8m0:
        return "ue8m0: its codes are quantised with another scale than the rounded one that it stores"
    if scale_layout == "mn_f32_tma" and x.dim() != 2:
        return f"x has {x.dim()} dimensions: writes mn_f32_tma for a matrix"
    return None


def group_quant_dynamic(
    x: Tensor,
    group_size: int,
    fp8: str = "e4m3fn",
    scale_layout: str = "row_f32",
    eps: float = 1e-10,
    ue8m0: bool = False,
) -> str | None:
    if not x.is_contiguous():
        return f"x has strides {x.stride()}: takes contiguous tensors"
    if _offset(x):
        return f"x has offset {x.storage_offset()}: must start on 16 bytes"
    if x.numel() >= 2**31:
        return f"{x.numel()} elements: offsets are 32-bit"
    return None


# DeepGEMM: fp8_block_linear


def fp8_block_linear_static(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = "plain",
) -> str | None:
    if x.dtype != torch.float8_e4m3fn:
        return f"x is {x.dtype}: takes e4m3fn"
    if out_dtype != torch.bfloat16:
        return f"out_dtype = {out_dtype}: writes bfloat16"
    if x_scale_layout != "mn_f32_tma":
        return f"x_scale_layout = {x_scale_layout!r}: reads mn_f32_tma, others it would copy at every call"
    if weight.shape[0] % 8 or weight.shape[1] == 0:
        return f"N = {weight.shape[0]}, K = {weight.shape[1]}: takes N % 8 == 0 and K > 0"
    return None


def fp8_block_linear_dynamic(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = "plain",
) -> str | None:
    if _offset(x_scale):
        return f"x_scale has offset {x_scale.storage_offset()}: must start on 16 bytes"
    if not (weight_scale.is_contiguous() or weight_scale.mT.is_contiguous()):
        return f"weight_scale has strides {weight_scale.stride()}: must be dense; see prepare"
    return _rows("x", x) or _rows("weight", weight)


# FlashMLA: mla_decode


def mla_decode_static(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Tensor | None = None,
    layout: str = "plain",
) -> str | None:
    if q_nope.dtype not in HALF or cache.dtype != q_nope.dtype:
        return f"q is {q_nope.dtype}, the cache {cache.dtype}: takes both bfloat16 or both float16"
    if (q_nope.shape[-1], q_pe.shape[-1]) != (512, 64):
        return f"L = {q_nope.shape[-1]}, R = {q_pe.shape[-1]}: takes 512 and 64"
    if cache.shape[1] != 64:
        return f"pages of {cache.shape[1]}: takes pages of 64"
    if not scale > 0:
        return f"scale = {scale}: multiplies the mask's -inf by it, so takes only positive ones"
    return None


def mla_decode_dynamic(
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: Tensor | None = None,
    layout: str = "plain",
) -> str | None:
    if page_table.stride(1) != 1 and page_table.shape[1] > 1:
        return f"page_table has strides {page_table.stride()}: rows must be dense"
    if not seq_lens.is_contiguous():
        return f"seq_lens has stride {seq_lens.stride()}: must be dense"
    if plan is not None and _offset(plan):
        return f"plan has offset {plan.storage_offset()}: must start on 16 bytes"
    if (q_nope.shape[0] + 160) * q_nope.shape[1] * q_nope.shape[2] * 512 >= 2**31:  # at most 160 splits beside B
        return f"q has shape {tuple(q_nope.shape)}: offsets of partial results are 32-bit"
    return _rows("cache", cache)


# NCCL: collectives


@torch.compiler.assume_constant_result
def group_backend(group: str) -> str | None:
    """The backend that serves CUDA tensors of the process group of this name; None if there is no such group."""
    groups = dist.distributed_c10d._world.pg_names if dist.is_available() else {}
    for known, name in groups.items():
        if name == group:
            try:
                return str(known._get_backend(torch.device("cuda")).name())
            except RuntimeError:
                return "nothing"
    return None


def all_reduce_static(x: Tensor, group: str) -> str | None:
    """A group that does not exist is the caller's error, which the kernel words as the reference does."""
    backend = group_backend(group)
    return None if backend in (None, "nccl") else f"group {group!r} serves CUDA tensors with {backend}, not nccl"
