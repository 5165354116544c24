"""Bringing a mixture-of-experts' tokens into the order of their experts, and back.

No size here depends on where tokens go: results have room for the worst spread (`max_expert_rows`), so that nothing
waits for the device to count. Ids are local: whoever splits experts over ranks has made those of other ranks -1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..check import FLOAT, FP8, INDEX, ceil_div
from ..contracts import Contracts
from ..formats import BLOCK, SCALE_LAYOUTS
from ..numerics import narrow, wide
from ..op import op
from ._moe import as_bits, is_expert, sort_by_group
from ._moe import max_expert_rows as max_expert_rows

_ORDER = (
    "Experts ascend. The assignments of one expert may come in any order (kernels use atomics; the reference keeps "
    "theirs), hence a kernel gives equal bits only if it says so; after ep_gather the order no longer shows."
)
_ROWS_FIT = "row numbers fit int32"


@op(
    shapes={"topk_ids": "T K"},
    dtypes={"topk_ids": INDEX},
    where={
        "num_experts >= 0 and block_size > 0": "no negative number of experts, and blocks of at least one row",
        "max_expert_rows(T * K, num_experts + 1, block_size) < 2**31": _ROWS_FIT,
    },
    rounds=0,
    accumulates=None,
    contracts=Contracts(
        C1_empties="T = 0 gives sorted_ids and expert_ids without elements, and num_tokens_post_pad 0.",
        C7_sentinels="An id outside [0, num_experts), such as -1, is nobody's: its assignment goes to blocks of expert "
        "-1. In the results, T·K marks padding, and -1 blocks that no expert computes.",
        C8_unwritten_rows="Every element is written, past num_tokens_post_pad too: sorted_ids T·K, expert_ids -1.",
        C9_rounding="None: ids.",
        C10_determinism=_ORDER,
        C13_ids="Takes int32 or int64, gives int32.",
    ),
)
def moe_align_block_size(topk_ids: Tensor, num_experts: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort assignments by expert into blocks of one expert each, for a GEMM that takes a block of rows at a time.

    Assignment i = t · K + k says that token t goes to expert ``topk_ids[t, k]``. Every assignment has exactly one
    place; those of nobody (id -1) come first, in blocks of expert -1, so that a kernel may write zeros for them.

    topk_ids: [T, K] int32/int64, any strides. With M = max_expert_rows(T · K, num_experts + 1, block_size), all int32:
    Returns (sorted_ids [M]: assignments, each expert's run padded with T · K to whole blocks;
    expert_ids [M / block_size]: the expert of each block; num_tokens_post_pad [1]: rows in use, padding included).
    Semantics: SGLang's kernel called with num_experts + 1, and vLLM's with an expert map.
    """
    assignments, groups = topk_ids.numel(), num_experts + 1
    group = torch.where(is_expert(topk_ids, num_experts), topk_ids + 1, 0).flatten().to(torch.int64)
    row, end = sort_by_group(group, groups, block_size)
    total = max_expert_rows(assignments, groups, block_size)
    count = torch.arange(total, device=row.device)
    sorted_ids = torch.full_like(count, assignments).scatter(0, row, count[:assignments])
    first = torch.arange(0, total, block_size, device=row.device)
    expert_ids = torch.where(first < end[-1], torch.searchsorted(end, first, right=True) - 1, -1)
    return sorted_ids.to(torch.int32), expert_ids.to(torch.int32), end[-1:].to(torch.int32)


_SCATTERED = Contracts(
    C1_empties="T = 0 and num_experts = 0 (a rank without experts) give zero rows.",
    C7_sentinels="An id outside [0, num_experts), such as -1, gets no row and output_index -1. Padding rows have "
    "m_indices -1.",
    C8_unwritten_rows="m_indices and output_index are written in full. A padding row itself, and its scales, hold "
    "anything, NaN included: nothing may read them but what gives a padding row again. The reference writes zeros.",
    C9_rounding="A copy: bitwise.",
    C10_determinism=_ORDER,
    C13_ids="Takes int32 or int64, gives int32.",
)
_SCATTER_WHERE = {
    "num_experts >= 0 and alignment > 0": "no negative number of experts, and runs of at least one row",
    "max_expert_rows(T * K, num_experts, alignment) < 2**31": _ROWS_FIT,
}


