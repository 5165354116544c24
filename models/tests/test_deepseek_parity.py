"""Logits against transformers' DeepseekV2 and DeepseekV3: float32, random weights, three paths, one answer.

Where transformers 5.24 departs from the released code, tests are against the formula instead:

* V2 ignores ``norm_topk_prob``; V2's own code then renormalises the weights and leaves them unscaled;
* both ignore ``moe_layer_freq`` (see test_deepseek_config);
* yarn with ``mscale`` and no ``mscale_all_dim`` ignores the former (see test_deepseek_config).

The bugs of earlier versions (V2's softmax scale without mscale², V3's groups masked with 0.0) are fixed in it, and
the cases below would show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import RELEASED, YARN, relative_error, small, token_ids
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import torch_hal as hal
import torch_hal_deepseek as deepseek
from torch_hal_deepseek.layers import Build
from torch_hal_deepseek.moe import Router

TOLERANCE = 1e-5
LENGTH = 75  # past YaRN's original 16 positions, and past a page of 64

NO_YARN: dict[str, Any] = {"rope_scaling": None}
PLAIN_YARN = {k: v for k, v in YARN.items() if not k.startswith("mscale")}
CASES: dict[str, dict[str, Any]] = {
    "V2-Lite": small("V2-Lite"),
    "V2-Lite, no yarn": small("V2-Lite", **NO_YARN),
    "V2-Lite, scaled": small("V2-Lite", routed_scaling_factor=2.0),
    "V2": small("V2"),
    "V2, no yarn": small("V2", **NO_YARN),
    "V3": small("V3", rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "V3, no yarn": small("V3", **NO_YARN),
    "V3, yarn without mscales": small("V3", rope_scaling=PLAIN_YARN),
    "V3, unequal mscales": small("V3", rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}),
    "V3, no renormalisation": small("V3", norm_topk_prob=False),
    "V3, no query latent": small("V3", q_lora_rank=None),
    "V3, half-split rope": small("V3", rope_interleave=False),
    "V3, other eps": small("V3", rms_norm_eps=1e-3),
    "V3, real widths": small(
        "V3", num_hidden_layers=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
}


def randomize(model: torch.nn.Module) -> None:
    """Weights large enough that logits differ, and biases of which most are negative: a mask of 0.0 would show."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if "e_score_correction_bias" in name}
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "e_score_correction_bias" in name:
                tensor.copy_(0.3 * noise - 0.5)
            elif tensor.dim() == 1:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(noise if "embed" in name else noise * tensor.shape[-1] ** -0.5)


