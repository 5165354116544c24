"""Wrong grouped products of codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

BASE = "core/runs_of3-E3-N256-K256-align128"
UNIT = f"{BASE}/bfloat16/contiguous/unit/0"
LAID = "core/runs_of3-E3-N128-K640-align128-{}/bfloat16/contiguous/b27_scales/0"
PARTIAL = "core/runs_of5-E4-N200-K704-align8/bfloat16/contiguous/b27_scales/0"
MASKED = "core/E4-M8-N256-K256"
MASKED_UNIT = f"{MASKED}/bfloat16/contiguous/unit/0"
MASKED_LAID = "core/E4-M8-N128-K640-{}/bfloat16/contiguous/b27_scales/0"
MASKED_PARTIAL = "core/E4-M7-N200-K704/bfloat16/contiguous/b27_scales/0"
BY_ROW = "stored.as_strided(stored.shape, (*stored.stride()[:-2], stored.shape[-1], 1)) if stored.dtype != torch.int32 "
BLOCKS = "range(weight_scales.shape[-1])"

MUTANTS = (
    edit(
        "fp8_grouped_linear_contiguous",
        "scale_next_block",
        "a block's scale along K is its neighbour's",
        "* weight_scales[..., None, :, b]",
        "* weight_scales[..., None, :, b - 1]",
        LAID.format("mn_f32_tma"),
        module="_fp8",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "scale_next_expert",
        "takes the scales of the expert before",
        "weight_scale[chosen]",
        "weight_scale[chosen - 1]",
        PARTIAL,
        "nonfinite",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "no_x_scale",
        "forgets the scales of x",
        "partial * x_scales[..., b, None]",
        "partial",
        UNIT,
        module="_fp8",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "drops_partial_block",
        "leaves out the last block along K if it is not whole",
        BLOCKS,
        "range(weight.shape[-1] // BLOCK)",
        PARTIAL,
        module="_fp8",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "first_scale_for_rows",
        "all rows of the weight take the first block's scale",
        "scales.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]",
        "scales[..., :1, :].expand(*scales.shape[:-2], rows, scales.shape[-1])",
        f"{BASE}/bfloat16/contiguous/b27_scales/0",
        module="formats",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "scales_by_rows",
        "reads the scales of x by rows whatever their layout",
        "else stored",
        f"else {BY_ROW}else stored",
        LAID.format("mn_f32"),
        "nonfinite",
        module="formats",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "first_word",
        "reads the first word of exponents for all",
        "exponents = words.unsqueeze(-1)",
        "exponents = words[..., :1].expand_as(words).unsqueeze(-1)",
        LAID.format("mn_ue8m0"),
        module="formats",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "exponents_backwards",
        "takes the highest byte of a word for the first",
        "torch.arange(0, 8 * per_word, 8, dtype=torch.int32, device=device)",
        "torch.arange(0, 8 * per_word, 8, dtype=torch.int32, device=device).flip(0)",
        LAID.format("mn_ue8m0"),
        module="formats",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "rounds_to_bf16",
        "rounds to bfloat16 whatever is asked for",
        "alignment, x_scale_layout).to(out_dtype)",
        "alignment, x_scale_layout).bfloat16().to(out_dtype)",
        f"{BASE}/float32/contiguous/unit/0",
    ),
    edit(
        "fp8_grouped_linear_contiguous",
        "last_row_decides",
        "takes a run's expert from its last row, which may be padding",
        "runs.amax(1)",
        "runs[:, -1]",
        UNIT,
        "nonfinite",
    ),
    edit(
        "fp8_grouped_linear_masked",
        "scale_next_expert",
        "takes the scales of the expert before",
        "weight_scale[chosen]",
        "weight_scale[chosen - 1]",
        MASKED_UNIT,
        "nonfinite",
    ),
    edit(
        "fp8_grouped_linear_masked",
        "scale_next_block",
        "a block's scale along K is its neighbour's",
        "* weight_scales[..., None, :, b]",
        "* weight_scales[..., None, :, b - 1]",
        MASKED_LAID.format("mn_f32_tma"),
        module="_fp8",
    ),
    edit(
        "fp8_grouped_linear_masked",
        "scale_twice",
        "multiplies by the weight's scale twice",
        "* weight_scales[..., None, :, b]",
        "* weight_scales[..., None, :, b].square()",
        MASKED_UNIT,
        module="_fp8",
    ),
    edit(
        "fp8_grouped_linear_masked",
        "drops_partial_block",
        "leaves out the last block along K if it is not whole",
        BLOCKS,
        "range(weight.shape[-1] // BLOCK)",
        MASKED_PARTIAL,
        module="_fp8",
    ),
    edit(
        "fp8_grouped_linear_masked",
        "one_row_short",
        "leaves out each expert's last row in use",
        "< masked_m[:, None]",
        "< masked_m[:, None] - 1",
        MASKED_UNIT,
    ),
    edit(
        "fp8_grouped_linear_masked",
        "scales_by_rows",
        "reads the scales of x by rows whatever their layout",
        "else stored",
        f"else {BY_ROW}else stored",
        MASKED_LAID.format("mn_f32"),
        "nonfinite",
        module="formats",
    ),
    edit(
        "fp8_grouped_linear_masked",
        "rounds_to_bf16",
        "rounds to bfloat16 whatever is asked for",
        "masked_m, x_scale_layout).to(out_dtype)",
        "masked_m, x_scale_layout).bfloat16().to(out_dtype)",
        f"{MASKED}/float32/contiguous/unit/0",
    ),
)


@kernel(
    "fp8_grouped_linear_contiguous",
    "unpromoted",
    "sums the whole of K with the 14 bits of a tensor core",
    f"{BASE}/float32/contiguous/one_sign/0",
)
def unpromoted(product: Any, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, *rest: Any) -> Tensor:
    out_dtype = rest[2]
    total = torch.zeros(len(x), weight.shape[1])
    for k in range(0, x.shape[1], 32):
        part = torch.zeros(len(x), x.shape[1], dtype=torch.uint8).view(x.dtype)
        part[:, k : k + 32] = x[:, k : k + 32]
        total = total + product(part, x_scale, weight, weight_scale, *rest).float()
        total = (total.view(torch.int32) & -1024).view(torch.float32)
    return total.to(out_dtype)


@kernel(
    "fp8_grouped_linear_contiguous",
    "fn_for_fnuz",
    "reads e4m3fnuz as e4m3fn",
    f"{BASE}/bfloat16/contiguous/b29_fnuz/0",
)
def fn_for_fnuz(product: Any, x: Tensor, x_scale: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    fn = torch.float8_e4m3fn
    return product(x.view(fn), x_scale, weight.view(fn), *rest)  # type: ignore[no-any-return]


@kernel(
    "fp8_grouped_linear_masked", "fn_for_fnuz", "reads e4m3fnuz as e4m3fn", f"{MASKED}/bfloat16/contiguous/b29_fnuz/0"
)
def fn_for_fnuz_masked(product: Any, x: Tensor, x_scale: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    fn = torch.float8_e4m3fn
    return product(x.view(fn), x_scale, weight.view(fn), *rest)  # type: ignore[no-any-return]


@kernel(
    "fp8_grouped_linear_masked",
    "expected_rows",
    "computes as many rows as the caller guessed",
    f"{MASKED}/bfloat16/contiguous/unit/0",
)
def expected_rows(
    product: Any, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, masked_m: Tensor, *rest: Any
) -> Tensor:
    rows = masked_m.clamp(max=rest[0])
    return product(x, x_scale, weight, weight_scale, rows, *rest)  # type: ignore[no-any-return]


@kernel(
    "fp8_grouped_linear_masked",
    "unpadded_scales",
    "takes the experts' scales to lie one after the other without padding",
    "core/E4-M7-N200-K704-mn_f32_tma/bfloat16/contiguous/unit/0",
    "nonfinite",
)
def unpadded_scales(product: Any, x: Tensor, x_scale: Tensor, *rest: Any) -> Tensor:
    _, rows, columns = x_scale.shape
    if x_scale.dtype == torch.float32 and x_scale.stride(1) == 1:
        x_scale = x_scale.as_strided(x_scale.shape, (columns * rows, 1, x_scale.stride(2)))
    aligned = -(-rows // 4) * 4
    padded = x_scale.new_zeros(len(x_scale), columns, aligned)
    padded[..., :rows] = x_scale.mT
    return product(x, padded.mT[:, :rows], *rest)  # type: ignore[no-any-return]