@op(
    shapes={"x": "T D", "topk_ids": "T K"},
    dtypes={"x": FLOAT, "topk_ids": INDEX},
    where=_SCATTER_WHERE,
    rounds=0,
    accumulates=None,
    traffic="(T + T * K) * D * x.element_size() + T * K * (topk_ids.element_size() + 8)",
    contracts=_SCATTERED,
)
def ep_scatter(x: Tensor, topk_ids: Tensor, num_experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token's row once for each of its experts, sorted by expert: the input of a contiguous grouped GEMM.

    Every expert's run is padded to a multiple of ``alignment`` rows, as `grouped_linear_contiguous` wants them.

    x: [T, D] bf16/f16/f32, any strides; topk_ids: [T, K] int32/int64, expert numbers on this rank.
    With M = max_expert_rows(T · K, num_experts, alignment), whatever the ids: Returns (rows [M, D] in x's dtype;
    m_indices [M] int32: the expert of each row, -1 for padding, which ends each run and fills what is left at the end;
    output_index [T, K] int32: the row of each assignment, -1 for those of nobody here). `ep_gather` takes it back.
    """
    token, m_indices, output_index = _places(topk_ids, num_experts, alignment)
    return _copy_rows(x, token, m_indices), m_indices, output_index


@op(
    shapes={"x": "T D", "x_scale": "T _", "topk_ids": "T K"},
    dtypes={"x": FP8, "x_scale": (torch.float32, torch.int32), "topk_ids": INDEX},
    where={
        **_SCATTER_WHERE,
        "x_scale_layout in SCALE_LAYOUTS and scale_layout in SCALE_LAYOUTS": (
            f"the layouts are among {', '.join(SCALE_LAYOUTS)}"
        ),
        "x_scale.dtype is SCALE_LAYOUTS[x_scale_layout].dtype": "x_scale has its layout's dtype",
        "x_scale.shape[1] == SCALE_LAYOUTS[x_scale_layout].columns(ceil_div(D, BLOCK))": (
            "x_scale holds one scale for each row and 128 columns of x"
        ),
        "SCALE_LAYOUTS[x_scale_layout].matches(x_scale)": "x_scale has its layout's strides",
    },
    rounds=0,
    accumulates=None,
    traffic="(T + T * K) * (D + 4 * x_scale.shape[1]) + T * K * (topk_ids.element_size() + 8)",
    contracts=replace(
        _SCATTERED,
        C3_strides="x and topk_ids have any strides; those of x_scale are exactly what x_scale_layout says.",
        C5_fp8_kind="Either: codes are moved as they are.",
        C6_fp8_cast="No cast to fp8: codes are moved.",
    ),
)
def ep_scatter_fp8(
    x: Tensor,
    x_scale: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    alignment: int,
    x_scale_layout: str = "row_f32",
    scale_layout: str = "row_f32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ep_scatter` of quantised rows, which take their scales along.

    x: [T, D] fp8 codes; x_scale: their scales [T, ⌈D/128⌉], stored as ``x_scale_layout`` names (`SCALE_LAYOUTS`).
    Returns (rows [M, D] codes; row_scale: the scales [M, ⌈D/128⌉], stored as ``scale_layout`` names, which may be
    another one: what a dispatch delivered becomes what a GEMM reads; m_indices [M]; output_index [T, K]). To be stored
    as exponents, scales must be powers of two, or +0: any other becomes NaN.
    Raises ArgumentError for a layout's wrong name, dtype, shape or strides.
    """
    token, m_indices, output_index = _places(topk_ids, num_experts, alignment)
    scales = SCALE_LAYOUTS[x_scale_layout].unpack(x_scale, ceil_div(x.shape[1], BLOCK))
    row_scale = SCALE_LAYOUTS[scale_layout].pack(_copy_rows(scales, token, m_indices))
    return _copy_rows(x, token, m_indices), row_scale, m_indices, output_index


@op(
    shapes={"rows": "M D", "output_index": "T K", "topk_weights": "T K"},
    dtypes={"rows": FLOAT, "output_index": torch.int32, "topk_weights": (torch.float32, torch.float64)},
    reduces="K",
    flops="2 * T * K * D",
    traffic="(min(M, T * K) + T) * D * rows.element_size() + 8 * T * K",
    terms=lambda rows, output_index, topk_weights: _gather(wide(rows).abs(), output_index, topk_weights.abs()),
    contracts=Contracts(
        C1_empties="T = 0 gives zero rows; K = 0 and M = 0 give zeros.",
        C7_sentinels="An index outside [0, M), such as -1, contributes exactly 0, whatever its weight.",
        C8_unwritten_rows="Every row is written: a token without any row gives zeros. Rows that no index names are "
        "not read: their NaN stays there.",
        C9_rounding="Weighted and summed in float32 in the order of K, rounded once.",
        C10_determinism="A row does not depend on the others.",
        C12_scale_owner="Applies no routed scaling factor: topk_weights carry it.",
        C13_ids="output_index is int32, as ep_scatter gives it.",
    ),
)
def ep_gather(rows: Tensor, output_index: Tensor, topk_weights: Tensor) -> Tensor:
    """``Σ_k weight · rows[output_index[t, k]]``: a token's expert outputs, brought together where ep_scatter sent them.

    rows: [M, D] bf16/f16/f32; output_index: [T, K] int32; topk_weights: [T, K] float32. Any strides.
    Returns [T, D] in rows' dtype.
    """
    return narrow(_gather(wide(rows), output_index, topk_weights), rows)


def _places(topk_ids: Tensor, num_experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token [M] int64, valid for padding too; m_indices [M] int32; output_index [T, K] int32)"""
    assignments, num_rows = topk_ids.numel(), max_expert_rows(topk_ids.numel(), num_experts, alignment)
    valid = is_expert(topk_ids, num_experts).flatten()
    group = torch.where(valid, topk_ids.flatten(), num_experts).to(torch.int64)
    # Nobody's assignments come last, from wherever the experts' rows end; one spare row takes them all.
    row = torch.where(valid, sort_by_group(group, num_experts + 1, alignment).row, num_rows)
    source = row.new_full((num_rows + 1,), -1).scatter(0, row, torch.arange(assignments, device=row.device))[:-1]
    assignment = source.clamp(min=0)
    m_indices = torch.where(source >= 0, group[assignment], -1)
    output_index = torch.where(valid, row, -1).view(topk_ids.shape)
    return assignment // max(topk_ids.shape[1], 1), m_indices.to(torch.int32), output_index.to(torch.int32)


def _copy_rows(x: Tensor, token: Tensor, m_indices: Tensor) -> Tensor:
    return as_bits(x)[token].masked_fill((m_indices < 0)[:, None], 0).view(x.dtype)


def _gather(rows: Tensor, output_index: Tensor, topk_weights: Tensor) -> Tensor:
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows.new_zeros(output_index.shape[0], rows.shape[1])
    picked = rows[output_index.clamp(0, num_rows - 1)] * topk_weights.unsqueeze(-1)
    valid = (output_index >= 0) & (output_index < num_rows)
    return torch.where(valid.unsqueeze(-1), picked, 0.0).sum(1)  # not times 0: the row taken instead may hold NaN
