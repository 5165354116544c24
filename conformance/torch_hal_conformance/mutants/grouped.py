"""Wrong grouped products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

RUNS, SMALL = "core/runs_of3-E6-N136-K320-align128", "core/runs_of9-E4-N33-K71-align16"
BF16, F32 = f"{RUNS}/bfloat16/contiguous/unit/0", f"{RUNS}/float32/contiguous/unit/0"
MASKED = "core/E5-M24-N136-K320"
MASKED_BF16, MASKED_F32 = f"{MASKED}/bfloat16/contiguous/unit/0", f"{MASKED}/float32/contiguous/unit/0"
MULTIPLY = "torch.bmm(wide(x[blocks]), wide(take(weight, chosen)).mT)"
CHOSEN = "experts = experts.clamp(0, num_experts - 1)"

MUTANTS = (
    edit(
        "grouped_linear_contiguous",
        "next_expert",
        "each row takes the next expert's weight",
        CHOSEN,
        "experts = (experts + 1) % num_experts",
        BF16,
        "nonfinite",
    ),
    edit(
        "grouped_linear_contiguous",
        "expert_before",
        "each row takes the weight of the expert before, the first one's rows the last one's",
        CHOSEN,
        "experts = (experts - 1) % num_experts",
        f"{SMALL}/float32/contiguous/unit/0",
    ),
    edit(
        "grouped_linear_contiguous",
        "last_row_decides",
        "takes a run's expert from its last row, which may be padding",
        "runs.amax(1)",
        "runs[:, -1]",
        F32,
    ),
    edit(
        "grouped_linear_contiguous",
        "skips_partial_runs",
        "skips a run in which any row is padding",
        "runs >= 0\n",
        "(runs >= 0).all(1, keepdim=True).expand_as(runs)\n",
        BF16,
    ),
    edit(
        "grouped_linear_contiguous",
        "one_row_a_run_short",
        "leaves out the last row in use of each run",
        "runs >= 0\n",
        "(runs >= 0) & (torch.nn.functional.pad(runs, (0, 1), value=-1)[:, 1:] >= 0)\n",
        F32,
    ),
    edit(
        "grouped_linear_contiguous",
        "ascending",
        "takes for granted that experts ascend",
        "runs.amax(1).to",
        "runs.amax(1).cummax(0).values.to",
        f"{RUNS}/float32/contiguous/unsorted/0",
    ),
    edit(
        "grouped_linear_contiguous",
        "padding_spreads",
        "clears padding by a product, which NaN survives, and reaches the rows of its run",
        MULTIPLY,
        f"{MULTIPLY} + 0 * wide(x[blocks]).sum((1, 2), keepdim=True)",
        F32,
        "nonfinite",
    ),
    edit(
        "grouped_linear_contiguous",
        "drops_a_block",
        "leaves out the last 64 along K",
        MULTIPLY,
        "torch.bmm(wide(x[blocks])[..., :-64], wide(take(weight, chosen)).mT[:, :-64])",
        BF16,
    ),
    edit(
        "grouped_linear_contiguous",
        "transposed",
        "takes a square weight by columns",
        MULTIPLY,
        "torch.bmm(wide(x[blocks]), wide(take(weight, chosen).mT if weight.shape[1] == weight.shape[2] "
        "else take(weight, chosen)).mT)",
        "core/runs_of7-E1-N48-K48-align4/float32/contiguous/unit/0",
    ),
    edit(
        "grouped_linear_masked",
        "one_row_short",
        "leaves out each expert's last row in use",
        "< masked_m[:, None]",
        "< masked_m[:, None] - 1",
        MASKED_BF16,
    ),
    edit(
        "grouped_linear_masked",
        "first_count",
        "takes the first expert's count for all",
        "< masked_m[:, None]",
        "< masked_m[:1, None].expand(len(masked_m), 1)",
        MASKED_F32,
    ),
    edit(
        "grouped_linear_masked",
        "empty_expert_shifts",
        "counts only the experts with rows, so that after an empty one all take another's weight",
        "    return experts, torch.arange(rows",
        "    experts = ((masked_m > 0).cumsum(0) - 1).clamp(min=0)\n    return experts, torch.arange(rows",
        MASKED_BF16,
        "nonfinite",
    ),
    edit(
        "grouped_linear_masked",
        "padding_spreads",
        "clears rows beyond the count by a product, which NaN survives, and reaches the expert's others",
        MULTIPLY,
        f"{MULTIPLY} + 0 * wide(x[blocks]).sum((1, 2), keepdim=True)",
        MASKED_F32,
        "nonfinite",
    ),
    edit(
        "grouped_linear_masked",
        "transposed",
        "takes a square weight by columns",
        MULTIPLY,
        "torch.bmm(wide(x[blocks]), wide(take(weight, chosen).mT if weight.shape[1] == weight.shape[2] "
        "else take(weight, chosen)).mT)",
        "core/E7-M40-N48-K48-expected1000/float32/contiguous/unit/0",
    ),
)


@kernel(
    "grouped_linear_contiguous",
    "tiles_of_128",
    "takes tiles of 128 rows for one expert's, whatever the alignment",
    f"{SMALL}/bfloat16/contiguous/unit/0",
)
def tiles_of_128(product: Any, x: Tensor, weight: Tensor, m_indices: Tensor, alignment: int, layout: str) -> Tensor:
    first = torch.arange(len(m_indices)) // 128 * 128
    owners = torch.where(m_indices >= 0, m_indices[first], -1)
    return product(x, weight, owners, 1, layout)  # type: ignore[no-any-return]


@kernel("grouped_linear_contiguous", "first_run", "computes the first run alone", BF16, "nonfinite")
def first_run(product: Any, x: Tensor, weight: Tensor, m_indices: Tensor, alignment: int, layout: str) -> Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    some = slice(0, alignment)
    out[some] = product(x[some], weight, m_indices[some], alignment, layout)
    return out


@kernel("grouped_linear_contiguous", "sums_in_bf16", "sums in bfloat16", f"{SMALL}/bfloat16/contiguous/unit/0")
def sums_in_bf16(product: Any, x: Tensor, weight: Tensor, m_indices: Tensor, alignment: int, layout: str) -> Tensor:
    total = torch.zeros(len(x), weight.shape[1], dtype=torch.bfloat16)
    for k in range(x.shape[1]):
        total += product(x[:, k : k + 1], weight[:, :, k : k + 1], m_indices, alignment, layout).bfloat16()
    return total.to(x.dtype)


@kernel("grouped_linear_masked", "expected_rows", "computes as many rows as the caller guessed", MASKED_BF16)
def expected_rows(product: Any, x: Tensor, weight: Tensor, masked_m: Tensor, expected_m: int, layout: str) -> Tensor:
    return product(x, weight, masked_m.clamp(max=expected_m), expected_m, layout)  # type: ignore[no-any-return]


@kernel(
    "grouped_linear_masked",
    "sums_in_bf16",
    "sums in bfloat16",
    "core/E4-M24-N33-K71-expected0/bfloat16/contiguous/unit/0",
)
def sums_masked_in_bf16(
    product: Any, x: Tensor, weight: Tensor, masked_m: Tensor, expected_m: int, layout: str
) -> Tensor:
    total = torch.zeros(*x.shape[:2], weight.shape[1], dtype=torch.bfloat16)
    for k in range(x.shape[2]):
        total += product(x[..., k : k + 1], weight[:, :, k : k + 1], masked_m, expected_m, layout).bfloat16()
    return total.to(x.dtype)


@kernel(
    "grouped_linear_masked",
    "asks_the_host",
    "declares that it is safe in graphs, and asks how many rows there are",
    f"{MASKED}/bfloat16/contiguous/b22_capture/0",
    "sync",
)
def asks_the_host(product: Any, x: Tensor, weight: Tensor, masked_m: Tensor, expected_m: int, layout: str) -> Tensor:
    out = product(x, weight, masked_m, expected_m, layout)
    rows = int(masked_m.max().item())
    out[:, rows:] = 0
    return out  # type: ignore[no-any-return]
