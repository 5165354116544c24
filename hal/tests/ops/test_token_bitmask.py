"""The grammar's bitmask over logits, against a loop over bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bounds import assert_traces, same_bits
from torch import Tensor

from torch_hal.errors import ArgumentError
from torch_hal.ops.sampling import apply_token_bitmask, apply_token_bitmask_

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def call(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits and random words, their highest bit, which is int32's sign, among them."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
    return torch.randn(rows, vocab, generator=generator).to(dtype), words.to(torch.int32)


def masked_by_loop(logits: Tensor, bitmask: Tensor, rows: list[int]) -> Tensor:
    expected = logits.clone()
    for row in rows:
        words = [word % 2**32 for word in bitmask[row].tolist()]
        for token in range(logits.shape[1]):
            if f"{words[token // 32]:032b}"[31 - token % 32] == "0":
                expected[row, token] = -torch.inf
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 95, 129])
def test_a_zero_bit_forbids_its_token(vocab: int, dtype: torch.dtype) -> None:
    logits, bitmask = call(4, vocab, dtype)
    bitmask[1], bitmask[2] = 0, -1
    expected = masked_by_loop(logits, bitmask, [0, 1, 2, 3])
    assert same_bits(apply_token_bitmask(logits, bitmask), expected)
    assert bool(expected[1].isneginf().all()) and same_bits(expected[2], logits[2])
    apply_token_bitmask_(logits, bitmask)
    assert same_bits(logits, expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("indices", [[2, 0], [], [3, 3, 1, 3], [-1, 1, 4, 2**31 - 1, -(2**31)], [-1, 4]])
def test_indices_name_rows_of_both_and_others_are_skipped(indices: list[int], index: torch.dtype) -> None:
    logits, bitmask = call(4, 70)
    rows = [row for row in indices if 0 <= row < 4]
    expected = masked_by_loop(logits, bitmask, rows)
    named = torch.tensor(indices, dtype=index)
    assert same_bits(apply_token_bitmask(logits, bitmask, named), expected)
    apply_token_bitmask_(logits, bitmask, named)
    assert same_bits(logits, expected)


def test_strided_views_and_bits_past_the_vocabulary() -> None:
    logits, bitmask = call(3, 96)
    padded = torch.full((3, 2, 100), torch.nan)
    view = padded[:, 0, :40]
    view.copy_(logits[:, :40])
    expected = masked_by_loop(logits[:, :40], bitmask[:, :2], [0, 1, 2])
    result = apply_token_bitmask(view, bitmask[:, :2])
    assert same_bits(result, expected) and result.is_contiguous()
    apply_token_bitmask_(view, bitmask[:, :2])
    assert same_bits(view, expected)
    assert bool(padded[:, 0, 40:].isnan().all()) and bool(padded[:, 1].isnan().all())


def test_nan_and_inf_go_where_forbidden_and_stay_where_allowed() -> None:
    logits = torch.tensor([[torch.nan, torch.nan, torch.inf, torch.inf, -torch.inf, -0.0]])
    result = apply_token_bitmask(logits, torch.tensor([[0b110101]], dtype=torch.int32))
    assert result[0, 0].isnan() and result[0, [1, 3]].isneginf().all()
    assert same_bits(result[0, [2, 4, 5]], logits[0, [2, 4, 5]])


@pytest.mark.parametrize(("rows", "vocab"), [(0, 40), (3, 0), (0, 0)])
def test_empties(rows: int, vocab: int) -> None:
    logits, bitmask = call(rows, vocab)
    for indices in (None, torch.tensor([0, -1])):
        result = apply_token_bitmask(logits, bitmask, indices)
        assert result.shape == (rows, vocab) and result.dtype == logits.dtype
        apply_token_bitmask_(logits, bitmask, indices)


@pytest.mark.parametrize("indices", [None, torch.tensor([1, -1])])
def test_traces_and_declares_the_write(indices: Tensor | None) -> None:
    assert_traces(apply_token_bitmask, *call(3, 40, torch.bfloat16), indices)
    (logits, bitmask), (eager, _) = call(3, 40), call(3, 40)
    torch.compile(apply_token_bitmask_.reference, fullgraph=True, backend="aot_eager")(logits, bitmask, indices)
    apply_token_bitmask_(eager, bitmask, indices)
    assert same_bits(logits, eager)
    arguments = "Tensor bitmask, Tensor? indices=None"
    assert apply_token_bitmask.schema == f"(Tensor logits, {arguments}) -> Tensor"
    assert apply_token_bitmask_.schema == f"(Tensor(a0!) logits, {arguments}) -> ()"


@pytest.mark.parametrize("op", [apply_token_bitmask, apply_token_bitmask_])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bitmask": torch.zeros(3, 1, dtype=torch.int32)}, ["'bitmask'", "ceil_div(V,32) = 2", "(3, 1)"]),
        ({"bitmask": torch.zeros(2, 2, dtype=torch.int32)}, ["'bitmask'", "B = 3", "(2, 2)"]),
        ({"bitmask": torch.zeros(3, 40, dtype=torch.bool)}, ["'bitmask'", "torch.int32", "torch.bool"]),
        ({"logits": torch.zeros(40)}, ["'logits'", "rank 2", "(40,)"]),
        ({"logits": torch.zeros(3, 40, dtype=torch.int32)}, ["'logits'", "float32", "torch.int32"]),
        ({"indices": torch.zeros(2)}, ["'indices'", "torch.int64", "torch.float32"]),
        ({"indices": [0, 1]}, ["'indices'", "a tensor", "list"]),
    ],
)
def test_errors_name_argument_expected_and_got(op: Any, change: dict[str, Any], words: list[str]) -> None:
    logits, bitmask = call(3, 40)
    with pytest.raises(ArgumentError) as error:
        op(**{"logits": logits, "bitmask": bitmask, **change})
    assert all(word in str(error.value) for word in [op.name, "expected", "got", *words]), str(error.value)
