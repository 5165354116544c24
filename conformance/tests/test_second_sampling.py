"""Second oracles of sampling agree with their ops' references at edges; the random numbers to the last bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, tensor

from torch_hal.op import declared
from torch_hal.ops.sampling import uniform as hal_uniform
from torch_hal_conformance.oracle import exact
from torch_hal_conformance.second import compare, sampling

NAN, INF = math.nan, math.inf


def check(name: str, **arguments: Any) -> None:
    """The op's reference in float64 and its second oracle agree on the arguments' bits."""
    op = declared()[name]
    op.check(**arguments)
    compare(name, op.bind(**arguments), exact(op, arguments).results)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed))


PROBS = {
    "ties": torch.full((7, 8), 0.125),
    "some_ties": tensor([[0.25, 0.125, 0.25, 0.125, 0.0, 0.25, 0.0, 0.0]]).repeat(7, 1),
    "one_token": torch.eye(8)[:7],
    "one_column": torch.ones(7, 1),
    "zeros": torch.zeros(7, 8),
    "nan": normal(7, 8).softmax(-1).index_fill_(1, tensor([3]), NAN),
    "not_normal": normal(7, 8).softmax(-1) * 1e-40,
    "wide": (normal(7, 300) * 3).softmax(-1),
}


@pytest.mark.parametrize("probs", PROBS)
def test_filters_at_edges(probs: str) -> None:
    rows = PROBS[probs]
    for top_k in ([0, -1, -(2**31), 1, 2, 3, 4], [7, 8, 9, 2**31 - 1, 300, 299, 5]):
        check("top_k_renorm", probs=rows, top_k=tensor(top_k, dtype=torch.int32))
    for bound in ([0.0, -0.5, 1.0, 1.5, 0.5, 0.25, 0.75], [0.125, 0.375, 0.999, 1e-30, -INF, INF, 0.9]):
        check("top_p_renorm", probs=rows, top_p=tensor(bound))
        check("min_p_renorm", probs=rows, min_p=tensor(bound))


def draw(rows: Tensor, seed: int = 0) -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=Generator().manual_seed(seed))
    check("sample", probs=rows, seeds=seeds, offsets=torch.arange(len(rows)) - 2)


def test_draws_at_edges() -> None:
    for rows in PROBS.values():
        draw(rows)
        draw(rows * 1e3)
    draw(normal(500, 50).softmax(-1), seed=1)
    draw(PROBS["wide"].index_fill(1, tensor([7]), INF))
    draw(PROBS["some_ties"].index_fill(1, tensor([2]), NAN))
    draw(PROBS["zeros"].index_fill(1, tensor([2]), NAN))
    draw(torch.zeros(0, 8))
    extremes = tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**62, 12345])
    check("sample", probs=PROBS["wide"], seeds=extremes, offsets=extremes.flip(0))


def undo_shift(word: int, bits: int) -> int:
    """z of ``word = z ^ (z >> bits)``."""
    z = word
    for _ in range(64 // bits):
        z = word ^ (z >> bits)
    return z


def offset_of(seed: int, wanted: Fraction) -> int:
    """The number of the draw in which a seed's uniform number is the wanted one: the generator, run backwards."""
    z = undo_shift(int(wanted * 2**53) << 11, 31)
    z = undo_shift(z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64, 27)
    state = undo_shift(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)
    _, start = sampling.splitmix64(seed)
    steps = (state - start) * pow(0x9E3779B97F4A7C15, -1, 2**64)
    return (steps - 1 + 2**63) % 2**64 - 2**63


def test_draws_on_the_boundary_between_two_tokens() -> None:
    least = Fraction(1, 2**53)
    wanted = [Fraction(0), least, Fraction(1, 4), Fraction(1, 4) - least, Fraction(1, 2), Fraction(7, 8), 1 - least]
    offsets = [offset_of(42, number) for number in wanted]
    assert [sampling.uniform(42, offset) for offset in offsets] == wanted
    for rows in ("ties", "some_ties", "one_token", "zeros"):
        check("sample", probs=PROBS[rows], seeds=torch.full((7,), 42), offsets=tensor(offsets))


def test_the_uniform_number_to_the_last_bit() -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (200,), generator=Generator().manual_seed(0))
    offsets = torch.cat([torch.arange(100), seeds.flip(0)[:100]])
    numbers = [sampling.uniform(int(seed), int(offset)) for seed, offset in zip(seeds, offsets, strict=True)]
    assert hal_uniform(seeds, offsets).tolist() == [float(number) for number in numbers]


def test_splitmix64_by_its_published_outputs() -> None:
    state, outputs = 1234567, []
    for _ in range(5):
        state, output = sampling.splitmix64(state)
        outputs.append(output)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert outputs == [*published, 16408922859458223821]


@pytest.mark.parametrize("name", ["apply_token_bitmask", "apply_token_bitmask_"])
@pytest.mark.parametrize("vocab", [1, 32, 33, 100])
def test_bitmasks(name: str, vocab: int) -> None:
    bitmask = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32)), generator=Generator().manual_seed(0)).int()
    bitmask[1], bitmask[2] = 0, -1
    logits = normal(4, vocab)
    logits[3, 0], logits[2, -1] = NAN, INF
    check(name, logits=logits, bitmask=bitmask)
    for indices in ([1, 1, 3], [-1, 4, 0, 2**31 - 1], []):
        for dtype in (torch.int32, torch.int64):
            check(name, logits=logits, bitmask=bitmask, indices=tensor(indices, dtype=dtype))
    check(name, logits=logits[:0], bitmask=bitmask[:0])
