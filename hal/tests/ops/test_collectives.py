"""Collectives over real gloo: two processes run every case once, the tests look at what each rank got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_hal.errors import ArgumentError
from torch_hal.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter

SIZE = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOVED = (*DTYPES, torch.int32, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
SENT = [[2, 1], [0, 3]]  # rows from rank (outer) to rank (inner)
RECEIVED = [[2, 0], [1, 3]]


def rows(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank holds: numbers that tell rank, row and column."""
    return (torch.arange(count * 4).view(count, 4) + 100 * rank).to(dtype)


def cases(rank: int, group: str) -> dict[str, Callable[[], Any]]:
    six, none = rows(rank, 6), rows(rank, 0)
    strided = torch.stack([six, six], -1)[..., 0]
    one_way = ([0, 6], [0, 0]) if rank == 0 else ([0, 0], [6, 0])  # rank 1 sends all that it has to rank 0

    def fake() -> list[tuple[torch.Size, torch.dtype]]:
        with FakeTensorMode():
            x = torch.empty(6, 4, dtype=torch.bfloat16)
            results = [
                all_reduce.reference(x, group),
                all_gather.reference(x, group),
                reduce_scatter.reference(x, group),
                all_to_all.reference(x, [5, 4], [3, 3], group),
            ]
        return [(y.shape, y.dtype) for y in results]

    def compiled() -> list[Tensor]:
        def step(x: Tensor) -> tuple[Tensor, ...]:
            return (
                all_reduce.reference(x, group),
                all_gather.reference(x, group),
                reduce_scatter.reference(x, group),
                all_to_all.reference(x[:3], RECEIVED[rank], SENT[rank], group),
            )

        return list(torch.compile(step, fullgraph=True, backend="eager")(six))

    def unchanged() -> bool:
        x = six.clone()
        results = [all_reduce(x, group), all_gather(x, group), all_to_all(x, [3, 3], [3, 3], group)]
        return torch.equal(x, six) and x.data_ptr() not in {y.data_ptr() for y in results}

    def error(call: Callable[[], object]) -> Callable[[], str]:
        def message() -> str:
            with pytest.raises(ArgumentError) as caught:
                call()
            return str(caught.value)

        return message

    return {
        **{f"reduce {d}": lambda d=d: all_reduce(rows(rank, 6, d) / 8, group) for d in DTYPES},
        **{f"scatter {d}": lambda d=d: reduce_scatter(rows(rank, 6, d) / 8, group) for d in DTYPES},
        **{f"gather {d}": lambda d=d: all_gather(rows(rank, 3, d), group) for d in MOVED},
        **{f"exchange {d}": lambda d=d: all_to_all(rows(rank, 3, d), RECEIVED[rank], SENT[rank], group) for d in MOVED},
        "empty": lambda: [
            all_reduce(none, group),
            all_gather(none, group),
            reduce_scatter(none, group),
            all_to_all(none, [0, 0], [0, 0], group),
        ],
        "one way": lambda: all_to_all(rows(rank, 6 * rank), *one_way, group),
        "scalar": lambda: all_reduce(torch.tensor(float(rank + 1)), group),
        "strided": lambda: [
            all_reduce(strided, group),
            all_gather(strided, group),
            reduce_scatter(strided, group),
            all_to_all(strided[:3], RECEIVED[rank], SENT[rank], group),
        ],
        "compiled": compiled,
        "fake": fake,
        "unchanged": unchanged,
        "unknown group": error(lambda: all_gather(six, "nobody")),
        "indivisible": error(lambda: reduce_scatter(rows(rank, 5), group)),
        "too few sizes": error(lambda: all_to_all(six, [6], [6, 0], group)),
    }


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    results = {name: case() for name, case in cases(rank, dist.group.WORLD.group_name).items()}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    mp.spawn(worker, args=(str(folder),), nprocs=SIZE)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(SIZE)]


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal bits; some 8-bit floats have no comparison of their own."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    return torch.equal(got.to(torch.float64), expected.to(torch.float64))