def transformers_model(config: dict[str, Any]) -> Any:
    classes: dict[str, Any] = {
        "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
        "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    }
    config_class, model_class = classes[config["model_type"]]
    arguments = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    if arguments["rope_scaling"] is None:
        del arguments["rope_scaling"]
    model = model_class._from_config(config_class(**arguments), attn_implementation="eager", dtype=torch.float32)
    randomize(model)
    return model.eval()


@dataclass
class Pair:
    """transformers' model, ours from what it saved, and its logits for one sequence."""

    theirs: Any
    ours: deepseek.DeepSeek
    ids: Tensor
    expected: Tensor

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.theirs(ids[None]).logits[0]
        return result


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("checkpoint")
    theirs = transformers_model(CASES[request.param])
    theirs.save_pretrained(path)
    ids = token_ids(LENGTH)
    result = Pair(theirs, deepseek.load(path), ids, torch.empty(0))
    result.expected = result.logits(ids)
    return result


def test_logits_are_not_trivial(pair: Pair) -> None:
    """Else parity would prove little: tokens and positions matter, and more than one expert was chosen."""
    assert pair.expected.std() > 0.3
    assert len(pair.expected.argmax(-1).unique()) > 10
    swapped = torch.cat([pair.ids[1:2], pair.ids[:1], pair.ids[2:]])
    assert relative_error(pair.logits(swapped)[-1], pair.expected[-1]) > 100 * TOLERANCE


def test_prefill(pair: Pair) -> None:
    got = pair.ours.logits(pair.ids)
    assert got.dtype == torch.float32
    assert relative_error(got, pair.expected) <= TOLERANCE


@pytest.mark.parametrize(("piece", "prefix_chunk"), [(32, 8192), (20, 7)])
def test_chunked_prefill(pair: Pair, monkeypatch: pytest.MonkeyPatch, piece: int, prefix_chunk: int) -> None:
    """Each piece attends to the cached ones before it, expanded ``prefix_chunk`` tokens at a time."""
    monkeypatch.setattr(pair.ours, "prefix_chunk", prefix_chunk)
    cache, sequence = pair.ours.new_cache(LENGTH), deepseek.Sequence()
    for end in range(piece, LENGTH + piece, piece):
        ids = pair.ids[end - piece : end]
        got = pair.ours.prefill([ids], [sequence], cache)
        assert relative_error(got[0], pair.expected[sequence.length - 1]) <= TOLERANCE
    assert sequence.length == LENGTH


def test_decode_token_by_token(pair: Pair) -> None:
    cache, sequence = pair.ours.new_cache(LENGTH), deepseek.Sequence()
    rows = [pair.ours.decode(token.view(1, 1), [sequence], cache)[0, 0] for token in pair.ids]
    assert relative_error(torch.stack(rows), pair.expected) <= TOLERANCE


def test_decode_several_tokens_at_a_time(pair: Pair) -> None:
    """As speculation verifies them: each sees those before it."""
    cache, sequence = pair.ours.new_cache(LENGTH), deepseek.Sequence()
    pair.ours.prefill([pair.ids[:60]], [sequence], cache)
    for begin in range(60, LENGTH, 5):
        got = pair.ours.decode(pair.ids[None, begin : begin + 5], [sequence], cache)
        assert relative_error(got[0], pair.expected[begin : begin + 5]) <= TOLERANCE


def test_unequal_lengths_in_one_batch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 1 to 75 tokens: prefilled together, then continued together, then decoded together."""
    monkeypatch.setattr(pair.ours, "prefix_chunk", 50)
    lengths = [1, 33, 64, 75]
    ids = [token_ids(n + 7, seed=n) for n in lengths]
    expected = [pair.logits(part) for part in ids]
    cache, sequences = pair.ours.new_cache(LENGTH + 7, len(lengths)), [deepseek.Sequence() for _ in lengths]
    first = [n - n // 3 for n in lengths]

    def check(got: Tensor, ends: list[int]) -> None:
        for row, answer, end in zip(got, expected, ends, strict=True):
            assert relative_error(row, answer[end - 1]) <= TOLERANCE

    check(pair.ours.prefill([p[:n] for p, n in zip(ids, first, strict=True)], sequences, cache), first)
    ends = [n + 4 for n in lengths]
    rest = [p[begin:end] for p, begin, end in zip(ids, first, ends, strict=True)]
    check(pair.ours.prefill(rest, sequences, cache), ends)
    for step in range(1, 4):
        tokens = torch.stack([p[end + step - 1] for p, end in zip(ids, ends, strict=True)])
        check(pair.ours.decode(tokens[:, None], sequences, cache)[:, 0], [end + step for end in ends])


def test_greedy_generation_is_transformers(pair: Pair) -> None:
    with torch.no_grad():
        answer = pair.theirs.generate(pair.ids[None, :20], max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert list(pair.ours.generate(pair.ids[:20], 12)) == answer[0, 20:].tolist()


@pytest.mark.parametrize("name", ["V2", "V3"])
@pytest.mark.parametrize(
    "options", [{"save_original_format": False}, {"max_shard_size": "100KB"}], ids=["packed", "sharded"]
)
def test_every_form_that_transformers_saves(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = transformers_model(CASES[name])
    theirs.save_pretrained(tmp_path, **options)
    ours = deepseek.load(tmp_path)
    assert ours.report.unused == ()
    with torch.no_grad():
        expected = theirs(token_ids(30)[None]).logits[0]
    assert relative_error(ours.logits(token_ids(30)), expected) <= TOLERANCE


# --- against the formula ---


def route(config: deepseek.Config, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor) -> list[dict[int, float]]:
    """Each token's expert -> weight, from the released code's rules, one token at a time in float64."""
    c = config
    result = []
    for logits in (x_TD.double() @ weight_ED.double().T).tolist():
        z = torch.tensor(logits, dtype=torch.float64)
        scores = (z.sigmoid() if c.scoring_func == "sigmoid" else z.softmax(0)).tolist()
        choice = (
            [s + b for s, b in zip(scores, bias_E.tolist(), strict=True)] if c.topk_method == "noaux_tc" else scores
        )
        size = c.n_routed_experts // c.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(c.n_group)]
        ranks = [sum(sorted(g)[-2:]) if c.topk_method == "noaux_tc" else max(g) for g in groups]
        kept = sorted(range(c.n_group), key=lambda g: -ranks[g])[: c.topk_group]
        allowed = [e for e in range(c.n_routed_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: c.num_experts_per_tok]
        total = sum(scores[e] for e in chosen) + 1e-20
        if c.model_type == "deepseek_v3":
            factor = c.routed_scaling_factor / (total if c.norm_topk_prob else 1)
        else:  # one or the other
            factor = 1 / total if c.norm_topk_prob and c.num_experts_per_tok > 1 else c.routed_scaling_factor
        result.append({e: scores[e] * factor for e in chosen})
    return result


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("name", ["V2-Lite", "V2", "V3"])
def test_router_is_the_formula(name: str, norm_topk_prob: bool) -> None:
    config = deepseek.parse_config(small(name, norm_topk_prob=norm_topk_prob, routed_scaling_factor=2.5))
    router = Router(Build(config, hal.bind("cpu"), torch.float32, torch.device("cpu")), "gate")
    generator = torch.Generator().manual_seed(3)
    router.weight_ED.copy_(torch.randn(router.weight_ED.shape, generator=generator) / 8)
    bias_E = torch.randn(8, generator=generator) - 0.5
    if router.bias_E is not None:
        router.bias_E.copy_(bias_E)
    x_TD = torch.randn(40, 64, generator=generator)
    weights, ids = router(x_TD)
    for got_weights, got_ids, expected in zip(
        weights.tolist(), ids.tolist(), route(config, x_TD, router.weight_ED, bias_E), strict=True
    ):
        assert set(got_ids) == set(expected)
        assert [expected[e] for e in got_ids] == pytest.approx(got_weights, rel=1e-5)


def test_one_chosen_expert_is_not_renormalised_in_v2() -> None:
    config = deepseek.parse_config(small("V2", norm_topk_prob=True, num_experts_per_tok=1))
    router = Router(Build(config, hal.bind("cpu"), torch.float32, torch.device("cpu")), "gate")
    router.weight_ED.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) / 8)
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    scores = (x_TD @ router.weight_ED.T).softmax(-1)
    torch.testing.assert_close(router(x_TD)[0], scores.amax(-1, keepdim=True) * 16.0)


def test_the_cases_are_the_released_shapes() -> None:
    """Every released router and query path stands among the parity cases."""
    keys = ("scoring_func", "topk_method", "norm_topk_prob")
    for name, released in RELEASED.items():
        assert [CASES[name][k] for k in keys] == [released[k] for k in keys]
        assert (CASES[name]["q_lora_rank"] is None) == (released["q_lora_rank"] is None)
