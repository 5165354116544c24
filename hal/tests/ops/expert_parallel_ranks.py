"""What each process of the expert-parallel tests does: every case once, in pairs or all four together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bounds import same_bits
from torch import Generator, Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torch_hal.errors import ArgumentError
from torch_hal.ops.expert_parallel import ep_combine, ep_counts, ep_dispatch
from torch_hal.ops.moe_experts import fused_experts

WORLD, PAIR = 4, 2
HIDDEN, INNER = 6, 5


@dataclass(frozen=True)
class Case:
    """Tokens and experts of each rank; ``ids`` picks some of ``range(low, high)`` a token, -1 and 999 among them."""

    experts: list[int]
    tokens: list[int]
    top_k: int = 3
    index: torch.dtype = torch.int64

    @property
    def capacity(self) -> int:
        return max(self.tokens) + 1

    def routing(self, rank: int) -> tuple[Tensor, Tensor]:
        generator = Generator().manual_seed(100 + rank)
        count = self.tokens[rank]
        scores = torch.rand(count, sum(self.experts), generator=generator)
        ids = scores.argsort(-1)[:, : self.top_k]
        ids[1::4, 0], ids[2::4, -1], ids[3::4] = -1, 999, -1
        return ids.to(self.index), torch.rand(count, self.top_k, generator=generator)

    def x(self, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
        x = torch.randn(self.tokens[rank], 2 * HIDDEN, generator=Generator().manual_seed(200 + rank))
        return x.to(dtype)[:, ::2]

    def weights(self) -> tuple[Tensor, Tensor]:
        generator, experts = Generator().manual_seed(300), sum(self.experts)
        w13 = torch.randn(experts, 2 * INNER, HIDDEN, generator=generator, dtype=torch.float64)
        return w13, torch.randn(experts, HIDDEN, INNER, generator=generator, dtype=torch.float64)

    def owned(self, rank: int) -> slice:
        first = sum(self.experts[:rank])
        return slice(first, first + self.experts[rank])


CASES = {
    "even": Case([4, 4], [5, 3]),
    "uneven": Case([5, 2], [4, 6], index=torch.int32),
    "a rank without experts": Case([7, 0], [3, 6]),
    "a rank without tokens": Case([3, 5], [0, 6]),
    "no tokens at all": Case([2, 2], [0, 0]),
    "one expert a token": Case([1, 3], [9, 2], top_k=1),
    "four ranks": Case([3, 0, 2, 4], [4, 7, 0, 1], index=torch.int32),
    "four ranks, three experts": Case([1, 1, 1, 0], [2, 5, 3, 2], top_k=2),
}
SIZES = ["exact", "capacity"]


class NoHostSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        assert not name.startswith(("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")), name
        return func(*args, **(kwargs or {}))


def exchange(case: Case, rank: int, group: str, how: str) -> dict[str, Any]:
    """Everything a layer does, on one rank: counts, dispatch, its own experts, combine."""
    (ids, weights), x = case.routing(rank), case.x(rank)
    counts = ep_counts(ids, case.experts, group)
    send, recv = counts.tolist() if how == "exact" else [[case.capacity] * len(case.experts)] * 2
    received = ep_dispatch(x, ids, weights, case.experts, send, recv, group)
    got_x, got_ids, got_weights = received
    w13, w2 = (w[case.owned(rank)] for w in case.weights())
    y = fused_experts(got_x, w13, w2, got_weights.double(), got_ids)
    y[(got_ids < 0).all(-1)] = torch.nan  # padding
    combined = ep_combine(y, ids, case.experts, send, recv, group)
    return {"counts": counts, "received": received, "y": y, "combined": combined}


def more(rank: int, group: str) -> dict[str, Callable[[], Any]]:
    """On a pair: dtypes, sizes that are too small, whole graphs, fake tensors, and errors.

    Rank 0 alone compiles and watches, as what that imports takes each process seconds.
    """
    case = CASES["even"]
    ids, weights = case.routing(rank)
    sizes = [[case.capacity] * PAIR] * 2

    def moved(dtype: torch.dtype) -> Tensor:
        x = (10 * case.x(rank, torch.float32)).to(dtype)
        return ep_dispatch(x, ids, weights, case.experts, *sizes, group)[0]

    def summed(dtype: torch.dtype) -> Tensor:
        y = torch.randn(2 * case.capacity, HIDDEN, generator=Generator().manual_seed(rank)).to(dtype)
        return ep_combine(y, ids, case.experts, *sizes, group)

    def too_small() -> list[Tensor]:
        got = ep_dispatch(case.x(rank), ids, weights, case.experts, [1, 1], [1, 1], group)
        return [*got, ep_combine(got[0], ids, case.experts, [1, 1], [1, 1], group)]

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        counts = ep_counts.reference(ids, case.experts, group)
        got = ep_dispatch.reference(x, ids, weights, case.experts, *sizes, group)
        return counts, *got, ep_combine.reference(got[0], ids, case.experts, *sizes, group)

    def compiled() -> list[bool]:
        arguments = (case.x(rank), ids, weights)
        whole = torch.compile(layer, fullgraph=True, backend="eager") if rank == 0 else layer
        return [same_bits(a, b) for a, b in zip(whole(*arguments), layer(*arguments), strict=True)]

    def fake() -> list[Any]:
        if rank != 0:
            return []
        with FakeTensorMode():
            x, ids = torch.empty(5, 8, dtype=torch.bfloat16), torch.empty(5, 3, dtype=torch.int32)
            got = layer(x, ids, torch.empty(5, 3))
        return [(tuple(y.shape), y.dtype) for y in got]

    def unchanged() -> bool:
        before = [x.clone() for x in (case.x(rank), ids, weights)]
        arguments = [x.clone() for x in before]
        with NoHostSync() if rank == 0 else contextlib.nullcontext():
            layer(*arguments)
        return all(same_bits(a, b) for a, b in zip(arguments, before, strict=True))

    def message(call: Callable[[], object]) -> Callable[[], str]:
        def text() -> str:
            with pytest.raises(ArgumentError) as caught:
                call()
            return str(caught.value)

        return text

    return {
        **{f"moved {dtype}": lambda dtype=dtype: moved(dtype) for dtype in MOVED},
        **{f"summed {dtype}": lambda dtype=dtype: summed(dtype) for dtype in SUMMED},
        "too small": too_small,
        "compiled": compiled,
        "fake": fake,
        "unchanged": unchanged,
        "three ranks": message(lambda: ep_counts(ids, [1, 2, 3], group)),
        "one size": message(lambda: ep_dispatch(case.x(rank), ids, weights, case.experts, [8], [8, 8], group)),
        "unknown group": message(lambda: ep_combine(case.x(rank)[:0], ids, [4, 4], [0, 0], [0, 0], "nobody")),
    }


MOVED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int32, torch.uint8)
SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    pair = dist.new_group([0, 1])
    groups = {WORLD: dist.group.WORLD.group_name, PAIR: pair.group_name if rank < PAIR else None}
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if (group := groups[len(case.experts)]) is not None:
            results |= {f"{name}, {how}": exchange(case, rank, group, how) for how in SIZES}
    if rank < PAIR:
        results |= {name: run() for name, run in more(rank, groups[PAIR]).items()}
    torch.save(tree_map_only(Tensor, Tensor.clone, results), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