def exchanged(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = [rows(source, 3, dtype).to(torch.float64).split(SENT[source])[rank] for source in range(SIZE)]
    return torch.cat(parts).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_float32_rounded_once(ranks: list[dict[str, Any]], dtype: torch.dtype) -> None:
    exact = sum(((rows(rank, 6, dtype) / 8).to(torch.float64) for rank in range(SIZE)), torch.zeros(6, 4))
    total = exact.to(dtype)
    for rank, results in enumerate(ranks):
        assert same(results[f"reduce {dtype}"], total)
        assert same(results[f"scatter {dtype}"], total[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("dtype", MOVED)
def test_rows_move_with_every_dtype(ranks: list[dict[str, Any]], dtype: torch.dtype) -> None:
    everyone = torch.cat([rows(rank, 3, dtype).to(torch.float64) for rank in range(SIZE)]).to(dtype)
    for rank, results in enumerate(ranks):
        assert same(results[f"gather {dtype}"], everyone)
        assert same(results[f"exchange {dtype}"], exchanged(rank, dtype))


def test_zero_rows(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert [tuple(y.shape) for y in results["empty"]] == [(0, 4)] * 4


def test_a_rank_may_send_or_receive_nothing(ranks: list[dict[str, Any]]) -> None:
    assert same(ranks[0]["one way"], rows(1, 6))
    assert ranks[1]["one way"].shape == (0, 4)


def test_all_reduce_takes_any_rank_of_tensor(ranks: list[dict[str, Any]]) -> None:
    assert all(same(results["scalar"], torch.tensor(3.0)) for results in ranks)


@pytest.mark.parametrize("how", ["strided", "compiled"])
def test_strided_inputs_and_compiled_graphs(ranks: list[dict[str, Any]], how: str) -> None:
    total, everyone = rows(0, 6) + rows(1, 6), torch.cat([rows(0, 6), rows(1, 6)])
    for rank, results in enumerate(ranks):
        expected = [total, everyone, total[3 * rank : 3 * rank + 3], exchanged(rank)]
        assert all(same(got, want) for got, want in zip(results[how], expected, strict=True))


def test_fake_tensors_give_shapes_and_dtypes(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["fake"] == [(torch.Size([n, 4]), torch.bfloat16) for n in (6, 12, 3, 9)]


def test_inputs_are_not_modified_nor_aliased(ranks: list[dict[str, Any]]) -> None:
    assert all(results["unchanged"] for results in ranks)


def test_errors_name_op_argument_expected_and_got(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert (
            "all_gather: argument 'group': expected the name of a process group (known: '0')"
            in results["unknown group"]
        )
        assert "got 'nobody'" in results["unknown group"]
        assert "reduce_scatter: argument 'x': expected rows divisible by the 2 ranks" in results["indivisible"]
        assert "got shape (5, 4)" in results["indivisible"]
        assert "all_to_all: argument 'output_sizes': expected 2 numbers" in results["too few sizes"]
        assert "got [6]" in results["too few sizes"]


X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: all_reduce(X, "tp"), r"all_reduce: argument 'group'.*known: none.*init_process_group.*got 'tp'"),
        (lambda: all_reduce(X.to(torch.int32), "tp"), r"all_reduce: argument 'x'.*float32.*got torch.int32"),
        (lambda: all_gather(torch.tensor(1.0), "tp"), r"all_gather: argument 'x'.*got shape \(\)"),
        (lambda: all_to_all(X, [1, 1], [2, 3], "tp"), r"all_to_all.*sum to x's rows.*got T=4, input_sizes=\[2, 3\]"),
        (lambda: all_to_all(X, [-1, 1], [2, 2], "tp"), r"all_to_all.*no size is negative.*output_sizes=\[-1, 1\]"),
    ],
)
def test_errors_before_any_group_exists(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("op", [all_reduce, all_gather, reduce_scatter, all_to_all])
def test_schemas_carry_the_group_by_name(op: Any) -> None:
    assert "str group" in op.schema
