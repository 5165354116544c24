"""What ranks should get, and the verdict on what they got, without any process."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_hal.native import NATIVE
from torch_hal.op import declared
from torch_hal_conformance import ranks, ranks_oracle
from torch_hal_conformance.cases import every_case, select
from torch_hal_conformance.judge import Item
from torch_hal_conformance.ranks_oracle import expected
from torch_hal_conformance.spec import specs
from torch_hal_conformance.verdict import Evidence, Failure, bounded

OPS = [op for op, spec in specs().items() if spec.ranks]


@pytest.mark.parametrize("op", OPS)
def test_arguments_meet_the_contract_and_ranks_agree(op: str) -> None:
    for case in select("deepseek", op):
        everyone = case.arguments()["ranks"]
        assert case.shape.startswith(f"ranks{len(everyone)}")
        for rank, own in enumerate(everyone):
            declared()[op].check(**own, group="any")
            sent, come = ("input_sizes", "output_sizes") if op == "all_to_all" else ("send_rows", "recv_rows")
            if sent in own:
                assert own[come] == [other[sent][rank] for other in everyone]


def test_definitions_on_numbers_that_one_can_check() -> None:
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])

    def results(op: str, *arguments: dict[str, object]) -> list[list[object]]:
        return [[y.tolist() for y in one.native] for one in expected(op, arguments)]

    assert results("all_reduce", {"x": a}, {"x": b}) == [[[[11.0], [22.0]]]] * 2
    assert results("reduce_scatter", {"x": a}, {"x": b}) == [[[[11.0]]], [[[22.0]]]]
    assert results("all_gather", {"x": a}, {"x": b}) == [[[[1.0], [2.0], [10.0], [20.0]]]] * 2
    sizes = {"input_sizes": [2, 0]}, {"input_sizes": [1, 1]}
    assert results("all_to_all", {"x": a, **sizes[0]}, {"x": b, **sizes[1]}) == [[[[1.0], [2.0], [10.0]]], [[[20.0]]]]
    ids = torch.tensor([[2, 0], [-1, 1]]), torch.tensor([[9, -1], [1, 2]])
    layers = [{"topk_ids": i, "experts_per_rank": [1, 2], "send_rows": [2, 1], "recv_rows": [2, 2]} for i in ids]
    layers[1]["recv_rows"] = [1, 1]
    assert results("ep_counts", *layers) == [[[[1, 2], [1, 0]]], [[[0, 1], [2, 1]]]]
    weights = torch.tensor([[0.5, 0.25], [0.125, 1.0]])
    sent = [{**layer, "x": x, "topk_weights": weights} for layer, x in zip(layers, (a, b), strict=True)]
    assert results("ep_dispatch", *sent) == [
        [[[1.0], [0.0], [0.0], [0.0]], [[-1, 0], [-1, -1], [-1, -1], [-1, -1]], [[0.0, 0.25]] + [[0.0, 0.0]] * 3],
        [[[1.0], [20.0]], [[1, -1], [0, 1]], [[0.5, 0.0], [0.125, 1.0]]],
    ]
    y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[8.0], [16.0]])
    made = [{**layer, "y": rows} for layer, rows in zip(layers, y, strict=True)]
    assert results("ep_combine", *made) == [[[[9.0], [0.0]]], [[[0.0], [16.0]]]]


def _sums(dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(2000, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_order_of_adding_in_the_type_is_right(dtype: torch.dtype) -> None:
    parts = _sums(dtype, 4)
    want = expected("all_reduce", [{"x": part} for part in parts])[0]
    for order in itertools.permutations(range(4)):
        a, b, c, d = (parts[i] for i in order)
        for total in (((a + b) + c) + d, (a + b) + (c + d)):
            score = bounded(Evidence(declared()["all_reduce"], {}, [total], want.exact, want.native))
            assert score.R is not None and score.R <= 1.1


def test_one_more_rounding_than_there_are_additions_is_not() -> None:
    """Two ranks have one addition, and so has an op that says it adds in float32 and rounds once."""
    op, parts = declared()["all_reduce"], _sums(torch.float32, 2)
    want = expected("all_reduce", [{"x": part} for part in parts])[0]
    with pytest.raises(Failure) as failure:
        total = parts[0].to(torch.bfloat16).float() + parts[1]
        bounded(Evidence(op, {}, [total], want.exact, want.native))
    assert failure.value.check == "bound"
    summed = ranks_oracle._sum([part.bfloat16() for part in _sums(torch.float32, 4)], narrow=False)
    with pytest.raises(Failure):
        a, b, c, d = (part.bfloat16() for part in _sums(torch.float32, 4))
        bounded(Evidence(declared()["ep_combine"], {}, [a + b + c + d], summed.exact, summed.native))


def test_partial_sums_are_the_mean_over_all_orders() -> None:
    wide = torch.randn(4, 50, dtype=torch.float64)
    orders = list(itertools.permutations(range(4)))
    squares = torch.stack([wide[list(order)].cumsum(0)[1:3].square().sum(0) for order in orders]).mean(0)
    torch.testing.assert_close(ranks_oracle._partial_sums(wide, wide.sum(0)), (2 * squares).sqrt())


def test_results_that_differ_between_ranks_are_wrong() -> None:
    item = Item(every_case()["all_reduce/core/ranks4-M17-D64/float32/contiguous/unit/0"], NATIVE, "cpu")
    arguments = item.case.arguments()["ranks"]
    want = expected("all_reduce", arguments)
    got = [[y.clone() for y in one.native] for one in want]
    assert ranks._verdict(item, arguments, want, got).E is not None
    got[2][0][5, 5] = torch.nextafter(got[2][0][5, 5], torch.tensor(torch.inf))
    with pytest.raises(Failure, match="rank 2 got other bits than rank 0") as failure:
        ranks._verdict(item, arguments, want, got)
    assert failure.value.check == "ranks"
    got[2][0] = got[2][0][:5]
    with pytest.raises(Failure, match=r"rank 2 of 4: result 0: expected shape .* got .*5, 64"):
        ranks._verdict(item, arguments, want, got)
