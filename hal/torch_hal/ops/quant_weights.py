"""FP8 weights in blocks of 128×128, as DeepSeek's checkpoints hold them: made, read, and made to fit a device.

These run once, while a model is made or loaded. A block's scale multiplies, though checkpoints call it
``weight_scale_inv``; the last block of a row or column may be partial and has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..check import FLOAT, FP8
from ..contracts import Contracts
from ..formats import BLOCK, FP8_KINDS, ceil_to_ue8m0, expand_block_scales, to_fp8
from ..numerics import wide
from ..op import op
from .quant import EPS_RULE, KIND_RULE, QUANTISING, group_scale

_BLOCK_SCALES = "... ceil_div(N,BLOCK) ceil_div(K,BLOCK)"
_ONE_BATCH = {"weight.shape[:-2] == weight_scale.shape[:-2]": "weight and weight_scale have the same leading dims"}
_ALL_DENSE = {
    "C3_strides": "Inputs have any strides; results are contiguous.",
    "C8_unwritten_rows": "Every code and scale is written.",
}
_EITHER_KIND = "The weight is e4m3fn or e4m3fnuz."


@op(
    shapes={"weight": "... N K"},
    dtypes={"weight": FLOAT},
    where={**KIND_RULE, **EPS_RULE},
    flops="3 * weight.numel()",
    contracts=Contracts(**{**QUANTISING, **_ALL_DENSE}),
)
def block_quant_fp8(
    weight: Tensor, fp8: str = "e4m3fn", eps: float = 1e-10, ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantisation with one scale for each block of 128×128 (DeepSeek-V3, 2024).

    scale = max(amax, eps) / quant_max, with ``ue8m0`` rounded up to a power of two;  weight ≈ code · scale

    weight: [..., N, K] bf16/f16/f32, any strides; leading dims, such as experts, hold matrices of their own.
    Returns (codes [..., N, K] of kind ``fp8``, scales [..., ⌈N/128⌉, ⌈K/128⌉] float32): a checkpoint's ``weight`` and
    ``weight_scale_inv``. A block of zeros has scale eps / quant_max (rounded up for UE8M0) and codes 0. A block that
    holds inf or NaN has unspecified codes and scale; the other blocks are right.
    """
    kind, w = FP8_KINDS[fp8], wide(weight)
    *batch, rows, columns = w.shape
    padded = pad(w, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(*batch, padded.shape[-2] // BLOCK, BLOCK, padded.shape[-1] // BLOCK, BLOCK)
    scale = group_scale(blocks.abs().amax((-3, -1)), kind, eps, ue8m0)
    return to_fp8(_by_block(torch.div, w, scale), kind), scale


@op(
    shapes={"weight": "... N K", "weight_scale": _BLOCK_SCALES},
    dtypes={"weight": FP8, "weight_scale": torch.float32},
    where={**_ONE_BATCH, "out_dtype in FLOAT": "the result is bfloat16, float16, float32 or float64"},
    flops="weight.numel()",
    terms=lambda weight, weight_scale, out_dtype: _by_block(torch.mul, wide(weight), weight_scale).abs(),
    contracts=Contracts(C5_fp8_kind=_EITHER_KIND, C6_fp8_cast="No cast to fp8.", C3_strides=_ALL_DENSE["C3_strides"]),
)
def block_dequant_fp8(weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``code · scale`` of weights in blocks of 128×128: for a device, a kernel or a user that wants no FP8.

    weight: [..., N, K], either fp8 kind; weight_scale: [..., ⌈N/128⌉, ⌈K/128⌉] float32, the checkpoint's
    ``weight_scale_inv``, which multiplies. Returns [..., N, K] out_dtype: multiplied in float32, rounded once.
    NaN codes give NaN, each in its element, and a NaN scale in its block.
    """
    return _by_block(torch.mul, wide(weight), weight_scale).to(out_dtype)


@op(
    shapes={"weight": "... N K", "weight_scale": _BLOCK_SCALES},
    dtypes={"weight": FP8, "weight_scale": torch.float32},
    where=_ONE_BATCH,
    flops="2 * weight.numel()",
    contracts=Contracts(
        **_ALL_DENSE,
        C5_fp8_kind=_EITHER_KIND + " The codes stay of that kind.",
        C6_fp8_cast="No code grows, so only fnuz's ±240 saturate, to ±224: quantisation makes none. To nearest, ties "
        "to even. On fnuz −0 never appears.",
        C9_rounding="code · (scale / new scale) in float32, the division exact, rounded once more to a code.",
    ),
)
def block_requant_ue8m0_fp8(weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same weight with scales that are powers of two, for kernels that keep a scale's exponent alone.

    new scale = the least power of two ≥ scale;  new code = cast(code · scale / new scale)

    weight: [..., N, K], either fp8 kind; weight_scale: [..., ⌈N/128⌉, ⌈K/128⌉] float32, not negative. Returns
    (codes, scales) in the same shapes and dtypes: scales still float32, which `expand_block_scales` and
    ``SCALE_LAYOUTS["mn_ue8m0"]`` pack. Blocks whose scale is a power of two already, as in DeepSeek-V3.1, keep their
    codes; others lose at most half a unit of a code's last place. NaN codes stay NaN, a NaN scale makes its block NaN.
    """
    scale = ceil_to_ue8m0(weight_scale).contiguous()
    kind = next(kind for kind in FP8_KINDS.values() if kind.dtype == weight.dtype)
    return to_fp8(_by_block(torch.mul, wide(weight), weight_scale / scale), kind), scale


@op(
    shapes={"codes": "...", "scale": "..."},
    dtypes={"codes": FP8, "scale": torch.float32},
    where=KIND_RULE,
    contracts=Contracts(
        **_ALL_DENSE,
        C5_fp8_kind="From either kind to the one that `fp8` names; of that kind already, codes and scale are copied.",
        C6_fp8_cast="Bytes are reinterpreted, not cast; those without a counterpart are replaced as said above.",
        C9_rounding="Exact: twice or half a scale.",
    ),
)
def convert_kind_fp8(codes: Tensor, scale: Tensor, fp8: str) -> tuple[Tensor, Tensor]:
    """The same values as codes of another kind: OCP checkpoints on a device whose 8-bit floats are fnuz, and back.

    A byte means twice as much in e4m3fn as in e4m3fnuz, so the bytes stay and the scale doubles (or halves). Three
    bytes differ: to fnuz, −0 (0x80, NaN there) becomes 0, and NaN (0x7F, 0xFF, ±240 there) becomes NaN, 0x80.
    Back to fn, NaN becomes 0x7F, and ±240, which fn has no code for and `quant_max` keeps out, the nearest, ±224.

    codes: any shape, either kind; scale: any shape, float32: of a block, a row or the whole. Packed UE8M0 scales must
    be unpacked first. Returns (codes, scale) in the same shapes. An activation's static scale changes alike.
    """
    kind = FP8_KINDS[fp8]
    if codes.dtype == kind.dtype:
        return codes.clone(memory_format=torch.contiguous_format), scale.clone(memory_format=torch.contiguous_format)
    code = codes.contiguous().view(torch.uint8)
    largest = code & 0x7F == 0x7F
    if kind.negative_zero:
        code = torch.where(code == 0x80, 0x7F, torch.where(largest, code - 1, code))
        return code.view(kind.dtype), (scale * 0.5).contiguous()
    code = torch.where(code == 0x80, 0x00, torch.where(largest, 0x80, code))
    return code.view(kind.dtype), (scale * 2.0).contiguous()


def _by_block(operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, scale: Tensor) -> Tensor:
    """``operation(element, its block's scale)`` of [..., N, K], without a scale for every element in memory."""
    columns = weight.shape[-1]
    groups = torch.unflatten(pad(weight, (0, -columns % BLOCK)), -1, (scale.shape[-1], BLOCK))
    scales = expand_block_scales(scale, weight.shape[-2]).unsqueeze(-1)
    return operation(groups, scales).flatten(-2)[..., :columns].contiguous()
