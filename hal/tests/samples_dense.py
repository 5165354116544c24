"""Sample arguments for norm, activation, rope, linear and quant: small, and strided as models stride them."""

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


SAMPLES: dict[str, Sample] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "fused_add_rms_norm_": _fused_add_rms_norm,
    "silu_and_mul": _silu_and_mul,
    "rope": _rope,
    "linear": _linear,
    "router_gemm": _router_gemm,
    "absorbed_bmm": _absorbed_bmm,
    "fp8_block_linear": _fp8_block_linear,
    "per_token_group_quant_fp8": _per_token_group_quant_fp8,
}
