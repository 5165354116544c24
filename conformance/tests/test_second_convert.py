"""The second oracles' tools: codes and scales by their definitions, comparison, and what a contract leaves open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator
from torch.utils._pytree import tree_leaves

from torch_hal.op import declared
from torch_hal_conformance.second import CANONICAL, ORACLES, agree, compare, to_numpy, unpack_scales
from torch_hal_conformance.second.convert import FP8_FORMATS, decode_byte, encode_number

NAN, INF = math.nan, math.inf
IDS = torch.randint(-1, 6, (11, 3), generator=Generator().manual_seed(0), dtype=torch.int32)


def test_oracles_are_of_ops() -> None:
    assert set(CANONICAL) <= set(ORACLES) <= set(declared())


@pytest.mark.parametrize("kind", FP8_FORMATS)
def test_codes_are_what_torch_reads(kind: str) -> None:
    every = torch.arange(256).to(torch.uint8).view(getattr(torch, f"float8_{kind}"))
    decoded = to_numpy(every).decode()
    np.testing.assert_array_equal(decoded, every.double().numpy())
    for byte in range(256):
        value = decode_byte(byte, kind)
        if math.isfinite(value) and abs(value) <= FP8_FORMATS[kind].quant_max:
            assert encode_number(value, kind) == byte


def test_a_number_half_way_goes_to_the_even_code() -> None:
    assert [encode_number(x, "e4m3fn") for x in (17.0, 19.0, 2.0**-10, 3 * 2.0**-10)] == [0x58, 0x5A, 0, 2]
    assert [encode_number(x, "e4m3fn") for x in (1e9, -INF, -1e-9, NAN)] == [0x7E, 0xFE, 0x80, 0x7F]
    assert [encode_number(x, "e4m3fnuz") for x in (1e9, -1e-9, NAN)] == [0x7E, 0, 0x80]


def test_scales_are_unpacked_by_the_layout() -> None:
    words = np.array([[0x7F80_7E01, 0x0000_FF82 - 2**32]])
    unpacked = unpack_scales(words, "mn_ue8m0", 6)
    np.testing.assert_array_equal(unpacked, [[2.0**-126, 0.5, 2.0, 1.0, 8.0, NAN]])
    with pytest.raises(ValueError, match="expected ⌈9/4⌉ columns"):
        unpack_scales(words, "mn_ue8m0", 9)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([np.ones(3)], [], "gives 1 results, the second oracle 0"),
        ([np.ones(3)], [np.ones(2)], "shape is"),
        ([np.ones(3)], [np.ones(3, dtype=np.int64)], "gives float, the second oracle int"),
        ([np.array([1, 2])], [np.array([1, 3])], r"op: result 0: 1 of 2 elements differ, first \(1,\): .* 2, .* 3"),
        ([np.array([1.0])], [np.array([1.0 + 1e-8])], "1 of 1 elements differ"),
        ([np.array([NAN])], [np.array([1.0])], "says nan"),
        ([np.array([INF])], [np.array([-INF])], "says inf"),
        ([np.array([1e308])], [np.array([INF])], "the second inf"),
    ],
)
def test_disagreement_is_named(first: list[Any], second: list[Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        agree("op", first, second)


def test_agreement_is_relative_to_the_terms() -> None:
    agree("op", [np.array([1.0, NAN, INF])], [np.array([1.0 + 1e-10, NAN, INF])])
    agree("op", [np.array([0.0])], [np.array([1e-10])], [np.array([1.0])])


def _reference(name: str, **arguments: Any) -> list[Any]:
    return [to_numpy(x) for x in tree_leaves(declared()[name].reference(**arguments))]


def test_the_order_within_an_expert_does_not_show() -> None:
    x = torch.arange(55.0, dtype=torch.float64).reshape(11, 5)
    call = {"x": x, "topk_ids": IDS, "num_experts": 6, "alignment": 4}
    rows, m_indices, index = _reference("ep_scatter", **call)
    first, second = np.flatnonzero(m_indices == 2)[:2]
    swapped, moved = rows.copy(), index.copy()
    swapped[[first, second]] = rows[[second, first]]
    moved[index == first], moved[index == second] = second, first
    swapped[m_indices < 0] = NAN
    compare("ep_scatter", call, [swapped, m_indices, moved])
    for wrong in ([swapped, m_indices, index], [rows, m_indices, moved], [rows, m_indices, np.maximum(index, 0)]):
        with pytest.raises(AssertionError, match="ep_scatter: result"):
            compare("ep_scatter", call, wrong)


def test_the_order_within_blocks_does_not_show() -> None:
    call = {"topk_ids": IDS, "num_experts": 6, "block_size": 4}
    sorted_ids, expert_ids, used = _reference("moe_align_block_size", **call)
    swapped = sorted_ids.copy()
    swapped[[0, 1]] = sorted_ids[[1, 0]]
    compare("moe_align_block_size", call, [swapped, expert_ids, used])
    run = np.flatnonzero(expert_ids == expert_ids[-1 if used[0] == len(sorted_ids) else used[0] // 4 - 1])[0] * 4
    wrong = sorted_ids.copy()
    wrong[[0, run]] = sorted_ids[[run, 0]]  # an assignment of nobody among those of an expert
    with pytest.raises(AssertionError, match="moe_align_block_size: result 0"):
        compare("moe_align_block_size", call, [wrong, expert_ids, used])
