"""The model's configuration, read from a checkpoint's ``config.json``.

Nothing essential has a default: the defaults of other libraries' config classes differ from the released
checkpoints, so a missing field is an error by its name. So is anything that would change the mathematics and is
not supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import torch

from torch_hal.ops.rope import YarnScaling, mla_softmax_scale, rope_inv_freq

from .errors import ConfigError
from .headers import read_json_file
from .quantization import Quantization
from .spellings import read_fields

MAX_POSITIONS = 2**24  # float32, which rotary angles are computed in, tells no more of them apart
Positive = Annotated[int, pydantic.Field(gt=0, lt=2**31)]
Few = Annotated[int, pydantic.Field(gt=0, le=2**16)]
Positions = Annotated[int, pydantic.Field(gt=0, le=MAX_POSITIONS)]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Yarn(pydantic.BaseModel):
    """YaRN context extension (Peng et al., 2023), as ``rope_scaling`` or ``rope_parameters`` gives it."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="ignore")

    factor: float = pydantic.Field(ge=1)
    original_max_position_embeddings: Positions
    beta_fast: float = pydantic.Field(32.0, gt=0)
    beta_slow: float = pydantic.Field(1.0, gt=0)
    mscale: float = pydantic.Field(1.0, ge=0)
    mscale_all_dim: float = pydantic.Field(0.0, ge=0)
    attention_factor: float | None = pydantic.Field(None, gt=0)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow} exceeds beta_fast {self.beta_fast}")
        if self.factor * self.original_max_position_embeddings > MAX_POSITIONS:
            raise ValueError(
                f"factor {self.factor} times original_max_position_embeddings {self.original_max_position_embeddings} "
                f"exceeds {MAX_POSITIONS}"
            )
        return self

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
    num_hidden_layers: Few
    num_attention_heads: Few
    max_position_embeddings: Positions
    rms_norm_eps: float = pydantic.Field(gt=0)

    q_lora_rank: Positive | None  # None: queries are projected directly
    kv_lora_rank: Positive
    qk_nope_head_dim: Few
    qk_rope_head_dim: Few
    v_head_dim: Few

    rope_theta: float = pydantic.Field(gt=1)
    rope_interleave: bool = True
    yarn: Yarn | None

    intermediate_size: Positive
    moe_intermediate_size: Positive
    n_routed_experts: Few
    n_shared_experts: int = pydantic.Field(ge=0, le=2**16)
    num_experts_per_tok: Positive
    first_k_dense_replace: pydantic.NonNegativeInt
    moe_layer_freq: Positive = 1
    scoring_func: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    n_group: Positive
    topk_group: Positive
    norm_topk_prob: bool
    routed_scaling_factor: float

    quantization: Quantization | None = None
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
        return read_fields(data)

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
        bos = frozenset() if self.bos_token_id is None else frozenset([self.bos_token_id])
        for field, ids in (("eos_token_id", self.eos_ids), ("bos_token_id", bos)):
            if any(not 0 <= i < self.vocab_size for i in ids):
                raise ValueError(f"{field}: expected 0 ≤ id < vocab_size {self.vocab_size}, got {sorted(ids)}")
        self._check_yarn()
        return self

    def _check_yarn(self) -> None:
        """What no field's own range rules out: rotary tables and a scale that are no numbers."""
        if self.yarn is None:
            return
        try:
            inv_freq = rope_inv_freq(self.qk_rope_head_dim, self.rope_theta, self.yarn.scaling)
            numbers = (*inv_freq.tolist(), self.yarn.scaling.cos_sin_multiplier, self.softmax_scale)
            usable = all(map(math.isfinite, numbers))
        except (ArithmeticError, ValueError):
            usable = False
        if not usable:
            raise ValueError(f"yarn: {self.yarn!r} and rope_theta {self.rope_theta} give no finite positions")

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
    if not isinstance(path, str | Path):
        raise ConfigError(f"path: expected the directory of a checkpoint, or a config.json, got {path!r}")
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    return parse_config(read_json_file(file, ConfigError), str(file))


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
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
