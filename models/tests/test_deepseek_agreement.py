"""Ranks that fail, or load different models, are named on every rank; nobody waits for a time-out."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_hal_deepseek as deepseek
from torch_hal_deepseek.random_weights import SMALL_CONFIG

SMALL = {**SMALL_CONFIG, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}

# case -> what each of two ranks passes beside its checkpoint, and which checkpoint
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "same": [("one", {}), ("one", {})],
    "weights": [("one", {}), ("other", {})],
    "experts_per_rank": [("one", {"experts_per_rank": (31, 1)}), ("one", {"experts_per_rank": (16, 16)})],
    "dtype": [("one", {}), ("one", {"dtype": torch.bfloat16})],
    "truncated": [("one", {}), ("truncated", {})],
    "missing": [("one", {}), ("nowhere", {})],
}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    said = {}
    for name, ranks in CASES.items():
        checkpoint, options = ranks[rank]
        experts = options.pop("experts_per_rank", None)
        parallel = deepseek.Parallel(ep_group=group, experts_per_rank=experts)
        try:
            deepseek.load(Path(folder) / checkpoint, parallel=parallel, **options)
            said[name] = "loaded"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    torch.save(said, f"{folder}/said{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("agreement")
    one = deepseek.random_checkpoint(folder / "one", SMALL, seed=1)
    deepseek.random_checkpoint(folder / "other", SMALL, seed=2)
    shutil.copytree(one, folder / "truncated")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    return [torch.load(folder / f"said{rank}") for rank in range(2)]


def test_ranks_of_one_model_load(said: list[dict[str, str]]) -> None:
    assert [ranks["same"] for ranks in said] == ["loaded", "loaded"]


@pytest.mark.parametrize("fact", ["weights", "experts_per_rank", "dtype"])
def test_ranks_that_disagree_say_in_what(fact: str, said: list[dict[str, str]]) -> None:
    for rank in range(2):
        assert said[rank][fact].startswith(f"ParallelError: rank {1 - rank} loads another model: {fact} is ")


@pytest.mark.parametrize(
    ("case", "kind", "cause"),
    [("truncated", "CheckpointError", "truncated"), ("missing", "ConfigError", "No such file or directory")],
)
def test_a_rank_that_cannot_load_is_named_on_the_others(
    case: str, kind: str, cause: str, said: list[dict[str, str]]
) -> None:
    assert said[0][case].startswith(f"ParallelError: rank 1 could not load its part: {kind}: ")
    assert said[1][case].startswith(f"{kind}: ")
    assert cause in said[0][case] and cause in said[1][case]
