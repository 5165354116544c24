"""Sample arguments for norm, activation, rope, linear and quantisation: small, and strided as models stride them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, to_fp8
from torch_hal.ops.rope import rope_cos_sin_cache

Sample = Callable[[Generator, torch.dtype, int], dict[str, Any]]


def _normal(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _codes(generator: Generator, *shape: int) -> Tensor:
    return to_fp8(torch.randn(*shape, generator=generator) * 100, FP8_KINDS["e4m3fn"])


def _rms_norm(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    latent = _normal(generator, dtype, tokens, 576)[:, :512]
    return {"x": latent, "weight": _normal(generator, dtype, 512), "eps": 1e-6}


def _fused_add_rms_norm(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    x, residual = (_normal(generator, dtype, tokens, 256) for _ in range(2))
    return {"x": x, "residual": residual, "weight": _normal(generator, dtype, 256), "eps": 1e-6}


def _silu_and_mul(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"x": _normal(generator, dtype, tokens, 2 * 96)}


def _rope(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    q = _normal(generator, dtype, tokens, 4, 192)[..., 128:]
    k = _normal(generator, dtype, tokens, 576)[:, None, 512:]
    positions = torch.randint(0, 100, (tokens,), generator=generator)
    return {
        "q": q,
        "k": k,
        "positions": positions,
        "cos_sin_cache": rope_cos_sin_cache(100, 64, 10000.0),
        "interleaved": True,
    }


def _linear(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    x = _normal(generator, dtype, tokens, 576)[:, :512]
    return {"x": x, "weight": _normal(generator, dtype, 96, 512)}


def _router_gemm(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"x": _normal(generator, dtype, tokens, 256), "weight": _normal(generator, torch.float32, 64, 256)}


def _absorbed_bmm(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    q_nope = _normal(generator, dtype, tokens, 4, 192)[..., :128]
    return {"x": q_nope, "weight": _normal(generator, dtype, 4, 128, 64)}


def _fp8_block_linear(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    scales = (torch.rand(tokens, 2, generator=generator) + 0.5) / 100  # what quantising values of about 1 gives
    return {
        "x": _codes(generator, tokens, 256),
        "x_scale": SCALE_LAYOUTS["mn_f32_tma"].pack(scales),
        "weight": _codes(generator, 192, 256),
        "weight_scale": (torch.rand(2, 2, generator=generator) + 0.5) / 1024,  # the sums fit float16
        "out_dtype": dtype,
        "x_scale_layout": "mn_f32_tma",
    }


def _per_token_group_quant_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"x": _normal(generator, dtype, tokens, 576)[:, :512], "group_size": 128}


def _one_scale(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"x": _normal(generator, dtype, tokens, 576)[:, :512]}


def _static_quant_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {**_one_scale(generator, dtype, tokens), "scale": torch.tensor([0.01])}


def _silu_and_mul_quant_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"x": _normal(generator, dtype, tokens, 512), "group_size": 128, "scale_layout": "mn_f32"}


def _masked_silu_and_mul_quant_fp8(generator: Generator, dtype: torch.dtype, experts: int) -> dict[str, Any]:
    x = _normal(generator, dtype, experts, 5, 256)
    masked_m = torch.arange(experts, dtype=torch.int32) * 3 % 6
    x[torch.arange(5) >= masked_m[:, None]] = torch.nan
    return {"x": x, "masked_m": masked_m, "group_size": 64, "scale_layout": "mn_ue8m0"}


def _rms_norm_quant_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {**_rms_norm(generator, dtype, tokens), "group_size": 128, "scale_layout": "mn_f32_tma"}


def _fused_add_rms_norm_quant_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {**_fused_add_rms_norm(generator, dtype, tokens), "group_size": 128, "ue8m0": True}


def _block_quant_fp8(generator: Generator, dtype: torch.dtype, blocks: int) -> dict[str, Any]:
    return {"weight": _normal(generator, dtype, 128 * blocks, 192)}


def _block_scaled(generator: Generator, dtype: torch.dtype, blocks: int) -> dict[str, Any]:
    """Rows in whole blocks, as only those can be zero in number together with their scales."""
    scale = (torch.rand(blocks, 2, generator=generator) + 0.5) / 100
    return {"weight": _codes(generator, 128 * blocks, 192), "weight_scale": scale}


def _block_dequant_fp8(generator: Generator, dtype: torch.dtype, blocks: int) -> dict[str, Any]:
    return {**_block_scaled(generator, dtype, blocks), "out_dtype": dtype}


def _convert_kind_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    scale = torch.rand(tokens, 2, generator=generator)
    return {"codes": _codes(generator, tokens, 256), "scale": scale, "fp8": "e4m3fnuz"}


SAMPLES: dict[str, Sample] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "fused_add_rms_norm_": _fused_add_rms_norm,
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _silu_and_mul,
    "gelu_tanh_and_mul": _silu_and_mul,
    "rope": _rope,
    "linear": _linear,
    "router_gemm": _router_gemm,
    "absorbed_bmm": _absorbed_bmm,
    "fp8_block_linear": _fp8_block_linear,
    "per_token_group_quant_fp8": _per_token_group_quant_fp8,
    "per_token_quant_fp8": _one_scale,
    "per_tensor_quant_fp8": _one_scale,
    "static_quant_fp8": _static_quant_fp8,
    "silu_and_mul_quant_fp8": _silu_and_mul_quant_fp8,
    "masked_silu_and_mul_quant_fp8": _masked_silu_and_mul_quant_fp8,
    "rms_norm_quant_fp8": _rms_norm_quant_fp8,
    "fused_add_rms_norm_quant_fp8": _fused_add_rms_norm_quant_fp8,
    "block_quant_fp8": _block_quant_fp8,
    "block_dequant_fp8": _block_dequant_fp8,
    "block_requant_ue8m0_fp8": _block_scaled,
    "convert_kind_fp8": _convert_kind_fp8,
}
