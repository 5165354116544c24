"""The trained model in the repository: what it claims, and the scripts that made it."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
import torch
from austen import corpus, evaluate, ngram, train
from austen.architecture import BOS, CONFIG, EOS, DeepSeekV3, Gate
from deepseek_cases import relative_error
from safetensors.torch import load_file, save_file

import torch_hal_deepseek as deepseek

BF16, FP8 = evaluate.CHECKPOINTS
HELD_OUT = ngram.HELD_OUT.read_bytes()
PART = HELD_OUT[:8000]  # enough to tell the models apart, and seconds instead of a minute


@pytest.fixture(scope="module")
def bits() -> dict[Path, float]:
    """Bits per byte of PART."""
    return {path: evaluate.bits_per_byte(deepseek.load(path), PART) for path in evaluate.CHECKPOINTS}


def test_predicts_better_than_the_n_gram_model(bits: dict[Path, float]) -> None:
    rival = ngram.KneserNey(ngram.load()).bits_per_byte(PART)
    assert bits[BF16] < 0.75 * rival
    assert bits[FP8] < 0.75 * rival


def test_fp8_predicts_within_one_percent_of_bf16(bits: dict[Path, float]) -> None:
    assert abs(bits[FP8] / bits[BF16] - 1) < 0.01


def test_n_gram_model() -> None:
    counts = ngram.load()
    assert counts.total() == 3_922_157 - ngram.ORDER  # every place of the training text
    model = ngram.KneserNey(counts)
    for context in (b"", b"t", b"th", b"the", b"zq\xff"):
        assert sum(model.probability(context, bytes([i])) for i in range(256)) == pytest.approx(1)
    assert model.bits_per_byte(HELD_OUT) == pytest.approx(2.0888, abs=1e-4)


def test_n_gram_counts_can_be_saved(tmp_path: Path) -> None:
    counts = ngram.count(b"to be or not to be")
    assert counts[b"to b"] == 2
    ngram.save(counts, tmp_path / "counts.gz")
    assert ngram.load(tmp_path / "counts.gz") == counts


def test_held_out_text_is_the_recorded_one() -> None:
    assert hashlib.sha256(HELD_OUT).hexdigest() == "fb54d61a343f8a074146dfbed4567f2f06b8383fa3dc01dc5497bd26484e63fa"


@pytest.mark.parametrize("path", evaluate.CHECKPOINTS, ids=lambda path: path.name)
def test_checkpoints_are_small(path: Path) -> None:
    assert sum(file.stat().st_size for file in path.iterdir()) <= 8_000_000


def test_fp8_is_what_the_quantiser_makes_of_bf16(tmp_path: Path) -> None:
    made = deepseek.quantize_checkpoint(BF16, tmp_path / "fp8")
    for name in ("config.json", "model.safetensors"):
        assert (made / name).read_bytes() == (FP8 / name).read_bytes()


def test_shape_suits_kernels() -> None:
    for name, weight in load_file(BF16 / "model.safetensors").items():
        if weight.dim() == 2 and not name.endswith((".gate.weight", "embed_tokens.weight")):
            rows, columns = weight.shape
            assert rows % 64 == 0 and columns % 128 == 0, name


def test_layers_draft_better_than_shuffled_ones(tmp_path: Path) -> None:
    tensors, generator = load_file(BF16 / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{CONFIG['num_hidden_layers']}."):
            order = torch.randperm(tensor.numel(), generator=generator)
            tensors[name] = tensor.flatten()[order].view(tensor.shape)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(BF16 / "config.json", tmp_path)
    trained, shuffled = (evaluate.acceptance(deepseek.load(path, mtp=True), PART[:1000]) for path in (BF16, tmp_path))
    assert trained > 0.75
    assert shuffled < 0.1


def test_training_architecture_agrees() -> None:
    """Two implementations, one written for training in plain torch, of the main model and of the prediction layer."""
    model = DeepSeekV3(json.loads((BF16 / "config.json").read_text())).eval()
    model.load_state_dict(load_file(BF16 / "model.safetensors"))
    ids = torch.tensor([BOS, *HELD_OUT[:300]])
    with torch.no_grad():
        logits, drafts = model(ids[None])
    ours = deepseek.load(BF16, dtype=torch.float32, mtp=True)
    assert relative_error(ours.logits(ids), logits[0]) < 1e-5
    accepted = float((drafts[0, :-1].argmax(-1) == logits[0, 1:-1].argmax(-1)).float().mean())
    assert deepseek.draft_acceptance(ours, ids) == pytest.approx(accepted, abs=1e-3)


def test_training_learns_balances_and_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG | {"hidden_size": 128, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    model, text = DeepSeekV3(config, dropout=0.1), train.encode("ab" * 400)
    log = train.Log(tmp_path / "log")
    settings = argparse.Namespace(
        steps=6, every=3, batch=2, length=32, rate=1e-3, decay=0.1, compile=False, package=None, folder=None
    )
    before = train.validate(model, text, 32)[0]
    train.fit(model, text, text, settings, log)
    assert train.validate(model, text, 32)[0] < before - 1
    assert all(gate.e_score_correction_bias.any() for gate in model.modules() if isinstance(gate, Gate))
    train.write(model, config, tmp_path / "bf16")
    loaded = deepseek.load(tmp_path / "bf16", mtp=True)
    assert evaluate.bits_per_byte(loaded, b"ab" * 40) < 8
    assert (tmp_path / "log").read_text().count("step") == 3


def test_rebalancing_favours_idle_experts() -> None:
    gate = DeepSeekV3(CONFIG).model.layers[-1].mlp.gate
    gate.load.copy_(torch.tensor([9.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]))
    assert float(gate.rebalance(0.5)) == pytest.approx(1.8)
    assert gate.e_score_correction_bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert not gate.load.any()


def test_chapters_lie_between_begin_and_end() -> None:
    assert train.encode("a\fbc").tolist() == [BOS, 97, EOS, BOS, 98, 99, EOS]


def test_corpus_reads_a_package(tmp_path: Path) -> None:
    books = {title: [title, "", "CHAPTER I", "", "One  two", " three.", "", "THE END"] for title in corpus.TITLES}
    package = tmp_path / "books.deb"
    package.write_bytes(_package(books))
    assert corpus.novels(package) == {title: "\n".join(lines) for title, lines in books.items()}
    assert corpus.chapters(corpus.novels(package)["EMMA"]) == ["One two three."]


def test_corpus_refuses_another_text(tmp_path: Path) -> None:
    lines = [line for i in range(4) for line in (f"CHAPTER {i}", "", "Other words.", "")]
    package = tmp_path / "books.deb"
    package.write_bytes(_package({title: [title, "", *lines] for title in corpus.TITLES}))
    with pytest.raises(ValueError, match="not the text expected"):
        corpus.read(package)


def _package(books: dict[str, list[str]]) -> bytes:
    """A .deb with nothing but the novels' database."""
    database = b"".join(struct.pack(">I", len(book)) + zlib.compress(book) for book in map(_serialised, books.values()))
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:xz") as archive:
        member = tarfile.TarInfo(corpus.DATABASE)
        member.size = len(database)
        archive.addfile(member, io.BytesIO(database))
    members = {"debian-binary": b"2.0", "data.tar.xz": tar.getvalue()}
    return b"!<arch>\n" + b"".join(
        f"{name:<16}{'0':<32}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        for name, data in members.items()
    )


def _serialised(lines: list[str]) -> bytes:
    strings = b"".join(struct.pack(">ii", 0x40009, len(line)) + line.encode() for line in lines)
    return b"X\n" + struct.pack(">4i", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines)) + strings
