"""How one model is spread over processes: which part of a weight is whose.

*Tensor parallel*: every rank holds some heads, and some columns of every MLP's and expert's inside; what they compute
are terms of sums over ranks. *Expert parallel*: every rank holds some experts, all of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from torch_hal.ops.collectives import group_size

from .errors import ParallelError


@dataclass(frozen=True)
class Parallel:
    """The process groups that a model is spread over, by name (``group.group_name``). None: not spread so.

    tp_group: its ranks share heads, dense, shared and expert intermediates, and the head's vocabulary.
    ep_group: its ranks share the experts. May be ``tp_group`` itself: experts then stay whole.
    experts_per_rank: how many each rank of ep_group holds, in order, 0 included; None: as even as can be.
    own_tokens: each rank of ep_group has sequences of its own, and tokens travel to their experts. If not, all have
    the same ones, and nothing but sums travels. Ranks of tp_group have the same tokens always. Own tokens may be more
    or fewer than other ranks': steps that are given no ``capacity`` agree on one, which waits for all ranks. One
    without tokens takes part all the same.
    """

    tp_group: str | None = None
    ep_group: str | None = None
    experts_per_rank: tuple[int, ...] | None = None
    own_tokens: bool = False


@dataclass(frozen=True)
class Group:
    """This process's place in a process group; a group of one where there is none."""

    name: str = ""
    rank: int = 0
    size: int = 1
    ranks: frozenset[int] = frozenset()  # of the default group, to tell groups of other names apart

    @classmethod
    def named(cls, name: str | None) -> Group:
        """Raises ArgumentError, listing the known groups, if there is none of that name."""
        if name is None:
            return cls()
        size = group_size(name, "Parallel")
        group = process_group(name)
        return cls(name, group.rank(), size, frozenset(dist.get_process_group_ranks(group)))


def process_group(name: str) -> dist.ProcessGroup:
    """torch's object of a known group."""
    return next(group for group, known in dist.distributed_c10d._world.pg_names.items() if known == name)


@dataclass(frozen=True)
class Span:
    """What this rank holds of one dimension: ``size`` of ``whole`` from ``begin`` on, and zeros up to ``room``."""

    whole: int
    begin: int
    size: int
    room: int

    @classmethod
    def all(cls, whole: int) -> Span:
        return cls(whole, 0, whole, whole)

    def times(self, width: int) -> Span:
        """Where each of what is spread, such as a head, is ``width`` wide."""
        return Span(self.whole * width, self.begin * width, self.size * width, self.room * width)

    def within(self, whole: int, offset: int) -> Span:
        """The same where all this is a run at ``offset`` of a longer dimension."""
        return Span(whole, offset + self.begin, self.size, self.room)


@dataclass(frozen=True)
class Ranks:
    """`Parallel`, resolved for a model."""

    tp: Group
    ep: Group
    expert_tp: Group  # whose ranks share each expert's intermediates
    experts_per_rank: tuple[int, ...]
    own_tokens: bool

    @classmethod
    def of(cls, parallel: Parallel, num_experts: int) -> Ranks:
        """Raises ParallelError for what contradicts itself or the model."""
        tp, ep = Group.named(parallel.tp_group), Group.named(parallel.ep_group)
        counts = parallel.experts_per_rank
        if counts is None:
            counts = tuple(num_experts * (r + 1) // ep.size - num_experts * r // ep.size for r in range(ep.size))
        if len(counts) != ep.size or sum(counts) != num_experts or min(counts) < 0:
            raise ParallelError(f"experts_per_rank: {counts} do not spread {num_experts} experts over {ep.size} ranks")
        same_name = parallel.tp_group is not None and parallel.tp_group == parallel.ep_group
        shared = same_name or (bool(tp.ranks) and tp.ranks == ep.ranks)
        if not shared and len(tp.ranks & ep.ranks) > 1:
            both = sorted(tp.ranks & ep.ranks)
            raise ParallelError(f"tp_group, ep_group: expected the same ranks, or none in common but this, got {both}")
        if parallel.own_tokens and (shared or parallel.ep_group is None):
            raise ParallelError("own_tokens: needs an ep_group, and one that is not tp_group, whose ranks share tokens")
        return cls(tp, ep, Group() if shared else tp, counts, parallel.own_tokens)

    @property
    def size(self) -> int:
        """How many ranks make up the model, as far as this one sees."""
        return self.tp.size * self.ep.size

    @property
    def experts(self) -> Span:
        """The experts of this rank."""
        count = self.experts_per_rank[self.ep.rank]
        return Span(sum(self.experts_per_rank), sum(self.experts_per_rank[: self.ep.rank]), count, count)


def share(what: str, whole: int, group: Group, unit: int = 1) -> Span:
    """An equal share of ``whole`` for each rank, in whole ``unit``s; the last unit may be partial, and gets room.

    Raises ParallelError, saying ``what``, if the units do not divide by the ranks.
    """
    units = -(-whole // unit)
    if units % group.size:
        blocks = f" in FP8 blocks of {unit}, which are {units}," if unit > 1 else ""
        raise ParallelError(f"{what}: {whole}{blocks} cannot be shared equally by the {group.size} ranks of tp_group")
    room = units // group.size * unit
    begin = group.rank * room
    return Span(whole, begin, min(room, whole - begin), room)
