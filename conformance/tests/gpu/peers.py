"""Kernels that nobody here wrote, through the thinnest of adapters: what the suite is calibrated against.

A backend "peers", for a machine with an NVIDIA GPU, sgl_kernel, flashinfer and deep_gemm. What an adapter refuses
is what its library says that it does not take; what it gets wrong is the library's, and recorded in
``docs/conformance-calibration.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import torch_hal as hal

HALF = (torch.bfloat16, torch.float16)


def dense_half(*tensors: Tensor) -> str | None:
    """Refuse what is not bfloat16 or float16, dense, and aligned to 16 bytes a row."""
    for x in tensors:
        if x.dtype not in HALF:
            return f"takes bfloat16 and float16, got {x.dtype}"
        if not x.is_contiguous() or offset(x):
            return "takes dense tensors that start on 16 bytes"
        if x.shape[-1] * x.element_size() % 16:
            return "takes rows of a multiple of 16 bytes"
    return None


def offset(x: Tensor) -> int:
    """Bytes past a 16-byte boundary; compilers cannot trace the question."""
    return 0 if torch.compiler.is_compiling() else x.storage_offset() * x.element_size() % 16


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def refuse_norm(x: Tensor, weight: Tensor, eps: float) -> str | None:
    return dense_half(x, weight) or (None if x.dtype == weight.dtype else "takes a weight of x's dtype")


def refuse_gated(x: Tensor) -> str | None:
    return dense_half(x) or (None if x.shape[-1] // 2 * x.element_size() % 16 == 0 else "takes halves of 16 bytes")


def refuse_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> str | None:
    return dense_half(x, residual, weight) or (None if x.dtype == weight.dtype else "takes a weight of x's dtype")


def norm(library: str) -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.numel() == 0:
            return torch.empty_like(x)
        out = torch.empty_like(x)
        if library == "sgl_kernel":
            torch.ops.sgl_kernel.rmsnorm.default(flat(out), flat(x), weight, eps, False)
            return out
        import flashinfer

        flashinfer.norm.rmsnorm(flat(x), weight, eps, out=flat(out))
        return out

    return rms_norm


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    import flashinfer

    if x.numel():
        flashinfer.norm.fused_add_rmsnorm(flat(x), flat(residual), weight, eps)


def gated(library: str, name: str) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        if x.numel() == 0:
            return out
        if library == "sgl_kernel":
            getattr(torch.ops.sgl_kernel, name).default(flat(out), flat(x))
            return out
        import flashinfer

        getattr(flashinfer.activation, name)(flat(x), out=flat(out))
        return out

    return run


def per_token_quant_fp8(x: Tensor, fp8: str = "e4m3fn", eps: float = 1e-10) -> tuple[Tensor, Tensor]:
    q, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    if x.numel():
        torch.ops.sgl_kernel.sgl_per_token_quant_fp8.default(flat(x), flat(q), scale.view(-1, 1))
    return q, scale


def refuse_token_quant(x: Tensor, fp8: str = "e4m3fn", eps: float = 1e-10) -> str | None:
    if fp8 != "e4m3fn" or eps != 1e-10:
        return "quantises to e4m3fn, with an eps of its own"
    return dense_half(x)


def merge(library: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        if library == "sgl_kernel":
            out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
            if out.numel():
                torch.ops.sgl_kernel.merge_state_v2.default(out_a, lse_a, out_b, lse_b, out, lse)
            return out, lse
        import flashinfer

        log2e = 1.4426950408889634
        if out_a.numel() == 0:
            return torch.empty_like(out_a), torch.empty_like(lse_a)
        out, lse = flashinfer.merge_state(out_a, lse_a * log2e, out_b, lse_b * log2e)
        return out, lse / log2e

    return merge_state


def refuse_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> str | None:
    if not (lse_a.is_contiguous() and lse_b.is_contiguous()):
        return "takes dense lse"
    if lse_a.dtype != torch.float32:
        return "takes float32 lse"
    return dense_half(out_a, out_b)


def topk_softmax(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    ids = logits.new_empty(logits.shape[0], top_k, dtype=torch.int32)
    if logits.numel():
        torch.ops.sgl_kernel.topk_softmax.default(weights, ids, logits, renormalize, 0.0, None)
    return weights, ids


def refuse_topk(logits: Tensor, top_k: int, renormalize: bool) -> str | None:
    return (
        None if logits.is_contiguous() and not logits.storage_offset() * logits.element_size() % 16 else "takes dense"
    )


def moe_fused_gate(
    logits: Tensor, bias: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if logits.numel() == 0:
        return logits.new_empty(0, top_k, dtype=torch.float32), logits.new_empty(0, top_k, dtype=torch.int32)
    found = torch.ops.sgl_kernel.moe_fused_gate.default(logits, bias, num_groups, topk_groups, top_k, 0, scale, True)
    return found[0], found[1]


def refuse_gate(
    logits: Tensor, bias: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> str | None:
    experts = logits.shape[1]
    if not renormalize:
        return "always renormalises"
    if experts & (experts - 1) or experts // num_groups > 32:
        return "takes powers of two experts, 32 a group at most"
    if logits.dtype != bias.dtype:
        return "takes a bias of the logits' dtype"
    return None if logits.is_contiguous() and bias.is_contiguous() else "takes dense tensors"


def renorm(name: str) -> Callable[..., Tensor]:
    def run(probs: Tensor, limit: Tensor) -> Tensor:
        import flashinfer

        return getattr(flashinfer.sampling, name)(probs, limit) if probs.numel() else torch.empty_like(probs)

    return run


def refuse_probs(probs: Tensor, top_k: Tensor) -> str | None:
    return None if probs.is_contiguous() and not offset(probs) else "takes dense probabilities that start on 16 bytes"


def refuse_probs_p(probs: Tensor, top_p: Tensor) -> str | None:
    return refuse_probs(probs, top_p)


def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    return renorm("top_k_renorm_probs")(probs, top_k)


def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    return renorm("top_p_renorm_probs")(probs, top_p)


def masked_gemm(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, masked_m: Tensor, expected_m: int,
    out_dtype: torch.dtype, x_scale_layout: str = "row_f32", layout: str = "plain",
) -> Tensor:  # fmt: skip
    import deep_gemm

    out = x.new_zeros(x.shape[0], x.shape[1], weight.shape[1], dtype=torch.bfloat16)
    if out.numel() and x.shape[2]:
        deep_gemm.fp8_m_grouped_gemm_nt_masked((x, x_scale), (weight, weight_scale), out, masked_m, expected_m)
    return out


def refuse_masked(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, masked_m: Tensor, expected_m: int,
    out_dtype: torch.dtype, x_scale_layout: str = "row_f32", layout: str = "plain",
) -> str | None:  # fmt: skip
    if out_dtype != torch.bfloat16 or x_scale_layout != "mn_f32_tma" or x.dtype != torch.float8_e4m3fn:
        return "gives bfloat16, of e4m3fn codes whose scales lie as mn_f32_tma"
    if x.shape[2] % 128 or weight.shape[1] % 64:
        return "takes K in 128s and N in 64s"
    if x.shape[1] % 64:
        return "takes rows of an expert in 64s: a part of a tile would be stored over the next expert's rows"
    dense = all(t.is_contiguous() for t in (x, weight, weight_scale, masked_m))
    return None if dense and not offset(x) else "takes dense tensors"


@hal.hookimpl
def torch_hal_kernels() -> Iterator[hal.Kernel]:
    needs = {lib: hal.Requires("nvidia", library=lib) for lib in ("sgl_kernel", "flashinfer", "deep_gemm")}
    safe = frozenset({hal.Trait.GRAPH_SAFE, hal.Trait.DETERMINISTIC})
    import importlib

    for library in ("sgl_kernel", "flashinfer"):
        try:
            importlib.import_module(library)
        except Exception:
            continue
        yield hal.Kernel(
            "rms_norm", library, run=norm(library), dynamic=refuse_norm, requires=needs[library], traits=safe
        )
        for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
            run = gated(library, name)
            yield hal.Kernel(name, library, run=run, dynamic=refuse_gated, requires=needs[library], traits=safe)
        yield hal.Kernel("merge_state", library, run=merge(library), dynamic=refuse_merge, requires=needs[library])
    fi, sgl = needs["flashinfer"], needs["sgl_kernel"]
    yield hal.Kernel(
        "fused_add_rms_norm_", "flashinfer", run=add_norm, dynamic=refuse_add_norm, requires=fi, traits=safe
    )
    yield hal.Kernel("top_k_renorm", "flashinfer", run=top_k_renorm, dynamic=refuse_probs, requires=fi)
    yield hal.Kernel("top_p_renorm", "flashinfer", run=top_p_renorm, dynamic=refuse_probs_p, requires=fi)
    quant = {"run": per_token_quant_fp8, "dynamic": refuse_token_quant}
    yield hal.Kernel("per_token_quant_fp8", "sgl_kernel", **quant, requires=sgl, traits=safe)
    yield hal.Kernel("topk_softmax", "sgl_kernel", run=topk_softmax, dynamic=refuse_topk, requires=sgl, traits=safe)
    gate = {"run": moe_fused_gate, "dynamic": refuse_gate}
    yield hal.Kernel("biased_grouped_topk", "sgl_kernel", **gate, requires=sgl, traits=safe)
    masked = {"run": masked_gemm, "dynamic": refuse_masked}
    formats = (("x_scale_layout", "mn_f32_tma"),)
    yield hal.Kernel("fp8_grouped_linear_masked", "deep_gemm", **masked, requires=needs["deep_gemm"], formats=formats)
