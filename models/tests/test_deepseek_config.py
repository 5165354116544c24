"""Configurations: every row of the released models, every spelling, and every refusal by name."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import FP8, FP8_UE8M0, RELEASED, small

import torch_hal as hal
import torch_hal_deepseek as deepseek
from torch_hal.ops.rope import rope_inv_freq


@pytest.mark.parametrize("name", RELEASED)
def test_every_field_of_a_released_config_is_read(name: str) -> None:
    data = RELEASED[name]
    config = deepseek.parse_config(data)
    dumped = config.model_dump()
    read = {key: value for key, value in data.items() if key in dumped}
    assert {key: dumped[key] for key in read} == read
    assert set(data) - set(dumped) == {
        "architectures", "hidden_act", "attention_bias", "num_key_value_heads", "rope_scaling"
    }  # fmt: skip
    assert config.yarn is not None
    assert config.yarn.factor == 40
    assert config.yarn.original_max_position_embeddings == 4096
    assert config.yarn.mscale == config.yarn.mscale_all_dim == data["rope_scaling"]["mscale"]
    assert config.dtype == torch.bfloat16
    assert config.eos_ids == {data["eos_token_id"]}
    assert (config.qk_head_dim, config.kv_width, config.max_positions) == (192, 576, 163840)


def test_layers_are_dense_first_then_moe_every_moe_layer_freq() -> None:
    v3 = deepseek.parse_config(RELEASED["V3"])
    assert [i for i in range(61) if not v3.is_moe(i)] == [0, 1, 2]
    # transformers ignores moe_layer_freq, which is 1 in every release; DeepSeek's own code reads it.
    sparse = deepseek.parse_config({**RELEASED["V2-Lite"], "moe_layer_freq": 2})
    assert [i for i in range(6) if sparse.is_moe(i)] == [2, 4]


# --- section 5 of the facts ---


@pytest.mark.parametrize(
    ("name", "scale"), [("V2-Lite", 0.11472138679292611), ("V2", 0.11472138679292611), ("V3", 0.1352337788608801)]
)
def test_softmax_scale(name: str, scale: float) -> None:
    assert math.isclose(deepseek.parse_config(RELEASED[name]).softmax_scale, scale, rel_tol=1e-15)


def test_softmax_scale_without_yarn_is_the_plain_one() -> None:
    config = deepseek.parse_config({**RELEASED["V3"], "rope_scaling": None})
    assert config.yarn is None
    assert config.softmax_scale == 192**-0.5


def test_rotary_frequencies() -> None:
    config = deepseek.parse_config(RELEASED["V3"])
    assert config.yarn is not None
    expected = [
        1, 0.749894209, 0.562341325, 0.421696503, 0.316227766, 0.237137371, 0.177827941, 0.133352143,
        0.1, 0.0749894209, 0.0562341325, 0.0390069266, 0.0268793601, 0.0183781462, 0.0124479559, 0.00833450895,
        0.0055, 0.00356199749, 0.0022493653, 0.00137051364, 0.000790569415, 0.000414990398, 0.000177827941,
        3.33380358e-5, 2.5e-5, 1.87473552e-5, 1.40585331e-5, 1.05424126e-5, 7.90569415e-6, 5.92843426e-6,
        4.44569853e-6, 3.33380358e-6,
    ]  # fmt: skip
    got = rope_inv_freq(config.qk_rope_head_dim, config.rope_theta, config.yarn.scaling)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=2e-6, atol=0)


def test_yarn_multiplies_cosines_by_the_ratio_of_the_mscales() -> None:
    """transformers ignores mscale where mscale_all_dim is absent; DeepSeek's code does not. Releases set both."""
    base = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    for given, multiplier in [
        ({}, 1.3688879454113936),
        ({"mscale": 0.707}, 1.2608037774058554),
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, 1.3688879454113936 / 1.2608037774058554),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707, "attention_factor": 1.25}, 1.25),
    ]:
        yarn = deepseek.parse_config({**RELEASED["V3"], "rope_scaling": {**base, **given}}).yarn
        assert yarn is not None
        assert math.isclose(yarn.scaling.cos_sin_multiplier, multiplier, rel_tol=1e-15)


# --- spellings ---


def _renamed(data: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in data.items()}


