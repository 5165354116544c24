"""Ranks that load one model together: that all of them could, and that it is one model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_hal.errors import describe

from .errors import ParallelError
from .parallel import Group, Parallel, process_group

if TYPE_CHECKING:
    from .model import DeepSeek

Answer = dict[str, str]  # "error", or the facts that all ranks must share, each in a word


def together(parallel: Parallel, attempt: Callable[[], DeepSeek], facts: Callable[[DeepSeek], Answer]) -> DeepSeek:
    """What ``attempt`` gives, once every rank has its part of the same model.

    This rank's own failure is raised as it is, after the others were told. Raises ParallelError, naming the rank,
    where another one failed or has other facts. Costs one exchange of a few hundred bytes a group.
    """
    model, failure = None, None
    try:
        model = attempt()
        mine = facts(model)
    except Exception as error:
        failure, mine = error, {"error": describe(error)}
    answers = _exchange(parallel, mine)
    if failure is not None:
        raise failure
    for rank, theirs in sorted(answers.items()):
        if "error" in theirs:
            raise ParallelError(f"rank {rank} could not load its part: {theirs['error']}")
        for fact, value in mine.items():
            if theirs[fact] != value:
                raise ParallelError(f"rank {rank} loads another model: {fact} is {theirs[fact]} there and {value} here")
    assert model is not None
    return model


def facts_of(model: DeepSeek, **arguments: Any) -> Answer:
    """What ranks must have in common. Weights are judged by the norms, which every rank holds whole."""
    norms = [model.norm.norm.weight, *(layer.input_norm.norm.weight for layer in model.layers)]
    known = {name: str(value) for name, value in arguments.items()}
    return {**known, "config": _digest(model.config.model_dump_json()), "weights": _digest(*map(_bits, norms))}


def _exchange(parallel: Parallel, mine: Answer) -> dict[int, Answer]:
    """Every rank's answer by its number, over the tensor parallel group and then, with what that gave, the other."""
    known: dict[int, Answer] = {}
    for name in dict.fromkeys(filter(None, (parallel.tp_group, parallel.ep_group))):
        group = Group.named(name)
        if len(group.ranks) < 2:
            continue
        known.setdefault(dist.get_rank(), mine)
        gathered: list[Any] = [None] * group.size
        dist.all_gather_object(gathered, known, group=process_group(name))
        known = {rank: answer for part in gathered for rank, answer in part.items()}
    return known


def _bits(x: torch.Tensor) -> str:
    return json.dumps(x.to(torch.float64).cpu().tolist())


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
