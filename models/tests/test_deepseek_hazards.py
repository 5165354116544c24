"""What once loaded, and answered wrongly: stale files, scales that are none, groups that overlap."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_hal as hal
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


def remove(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def to_fp8(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    """As an FP8 checkpoint's, of which the config says nothing."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name], tensors[f"{name}_scale_inv"] = hal.ops.block_quant_fp8(tensors[name])

    return change


DRAFTS = "model.layers.2"
EXPERT = "model.layers.1.mlp.experts.31.up_proj.weight"
UNSAID = r"model\.safetensors: dtype F8_E4M3, expected one of BF16, .*: FP8, which quantization_config .* does not say"
UNREAD = {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}
SOURCES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no embedding": (remove("model.embed_tokens.weight"), r"model\.embed_tokens\.weight: missing"),
    "no norm": (remove("model.norm.weight"), r"model\.norm\.weight: missing"),
    "no projection": (remove(SCALED), f"{SCALED}: missing"),
    "no expert": (remove(EXPERT), f"{EXPERT}: missing"),
    "half a layer for drafts": (remove(f"{DRAFTS}.enorm.weight"), rf"{DRAFTS}\.enorm\.weight: missing"),
    "another shape": (
        lambda tensors: tensors.update({SCALED: torch.zeros(3, 4)}),
        rf"{SCALED}: model\.safetensors: shape \[3, 4\], expected \[128, 256\]",
    ),
    "fp8": (to_fp8(SCALED, EXPERT), rf"(?s){SCALED}: {UNSAID}.*{EXPERT}: {UNSAID}"),
    "fp8 codes alone": (
        lambda tensors: tensors.update({SCALED: tensors[SCALED].to(torch.float8_e4m3fn)}), f"{SCALED}: {UNSAID}"
    ),
    "fp8 that nobody reads": (lambda tensors: tensors.update(UNREAD), rf"layers\.9\.mlp\.up_proj\.weight: {UNSAID}"),
    "integers": (
        lambda tensors: tensors.update({SCALED: tensors[SCALED].to(torch.int8)}),
        rf"{SCALED}: model\.safetensors: dtype I8, expected one of BF16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCES)
def test_the_quantiser_wants_a_whole_checkpoint(case: str, tmp_path: Path) -> None:
    """And one that is not quantised; it writes nothing until it has seen that."""
    change, message = SOURCES[case]
    source = deepseek.random_checkpoint(tmp_path / "plain", {**SMALL, "num_nextn_predict_layers": 1}, mtp=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(deepseek.CheckpointError, match=message):
        deepseek.quantize_checkpoint(source, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize("mtp", [False, True])
def test_the_quantiser_asks_for_no_more_than_there_must_be(
    mtp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer for drafts may be absent, and no kernel is needed, whatever a user asks of those that run the model."""
    monkeypatch.setenv("TORCH_HAL_PREFER", "linear=acme")
    monkeypatch.setenv("TORCH_HAL_GRAPH_SAFE", "1")
    source = deepseek.random_checkpoint(tmp_path / "plain", {**SMALL, "num_nextn_predict_layers": 1}, mtp=mtp)
    out = deepseek.quantize_checkpoint(source, tmp_path / "fp8")
    assert any(name.startswith(DRAFTS) for name in load_file(out / "model.safetensors")) is mtp


def test_the_quantiser_reads_what_the_index_says(tmp_path: Path) -> None:
    """A tensor may be in two files, where the index chooses, and so may what is in no index."""
    source = deepseek.random_checkpoint(tmp_path / "plain", SMALL, max_shard_bytes=500_000)
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    last = source / max(index.values())
    assert index[SCALED] != last.name
    expected, _ = hal.ops.block_quant_fp8(load_file(source / index[SCALED])[SCALED])
    tensors = load_file(last)
    save_file({**tensors, **UNREAD, SCALED: torch.zeros(128, 256)}, last, metadata={"format": "pt"})
    out = deepseek.quantize_checkpoint(source, tmp_path / "fp8")
    after = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name in after if not name.endswith("_scale_inv")} == set(index)
    assert after[SCALED] == index[SCALED]
    assert torch.equal(load_file(out / after[SCALED])[SCALED].view(torch.uint8), expected.view(torch.uint8))


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
