"""Ranks that share experts and have tokens of their own need not have equally many, in a call or in a row of calls."""

from __future__ import annotations

import datetime
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepseek_cases import small, token_ids
from torch import Tensor

import torch_hal_deepseek as deepseek
from torch_hal_deepseek.generate import generate

EOS_AFTER = 3  # tokens, of what rank 0 says first


def engine(model: deepseek.DeepSeek, lengths: list[int]) -> Tensor:
    """A batched step of a rank's prompts and one more, without a capacity."""
    cache, sequences = model.new_cache(20, len(lengths)), [deepseek.Sequence() for _ in lengths]
    first = model.prefill([token_ids(n, seed=n) for n in lengths], sequences, cache)
    return torch.cat([first, model.decode(first.argmax(-1)[:, None], sequences, cache)[:, 0]])


def say(model: deepseek.DeepSeek, length: int, new: int, **options: Any) -> Tensor:
    return torch.tensor(list(model.generate(token_ids(length), new, **options)), dtype=torch.int64)


def say_in_chunks(model: deepseek.DeepSeek, length: int, new: int) -> Tensor:
    return torch.tensor(list(generate(model, token_ids(length), new, 0.0, 1.0, 0, 0.0, None, prefill_chunk=3)))


def acceptance(model: deepseek.DeepSeek, length: int) -> Tensor:
    return torch.tensor(deepseek.draft_acceptance(model, token_ids(length)))


# case -> what each of two ranks calls, and with what
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[Any, ...]]]] = {
    "logits": (lambda model, n: model.logits(token_ids(n)), [(20,), (7,)]),
    "logits of no token": (lambda model, n: model.logits(token_ids(n)), [(0,), (5,)]),
    "no rank has a token": (lambda model, n: model.logits(token_ids(n)), [(0,), (0,)]),
    "steps": (engine, [([5, 9, 2], ), ([3], )]),
    "a rank without sequences": (engine, [([], ), ([3, 4], )]),
    "prompts of other lengths": (say, [(9, 4), (30, 4)]),
    "one ends first": (say, [(9, 2), (9, 8)]),
    "the longer prompt ends first": (say, [(30, 1), (2, 6)]),
    "one at an end of sequence": (say, [(12, 8), (5, 8)]),
    "nothing to say": (say, [(1, 0), (9, 4)]),
    "more chunks of a prompt": (say_in_chunks, [(10, 2), (2, 7)]),
    "drafts": (acceptance, [(11,), (24,)]),
}  # fmt: skip


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=30)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=patience)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    model = deepseek.load(f"{folder}/model", mtp=True, parallel=deepseek.Parallel(ep_group=group, own_tokens=True))
    torch.save({name: call(model, *given[rank]) for name, (call, given) in CASES.items()}, f"{folder}/got{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which what rank 0 says ends soon, and what two ranks made of it."""
    folder = tmp_path_factory.mktemp("own_tokens")
    path = deepseek.random_checkpoint(folder / "model", small("V3"), seed=1, mtp=True)
    (_, ((length, new), _)) = CASES["one at an end of sequence"]
    config = json.loads((path / "config.json").read_text())
    config["eos_token_id"] = int(say(deepseek.load(path), length, new)[EOS_AFTER - 1])
    (path / "config.json").write_text(json.dumps(config))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    return folder


@pytest.fixture(scope="module")
def got(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"got{rank}") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_each_rank_gets_what_a_process_alone_gets(name: str, folder: Path, got: list[dict[str, Tensor]]) -> None:
    call, given = CASES[name]
    alone = deepseek.load(folder / "model", mtp=True)
    for rank in range(2):
        torch.testing.assert_close(got[rank][name], call(alone, *given[rank]), rtol=1e-5, atol=1e-5)


def test_the_cases_end_when_they_should(got: list[dict[str, Tensor]]) -> None:
    assert [len(ranks["one at an end of sequence"]) for ranks in got] == [EOS_AFTER, 8]
    assert [len(ranks["nothing to say"]) for ranks in got] == [0, 4]
