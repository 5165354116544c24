"""What once loaded, and answered wrongly: stale files, scales that are none, groups that overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torch_hal_deepseek as deepseek
from torch_hal_deepseek.errors import ParallelError
from torch_hal_deepseek.parallel import Group, Parallel, Ranks
from torch_hal_deepseek.random_weights import SMALL_CONFIG

SMALL = {**SMALL_CONFIG, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
SCALED = "model.layers.0.mlp.down_proj.weight"


def test_writing_a_checkpoint_anew_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    deepseek.random_checkpoint(tmp_path, SMALL, seed=7, max_shard_bytes=200_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    deepseek.random_checkpoint(tmp_path, SMALL, seed=1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.json", "model.safetensors"]
    fresh = deepseek.load(deepseek.random_checkpoint(tmp_path / "fresh", SMALL, seed=1))
    assert torch.equal(deepseek.load(tmp_path).logits([1, 2, 3]), fresh.logits([1, 2, 3]))


def test_the_quantiser_writes_over_no_checkpoint(tmp_path: Path) -> None:
    source = deepseek.random_checkpoint(tmp_path / "bf16", SMALL)
    out = deepseek.quantize_checkpoint(source, tmp_path / "fp8")
    with pytest.raises(deepseek.CheckpointError, match=r"fp8: holds weights already \(model.safetensors\)"):
        deepseek.quantize_checkpoint(source, out)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_quantiser_refuses_what_is_not_finite_by_name(tmp_path: Path, value: float) -> None:
    source = deepseek.random_checkpoint(tmp_path / "bf16", SMALL)
    tensors = load_file(source / "model.safetensors")
    tensors[SCALED][3, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(deepseek.CheckpointError, match=f"{SCALED}: values that are not finite"):
        deepseek.quantize_checkpoint(source, tmp_path / "fp8")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_scales_are_positive(tmp_path: Path, value: float) -> None:
    out = deepseek.quantize_checkpoint(deepseek.random_checkpoint(tmp_path / "bf16", SMALL), tmp_path / "fp8")
    tensors = load_file(out / "model.safetensors")
    tensors[f"{SCALED}_scale_inv"][0, 0] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(deepseek.CheckpointError, match=f"{SCALED}_scale_inv: .* scales that are not positive"):
        deepseek.load(out)


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [
        ({0, 1}, {0, 1}, None),
        ({0, 1}, {0, 2}, None),
        ({0, 1, 2, 3}, {0, 1}, r"got \[0, 1\]"),
        ({0, 1, 2}, {0, 1, 3}, "got"),
    ],
)
def test_groups_are_told_apart_by_their_ranks(
    monkeypatch: pytest.MonkeyPatch, tp: set[int], ep: set[int], message: str | None
) -> None:
    groups = {"tp": tp, "ep": ep}
    named = lambda name: Group(name, 0, len(groups[name]), frozenset(groups[name]))  # noqa: E731
    monkeypatch.setattr(Group, "named", staticmethod(named))
    if message is not None:
        with pytest.raises(ParallelError, match=message):
            Ranks.of(Parallel(tp_group="tp", ep_group="ep"), 12)
        return
    ranks = Ranks.of(Parallel(tp_group="tp", ep_group="ep"), 12)
    assert (ranks.expert_tp.size == 1) == (tp == ep)
