"""The model's configuration, read from a checkpoint's ``config.json``.

Nothing essential has a default: the defaults of other libraries' config classes differ from the released
checkpoints, so a missing field is an error by its name. So is anything that would change the mathematics and is
not supported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import torch

from torch_hal.ops.rope import YarnScaling, mla_softmax_scale

from .errors import ConfigError

Positive = pydantic.PositiveInt

_ARCHITECTURES = {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
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


class Yarn(pydantic.BaseModel):
    """YaRN context extension (Peng et al., 2023), as ``rope_scaling`` or ``rope_parameters`` gives it."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="ignore")

    factor: float = pydantic.Field(ge=1)
    original_max_position_embeddings: Positive
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    @property
    def scaling(self) -> YarnScaling:
        return YarnScaling(
            self.factor,
            self.original_max_position_embeddings,
            self.beta_fast,
            self.beta_slow,
            self.mscale,
            self.mscale_all_dim,
            self.attention_factor,
        )


class Config(pydantic.BaseModel):
    """A DeepSeek V2 or V3 model's shape. Fields carry the names of the released ``config.json`` files."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="ignore")

    model_type: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    max_position_embeddings: Positive
    rms_norm_eps: float = pydantic.Field(gt=0)

    q_lora_rank: Positive | None  # None: queries are projected directly
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive

    rope_theta: float = pydantic.Field(gt=1)
    rope_interleave: bool = True
    yarn: Yarn | None

    intermediate_size: Positive
    moe_intermediate_size: Positive
    n_routed_experts: Positive
    n_shared_experts: pydantic.NonNegativeInt
    num_experts_per_tok: Positive
    first_k_dense_replace: pydantic.NonNegativeInt
    moe_layer_freq: Positive = 1
    scoring_func: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    n_group: Positive
    topk_group: Positive
    norm_topk_prob: bool
    routed_scaling_factor: float

    tie_word_embeddings: bool = False
    num_nextn_predict_layers: pydantic.NonNegativeInt = 0  # multi-token prediction: for speculation only
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    torch_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    torch_hal_tokenizer: Literal["bytes"] | None = None  # our own: token ids 0..255 are UTF-8 bytes

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError("not a JSON object")
        data = _rename(data)
        data["model_type"] = _model_type(data)
        _refuse(data)
        _read_rope(data)
        _read_router(data)
        if data.get("q_lora_rank") == 0:
            data["q_lora_rank"] = None
        if data.get("n_shared_experts", 0) is None:
            data["n_shared_experts"] = 0
        return data

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd: rotary dimensions come in pairs")
        if self.n_routed_experts % self.n_group:
            raise ValueError(f"n_routed_experts {self.n_routed_experts} is no multiple of n_group {self.n_group}")
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group {self.topk_group} exceeds n_group {self.n_group}")
        group = self.n_routed_experts // self.n_group
        if self.num_experts_per_tok > self.topk_group * group:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the {self.topk_group * group} experts "
                f"of topk_group {self.topk_group} groups"
            )
        if self.topk_method == "noaux_tc" and group < 2:
            raise ValueError(f"n_group {self.n_group}: noaux_tc scores a group by two experts, it has {group}")
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """What a token leaves in the cache of each layer: its latent and its one rotary key (576 in all releases)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-1/2, times YaRN's mscale_all_dim factor squared: once for the query, once for the key."""
        return mla_softmax_scale(self.qk_head_dim, self.yarn.scaling if self.yarn else None)

    @property
    def max_positions(self) -> int:
        """How long a sequence may get: what YaRN stretches the original length to, if that is more."""
        stretched = int(self.yarn.factor * self.yarn.original_max_position_embeddings) if self.yarn else 0
        return max(self.max_position_embeddings, stretched)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.torch_dtype]

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = self.eos_token_id
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def load_config(path: str | Path) -> Config:
    """The configuration of the checkpoint in directory ``path``, or of a ``config.json`` itself."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    return parse_config(data, str(file))


def parse_config(data: Any, source: str = "config") -> Config:
    """``data``, the content of a ``config.json``, as a Config. Raises ConfigError naming every field at fault."""
    try:
        return Config.model_validate(data)
    except pydantic.ValidationError as error:
        problems = []
        for e in error.errors():
            field = ".".join(str(part) for part in e["loc"])
            message = e["msg"].removeprefix("Value error, ")
            problems.append(f"{field}: {message}" if field else message)
        raise ConfigError(f"{source}: {'; '.join(problems)}") from None


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
    architectures = data.get("architectures") or [None]
    found = data.get("model_type") or _ARCHITECTURES.get(architectures[0])
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
    if data.get("quantization_config"):
        method = dict(data["quantization_config"]).get("quant_method", "unknown")
        raise ValueError(f"quantization_config: quantised checkpoints ({method}) are not supported yet")
    if sparse := [field for field in ("index_topk", "index_n_heads", "index_head_dim") if data.get(field)]:
        raise ValueError(f"{', '.join(sparse)}: sparse attention (DSA) is not supported yet")
    heads, kv_heads = data.get("num_attention_heads"), data.get("num_key_value_heads")
    if None not in (heads, kv_heads) and kv_heads != heads:
        raise ValueError(f"num_key_value_heads: {kv_heads}, expected num_attention_heads {heads}: MLA groups no heads")


def _read_rope(data: dict[str, Any]) -> None:
    """Rotary settings, from ``rope_scaling`` (released checkpoints) or ``rope_parameters`` (newer files)."""
    given = {key: dict(data[key]) for key in ("rope_scaling", "rope_parameters") if data.get(key)}
    for key, rope in given.items():
        kind = rope.pop("rope_type", None) or rope.get("type") or "default"
        rope.pop("type", None)
        theta = rope.pop("rope_theta", None)
        if theta is not None and data.setdefault("rope_theta", theta) != theta:
            raise ValueError(f"{key}.rope_theta is {theta} but rope_theta is {data['rope_theta']}")
        if kind not in ("default", "yarn", "deepseek_yarn"):
            raise ValueError(f"{key}: type {kind!r} is not supported, only 'yarn' and 'default'")
        if rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope.pop("truncate", True) is not True:
            raise ValueError(f"{key}: partial_rotary_factor and truncate are not supported")
        given[key] = {} if kind == "default" else {name: value for name, value in rope.items() if value is not None}
    settings = list(given.values())
    if len(settings) == 2 and settings[0] != settings[1]:
        raise ValueError("rope_scaling and rope_parameters disagree")
    data["yarn"] = settings[0] if settings and settings[0] else None


def _read_router(data: dict[str, Any]) -> None:
    """Router settings; where a config leaves them out, its architecture implies them."""
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
