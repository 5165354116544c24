"""Matrix multiplications with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..check import FLOAT, FP8
from ..contracts import Contracts
from ..formats import BLOCK as BLOCK  # in the declared shapes
from ..formats import SCALE_LAYOUTS, expand_block_scales
from ..numerics import narrow, wide
from ..op import PLAIN, op
from ._fp8 import BLOCK_ERROR, matmul_blocks


def _linear_terms(x: Tensor, weight: Tensor) -> Tensor:
    return _wide_linear(wide(x).abs(), wide(weight).abs())


def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """In the wide type of ``x``, whatever the weight's."""
    return torch.nn.functional.linear(wide(x), weight.to(wide(x).dtype))


def prepare_linear(weight: Tensor) -> list[Tensor]:
    """The plain layout: the weight as the checkpoint holds it."""
    return [weight]


@op(
    shapes={"x": "... K", "weight": "N K"},
    dtypes={"x": FLOAT, "weight": "x"},
    reduces="K",
    flops="2 * x.numel() * N",
    terms=lambda x, weight, layout=PLAIN: _linear_terms(x, weight),
    prepare=prepare_linear,
)
def linear(x: Tensor, weight: Tensor, layout: str = PLAIN) -> Tensor:
    """``x · weightᵀ``, without bias.

    x: [..., K] bf16/f16/f32, any strides; weight: [N, K], x's dtype, in the layout that ``layout`` names.
    Returns [..., N], x's dtype: summed in float32, rounded once. K = 0 gives zeros.

    What reads the same x is one call, its weights joined by rows: gate and up, or MLA's q_a, latent and rotary key
    (fused qkv_a, [2112, 7168] in DeepSeek-V3). Kernels for such a shape alone, as ``dsv3_fused_a_gemm`` for at most 16
    tokens, are kernels of this op that refuse the rest.
    """
    return narrow(torch.nn.functional.linear(wide(x), wide(weight)), x)


@op(
    shapes={"x": "T D", "weight": "E D"},
    dtypes={"x": FLOAT, "weight": ("x", torch.float32)},
    reduces="D",
    flops="2 * T * E * D",
    terms=lambda x, weight: _linear_terms(x, weight),
    contracts=Contracts(C9_rounding="Computed in float32 and returned so, without a rounding to x's dtype."),
)
def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """The router's logits, ``x · weightᵀ`` in float32: rounding them makes ties and chooses other experts.

    x: [T, D] bf16/f16/f32, any strides; weight: [E, D], x's dtype or float32. Returns [T, E] float32.
    """
    return _wide_linear(x, weight)


@op(
    shapes={"x": "T H K", "weight": "H K N"},
    dtypes={"x": FLOAT, "weight": "x"},
    reduces="K",
    flops="2 * T * H * K * N",
    terms=lambda x, weight: _by_head(wide(x).abs(), wide(weight).abs()),
)
def absorbed_bmm(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix a head: out[t, h] = x[t, h] · weight[h], MLA's absorbed projections (DeepSeek-V2, 2024).

    x: [T, H, K] bf16/f16/f32, any strides, such as the nope slice of q; weight: [H, K, N], x's dtype, any strides:
    W_UK [H, 128, 512] takes q_nope to the latent space, W_UVᵀ [H, 512, 128] takes the attention's latents back.
    Returns [T, H, N], x's dtype: summed in float32, rounded once.
    """
    return narrow(_by_head(wide(x), wide(weight)), x)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x.transpose(0, 1), weight).transpose(0, 1)


def prepare_fp8_block_linear(weight: Tensor, weight_scale: Tensor) -> list[Tensor]:
    """The plain layout: codes and scales as the checkpoint holds them."""
    return [weight, weight_scale]


def _absolute_terms(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = PLAIN,
) -> Tensor:
    x, weight = wide(x).abs(), wide(weight).abs()
    weight_scale = wide(weight_scale).abs()
    return fp8_block_linear.reference(x, x_scale, weight, weight_scale, weight_scale.dtype, x_scale_layout)


@op(
    shapes={
        "x": "M K",
        "x_scale": "M _",
        "weight": "N K",
        "weight_scale": "ceil_div(N,BLOCK) ceil_div(K,BLOCK)",
    },
    dtypes={"x": FP8, "x_scale": (torch.float32, torch.int32), "weight": "x", "weight_scale": torch.float32},
    where={
        "out_dtype in FLOAT": "the result is bfloat16, float16, float32 or float64",
        "x_scale_layout in SCALE_LAYOUTS": f"the layout is one of {', '.join(SCALE_LAYOUTS)}",
        "x_scale.dtype is SCALE_LAYOUTS[x_scale_layout].dtype": "x_scale has its layout's dtype",
        "x_scale.shape[1] == SCALE_LAYOUTS[x_scale_layout].columns(ceil_div(K, BLOCK))": (
            "x_scale holds one scale for each row and 128 columns of x"
        ),
        "SCALE_LAYOUTS[x_scale_layout].matches(x_scale)": "x_scale has its layout's strides",
    },
    reduces="K",
    flops="2 * M * N * K",
    terms=_absolute_terms,
    block_error=BLOCK_ERROR,
    prepare=prepare_fp8_block_linear,
    contracts=Contracts(
        C3_strides="x and weight have any strides; those of x_scale are exactly what x_scale_layout says.",
        C5_fp8_kind="x and weight are of one kind, e4m3fn or e4m3fnuz, whichever the device multiplies.",
        C6_fp8_cast="No cast to fp8: x and weight arrive as codes.",
        C9_rounding=(
            "Each block of 128 along K is summed by itself, then scaled and added in float32. Within a block an fp8 "
            "tensor core's accumulator may serve, which keeps 14 bits on Hopper. Rounded once, to out_dtype."
        ),
    ),
)
def fp8_block_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    x_scale_layout: str = "row_f32",
    layout: str = PLAIN,
) -> Tensor:
    """``x · weightᵀ`` of fp8 codes with a scale for every 1×128 of x and 128×128 of weight (DeepSeek-V3, 2024).

    out[m, n] = Σ_b x_scale[m, b] · weight_scale[⌊n/128⌋, b] · Σ_{k in block b} x[m, k] · weight[n, k]

    x: [M, K], weight: [N, K], one fp8 kind; x_scale: the scales [M, ⌈K/128⌉], stored as ``x_scale_layout`` names
    (`SCALE_LAYOUTS`; the result of `per_token_group_quant_fp8` with group size 128); weight_scale:
    [⌈N/128⌉, ⌈K/128⌉] float32, the checkpoint's ``weight_scale_inv``, which multiplies. N and K may end in a partial
    block: 576 rows have 5 scales, the last for 64. Returns [M, N] out_dtype.
    Raises ArgumentError for a layout's wrong name, dtype, shape or strides. A NaN code gives NaN in its row or column.
    """
    x_scales = wide(SCALE_LAYOUTS[x_scale_layout].unpack(x_scale, weight_scale.shape[1]))
    return matmul_blocks(x, x_scales, weight, expand_block_scales(wide(weight_scale), weight.shape[0])).to(out_dtype)