def _with_rope_parameters(data: dict[str, Any], key: str) -> dict[str, Any]:
    rope = {**data["rope_scaling"], "rope_theta": data["rope_theta"], key: "yarn"}
    rest = {k: v for k, v in data.items() if k not in ("rope_scaling", "rope_theta")}
    return {**rest, "rope_parameters": {k: v for k, v in rope.items() if k == key or k not in ("type", "rope_type")}}


V3, LITE = RELEASED["V3"], RELEASED["V2-Lite"]
SPELLINGS = {
    "num_mtp_layers": (_renamed(V3, num_nextn_predict_layers="num_mtp_layers"), V3),
    "num_local_experts": (_renamed(V3, n_routed_experts="num_local_experts"), V3),
    "both, equal": ({**V3, "num_local_experts": 256}, V3),
    "dtype": (_renamed(V3, torch_dtype="dtype"), V3),
    "dtype with its module": ({**_renamed(V3, torch_dtype="dtype"), "dtype": "torch.bfloat16"}, V3),
    "gready": ({**LITE, "topk_method": "gready"}, LITE),
    "q_lora_rank 0": ({**LITE, "q_lora_rank": 0}, LITE),
    "greedy without groups": ({**LITE, "n_group": None, "topk_group": None}, LITE),
    "rope_parameters, rope_type": (_with_rope_parameters(V3, "rope_type"), V3),
    "rope_parameters, type": (_with_rope_parameters(V3, "type"), V3),
    "both keys, equal": ({**V3, "rope_parameters": V3["rope_scaling"]}, V3),
    "rope_scaling, rope_type": ({**V3, "rope_scaling": {**V3["rope_scaling"], "rope_type": "deepseek_yarn"}}, V3),
    "router implied by V3": ({k: v for k, v in V3.items() if k not in ("scoring_func", "topk_method")}, V3),
    "router implied by V2": ({k: v for k, v in LITE.items() if k != "scoring_func"}, LITE),
    "no model_type": ({k: v for k, v in V3.items() if k != "model_type"}, V3),
    "unknown harmless field": ({**V3, "ep_size": 1, "aux_loss_alpha": 0.001}, V3),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings_of_one_config(case: str) -> None:
    given, meant = SPELLINGS[case]
    assert deepseek.parse_config(given) == deepseek.parse_config(meant)


def test_rope_type_default_is_no_yarn() -> None:
    data = {**V3, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert deepseek.parse_config(data).yarn is None


def test_several_ends_of_sequence() -> None:
    assert deepseek.parse_config({**V3, "eos_token_id": [1, 7]}).eos_ids == {1, 7}
    assert deepseek.parse_config({**V3, "eos_token_id": None}).eos_ids == frozenset()


# --- FP8 ---


def test_quantisation_is_read() -> None:
    assert deepseek.parse_config(V3).quantization is None
    assert deepseek.parse_config({**V3, "quantization_config": {}}).quantization is None
    v3 = deepseek.parse_config({**V3, "quantization_config": FP8}).quantization
    assert v3 == deepseek.Quantization(ue8m0=False, skipped=())
    v31 = deepseek.parse_config({**V3, "quantization_config": FP8_UE8M0}).quantization
    assert v31 == deepseek.Quantization(ue8m0=True)
    saved_by_transformers = {
        "activation_scheme": "dynamic", "dequantize": False, "modules_to_not_convert": None, "scale_fmt": "float",
        "modules_to_convert": None, "expert_dtype": "fp8", "quant_method": "fp8", "weight_block_size": [128, 128],
    }  # fmt: skip
    assert deepseek.parse_config({**V3, "quantization_config": saved_by_transformers}).quantization == v3


def test_ignored_layers_are_names_parts_of_paths_or_expressions() -> None:
    lists = {"modules_to_not_convert": ["model.layers.1", "kv_b_proj"], "ignored_layers": [r"re:.*\.7\.mlp.*"]}
    quantization = deepseek.parse_config({**V3, "quantization_config": {**FP8, **lists}}).quantization
    assert quantization is not None
    for module, covered in {
        "model.layers.1.mlp.up_proj": False,
        "model.layers.11.mlp.up_proj": True,
        "model.layers.0.self_attn.kv_b_proj": False,
        "model.layers.0.self_attn.q_b_proj": True,
        "model.layers.7.mlp.experts.3.down_proj": False,
        "model.layers.7.self_attn.o_proj": True,
        "lm_head": False,
        "model.layers.5.mlp.gate": False,
    }.items():
        assert quantization.covers(module) is covered, module


MEANT = [  # as configs of released models, and of tools, have them
    "lm_head", "model.embed_tokens", "embed_tokens", "model.norm", "gate", "mlp.gate", "model.layers.1.mlp.gate",
    "e_score_correction_bias", "model.layers.0", "model.layers.2.input_layernorm", "model.layers.1.mlp.experts",
    "self_attn", "model.layers.0.self_attn.kv_b_proj", "re:.*lm_head", "re:.*gate$", r"re:model\.layers\.\d+\.mlp\..*",
    "model.layers.3", "model.layers.3.eh_proj", "model.layers.60.mlp", r"re:.*layers\.3\..*", "re:model.layers.3.*",
    "eh_proj", "shared_head", "shared_head.head", "re:.*enorm", "hnorm", "layers.99999999999",
]  # fmt: skip
IDLE = [
    "self_attn.o_prj", "o_proj.weight", "model.layers.1.o_proj", "layers.0.mlp.gate_up", "mtp.layers.0", "visual",
    "model.layers.*.self_attn", "mlp.", "re:lm_headed", r"re:layers\.0", r"re:.*mlp$", "",
]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_modules_that_are_not_there_are_told_from_those_that_may_not_be(v3_path: Path, tied: bool) -> None:
    """Three layers, without one for drafts; a head, or a tied one."""
    tensors = [name for name in deepseek.Checkpoint(v3_path).files if not (tied and name == "lm_head.weight")]
    assert deepseek.Quantization(skipped=(*MEANT, *IDLE)).idle(tensors, 3) == IDLE


def test_a_module_that_is_not_there_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before what it may lead to, that a projection which is no FP8 was taken for one."""
    lists = {"modules_to_not_convert": ["lm_head", "o_prj"], "ignored_layers": ["q_b_proj", "model.layers.3", "re:x"]}
    path = deepseek.random_checkpoint(tmp_path, small("V3", quantization_config={**FP8, **lists}))
    with caplog.at_level(logging.WARNING, "torch_hal_deepseek"):
        deepseek.load(path)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path}: quantization_config: modules_to_not_convert or ignored_layers: no module is named by 'o_prj', 're:x'"
    )
    caplog.clear()
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["q_b_prjo"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(deepseek.CheckpointError, match=r"q_b_proj\.weight_scale_inv: missing"):
        deepseek.load(path)
    assert "no module is named by 'q_b_prjo'" in caplog.text


# --- errors ---


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta", "n_routed_experts", "n_shared_experts",
        "num_experts_per_tok", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob",
        "routed_scaling_factor",
    ],
)  # fmt: skip
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(deepseek.ConfigError, match=rf"\b{field}: Field required"):
        deepseek.parse_config({k: v for k, v in V3.items() if k != field})


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(deepseek.ConfigError, match=r"vocab_size: .*; hidden_size: "):
        deepseek.parse_config({k: v for k, v in V3.items() if k not in ("vocab_size", "hidden_size")})


@pytest.mark.parametrize("field", ["factor", "original_max_position_embeddings"])
def test_a_missing_yarn_field_is_named(field: str) -> None:
    rope = {k: v for k, v in V3["rope_scaling"].items() if k != field}
    with pytest.raises(deepseek.ConfigError, match=rf"yarn\.{field}: Field required"):
        deepseek.parse_config({**V3, "rope_scaling": rope})


YARN_KEYS = {key: value for key, value in V3["rope_scaling"].items() if key != "type"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another quantisation": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config.quant_method: 'gptq' is not supported, only 'fp8'",
    ),
    "no method": ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method: None"),
    "one scale a tensor": (
        {"quantization_config": {**FP8, "weight_block_size": None}},
        r"quantization_config.weight_block_size: None is not supported, only \[128, 128\]",
    ),
    "other blocks": ({"quantization_config": {**FP8, "weight_block_size": [1, 128]}}, "weight_block_size: \\[1, 128"),
    "static activations": ({"quantization_config": {**FP8, "activation_scheme": "static"}}, "activation_scheme: 'stat"),
    "e5m2": ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "quantization_config.fmt: 'e5m2'"),
    "fp4 experts": ({"quantization_config": {**FP8, "expert_dtype": "fp4"}}, "expert_dtype: 'fp4'"),
    "fp8 embeddings": ({"quantization_config": {**FP8, "modules_to_convert": ["embed_tokens"]}}, "modules_to_convert"),
    "other scales": ({"quantization_config": {**FP8, "scale_fmt": "e5m3"}}, "scale_fmt: 'e5m3'"),
    "V3.2": ({"model_type": "deepseek_v32"}, "model_type: 'deepseek_v32'.*sparse"),
    "DSA fields": ({"index_topk": 2048, "index_n_heads": 64}, "index_topk, index_n_heads: sparse"),
    "another family": ({"model_type": "llama"}, "model_type: 'llama'"),
    "no family": ({"model_type": None, "architectures": None}, "model_type: missing"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    "attention bias": ({"attention_bias": True}, "attention_bias: True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias: True"),
    "fewer kv heads": ({"num_key_value_heads": 8}, "num_key_value_heads: 8"),
    "rope type": ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: type 'linear'"),
    "partial rotary": ({"rope_scaling": {**V3["rope_scaling"], "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "two ropes": ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_parameters disagree"),
    "two thetas": ({"rope_parameters": {**V3["rope_scaling"], "rope_theta": 5e5}}, "rope_theta"),
    "two expert counts": ({"num_local_experts": 128}, "num_local_experts is 128 but n_routed_experts is 256"),
    "router": ({"topk_method": "greedy"}, "sigmoid/greedy"),
    "unknown router": ({"topk_method": "hash"}, "sigmoid/hash"),
    "groups": ({"n_group": 7}, "n_routed_experts 256 is no multiple of n_group 7"),
    "kept groups": ({"topk_group": 9}, "topk_group 9 exceeds n_group 8"),
    "experts of kept groups": ({"num_experts_per_tok": 129}, "num_experts_per_tok 129"),
    "groups of one": ({"n_group": 256, "topk_group": 8}, "noaux_tc"),
    "odd rotary": ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
    "negative": ({"hidden_size": -1}, "hidden_size"),
    "text for a number": ({"hidden_size": "7168"}, "hidden_size"),
    "nan": ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    "dtype": ({"torch_dtype": "int8"}, "torch_dtype"),
    # values of another kind than any config has
    "architectures, a number": ({"model_type": None, "architectures": 5}, "architectures: expected a list of names"),
    "architectures, an object": ({"model_type": None, "architectures": {"a": 1}}, "architectures: expected a list"),
    "architectures, nested": ({"model_type": None, "architectures": [["a"]]}, "architectures: expected a list of na"),
    "model_type, a list": ({"model_type": ["deepseek_v3"]}, "model_type: expected a name"),
    "quantization_config, a number": ({"quantization_config": 5}, "quantization_config: expected an object, got 5"),
    "quantization_config, a name": ({"quantization_config": "fp8"}, "quantization_config: expected an object"),
    "modules, a name": ({"quantization_config": {**FP8, "ignored_layers": "lm_head"}}, "ignored_layers: expected a li"),
    "modules, numbers": ({"quantization_config": {**FP8, "ignored_layers": [1]}}, "ignored_layers: expected a list"),
    "modules, no expression": ({"quantization_config": {**FP8, "ignored_layers": ["re:("]}}, "no regular expression"),
    "rope_scaling, a number": ({"rope_scaling": 5}, "rope_scaling: expected an object, got 5"),
    "rope_scaling, a list": ({"rope_scaling": [1]}, "rope_scaling: expected an object"),
    "rope_scaling.type, a list": ({"rope_scaling": {**V3["rope_scaling"], "type": ["yarn"]}}, "type: expected a name"),
    "scoring_func": ({"scoring_func": ["x"]}, "scoring_func: expected a name"),
    "topk_method": ({"topk_method": ["x"]}, "topk_method: expected a name"),
    # YaRN that would be dropped
    "no rope type": ({"rope_scaling": YARN_KEYS}, "rope_scaling.type: missing, though there is factor"),
    "no rope type, newer": ({"rope_scaling": None, "rope_parameters": YARN_KEYS}, "rope_parameters.type: missing"),
    "default with a factor": ({"rope_scaling": {"type": "default", "factor": 40}}, "type 'default', though.* factor"),
    "two rope types": ({"rope_scaling": {**V3["rope_scaling"], "rope_type": "default"}}, "rope_type 'default' and typ"),
    # numbers that give no finite, or no, mathematics
    "beta_fast 0": ({"rope_scaling": {**V3["rope_scaling"], "beta_fast": 0}}, "yarn.beta_fast"),
    "beta_slow negative": ({"rope_scaling": {**V3["rope_scaling"], "beta_slow": -1}}, "yarn.beta_slow"),
    "betas": ({"rope_scaling": {**V3["rope_scaling"], "beta_slow": 64}}, "beta_slow 64.0 exceeds beta_fast 32.0"),
    "beta_fast huge": ({"rope_scaling": {**V3["rope_scaling"], "beta_fast": 1e308}}, "yarn: .*beta_fast=1e[+]308"),
    "mscale_all_dim": ({"rope_scaling": {**V3["rope_scaling"], "mscale_all_dim": -2.71085}}, "yarn.mscale_all_dim"),
    "mscale_all_dim huge": ({"rope_scaling": {**V3["rope_scaling"], "mscale_all_dim": 1e308}}, "yarn: .*mscale_all"),
    "attention_factor 0": ({"rope_scaling": {**V3["rope_scaling"], "attention_factor": 0.0}}, "yarn.attention_factor"),
    "factor huge": ({"rope_scaling": {**V3["rope_scaling"], "factor": 1e300}}, "factor 1e[+]300 times original_max"),
    "positions": ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
    "size": ({"hidden_size": 10**30}, "hidden_size"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "end beyond the vocabulary": ({"eos_token_id": [1, 129280]}, "eos_token_id: expected 0 ≤ id < vocab_size 129280"),
    "negative end": ({"eos_token_id": -3}, "eos_token_id: expected 0 ≤ id"),
    "beginning beyond the vocabulary": ({"bos_token_id": 129280}, "bos_token_id: expected 0 ≤ id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(deepseek.ConfigError, match=message):
        deepseek.parse_config({**V3, **changes}, "here")


def test_v2_needs_its_method() -> None:
    with pytest.raises(deepseek.ConfigError, match="topk_method: Field required"):
        deepseek.parse_config({k: v for k, v in LITE.items() if k != "topk_method"})


def test_files(tmp_path: Path) -> None:
    with pytest.raises(deepseek.ConfigError, match=r"config\.json: No such file"):
        deepseek.load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(deepseek.ConfigError, match=r"config\.json: not JSON"):
        deepseek.load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(deepseek.ConfigError, match=r"config\.json: not a JSON object"):
        deepseek.load_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(deepseek.ConfigError, match=r"config\.json: .*nested too deeply"):
        deepseek.load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}')
    with pytest.raises(deepseek.ConfigError, match=r"vocab_size: named twice in .*config\.json"):
        deepseek.load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small("V2")))
    assert deepseek.load_config(tmp_path) == deepseek.load_config(tmp_path / "config.json")


def test_a_config_must_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder/config.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "config.json")
    for path, message in ((tmp_path / "folder", "got a directory"), (tmp_path, "got a device or pipe")):
        with pytest.raises(deepseek.ConfigError, match=rf"config\.json: expected a file, {message}"):
            deepseek.load_config(path)
    for name in ("a\0b", None, 5):
        with pytest.raises(deepseek.ConfigError, match=r"embedded null|path: expected"):
            deepseek.load_config(name)  # type: ignore[arg-type]


# --- section 4 of the facts ---

COUNTS = {
    "V2-Lite": (15_706_484_224, 13_763_072, 571_080_704, 2_661_150_208, 2_451_435_008, 15_552),
    "V2": (235_741_434_880, 149_227_520, 3_822_878_720, 21_375_800_320, 20_851_512_320, 34_560),
    "V3": (671_026_419_200, 187_107_328, 11_320_164_608, 37_552_297_472, 36_625_618_432, 35_136),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    assert deepseek.counts(deepseek.parse_config(RELEASED[name])) == deepseek.Counts(*COUNTS[name])


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_what_is_allocated(name: str) -> None:
    config = deepseek.parse_config(RELEASED[name])
    model = deepseek.allocate(config, hal.bind("cpu"), device=torch.device("meta"))
    assert sum(part.into.numel() for _, part in model.targets() if part) == COUNTS[name][0]
