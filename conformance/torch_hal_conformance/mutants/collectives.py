"""Wrong collectives. A plugin of its own as well, as every rank process has to make these kernels anew."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_hal as hal
from torch_hal.op import declared

from ..rebuild import rebuild
from . import TRAITS, Mutant, edit, kernel

Reference = Callable[..., Any]

PAIR, FOUR = "core/ranks2-M17-D64", "core/ranks4-M17-D64"
UNIT = f"{PAIR}/bfloat16/contiguous/unit/0"
UNIT4 = f"{FOUR}/float32/contiguous/unit/0"
RUNS = "core/ranks2-M9-D64-varied/float32/contiguous/unit/0"
EMPTY = "core/ranks2-M0-D64/bfloat16/contiguous/b24_empty/0"
DEVICES = frozenset({hal.Trait.DETERMINISTIC})  # opaque, and not for graphs


@functools.cache
def other(op: str) -> Reference:
    """Another op's reference, in code of its own."""
    return rebuild(op)


def gathered(x: Tensor, group: str) -> list[Tensor]:
    """Every rank's ``x``."""
    size = process_group(group).size()
    everyone: Tensor = other("all_gather")(x.reshape(1, *x.shape), group)
    return list(everyone.unbind(0)[:size])


def process_group(group: str) -> dist.ProcessGroup:
    found: dist.ProcessGroup = vars(dist.distributed_c10d)["_resolve_process_group"](group)
    return found


def own_rank(group: str) -> int:
    return dist.get_rank(process_group(group))


@kernel("all_reduce", "returns_input", "nothing is sent", UNIT)
def returns_input(reference: Reference, x: Tensor, group: str) -> Tensor:
    return x.clone()


@kernel("all_reduce", "forgets_a_rank", "the last rank of four is left out", UNIT4)
def forgets_a_rank(reference: Reference, x: Tensor, group: str) -> Tensor:
    return torch.stack([part.float() for part in gathered(x, group)[:3]]).sum(0).to(x.dtype)


@kernel("all_reduce", "averages", "the mean instead of the sum", UNIT)
def averages(reference: Reference, x: Tensor, group: str) -> Tensor:
    return reference(x, group) / process_group(group).size()  # type: ignore[no-any-return]


@kernel("all_reduce", "truncates", "bfloat16 sums are cut off instead of rounded", UNIT)
def truncates(reference: Reference, x: Tensor, group: str) -> Tensor:
    total: Tensor = reference(x.float(), group)
    return (total.view(torch.int32) & -65536).view(torch.float32).to(x.dtype)


@kernel("all_reduce", "own_order", "each rank adds its own first, so that ranks differ in the last bit", UNIT4, "ranks")
def own_order(reference: Reference, x: Tensor, group: str) -> Tensor:
    parts, rank = gathered(x, group), own_rank(group)
    return functools.reduce(torch.add, [part.float() for part in parts[rank:] + parts[:rank]]).to(x.dtype)


