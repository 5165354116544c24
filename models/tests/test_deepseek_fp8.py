"""FP8 checkpoints: run as FP8 or dequantised, against transformers; on devices of every kind of 8-bit float."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.quantizers.quantizer_finegrained_fp8
from deepseek_cases import BLOCKS, FP8, FP8_UE8M0, RELEASED, relative_error, small, token_ids
from safetensors.torch import load_file, save_file
from test_deepseek_parity import transformers_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

import torch_hal as hal
import torch_hal_deepseek as deepseek
from torch_hal_deepseek.experts import Fp8Experts
from torch_hal_deepseek.layers import Fp8Linear
from torch_hal_deepseek.quantization import PROJECTIONS

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH = 40
NO_MTP = {"num_nextn_predict_layers": 0}

# name -> (config, whether scales are powers of two); the first ones have dimensions that end within a block.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "V3": (small("V3", **NO_MTP), False),
    "V2-Lite": (small("V2-Lite"), False),
    "V2": (small("V2"), False),
    "V3, blocks": (small("V3", **BLOCKS, **NO_MTP), False),
    "V3.1": (small("V3", **BLOCKS, **NO_MTP), True),
    "odd widths": (small("V3", **NO_MTP, hidden_size=200, intermediate_size=330, moe_intermediate_size=136), False),
}


def dequantized(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors with every block's scale multiplied in, by the definition."""
    stored = load_file(path / FILE)
    result = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            tensor = tensor.to(torch.float32)
            for i, row in enumerate(scale.tolist()):
                for j, factor in enumerate(row):
                    tensor[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= factor
        result[name] = tensor
    return result


def fake_quantize(x: Tensor, ue8m0: bool) -> Tensor:
    """What x becomes as codes with a scale for each 128 elements, in floats."""
    parts = []
    for part in x.split(128, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        if ue8m0:
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(torch.int32))
        parts.append((part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale)
    return torch.cat(parts, -1)


class QuantizedInputs(TorchFunctionMode):
    """Every linear function within sees quantised activations."""

    def __init__(self, ue8m0: bool) -> None:
        self.ue8m0 = ue8m0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, *rest = args
            with torch._C.DisableTorchFunction():
                args = (fake_quantize(x, self.ue8m0), *rest)
        return function(*args, **(kwargs or {}))


def quantize_activations(model: nn.Module, ue8m0: bool) -> None:
    """As an FP8 model computes: all but kv_b, whose product is taken before or after attention, routers and head."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def quantized(*args: Any) -> Any:
            with QuantizedInputs(ue8m0):
                return forward(*args)

        return quantized

    for name, module in model.named_modules():
        is_projection = isinstance(module, nn.Linear) and not name.endswith(("kv_b_proj", "lm_head", "gate"))
        if is_projection or name.endswith("mlp.experts"):
            module.forward = wrap(module.forward)  # type: ignore[assignment]


@dataclasses.dataclass
class Twin:
    """An FP8 checkpoint, and transformers' model with its weights dequantised."""

    path: Path
    ue8m0: bool
    theirs: Any

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.theirs(ids).logits
        return result


def make_twin(case: str, folder: Path) -> Twin:
    config, ue8m0 = CASES[case]
    transformers_model(config).save_pretrained(folder / "float")
    path = deepseek.quantize_checkpoint(folder / "float", folder / "fp8", ue8m0=ue8m0)
    save_file(dequantized(path), folder / "float" / FILE, metadata={"format": "pt"})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(folder / "float", dtype=torch.float32, **eager)
    return Twin(path, ue8m0, theirs.eval())


@pytest.fixture(scope="module", params=CASES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(request.param, tmp_path_factory.mktemp("twin"))


def test_dequantised_weights_are_transformers(twin: Twin) -> None:
    ids, model = token_ids(LENGTH), deepseek.load(twin.path, dequantize=True)
    assert {part.into.dtype for _, part in model.targets() if part} == {torch.float32}
    expected = twin.logits(ids[None])[0]
    assert relative_error(model.logits(ids), expected) < 1e-5
    cache, sequence = model.new_cache(LENGTH), deepseek.Sequence()
    model.prefill([ids[:30]], [sequence], cache)
    assert relative_error(model.decode(ids[None, 30:], [sequence], cache)[0], expected[30:]) < 1e-5


def test_fp8_is_transformers_with_quantised_activations(twin: Twin) -> None:
    """All three ways to run, on 40 short sequences, since a code at a tie, which a last bit sways, changes all after.

    That happens to one in twelve or so; the rest agree to float32's last bits.
    """
    ids_BT, model = token_ids(40 * 3).view(40, 3), deepseek.load(twin.path)
    exact = twin.logits(ids_BT)[:, -1]
    quantize_activations(twin.theirs, twin.ue8m0)
    expected = twin.logits(ids_BT)[:, -1]
    assert relative_error(exact, expected) > 0.02  # what it costs to quantise activations

    def check(got: Tensor) -> None:
        errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert (errors < 1e-5).sum() >= 30

    cache, sequences = model.new_cache(3, 40), [deepseek.Sequence() for _ in ids_BT]
    check(model.prefill(list(ids_BT), sequences, cache))
    for sequence in sequences:
        cache.release(sequence)
    model.prefill(list(ids_BT[:, :1]), sequences, cache)
    model.prefill(list(ids_BT[:, 1:2]), sequences, cache)
    check(model.decode(ids_BT[:, 2:], sequences, cache)[:, 0])


# --- what is FP8 and what is not ---


@pytest.fixture(scope="module")
def blocks_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small("V3", **BLOCKS, quantization_config=FP8)
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("blocks"), config, seed=1, mtp=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_is_that_of_all_but_fp8_weights(blocks_path: Path, dtype: torch.dtype) -> None:
    model = deepseek.load(blocks_path, dtype=dtype)
    stored = load_file(blocks_path / FILE)
    for name, part in model.targets():
        assert part is not None
        if name.endswith("_scale_inv") or ".mlp.gate." in name:
            assert part.into.dtype == torch.float32, name
        elif "kv_b_proj" in name:
            assert part.into.dtype == dtype, name
        elif stored[name].dtype == torch.float8_e4m3fn:
            assert part.into.dtype == torch.float8_e4m3fn, name
            assert torch.equal(part.into.view(torch.uint8), stored[name].view(torch.uint8)), name
        else:
            assert part.into.dtype == dtype, name
    assert model.forward(token_ids(3), *step(model)).dtype == dtype
    assert list(model.generate(token_ids(5), 3))


def step(model: deepseek.DeepSeek) -> tuple[deepseek.Prefill, deepseek.KVCache]:
    cache, sequence = model.new_cache(3), deepseek.Sequence()
    cache.reserve(sequence, 3)
    return deepseek.plan_prefill(cache, [sequence], [3]), cache


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_step_is_one_graph(blocks_path: Path, name: str) -> None:
    model = deepseek.load(blocks_path)
    batch, cache = step(model)
    expected = model.forward(token_ids(3), batch, cache)
    again: Any = batch
    if name == "decode":
        again = deepseek.plan_decode(model.ops, cache, [deepseek.Sequence([0], 0)], 3, model.heads)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert relative_error(compiled(token_ids(3), again, cache), expected) < 2e-3


def test_float64_activations_are_refused(blocks_path: Path) -> None:
    with pytest.raises(ValueError, match="float64 activations"):
        deepseek.load(blocks_path, dtype=torch.float64)
    assert deepseek.load(blocks_path, dtype=torch.float64, dequantize=True).dtype == torch.float64


def test_ops_of_an_fp8_step(blocks_path: Path) -> None:
    model = deepseek.load(blocks_path, policy=hal.Policy(trace=True))
    trace = model.ops.trace
    assert trace is not None
    trace.calls.clear()
    model.logits(token_ids(3))
    calls = [op for op, _, _ in trace.calls]
    # By layer: qkv_a, q_b, o; dense or shared gate_up and down. Plain are kv_b, and the head.
    assert calls.count("fp8_block_linear") == calls.count("per_token_group_quant_fp8") == 2 * 5
    assert (calls.count("linear"), calls.count("fused_experts_fp8_block")) == (2 + 1, 1)


def test_fused_projections_keep_their_blocks() -> None:
    """The released shapes: 2112 rows of [q_a | kv_a] have 12 + 5 scale rows, the last of which is for 64 rows."""
    config = deepseek.parse_config({**RELEASED["V3"], "quantization_config": FP8, "num_hidden_layers": 4})
    model = deepseek.allocate(config, hal.bind("cpu"), device=torch.device("meta"))
    layer = model.layers[3]
    qkv_a, o = layer.attention.qkv_a, layer.attention.o
    assert isinstance(qkv_a, Fp8Linear) and isinstance(o, Fp8Linear)
    assert (qkv_a.weight.shape, qkv_a.scale.shape) == ((2112, 7168), (17, 56))
    assert (o.weight.shape, o.scale.shape) == ((7168, 16384), (56, 128))
    experts = layer.mlp.experts  # type: ignore[union-attr]
    assert isinstance(experts, Fp8Experts)
    assert (experts.w13_EID.shape, experts.w13_scale.shape) == ((256, 4096, 7168), (256, 32, 56))
    parts = [(name, part) for name, part in model.targets() if part]
    kv_a = next(part for name, part in parts if name.endswith("kv_a_proj_with_mqa.weight_scale_inv"))
    assert (kv_a.whole, kv_a.into.storage_offset()) == ((5, 56), 12 * 56)


def test_every_weight_of_v3_has_its_place() -> None:
    """685 B parameters, as Hugging Face counts: with the layer for drafts, and copies of embedding and head there."""
    config = deepseek.parse_config({**RELEASED["V3"], "quantization_config": FP8})
    copies = {f"model.layers.61.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    model = deepseek.allocate(config, hal.bind("cpu"), device=torch.device("meta"), names=copies, mtp=True)
    sizes = {name: math.prod(part.whole) for name, part in model.targets() if part}
    assert sum(size for name, size in sizes.items() if not name.endswith("_scale_inv")) == 684_489_845_504
    projections = {name.removesuffix("_scale_inv") for name in sizes if name.endswith("_scale_inv")}
    assert {name.split(".")[-2] for name in projections} == set(PROJECTIONS) - {"q_proj", "gate_up_proj"}
    assert len(projections) == 62 * 5 + 3 * 3 + 59 * 257 * 3


def test_v2_lites_dense_layer_gets_rows_of_zeros() -> None:
    """10944 columns are 85 blocks and a half: gate and up each begin with a block, and down reads whole ones."""
    config = deepseek.parse_config({**RELEASED["V2-Lite"], "quantization_config": FP8, "num_hidden_layers": 1})
    mlp: Any = deepseek.allocate(config, hal.bind("cpu"), device=torch.device("meta")).layers[0].mlp
    assert (mlp.gate_up.weight.shape, mlp.gate_up.scale.shape) == ((2 * 11008, 2048), (2 * 86, 16))
    assert (mlp.down.weight.shape, mlp.down.scale.shape) == ((2048, 11008), (16, 86))


SKIPS = {
    "name": ["model.layers.1.self_attn.o_proj"],
    "parent": ["model.layers.1.mlp.shared_experts"],
    "path": ["self_attn.q_b_proj", "lm_head", "gate"],
    "expression": [r"re:model\.layers\.\d+\.self_attn\.(o|q_b)_proj"],
    "one of a fused two": ["model.layers.0.self_attn.kv_a_proj_with_mqa", "model.layers.0.mlp.up_proj"],
    "one of the experts": ["model.layers.1.mlp.experts.3.down_proj"],
}


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("case", SKIPS)
def test_ignored_layers_stay_as_they_are(case: str, key: str, tmp_path: Path) -> None:
    """Of projections that make one weight, none is FP8 then: the others are dequantised."""
    config = small("V3", **BLOCKS, quantization_config={**FP8, key: SKIPS[case]})
    path = deepseek.random_checkpoint(tmp_path, config, seed=2)
    stored = load_file(path / FILE)
    assert any(t.dtype == torch.float8_e4m3fn for t in stored.values())
    model = deepseek.load(path)
    assert model.report.unused == ()
    plain = deepseek.load(path, dequantize=True)
    got = model.logits(token_ids(9))
    assert relative_error(got, plain.logits(token_ids(9))) < 0.5
    assert model.report.tensors == plain.report.tensors == len(stored)
    kept = {name for name, part in model.targets() if part and part.into.dtype == torch.float8_e4m3fn}
    fp8 = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert kept < fp8  # kv_b is dequantised anyway
    lost = {name.removesuffix(".weight") for name in fp8 - kept if "kv_b_proj" not in name}
    if case == "one of a fused two":
        assert lost == {"model.layers.0.self_attn.q_a_proj", "model.layers.0.mlp.gate_proj"}
    elif case == "one of the experts":
        assert len(lost) == 3 * 8 - 1 and all(".mlp.experts." in name for name in lost)
    else:
        assert lost == set()


def test_fusing_the_shared_expert_changes_nothing(blocks_path: Path, v3_path: Path) -> None:
    for path in (blocks_path, v3_path):
        fused, apart = deepseek.load(path, fuse_shared_expert=True), deepseek.load(path)
        assert fused.layers[1].mlp.shared is None  # type: ignore[union-attr]
        assert relative_error(fused.logits(token_ids(20)), apart.logits(token_ids(20))) < 2e-3
    two = deepseek.parse_config(small("V2-Lite"))
    with pytest.raises(deepseek.ConfigError, match="n_shared_experts: 2, fuse_shared_expert needs just 1"):
        deepseek.allocate(two, hal.bind("cpu"), fuse_shared_expert=True)


# --- what devices and kernels ask for ---


def test_a_device_whose_8_bit_floats_are_fnuz_gets_the_same_values(blocks_path: Path) -> None:
    """A byte means half as much there, so scales double; activations are quantised to that kind as well."""
    device = dataclasses.replace(hal.bind("cpu").device, fp8="e4m3fnuz")
    model = deepseek.load(blocks_path, ops=hal.bind(device))
    usual = deepseek.load(blocks_path)
    qkv_a, usual_qkv_a = model.layers[0].attention.qkv_a, usual.layers[0].attention.qkv_a
    assert isinstance(qkv_a, Fp8Linear) and isinstance(usual_qkv_a, Fp8Linear)
    assert qkv_a.weight.dtype == torch.float8_e4m3fnuz
    assert torch.equal(qkv_a.weight.to(torch.float32) * 2, usual_qkv_a.weight.to(torch.float32))
    assert torch.equal(qkv_a.scale, usual_qkv_a.scale * 2)
    assert relative_error(model.logits(token_ids(20)), usual.logits(token_ids(20))) < 1e-5


def test_a_device_without_8_bit_floats_says_so(blocks_path: Path) -> None:
    ops = hal.bind(dataclasses.replace(hal.bind("cpu").device, fp8=None))
    with pytest.raises(hal.Unsupported, match=r"cpu has no 8-bit floats.*dequantize"):
        deepseek.load(blocks_path, ops=ops)
    assert deepseek.load(blocks_path, ops=ops, dequantize=True).dtype == torch.float32


class PowersOfTwo:
    """A plugin whose kernels read nothing but packed powers of two, as DeepGEMM's on sm_100."""

    scales: list[Tensor]

    def __init__(self) -> None:
        self.scales = []

    def linear(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        out_dtype: torch.dtype,
        x_scale_layout: str = "row_f32",
        layout: str = "plain",
    ) -> Tensor:
        assert (x_scale_layout, x_scale.dtype) == ("mn_ue8m0", torch.int32)
        self.scales.append(weight_scale)
        return hal.ops.fp8_block_linear.reference(x, x_scale, weight, weight_scale, out_dtype, x_scale_layout)

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterator[hal.Kernel]:
        formats = (("x_scale_layout", "mn_ue8m0"),)
        yield hal.Kernel("fp8_block_linear", "powers", run=self.linear, formats=formats)


@pytest.mark.parametrize("scale_fmt", [FP8, FP8_UE8M0])
def test_a_kernel_that_wants_powers_of_two_gets_them(scale_fmt: dict[str, Any], tmp_path: Path) -> None:
    path = deepseek.random_checkpoint(tmp_path, small("V3", **BLOCKS, quantization_config=scale_fmt), seed=1)
    usual, plugin = deepseek.load(path), PowersOfTwo()
    hal.register(plugin, "powers")
    try:
        model = deepseek.load(path)
        got = model.logits(token_ids(20))
    finally:
        hal.unregister("powers")
    assert len(plugin.scales) == 10
    assert all((torch.frexp(scale).mantissa == 0.5).all() for scale in plugin.scales)
    same = scale_fmt is FP8_UE8M0
    assert relative_error(got, usual.logits(token_ids(20))) < (1e-5 if same else 0.5)
    dequantised = deepseek.load(path, dequantize=True)
    for ours, exact in zip(model.layers, dequantised.layers, strict=True):
        o = ours.attention.o
        assert isinstance(o, Fp8Linear)
        values = hal.ops.block_dequant_fp8(o.weight, o.scale, torch.float32)
        assert relative_error(values, exact.attention.o.weight) < (1e-7 if same else 0.08)


# --- making FP8 checkpoints, and other readers ---


def test_quantised_checkpoints_are_what_the_op_gives(v3_path: Path, tmp_path: Path) -> None:
    plain = deepseek.random_checkpoint(tmp_path / "plain", small("V3"), seed=1, mtp=True, max_shard_bytes=150_000)
    (plain / "tokenizer.json").write_text("{}")
    path = deepseek.quantize_checkpoint(plain, tmp_path / "fp8")
    assert (path / "tokenizer.json").read_text() == "{}"
    before = {k: v for file in plain.glob("*.safetensors") for k, v in load_file(file).items()}
    after = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    assert json.loads((path / INDEX).read_text())["weight_map"].keys() == after.keys()
    assert deepseek.load_config(path).quantization == deepseek.Quantization()
    quantised = {name for name in before if after[name].dtype == torch.float8_e4m3fn}
    assert len(after) == len(before) + len(quantised)
    assert {name.split(".")[-2] for name in before.keys() - quantised if before[name].dim() == 2} == {
        "embed_tokens", "lm_head", "gate", "eh_proj"
    }  # fmt: skip
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    codes, scale = hal.ops.block_quant_fp8(before[name])
    assert torch.equal(after[name].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(after[f"{name}_scale_inv"], scale)
    assert deepseek.load(path, mtp=True).report.unused == ()
    with pytest.raises(deepseek.CheckpointError, match="quantised already"):
        deepseek.quantize_checkpoint(path, tmp_path / "again")


@pytest.mark.parametrize("case", ["whole blocks", "released widths"])
def test_transformers_own_reader(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it dequantises, and reads our files, where every dimension is of whole blocks.

    It computes a block's size as rows / scale rows, so that kv_a's 576 rows of 4½ blocks, in every released model,
    are an error (transformers 5.24), and other partial blocks wrong numbers: nothing that our files could mend.
    """
    module = transformers.quantizers.quantizer_finegrained_fp8
    monkeypatch.setattr(module, "is_accelerate_available", lambda: True)  # needs it not, on a CPU
    widths = {"qk_rope_head_dim": 128} if case == "whole blocks" else {"kv_lora_rank": 512}
    config = small("V3", **{**BLOCKS, **widths}, **NO_MTP)
    transformers_model(config).save_pretrained(tmp_path / "float")
    path = deepseek.quantize_checkpoint(tmp_path / "float", tmp_path / "fp8")
    if case == "released widths":
        with pytest.raises(RuntimeError, match="automatic conversion"):
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return
    theirs = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(token_ids(LENGTH)[None]).logits[0]
    assert relative_error(deepseek.load(path, dequantize=True).logits(token_ids(LENGTH)), expected) < 1e-5
