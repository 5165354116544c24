"""Loading: every malformed checkpoint gets its error by name, and a good one is read as sparingly as promised."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import BLOCKS, FP8, FP8_UE8M0, small, token_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_hal_deepseek as deepseek
import torch_hal_deepseek.checkpoint

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_B = "model.layers.2.self_attn.q_b_proj.weight"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
NORM = "model.layers.0.self_attn.q_a_layernorm.weight"
HUGE = torch.full((24,), 1e39, dtype=torch.float64)  # finite, but not in float32


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("pristine"), small("V3"), seed=1)


@pytest.fixture
def whole(pristine: Path, tmp_path: Path) -> Path:
    """A good checkpoint in one file, to be spoilt."""
    return Path(shutil.copytree(pristine, tmp_path / "whole"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files with an index."""
    return deepseek.random_checkpoint(tmp_path / "sharded", small("V3"), seed=1, max_shard_bytes=150_000)


def edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


def edit_index(path: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def shard_of(path: Path, name: str) -> str:
    return str(json.loads((path / INDEX).read_text())["weight_map"][name])


def set_value(name: str, value: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[name].view(-1)[-1].fill_(value)


def replace(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(name, tensor)


# --- what is wrong with one tensor: the message names it and its file ---

TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str, str]] = {
    "missing": (lambda t: t.pop(Q_B), Q_B, "missing"),
    "missing expert": (lambda t: t.pop(EXPERT), EXPERT, "missing"),
    "missing bias": (lambda t: t.pop(BIAS), BIAS, "missing"),
    "missing head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight", "missing"),
    "shape": (replace(Q_B, torch.zeros(96, 25)), Q_B, f"{FILE}: shape [96, 25], expected [96, 24]"),
    "transposed": (replace(EXPERT, torch.zeros(64, 32)), EXPERT, f"{FILE}: shape [64, 32], expected [32, 64]"),
    "rank": (replace(NORM, torch.zeros(24, 1)), NORM, f"{FILE}: shape [24, 1], expected [24]"),
    "integers": (replace(NORM, torch.ones(24, dtype=torch.int32)), NORM, f"{FILE}: dtype I32, expected one of"),
    "fp8": (replace(NORM, torch.ones(24).to(torch.float8_e4m3fn)), NORM, f"{FILE}: dtype F8_E4M3, expected one of"),
    "nan": (set_value(EXPERT, torch.nan), EXPERT, f"{FILE}: values that are not finite in torch.float32"),
    "infinite": (set_value(NORM, -torch.inf), NORM, f"{FILE}: values that are not finite"),
    "nan bias": (set_value(BIAS, torch.nan), BIAS, f"{FILE}: values that are not finite"),
    "overflow": (replace(NORM, HUGE), NORM, f"{FILE}: values that are not finite in torch.float32"),
    "both forms": (
        replace("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 64, 64)),
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "duplicated, for model.layers.1.mlp.experts.gate_up_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_bad_tensor_is_named(case: str, whole: Path) -> None:
    change, name, message = TENSORS[case]
    edit(whole, change)
    with pytest.raises(deepseek.CheckpointError) as caught:
        deepseek.load(whole)
    assert f"{name}: {message}" in str(caught.value)


def test_an_overflow_in_the_models_dtype_is_not_finite(whole: Path) -> None:
    edit(whole, set_value(NORM, 1e5))
    deepseek.load(whole)
    with pytest.raises(deepseek.CheckpointError, match=rf"{NORM}: {FILE}: .* not finite in torch\.float16"):
        deepseek.load(whole, dtype=torch.float16)


def test_several_faults_are_listed_together(whole: Path) -> None:
    edit(whole, lambda t: t.pop(Q_B))
    edit(whole, replace(NORM, torch.zeros(3)))
    with pytest.raises(deepseek.CheckpointError) as caught:
        deepseek.load(whole)
    assert Q_B in str(caught.value)
    assert NORM in str(caught.value)


def test_a_long_list_of_faults_is_cut(whole: Path) -> None:
    edit(whole, lambda t: [t.pop(name) for name in list(t) if ".experts." in name])
    with pytest.raises(deepseek.CheckpointError, match=r"… and 40 more"):
        deepseek.load(whole)


# --- FP8: what is wrong with a weight or its scale ---

FP8_Q_B, FP8_EXPERT = Q_B.replace("2", "1"), EXPERT
MTP = "model.layers.2"


@pytest.fixture(scope="module")
def pristine_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small("V3", **BLOCKS, quantization_config=FP8)
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("fp8"), config, seed=1, mtp=True)


@pytest.fixture
def fp8(pristine_fp8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine_fp8, tmp_path / "fp8"))


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def set_code(name: str, code: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[name].view(torch.uint8)[-1, -1].fill_(code)


FP8_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str, str]] = {
    "no scale": (lambda t: t.pop(f"{FP8_Q_B}_scale_inv"), f"{FP8_Q_B}_scale_inv", "missing"),
    "no scale of an expert": (lambda t: t.pop(f"{FP8_EXPERT}_scale_inv"), f"{FP8_EXPERT}_scale_inv", "missing"),
    "no weight": (lambda t: t.pop(FP8_Q_B), FP8_Q_B, "missing"),
    "scale of nothing": (
        replace("model.layers.0.adapter.weight_scale_inv", torch.ones(1, 1)),
        "model.layers.0.adapter.weight_scale_inv",
        f"{FILE}: a scale, but model.layers.0.adapter.weight is no FP8 weight",
    ),
    "scale of a float": (
        replace("lm_head.weight_scale_inv", torch.ones(1, 2)),
        "lm_head.weight",
        f"{FILE}: dtype F32, expected F8_E4M3",
    ),
    "floor of blocks": (
        replace("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", torch.ones(1, 2)),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        f"{FILE}: shape [1, 2], expected [2, 2]",
    ),
    "a scale a row": (
        replace(f"{FP8_EXPERT}_scale_inv", torch.ones(256, 1)),
        f"{FP8_EXPERT}_scale_inv",
        f"{FILE}: shape [256, 1], expected [2, 2]",
    ),
    "not quantised": (replace(FP8_Q_B, torch.ones(512, 128)), FP8_Q_B, f"{FILE}: dtype F32, expected F8_E4M3"),
    "another fp8": (
        replace(FP8_Q_B, torch.ones(512, 128).to(torch.float8_e5m2)), FP8_Q_B, f"{FILE}: dtype F8_E5M2, expected F8"
    ),
    "integer scale": (
        replace(f"{FP8_Q_B}_scale_inv", torch.ones(4, 1, dtype=torch.int32)),
        f"{FP8_Q_B}_scale_inv",
        f"{FILE}: dtype I32, expected one of",
    ),
    "nan code": (set_code(FP8_Q_B, 0x7F), FP8_Q_B, f"{FILE}: values that are not finite in torch.float8_e4m3fn"),
    "negative nan code": (set_code(FP8_EXPERT, 0xFF), FP8_EXPERT, f"{FILE}: values that are not finite"),
    "nan scale": (set_value(f"{FP8_EXPERT}_scale_inv", torch.nan), f"{FP8_EXPERT}_scale_inv", f"{FILE}: values that"),
    "nan in what is dequantised": (
        set_code("model.layers.0.self_attn.kv_b_proj.weight", 0x7F),
        "model.layers.0.self_attn.kv_b_proj.weight",
        f"{FILE}: values that are not finite in torch.float32",
    ),
    "two names": (
        replace(f"{FP8_Q_B.removesuffix('.weight')}.weight_scale", torch.ones(4, 1)),
        f"{FP8_Q_B}_scale_inv",
        f"duplicated, {FP8_Q_B}_scale and {FP8_Q_B}_scale_inv are one",
    ),
    "no projection for drafts": (lambda t: t.pop(f"{MTP}.eh_proj.weight"), f"{MTP}.eh_proj.weight", "missing"),
    "no norm for drafts": (
        lambda t: t.pop(f"{MTP}.shared_head.norm.weight"), f"{MTP}.shared_head.norm.weight", "missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FP8_TENSORS)
def test_a_bad_fp8_tensor_is_named(case: str, fp8: Path) -> None:
    change, name, message = FP8_TENSORS[case]
    edit(fp8, change)
    with pytest.raises(deepseek.CheckpointError) as caught:
        deepseek.load(fp8, mtp=True)
    assert f"{name}: {message}" in str(caught.value)


def test_drafting_layers_are_judged_only_if_they_are_loaded(fp8: Path, pristine_fp8: Path) -> None:
    edit(fp8, lambda t: [t.pop(f"{MTP}.eh_proj.weight"), t.pop(f"{MTP}.self_attn.o_proj.weight")])
    assert torch.equal(logits(fp8), logits(pristine_fp8))


def test_fp8_weights_without_a_quantization_config(fp8: Path) -> None:
    config = json.loads((fp8 / "config.json").read_text())
    del config["quantization_config"]
    (fp8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(deepseek.CheckpointError, match=r"q_a_proj\.weight: .*: dtype F8_E4M3, expected one of BF16"):
        deepseek.load(fp8)


# --- FP8: other forms of the same ---


def rename_scales(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name)


def shrink_scales(tensors: dict[str, Tensor]) -> None:
    """To exponents alone, in a byte, as newer tools store powers of two."""
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu)


def add_cache_scales(tensors: dict[str, Tensor]) -> None:
    tensors |= {f"model.layers.0.self_attn.{kind}_scale": torch.tensor(2.0) for kind in "kv"}


def pack_fp8(tensors: dict[str, Tensor]) -> None:
    prefix = "model.layers.1.mlp.experts"
    for ending in ("", "_scale_inv"):
        part = {
            kind: torch.stack([tensors.pop(f"{prefix}.{e}.{kind}.weight{ending}").float() for e in range(8)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        packed = {"gate_up_proj": torch.cat([part["gate_proj"], part["up_proj"]], 1), "down_proj": part["down_proj"]}
        for kind, tensor in packed.items():
            tensors[f"{prefix}.{kind}{ending}"] = tensor if ending else tensor.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("change", [rename_scales, add_cache_scales, pack_fp8])
def test_other_forms_of_an_fp8_checkpoint(
    change: Callable[[dict[str, Tensor]], None], fp8: Path, pristine_fp8: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(fp8, change)
    for options in ({}, {"dequantize": True}):
        assert torch.equal(logits(fp8, **options), logits(pristine_fp8, **options))
    assert not caplog.records


def test_scales_may_be_exponents_in_a_byte(tmp_path: Path) -> None:
    path = deepseek.random_checkpoint(tmp_path, small("V3", **BLOCKS, quantization_config=FP8_UE8M0))
    expected = logits(path)
    edit(path, shrink_scales)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_scale_may_lie_in_another_shard(dequantize: bool, pristine_fp8: Path, tmp_path: Path) -> None:
    tensors = load_file(pristine_fp8 / FILE)
    shards = [{n: t for n, t in tensors.items() if n.endswith("_scale_inv") is scale} for scale in (False, True)]
    shutil.copy(pristine_fp8 / "config.json", tmp_path)
    for i, shard in enumerate(shards):
        save_file(shard, tmp_path / f"{i}.safetensors")
    model = deepseek.load(tmp_path, dequantize=dequantize)
    assert model.report.files == 2
    assert torch.equal(model.logits(token_ids(9)), logits(pristine_fp8, dequantize=dequantize))


# --- what is wrong with a file ---


def header_and_data(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def truncate_data(path: Path) -> str:
    """Cut the last bytes off; the tensor that loses them."""
    header, data = header_and_data(path / FILE)
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    write_raw(path / FILE, json.dumps(header), data[:-4])
    return str(last)


def truncate_header(path: Path) -> str:
    (path / FILE).write_bytes((path / FILE).read_bytes()[:100])
    return "cut within its header"


def empty(path: Path) -> str:
    (path / FILE).write_bytes(b"")
    return "not a safetensors file"


def lfs_pointer(path: Path) -> str:
    (path / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" * 3)
    return "Git LFS pointer"


def not_json(path: Path) -> str:
    write_raw(path / FILE, "{" * 20, b"")
    return "not JSON"


def malformed(path: Path) -> str:
    header, data = header_and_data(path / FILE)
    del header[Q_B]["shape"]
    write_raw(path / FILE, json.dumps(header), data)
    return "malformed header"


def named_twice(path: Path) -> str:
    header, data = header_and_data(path / FILE)
    text = json.dumps(header)
    write_raw(path / FILE, text[:-1] + f', "{Q_B}": {json.dumps(header[Q_B])}}}', data)
    return f"{Q_B}: named twice"


def wrong_length(path: Path) -> str:
    header, data = header_and_data(path / FILE)
    begin, end = header[Q_B]["data_offsets"]
    header[Q_B]["data_offsets"] = [begin, end - 4]
    write_raw(path / FILE, json.dumps(header), data)
    return f"{Q_B}: {FILE}: 9212 bytes for a tensor of 9216"


def entry(key: str, value: Any, message: str, name: str = Q_B) -> Callable[[Path], str]:
    """One value of the header is of a kind that no header has."""

    def spoil(path: Path) -> str:
        header, data = header_and_data(path / FILE)
        header.setdefault(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})[key] = value
        write_raw(path / FILE, json.dumps(header), data)
        return f"malformed header: {name}: {message}"

    return spoil


def nested(path: Path) -> str:
    write_raw(path / FILE, '{"a":' + "[" * 100_000, b"")
    return "nested too deeply"


def pipe(path: Path) -> str:
    (path / FILE).unlink()
    os.mkfifo(path / FILE)
    return "expected a file, got a device or pipe"


def folder(path: Path) -> str:
    (path / FILE).unlink()
    (path / FILE).mkdir()
    return "expected a file, got a directory"


def hole(path: Path) -> str:
    """Consistent to us, but not to the library that reads the data."""
    header, data = header_and_data(path / FILE)
    write_raw(path / FILE, json.dumps(header), data + b"1234")
    return FILE


@pytest.mark.parametrize(
    "spoil",
    [
        truncate_data, truncate_header, empty, lfs_pointer, not_json, malformed, named_twice, wrong_length, hole,
        nested, pipe, folder,
        entry("dtype", ["F32"], "dtype: expected text"),
        entry("dtype", ["F32"], "dtype: expected text", name="unused"),
        entry("shape", [[64]], "shape: expected a list of integers ≥ 0"),
        entry("shape", [-1], "shape: expected a list of integers ≥ 0"),
        entry("data_offsets", [0, math.inf], "data_offsets: expected two integers"),
        entry("data_offsets", [4, 0], "data_offsets: expected two integers, 0 ≤ begin ≤ end"),
        entry("data_offsets", [0, 1, 2], "data_offsets: expected two integers"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(spoil: Callable[[Path], str], whole: Path) -> None:
    message = spoil(whole)
    with pytest.raises(deepseek.CheckpointError) as caught:
        deepseek.load(whole)
    assert message in str(caught.value)
    assert str(whole / FILE) in str(caught.value) or FILE in str(caught.value)


def test_a_truncated_tensor_says_so(whole: Path) -> None:
    name = truncate_data(whole)
    with pytest.raises(deepseek.CheckpointError, match=rf"{name}: {FILE}: truncated"):
        deepseek.load(whole)


def test_no_checkpoint(tmp_path: Path, pristine: Path) -> None:
    with pytest.raises(deepseek.ConfigError, match="No such file"):
        deepseek.load(tmp_path / "absent")
    shutil.copy(pristine / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(deepseek.CheckpointError, match=r"no model\.safetensors\.index\.json and no \*\.safetensors"):
        deepseek.load(tmp_path)


def test_arguments_of_load_are_judged_first(pristine: Path) -> None:
    for dtype in ("bfloat16", torch.int32, torch.float8_e4m3fn, torch.float32.__class__):
        with pytest.raises(ValueError, match=r"dtype: expected one of torch\.bfloat16, .*, got "):
            deepseek.load(pristine, dtype=dtype)  # type: ignore[arg-type]
    for path in (None, 5, pristine / FILE, pristine / "config.json"):
        with pytest.raises(deepseek.CheckpointError, match="expected the directory of a checkpoint, got "):
            deepseek.load(path)  # type: ignore[arg-type]
    with pytest.raises(deepseek.CheckpointError, match="expected a directory, got a file"):
        deepseek.Checkpoint(pristine / FILE)


def test_what_is_quantised_is_judged_too(whole: Path, sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(deepseek.CheckpointError, match="is the checkpoint itself"):
        deepseek.quantize_checkpoint(whole, whole / ".." / "whole")
    shard = sharded / shard_of(sharded, Q_B)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(deepseek.CheckpointError, match=rf"{shard.name}: expected a file"):
        deepseek.quantize_checkpoint(sharded, tmp_path / "out")
    hole(whole)
    with pytest.raises(deepseek.CheckpointError, match=FILE):
        deepseek.quantize_checkpoint(whole, tmp_path / "out")


def test_one_tensor_in_two_files_without_an_index(whole: Path) -> None:
    save_file({Q_B: torch.zeros(96, 24)}, whole / "other.safetensors")
    with pytest.raises(deepseek.CheckpointError, match=rf"{Q_B}: duplicated, in model\.safetensors and other"):
        deepseek.load(whole)


# --- what is wrong with an index ---


def index_lies(path: Path) -> str:
    wrong = next(f.name for f in sorted(path.glob("*.safetensors")) if f.name != shard_of(path, Q_B))
    edit_index(path, lambda m: m.__setitem__(Q_B, wrong))
    return f"{Q_B}: {wrong}: {INDEX} places it there, the file lacks it"


def shard_missing(path: Path) -> str:
    (path / shard_of(path, Q_B)).unlink()
    return f"{shard_of(path, Q_B)}: No such file"


def shard_truncated(path: Path) -> str:
    file = path / shard_of(path, Q_B)
    file.write_bytes(file.read_bytes()[:50])
    return f"{file}: not a safetensors file, or cut within its header"


def index_lacks(path: Path) -> str:
    edit_index(path, lambda m: m.pop(Q_B))
    return f"{Q_B}: missing"


def index_leaves(path: Path) -> str:
    edit_index(path, lambda m: m.__setitem__(Q_B, "../model.safetensors"))
    return f"{Q_B}: {INDEX} places it in '../model.safetensors', which is no file of this directory"


def index_of_numbers(path: Path) -> str:
    edit_index(path, lambda m: m.__setitem__(Q_B, 3))
    return f"{Q_B}: {INDEX} places it in 3"


def index_not_json(path: Path) -> str:
    (path / INDEX).write_text("weight_map")
    return f"{INDEX}: not JSON"


def index_empty(path: Path) -> str:
    (path / INDEX).write_text("{}")
    return f"{INDEX}: no weight_map"


def index_names_twice(path: Path) -> str:
    text = (path / INDEX).read_text().rstrip().removesuffix("}").rstrip().removesuffix("}")
    (path / INDEX).write_text(f'{text}, "{Q_B}": "x"}}}}')
    return f"{Q_B}: named twice"


def index_places(file: str) -> Callable[[Path], str]:
    def spoil(path: Path) -> str:
        edit_index(path, lambda m: m.__setitem__(Q_B, file))
        return f"{Q_B}: {INDEX} places it in {file!r}, which is no file of this directory"

    return spoil


def index_nested(path: Path) -> str:
    (path / INDEX).write_text("[" * 100_000)
    return f"{INDEX}: not JSON that can be read: nested too deeply"


def index_folder(path: Path) -> str:
    (path / INDEX).unlink()
    (path / INDEX).mkdir()
    return f"{INDEX}: expected a file, got a directory"


def index_dangles(path: Path) -> str:
    (path / INDEX).unlink()
    (path / INDEX).symlink_to(path / "nowhere")
    return f"{INDEX}: No such file"


@pytest.mark.parametrize(
    "spoil",
    [
        *map(index_places, ["a\0b", "\ud800", "", ".."]), index_nested, index_folder, index_dangles,
        index_lies, shard_missing, shard_truncated, index_lacks, index_leaves, index_of_numbers, index_not_json,
        index_empty, index_names_twice,
    ],
)  # fmt: skip
def test_a_bad_index_is_named(spoil: Callable[[Path], str], sharded: Path) -> None:
    message = spoil(sharded)
    with pytest.raises(deepseek.CheckpointError) as caught:
        deepseek.load(sharded)
    assert message in str(caught.value)


# --- good checkpoints ---


def logits(path: Path, **options: Any) -> Tensor:
    return deepseek.load(path, **options).logits(token_ids(9))


def test_sharded_equals_whole(pristine: Path, sharded: Path) -> None:
    model = deepseek.load(sharded)
    assert model.report.files == len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(model.logits(token_ids(9)), logits(pristine))


def test_a_cache_of_links_is_followed(pristine: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "85864749"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(pristine.iterdir()):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    assert torch.equal(logits(snapshot), logits(pristine))


def test_packed_experts_equal_single_ones(whole: Path, pristine: Path) -> None:
    def pack(tensors: dict[str, Tensor]) -> None:
        for prefix in ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts"):
            part = {
                kind: torch.stack([tensors.pop(f"{prefix}.{e}.{kind}.weight") for e in range(8)])
                for kind in ("gate_proj", "up_proj", "down_proj")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([part["gate_proj"], part["up_proj"]], 1)
            tensors[f"{prefix}.down_proj"] = part["down_proj"]

    edit(whole, pack)
    assert torch.equal(logits(whole), logits(pristine))


def test_with_an_index_only_what_it_names_is_read(sharded: Path, pristine: Path) -> None:
    (sharded / FILE).write_bytes(b"no safetensors file at all")
    (sharded / "consolidated.safetensors").write_bytes(b"")
    assert torch.equal(logits(sharded), logits(pristine))


def test_shards_that_nobody_needs_are_not_opened(sharded: Path, pristine: Path) -> None:
    edit_index(sharded, lambda m: m.__setitem__("model.layers.3.eh_proj.weight", "mtp.safetensors"))
    model = deepseek.load(sharded)
    assert model.report.speculative == ("model.layers.3.eh_proj.weight",)
    assert torch.equal(model.logits(token_ids(9)), logits(pristine))


def test_tensors_that_nobody_needs_are_reported_in_one_warning(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = [f"model.layers.0.adapter.{i}" for i in range(12)]
    edit(whole, lambda t: t.update({name: torch.full((3,), torch.nan) for name in extra}))
    with caplog.at_level(logging.WARNING, "torch_hal_deepseek"):
        model = deepseek.load(whole)
    assert set(model.report.unused) == set(extra)
    (record,) = caplog.records
    assert "12 tensors are not used: model.layers.0.adapter.0, " in record.getMessage()


def test_multi_token_prediction_and_stored_frequencies_are_no_cause_for_a_warning(
    whole: Path, pristine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mtp = {"model.layers.3.enorm.weight": torch.zeros(64), "model.layers.3.shared_head.head.weight": torch.zeros(2, 2)}
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    edit(whole, lambda t: t.update({**mtp, **frequencies}))
    with caplog.at_level(logging.WARNING, "torch_hal_deepseek"):
        model = deepseek.load(whole)
    assert model.report.speculative == tuple(sorted(mtp))
    assert model.report.unused == ()
    assert not caplog.records
    assert torch.equal(model.logits(token_ids(9)), logits(pristine))


def test_tied_embeddings_need_no_head(pristine: Path, tmp_path: Path) -> None:
    tied = deepseek.random_checkpoint(tmp_path, small("V3", tie_word_embeddings=True), seed=1)
    assert "lm_head.weight" not in load_file(tied / FILE)
    embedding = load_file(tied / FILE)["model.embed_tokens.weight"]
    edit(tied, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    as_tied = logits(tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(as_tied, logits(tied))


def test_report(pristine: Path) -> None:
    report = deepseek.load(pristine).report
    tensors = load_file(pristine / FILE)
    assert report.files == 1
    assert report.tensors == len(tensors)
    assert report.bytes == sum(t.nbytes for t in tensors.values())
    assert report.seconds > 0
    assert report.unused == report.speculative == ()


def test_every_value_of_a_checkpoint_arrives(pristine: Path) -> None:
    model = deepseek.load(pristine)
    stored = load_file(pristine / FILE)
    arrived = dict(model.targets())
    assert arrived.keys() == stored.keys()
    for name, tensor in stored.items():
        part = arrived[name]
        assert part is not None and torch.equal(part.into, tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype(pristine: Path, dtype: torch.dtype) -> None:
    """The router stays wide, whatever the rest is: bfloat16 logits or bias would choose other experts."""
    model = deepseek.load(pristine, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, part in model.targets():
        assert part is not None and part.into.dtype == (wide if ".mlp.gate." in name else dtype), name
    got, expected = model.logits(token_ids(9)), logits(pristine)
    assert got.dtype == torch.float32
    assert float((got - expected).norm() / expected.norm()) < (0.05 if dtype == torch.bfloat16 else 1e-5)


def test_the_checkpoints_dtype_is_the_default(tmp_path: Path) -> None:
    path = deepseek.random_checkpoint(tmp_path, small("V2-Lite", torch_dtype="bfloat16"))
    model = deepseek.load(path)
    assert model.dtype == model.embedding_WD.dtype == torch.bfloat16


def test_latents_are_expanded_by_views_of_one_weight(pristine: Path) -> None:
    attention = deepseek.load(pristine).layers[0].attention
    heads = attention.kv_b.weight.view(4, 16 + 12, 32)
    assert torch.equal(attention.w_kc_HNL, heads[:, :16])
    assert torch.equal(attention.w_vc_HLV, heads[:, 16:].transpose(1, 2))
    assert attention.w_kc_HNL.data_ptr() == attention.kv_b.weight.data_ptr()


class Watch:
    """Stands in for safetensors' ``safe_open``: how many files are open, and tensors alive, at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = self.most_open = self.most_alive = self.read = 0
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        original = torch_hal_deepseek.checkpoint.safe_open
        watch = self

        class Opened:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.file = original(*args, **kwargs)

            def __enter__(self) -> Opened:
                watch.open += 1
                watch.most_open = max(watch.most_open, watch.open)
                self.file.__enter__()
                return self

            def __exit__(self, *args: Any) -> None:
                watch.open -= 1
                self.file.__exit__(*args)

            def get_tensor(self, name: str) -> Tensor:
                tensor: Tensor = self.file.get_tensor(name)
                watch.read += 1
                watch.alive.add(tensor)
                watch.most_alive = max(watch.most_alive, len(watch.alive))
                return tensor

        monkeypatch.setattr(torch_hal_deepseek.checkpoint, "safe_open", Opened)


def test_memory_is_at_most_the_model_and_one_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    model = deepseek.load(sharded)
    assert watch.read == model.report.tensors
    assert watch.most_open == 1
    assert watch.most_alive == 1


def test_what_headers_tell_is_an_error_before_data_is_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    index_lies(sharded)
    with pytest.raises(deepseek.CheckpointError, match=Q_B):
        deepseek.load(sharded)
    assert watch.read == 0


def test_random_checkpoints_are_reproducible(pristine: Path, tmp_path: Path) -> None:
    again = deepseek.random_checkpoint(tmp_path / "again", small("V3"), seed=1)
    other = deepseek.random_checkpoint(tmp_path / "other", small("V3"), seed=2)
    assert (again / FILE).read_bytes() == (pristine / FILE).read_bytes()
    assert (other / FILE).read_bytes() != (pristine / FILE).read_bytes()
    assert deepseek.load_config(pristine) == deepseek.parse_config(small("V3"))
    assert json.loads((pristine / "config.json").read_text())["num_key_value_heads"] == 4
    bias = load_file(pristine / FILE)[BIAS]
    assert bias.min() < 0 < bias.max()


def test_a_policy_belongs_to_binding(pristine: Path) -> None:
    import torch_hal as hal

    with pytest.raises(ValueError, match="not both"):
        deepseek.load(pristine, ops=hal.bind("cpu"), policy=hal.Policy())
    ops = hal.bind("cpu", hal.Policy(validation=False))
    model = deepseek.load(pristine, ops=ops)
    assert model.ops is ops
    assert torch.equal(model.logits(token_ids(9)), logits(pristine))


def test_progress_is_drawn_on_a_terminal_only(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deepseek.load(pristine)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    deepseek.load(pristine)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"Loading {pristine.name}" in err