@kernel("all_reduce", "stale", "the first result of that shape for ever", UNIT)
def stale(reference: Reference, x: Tensor, group: str, kept: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    total = reference(x, group)
    return kept.setdefault((x.shape, x.dtype, group), total).clone()


@kernel(
    "all_reduce",
    "default_group",
    "the default group whatever is asked for",
    f"{PAIR}/bfloat16/contiguous/subgroup/0",
    traits=DEVICES,
)
def default_group(reference: Reference, x: Tensor, group: str) -> Tensor:
    return reference(x, dist.distributed_c10d._get_default_group().group_name)  # type: ignore[no-any-return]


@kernel(
    "all_reduce",
    "one_chunk",
    "nothing after the first 64Ki elements is summed",
    "core/ranks2-M129-D1025/bfloat16/contiguous/chunks/0",
)
def one_chunk(reference: Reference, x: Tensor, group: str) -> Tensor:
    flat = x.reshape(-1).clone()
    flat[:65536] = reference(flat[:65536], group)
    return flat.view(x.shape)


@kernel(
    "all_reduce",
    "contiguous_assumed",
    "reads memory as if x were packed",
    "core/ranks2-M17-D64-columns/bfloat16/contiguous/b25_strides/0",
    "nonfinite",
)
def contiguous_assumed(reference: Reference, x: Tensor, group: str) -> Tensor:
    return reference(x.as_strided((x.numel(),), (1,)).view(x.shape), group)  # type: ignore[no-any-return]


@kernel("all_reduce", "in_place", "sums into its argument", UNIT, "mutation")
def in_place(reference: Reference, x: Tensor, group: str) -> Tensor:
    return x.copy_(reference(x, group)).clone()


@kernel("all_reduce", "flat_empties", "zero rows give a flat result", EMPTY, "shape")
def flat_empties(reference: Reference, x: Tensor, group: str) -> Tensor:
    return reference(x, group) if x.numel() else x.reshape(-1)


@kernel("all_reduce", "falls_back", "native torch answers in silence", UNIT, "provenance")
def falls_back(reference: Reference, x: Tensor, group: str) -> Tensor:
    return declared()["all_reduce"].reference(x, group)  # type: ignore[no-any-return]


@kernel(
    "all_reduce",
    "waits_on_host",
    "declared graph_safe, yet the host looks at the result",
    f"{PAIR}/bfloat16/contiguous/b22_capture/0",
    "sync",
)
def waits_on_host(reference: Reference, x: Tensor, group: str) -> Tensor:
    total: Tensor = reference(x, group)
    return total if bool(total.isfinite().all()) else total.nan_to_num()


@kernel(
    "all_reduce",
    "ignores_the_dead",
    "gives its own when the others cannot be reached",
    f"{PAIR}/bfloat16/contiguous/dead_rank/0",
    "fault",
    traits=DEVICES,
)
def ignores_the_dead(reference: Reference, x: Tensor, group: str) -> Tensor:
    try:
        return reference(x, group)  # type: ignore[no-any-return]
    except RuntimeError:
        return x.clone()


@kernel(
    "all_reduce", "waits_for_ever", "knows no time-out", f"{PAIR}/bfloat16/contiguous/timeout/0", "hang", traits=DEVICES
)
def waits_for_ever(reference: Reference, x: Tensor, group: str) -> Tensor:
    try:
        return reference(x, group)  # type: ignore[no-any-return]
    except RuntimeError:
        time.sleep(3600)
        raise


@kernel("all_gather", "backwards", "the last rank's rows come first", UNIT, "copy")
def backwards(reference: Reference, x: Tensor, group: str) -> Tensor:
    return torch.cat(gathered(x, group)[::-1])


@kernel("all_gather", "interleaved", "ranks' rows alternate", UNIT, "copy")
def interleaved(reference: Reference, x: Tensor, group: str) -> Tensor:
    return torch.stack(gathered(x, group), 1).flatten(0, 1)


@kernel("all_gather", "own_rows_only", "every rank gets its own rows over and over", UNIT, "copy")
def own_rows_only(reference: Reference, x: Tensor, group: str) -> Tensor:
    return torch.cat([x] * process_group(group).size())


@kernel("all_gather", "through_float32", "64-bit integers travel as float32", f"{PAIR}/int64/contiguous/bits/0", "copy")
def through_float32(reference: Reference, x: Tensor, group: str) -> Tensor:
    return reference(x.float(), group).to(x.dtype)  # type: ignore[no-any-return]


@kernel("all_gather", "tidies_nan", "payloads of NaN are lost", f"{PAIR}/float32/contiguous/bits/0", "copy")
def tidies_nan(reference: Reference, x: Tensor, group: str) -> Tensor:
    return torch.where(x.isnan(), torch.nan, reference(x, group).unflatten(0, (-1, len(x)))).flatten(0, 1)


@kernel(
    "all_gather",
    "whole_world",
    "the default group whatever is asked for",
    f"{PAIR}/bfloat16/contiguous/subgroup/0",
    "shape",
    traits=DEVICES,
)
def whole_world(reference: Reference, x: Tensor, group: str) -> Tensor:
    return reference(x, dist.distributed_c10d._get_default_group().group_name)  # type: ignore[no-any-return]


@kernel("reduce_scatter", "next_shard", "keeps the next rank's rows", UNIT)
def next_shard(reference: Reference, x: Tensor, group: str) -> Tensor:
    size = process_group(group).size()
    return other("all_reduce")(x, group).chunk(size)[(own_rank(group) + 1) % size].clone()  # type: ignore[no-any-return]


@kernel("reduce_scatter", "every_nth_row", "keeps every n-th row instead of a run", UNIT)
def every_nth_row(reference: Reference, x: Tensor, group: str) -> Tensor:
    total: Tensor = other("all_reduce")(x, group)
    return total[own_rank(group) :: process_group(group).size()].contiguous()


@kernel(
    "reduce_scatter",
    "global_rank",
    "takes the process's rank for the group's",
    f"{PAIR}/bfloat16/contiguous/subgroup/0",
    traits=DEVICES,
)
def global_rank(reference: Reference, x: Tensor, group: str) -> Tensor:
    size = process_group(group).size()
    return other("all_reduce")(x, group).chunk(size)[dist.get_rank() % size].clone()  # type: ignore[no-any-return]


@kernel("reduce_scatter", "not_summed", "scatters without a sum", UNIT)
def not_summed(reference: Reference, x: Tensor, group: str) -> Tensor:
    return x.chunk(process_group(group).size())[own_rank(group)].clone()


@kernel("all_to_all", "own_run_missing", "the run to itself is left zero", RUNS, "copy")
def own_run_missing(reference: Reference, x: Tensor, come: list[int], sent: list[int], group: str) -> Tensor:
    y: Tensor = reference(x, come, sent, group)
    torch.split(y, come)[own_rank(group)].zero_()
    return y


@kernel("all_to_all", "own_run_first", "runs begin with the rank's own", RUNS, "copy")
def own_run_first(reference: Reference, x: Tensor, come: list[int], sent: list[int], group: str) -> Tensor:
    runs, rank = list(reference(x, come, sent, group).split(come)), own_rank(group)
    return torch.cat(runs[rank:] + runs[:rank])


@kernel("all_to_all", "last_rows_lost", "each run's last row stays behind", RUNS, "copy")
def last_rows_lost(reference: Reference, x: Tensor, come: list[int], sent: list[int], group: str) -> Tensor:
    y: Tensor = reference(x, come, sent, group)
    for run in torch.split(y, come):
        run[-1:] = 0
    return y


@kernel(
    "all_to_all",
    "leaves_early",
    "a rank that sends nothing takes no part",
    "core/ranks2-M9-D64-one_way/bfloat16/contiguous/unit/0",
    "hang",
    traits=DEVICES,
)
def leaves_early(reference: Reference, x: Tensor, come: list[int], sent: list[int], group: str) -> Tensor:
    return reference(x, come, sent, group) if len(x) else x.new_zeros(sum(come), *x.shape[1:])


EDITS = (
    edit(
        "all_reduce",
        "sums_in_bfloat16",
        "added in bfloat16 whatever x is",
        'all_reduce(wide(x), "sum"',
        'all_reduce(x.to(torch.bfloat16), "sum"',
        f"{PAIR}/float32/contiguous/unit/0",
    ),
    edit(
        "reduce_scatter",
        "max_for_sum",
        "the largest instead of the sum",
        'contiguous(), "sum"',
        'contiguous(), "max"',
        UNIT,
    ),
    edit(
        "reduce_scatter",
        "sums_in_bfloat16",
        "added in bfloat16 whatever x is",
        "reduce_scatter_tensor(wide(x)",
        "reduce_scatter_tensor(x.to(torch.bfloat16)",
        f"{PAIR}/float32/contiguous/unit/0",
    ),
    edit(
        "all_to_all",
        "through_bfloat16",
        "rows travel as bfloat16",
        "all_to_all_single(_payload(x),",
        "all_to_all_single(_payload(x.to(torch.bfloat16)).to(x.dtype),",
        RUNS,
        "copy",
    ),
)


@hal.hookimpl
def torch_hal_kernels() -> Iterator[hal.Kernel]:
    """These, and those of `expert_parallel`."""
    from . import expert_parallel

    for module in (vars(expert_parallel), globals()):
        for value in list(module.values()):
            for mutant in value if isinstance(value, tuple) else (value,):
                if isinstance(mutant, Mutant):
                    options = {"traits": TRAITS, **mutant.options}
                    yield hal.Kernel(mutant.op, mutant.name, run=mutant.build(), **options)
