"""Sorting by expert against loops over assignments, every spread of the load, and the way there and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, to_fp8
from torch_hal.ops import (
    ep_gather,
    ep_scatter,
    ep_scatter_fp8,
    fused_experts,
    grouped_linear_contiguous,
    max_expert_rows,
    moe_align_block_size,
    silu_and_mul,
)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spreads(tokens: int, top_k: int, experts: int) -> dict[str, Tensor]:
    """Ids that load the experts in every way that has gone wrong somewhere."""
    g = torch.Generator().manual_seed(tokens + top_k)
    some = torch.randint(-1, experts, (tokens, top_k), generator=g)
    outside = torch.tensor([-1, experts, 2**31 - 1, -(2**31), 0])
    return {
        "mixed": some,
        "nobody": torch.full((tokens, top_k), -1),
        "all to the first": torch.zeros(tokens, top_k, dtype=torch.int64),
        "all to the last": torch.full((tokens, top_k), experts - 1),
        "two of many": torch.where(some >= 0, some % 2 * (experts - 1), -1),
        "repeated": some[:, :1].expand(-1, top_k),
        "outside": outside[torch.arange(tokens * top_k) % 5].view(tokens, top_k),
    }


SIZES = [(5, 3, 4, 4), (1, 1, 8, 16), (17, 2, 3, 4), (9, 4, 2, 1), (3, 8, 256, 8), (40, 1, 5, 128), (4, 2, 1, 3)]
CASES = [
    pytest.param(ids, experts, block, id=f"{tokens}x{top_k} of {experts} by {block}, {name}")
    for tokens, top_k, experts, block in SIZES
    for name, ids in spreads(tokens, top_k, experts).items()
]


def runs(ids: Tensor, experts: int, alignment: int, nobody: bool) -> list[tuple[int, list[int | None]]]:
    """(expert, its assignments padded with None) for every expert with any, -1 first if ``nobody`` counts too."""
    found = []
    flat = [e if 0 <= e < experts else -1 for e in ids.flatten().tolist()]
    for expert in range(-1 if nobody else 0, experts):
        assignments: list[int | None] = [i for i, e in enumerate(flat) if e == expert]
        if assignments:
            found.append((expert, assignments + [None] * (-len(assignments) % alignment)))
    return found


@pytest.mark.parametrize("ids, experts, block", CASES)
def test_align_is_a_stable_sort_into_blocks(ids: Tensor, experts: int, block: int) -> None:
    sorted_ids, expert_ids, num = moe_align_block_size(ids, experts, block)
    numel = ids.numel()
    rows = [numel if i is None else i for _, run in runs(ids, experts, block, nobody=True) for i in run]
    blocks = [e for e, run in runs(ids, experts, block, nobody=True) for _ in range(len(run) // block)]
    room = max_expert_rows(numel, experts + 1, block)
    assert num.tolist() == [len(rows)] and len(rows) <= room
    assert sorted_ids.tolist() == rows + [numel] * (room - len(rows))
    assert expert_ids.tolist() == blocks + [-1] * (room // block - len(blocks))
    assert {sorted_ids.dtype, expert_ids.dtype, num.dtype} == {torch.int32}


@pytest.mark.parametrize("ids, experts, alignment", CASES)
def test_scatter_copies_each_row_to_each_of_its_experts(ids: Tensor, experts: int, alignment: int) -> None:
    tokens, top_k = ids.shape
    x = normal(tokens, 12)[:, :7]
    rows, m_indices, output_index = ep_scatter(x, ids, experts, alignment)
    room = max_expert_rows(ids.numel(), experts, alignment)
    assert rows.shape == (room, 7) and m_indices.shape == (room,) and output_index.shape == ids.shape
    assert m_indices.dtype == output_index.dtype == torch.int32
    sources = [(e, i) for e, run in runs(ids, experts, alignment, nobody=False) for i in run]
    expected_index = [-1] * ids.numel()
    for row, (expert, i) in enumerate(sources):
        assert m_indices[row] == (-1 if i is None else expert)
        if i is not None:
            assert torch.equal(rows[row], x[i // top_k])
            expected_index[i] = row
    assert (m_indices[len(sources) :] == -1).all()
    assert output_index.flatten().tolist() == expected_index


def test_the_room_is_the_least_that_is_always_enough() -> None:
    """Against every way to spread up to 7 assignments over up to 3 groups."""
    for assignments, groups, alignment in itertools.product(range(8), range(4), range(1, 5)):
        spread = [c for c in itertools.product(range(assignments + 1), repeat=groups) if sum(c) == assignments]
        needed = [sum(-(-n // alignment) * alignment for n in counts) for counts in spread]
        assert max_expert_rows(assignments, groups, alignment) == max(needed, default=0)


@pytest.mark.parametrize("stored", SCALE_LAYOUTS)
@pytest.mark.parametrize("scattered", SCALE_LAYOUTS)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_scatter_of_codes_takes_the_scales_along(stored: str, scattered: str, kind: str) -> None:
    """D = 640 has five scales, the second packed word with one; powers of two, so that any layout holds them."""
    tokens, experts, alignment = 7, 4, 4
    ids = torch.randint(-1, experts, (tokens, 2), generator=torch.Generator().manual_seed(1))
    x = to_fp8(normal(tokens, 640) * 50, FP8_KINDS[kind])
    scales = 2.0 ** torch.arange(tokens * 5, dtype=torch.float32).remainder(19).sub(9).view(tokens, 5)
    x_scale = SCALE_LAYOUTS[stored].pack(scales)
    rows, row_scale, m_indices, output_index = ep_scatter_fp8(x, x_scale, ids, experts, alignment, stored, scattered)
    _, expected_m_indices, expected_index = ep_scatter(normal(tokens, 640), ids, experts, alignment)
    assert torch.equal(m_indices, expected_m_indices) and torch.equal(output_index, expected_index)
    layout = SCALE_LAYOUTS[scattered]
    assert rows.dtype == x.dtype and row_scale.dtype == layout.dtype and layout.matches(row_scale)
    logical = layout.unpack(row_scale, 5)
    for t, k in itertools.product(range(tokens), range(2)):
        if (row := int(output_index[t, k])) >= 0:
            assert same_bits(rows[row], x[t]) and torch.equal(logical[row], scales[t])
    assert not rows.view(torch.uint8)[m_indices < 0].any()


def test_nothing_to_sort() -> None:
    none = torch.empty(0, 3, dtype=torch.int64)
    assert [x.tolist() for x in moe_align_block_size(none, 4, 8)] == [[], [], [0]]
    assert [x.tolist() for x in moe_align_block_size(torch.empty(2, 0, dtype=torch.int32), 4, 8)] == [[], [], [0]]
    assert [tuple(x.shape) for x in ep_scatter(normal(0, 5), none, 4, 8)] == [(0, 5), (0,), (0, 3)]
    assert ep_gather(normal(0, 5), none.to(torch.int32), torch.empty(0, 3)).shape == (0, 5)


def test_a_rank_without_experts() -> None:
    ids = torch.full((2, 3), -1)
    sorted_ids, expert_ids, num = moe_align_block_size(ids, 0, 4)
    assert (sorted_ids.tolist(), expert_ids.tolist(), num.tolist()) == ([0, 1, 2, 3, 4, 5, 6, 6], [-1, -1], [8])
    rows, m_indices, output_index = ep_scatter(normal(2, 5), ids, 0, 4)
    assert rows.shape == (0, 5) and m_indices.shape == (0,) and output_index.tolist() == [[-1] * 3] * 2
    assert torch.equal(ep_gather(rows, output_index, torch.ones(2, 3)), torch.zeros(2, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_is_the_weighted_sum(dtype: torch.dtype) -> None:
    rows, weights = normal(20, 24, dtype=dtype)[:, ::2], torch.rand(5, 3)
    index = torch.tensor([[0, 19, 7], [3, 3, 3], [-1, 4, -1], [-1, -1, -1], [20, 2**31 - 1, 6]], dtype=torch.int32)
    weights[2, 0] = weights[3] = weights[4, 0] = torch.nan
    exact, terms = torch.zeros(5, 12, dtype=torch.float64), torch.zeros(5, 12, dtype=torch.float64)
    for t, k in itertools.product(range(5), range(3)):
        if 0 <= index[t, k] < 20:
            product = weights[t, k].double() * rows[index[t, k]].double()
            exact[t] += product
            terms[t] += product.abs()
    y = ep_gather(rows, index, weights)
    assert y.dtype == dtype and y.is_contiguous() and not y[3].any()
    assert_within(y, exact, terms, length=3)


def test_gather_sums_in_float32_and_rounds_once() -> None:
    rows = torch.tensor([[1.0], [2.0**-9], [-1.0]], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    assert ep_gather(rows, index, torch.ones(1, 3)).item() == 2.0**-9


def test_gather_does_not_read_rows_that_nobody_named() -> None:
    rows = normal(6, 4)
    rows[[0, 3, 5]] = torch.nan
    index = torch.tensor([[1, -1], [4, 2]], dtype=torch.int32)
    assert ep_gather(rows, index, torch.ones(2, 2)).isfinite().all()


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("name", spreads(1, 1, 1))
def test_there_and_back_is_fused_experts(name: str, alignment: int) -> None:
    """With NaN in every row that the contract lets kernels leave unwritten."""
    tokens, experts, hidden, inter = 11, 5, 24, 10
    ids = spreads(tokens, 3, experts)[name]
    x, weights = normal(tokens, hidden), torch.rand(tokens, 3)
    w13, w2 = normal(experts, 2 * inter, hidden, seed=1), normal(experts, hidden, inter, seed=2)
    rows, m_indices, output_index = ep_scatter(x, ids, experts, alignment)
    padding = (m_indices < 0)[:, None]
    gate_up = grouped_linear_contiguous(rows.masked_fill(padding, torch.nan), w13, m_indices, alignment)
    activated = silu_and_mul(gate_up.masked_fill(padding, torch.nan))
    outputs = grouped_linear_contiguous(activated, w2, m_indices, alignment).masked_fill(padding, torch.nan)
    got = ep_gather(outputs, output_index, weights)
    torch.testing.assert_close(got, fused_experts(x, w13, w2, weights, ids), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", spreads(1, 1, 1))
def test_a_gemm_over_aligned_blocks_is_fused_experts(name: str) -> None:
    """What a fused kernel does with the sorted ids: block after block, zeros for those of nobody."""
    tokens, top_k, experts, hidden, inter, block = 11, 3, 5, 24, 10, 4
    ids = spreads(tokens, top_k, experts)[name]
    x, weights = normal(tokens, hidden), torch.rand(tokens, top_k)
    w13, w2 = normal(experts, 2 * inter, hidden, seed=1), normal(experts, hidden, inter, seed=2)
    sorted_ids, expert_ids, num = moe_align_block_size(ids, experts, block)
    outputs = torch.full((tokens * top_k + 1, hidden), torch.nan)  # one more: where the padding goes
    for b in range(int(num) // block):
        chosen, expert = sorted_ids[b * block : (b + 1) * block].long(), int(expert_ids[b])
        if expert < 0:
            outputs[chosen] = 0
        else:
            token = (chosen // top_k).clamp(max=tokens - 1)
            outputs[chosen] = silu_and_mul(x[token] @ w13[expert].T) @ w2[expert].T
    got = (outputs[:-1].view(tokens, top_k, hidden) * weights[..., None]).sum(1)
    torch.testing.assert_close(got, fused_experts(x, w13, w2, weights, ids), rtol=1e-5, atol=1e-4)


def test_traces() -> None:
    ids = spreads(5, 3, 4)["mixed"].to(torch.int32)
    assert_traces(moe_align_block_size, ids, 4, 8)
    assert_traces(ep_scatter, normal(5, 16, dtype=torch.bfloat16)[:, :8], ids, 4, 8)
    x, scale = to_fp8(normal(5, 256), FP8_KINDS["e4m3fn"]), normal(5, 2).abs()
    for layout in ("row_f32", "mn_f32_tma"):
        assert_traces(ep_scatter_fp8, x, scale, ids, 4, 8, "row_f32", layout)
    index = torch.arange(15, dtype=torch.int32).view(5, 3)
    assert_traces(ep_gather, normal(20, 8), index, torch.rand(5, 3))


X, IDS, WEIGHTS = normal(3, 8), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
CODES, SCALE = to_fp8(normal(3, 256), FP8_KINDS["e4m3fn"]), torch.ones(3, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: moe_align_block_size(IDS[0], 4, 8),
            r"moe_align_block_size.*'topk_ids'.*rank 2 \[T, K\].*shape \(2,\)",
        ),
        (lambda: moe_align_block_size(IDS.to(torch.int16), 4, 8), r"'topk_ids'.*int32 or torch.int64, got torch.int16"),
        (lambda: moe_align_block_size(IDS, 4, 0), r"moe_align_block_size.*'block_size, num_experts'.*block_size=0"),
        (lambda: moe_align_block_size(IDS, -1, 8), r"no negative number of experts.*num_experts=-1"),
        (
            lambda: moe_align_block_size(IDS, 4, 2**30),
            r"moe_align_block_size.*row numbers fit int32.*block_size=1073741",
        ),
        (lambda: ep_scatter(X, IDS[:2], 4, 8), r"ep_scatter.*'topk_ids'.*T = 3.*got shape \(2, 2\)"),
        (lambda: ep_scatter(CODES, IDS, 4, 8), r"ep_scatter.*'x'.*expected torch.bfloat16.*got torch.float8_e4m3fn"),
        (lambda: ep_scatter(X, IDS, 4, 0), r"ep_scatter.*'alignment, num_experts'.*got alignment=0"),
        (lambda: ep_scatter_fp8(X, SCALE, IDS, 4, 8), r"ep_scatter_fp8.*'x'.*float8_e4m3fn.*got torch.float32"),
        (lambda: ep_scatter_fp8(CODES, SCALE[:, :1], IDS, 4, 8), r"ep_scatter_fp8.*one scale for each row and 128"),
        (
            lambda: ep_scatter_fp8(CODES, SCALE, IDS, 4, 8, "row"),
            r"ep_scatter_fp8.*the layouts are among row_f32.*'row'",
        ),
        (lambda: ep_scatter_fp8(CODES, SCALE, IDS, 4, 8, "row_f32", "fp32"), r"the layouts are among row_f32.*'fp32'"),
        (lambda: ep_scatter_fp8(CODES, SCALE, IDS, 4, 8, "mn_f32_tma"), r"x_scale has its layout's strides"),
        (lambda: ep_scatter_fp8(CODES, SCALE, IDS, 4, 8, "mn_ue8m0"), r"x_scale has its layout's dtype"),
        (
            lambda: ep_gather(X, IDS.long(), WEIGHTS),
            r"ep_gather.*'output_index'.*expected torch.int32, got torch.int64",
        ),
        (lambda: ep_gather(X, IDS, WEIGHTS[:, :1]), r"ep_gather.*'topk_weights'.*K = 2.*got shape \(3, 1\)"),
        (lambda: ep_gather(X, IDS, WEIGHTS.bfloat16()), r"ep_gather.*'topk_weights'.*float32.*got torch.bfloat16"),
    ],
)
def test_errors_name_op_argument_expected_and_got(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
