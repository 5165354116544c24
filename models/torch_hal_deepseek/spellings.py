"""From what a ``config.json`` may say, in its spellings old and new, to the fields of `Config`.

What would change the mathematics and is not supported is a ValueError by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .quantization import read_quantization

_ARCHITECTURES = {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}
_RENAMED = {  # newer spelling -> the released checkpoints' one
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "dtype": "torch_dtype",
}
_ONLY = {  # fields with one supported value
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_ROUTERS = {  # (scoring_func, topk_method) that exist in released models
    ("softmax", "greedy"),
    ("softmax", "group_limited_greedy"),
    ("sigmoid", "noaux_tc"),
}


def read_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by their own names, for `Config` to judge each."""
    data = _rename(given)
    data["model_type"] = _model_type(data)
    _refuse(data)
    _read_rope(data)
    _read_router(data)
    data["quantization"] = read_quantization(data.get("quantization_config"))
    if data.get("q_lora_rank") == 0:
        data["q_lora_rank"] = None
    if data.get("n_shared_experts", 0) is None:
        data["n_shared_experts"] = 0
    return data


def _get(data: Mapping[str, Any], field: str, kind: type, what: str) -> Any:
    """A field's value, None if it is absent; ValueError if it is no ``what``."""
    value = data.get(field)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{field}: expected {what}, got {value!r}")
    return value


def _rename(data: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    for new, old in _RENAMED.items():
        if new in data:
            value = data[new].removeprefix("torch.") if new == "dtype" and isinstance(data[new], str) else data[new]
            if result.setdefault(old, value) != value:
                raise ValueError(f"{new} is {value!r} but {old} is {result[old]!r}: they are one field")
    if result.get("torch_dtype", "") is None:
        del result["torch_dtype"]
    return result


def _model_type(data: Mapping[str, Any]) -> str:
    architectures = _get(data, "architectures", list, "a list of names") or [None]
    if not all(name is None or isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures: expected a list of names, got {architectures!r}")
    found = _get(data, "model_type", str, "a name") or _ARCHITECTURES.get(architectures[0])
    if found is None:
        raise ValueError("model_type: missing")
    if found not in _ARCHITECTURES.values():
        sparse = " (sparse attention)" if found == "deepseek_v32" else ""
        raise ValueError(f"model_type: {found!r}{sparse} is not supported: expected deepseek_v2 or deepseek_v3")
    return str(found)


def _refuse(data: Mapping[str, Any]) -> None:
    """Raise for what would change the mathematics and is not supported."""
    for field, value in _ONLY.items():
        if data.get(field, value) != value:
            raise ValueError(f"{field}: {data[field]!r} is not supported, only {value!r}")
    if sparse := [field for field in ("index_topk", "index_n_heads", "index_head_dim") if data.get(field)]:
        raise ValueError(f"{', '.join(sparse)}: sparse attention (DSA) is not supported yet")
    heads, kv_heads = data.get("num_attention_heads"), data.get("num_key_value_heads")
    if None not in (heads, kv_heads) and kv_heads != heads:
        raise ValueError(f"num_key_value_heads: {kv_heads}, expected num_attention_heads {heads}: MLA groups no heads")


def _read_rope(data: dict[str, Any]) -> None:
    """Rotary settings, from ``rope_scaling`` (released checkpoints) or ``rope_parameters`` (newer files)."""
    keys = ("rope_scaling", "rope_parameters")
    given = {key: dict(value) for key in keys if (value := _get(data, key, Mapping, "an object"))}
    for key, rope in given.items():
        kinds = {_get(rope, name, str, "a name") for name in ("rope_type", "type")} - {None, ""}
        kinds = {kind.removeprefix("deepseek_") for kind in kinds}
        if len(kinds) > 1:
            raise ValueError(f"{key}: rope_type {rope['rope_type']!r} and type {rope['type']!r} disagree")
        kind = kinds.pop() if kinds else None
        rope = given[key] = {name: value for name, value in rope.items() if name not in ("rope_type", "type")}
        theta = rope.pop("rope_theta", None)
        if theta is not None and data.setdefault("rope_theta", theta) != theta:
            raise ValueError(f"{key}.rope_theta is {theta} but rope_theta is {data['rope_theta']}")
        if kind not in ("default", "yarn", None):
            raise ValueError(f"{key}: type {kind!r} is not supported, only 'yarn' and 'default'")
        if rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope.pop("truncate", True) is not True:
            raise ValueError(f"{key}: partial_rotary_factor and truncate are not supported")
        given[key] = {name: value for name, value in rope.items() if value is not None}
        if kind != "yarn" and given[key]:
            missing = "type: missing" if kind is None else "type 'default'"
            raise ValueError(f"{key}.{missing}, though there is {', '.join(given[key])}: expected 'yarn'")
    settings = list(given.values())
    if len(settings) == 2 and settings[0] != settings[1]:
        raise ValueError("rope_scaling and rope_parameters disagree")
    data["yarn"] = settings[0] if settings and settings[0] else None


def _read_router(data: dict[str, Any]) -> None:
    """Router settings; where a config leaves them out, its architecture implies them."""
    for field in ("scoring_func", "topk_method"):
        _get(data, field, str, "a name")
    v3 = data["model_type"] == "deepseek_v3"
    if not data.get("scoring_func"):
        data["scoring_func"] = "sigmoid" if v3 else "softmax"
    if v3 and not data.get("topk_method"):
        data["topk_method"] = "noaux_tc"
    if data.get("topk_method") == "gready":  # spelled so in early configs
        data["topk_method"] = "greedy"
    pair = (data["scoring_func"], data.get("topk_method"))
    if pair[1] is not None and pair not in _ROUTERS:
        known = ", ".join(f"{scoring}/{method}" for scoring, method in sorted(_ROUTERS))
        raise ValueError(f"scoring_func/topk_method: {pair[0]}/{pair[1]} is not supported, only {known}")
    if pair[1] == "greedy":  # chooses among all experts, whatever the groups
        data["n_group"] = data["topk_group"] = 1
