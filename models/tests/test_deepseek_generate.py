"""Generation and sampling: deterministic where promised, and what each filter means."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import relative_error, small, token_ids
from torch import Tensor

import torch_hal as hal
import torch_hal_deepseek as deepseek
from torch_hal_deepseek.generate import generate

PROMPT = token_ids(12)


def test_greedy_is_the_likeliest_token_each_time(model: deepseek.DeepSeek) -> None:
    ids = PROMPT.tolist()
    for _ in range(8):
        ids.append(int(model.logits(ids)[-1].argmax()))
    assert list(model.generate(PROMPT, 8)) == ids[12:]
    assert list(model.generate(PROMPT.tolist(), 8, seed=5)) == ids[12:]


def test_ids_come_one_by_one(model: deepseek.DeepSeek) -> None:
    tokens = model.generate(PROMPT, 100)
    assert inspect.isgenerator(tokens)
    assert type(next(tokens)) is int
    tokens.close()
    assert list(model.generate(PROMPT, 0)) == []
    assert len(list(model.generate(PROMPT, 1))) == 1


def test_equal_seeds_give_equal_ids(model: deepseek.DeepSeek) -> None:
    def draw(**options: Any) -> list[int]:
        return list(model.generate(PROMPT, 16, temperature=1.5, **options))

    assert draw(seed=1) == draw(seed=1)
    assert len({tuple(draw(seed=s)) for s in range(5)}) == 5
    assert draw(seed=-1) == draw(seed=2**64 - 1)  # any integer will do
    torch.manual_seed(3)
    first = draw()
    second = draw()
    torch.manual_seed(3)
    assert draw() == first != second


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_strictest_filters_are_greedy(model: deepseek.DeepSeek, options: dict[str, Any]) -> None:
    greedy = list(model.generate(PROMPT, 12))
    assert list(model.generate(PROMPT, 12, temperature=2.0, seed=1, **options)) == greedy
    assert list(model.generate(PROMPT, 12, temperature=2.0, seed=1)) != greedy


def test_a_tiny_temperature_is_greedy(model: deepseek.DeepSeek) -> None:
    assert list(model.generate(PROMPT, 6, temperature=1e-40, seed=1)) == list(model.generate(PROMPT, 6))


def test_the_end_of_sequence_ends(model: deepseek.DeepSeek, v3_path: Path, tmp_path: Path) -> None:
    greedy = list(model.generate(PROMPT, 12))
    end = next(i for i in range(2, 12) if greedy[i] not in greedy[:i])
    (tmp_path / "model.safetensors").symlink_to(v3_path / "model.safetensors")
    config = json.loads((v3_path / "config.json").read_text())
    for eos in (greedy[end], [greedy[end], 100]):
        (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
        assert list(deepseek.load(tmp_path).generate(PROMPT, 12)) == greedy[: end + 1]


def test_a_prompt_may_be_prefilled_in_pieces(model: deepseek.DeepSeek) -> None:
    pieces = generate(model, token_ids(70), 5, 0.0, 1.0, 0, 0.0, None, prefill_chunk=16)
    assert list(pieces) == list(model.generate(token_ids(70), 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "the prompt is empty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 245}, "12 prompt and 245 new tokens exceed the model's 256 positions"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        *(({"max_new_tokens": n}, "max_new_tokens: expected an integer ≥ 0") for n in (2.5, "3", None, True)),
        *(({name: "1"}, f"{name}: expected a number, got '1'") for name in ("temperature", "top_p", "min_p")),
        ({"temperature": None}, "temperature: expected a number, got None"),
        ({"temperature": 10**400}, "temperature: expected a finite number"),
        ({"top_p": True}, "top_p: expected a number, got True"),
        *(({name: 1.5}, f"{name}: expected an integer, got 1.5") for name in ("top_k", "seed")),
        *(({name: True}, f"{name}: expected an integer, got True") for name in ("top_k", "seed")),
        ({"seed": "x"}, "seed: expected an integer, got 'x'"),
    ],
)
def test_bad_requests_are_refused_at_once(model: deepseek.DeepSeek, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(**{"token_ids": PROMPT, "max_new_tokens": 4, **change})


def test_without_drawing_torchs_generator_stays_as_it_is(model: deepseek.DeepSeek) -> None:
    before = torch.get_rng_state()
    list(model.generate(PROMPT, 3))
    assert torch.equal(torch.get_rng_state(), before)
    list(model.generate(PROMPT, 3, temperature=1.0, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("inside", [0, 1, 4])
def test_iteration_may_move_into_and_out_of_inference_mode(model: deepseek.DeepSeek, inside: int) -> None:
    """The ``inside`` first tokens are computed in it; later, the others are."""
    expected = list(model.generate(PROMPT, 4))
    for first in (True, False):
        tokens, got = model.generate(PROMPT, 4), []
        for part, count in ((first, inside), (not first, 4 - inside)):
            with torch.inference_mode(part):
                got += [next(tokens) for _ in range(count)]
        assert got == expected


def test_weights_that_want_gradients_do_not_matter(v3_path: Path) -> None:
    model = deepseek.load(v3_path)
    expected = model.logits(PROMPT), list(model.generate(PROMPT, 3, temperature=1.0, seed=1))
    for weight in (model.embedding_WD, model.head.weight, model.norm.norm.weight):
        weight.requires_grad_()
    logits = model.logits(PROMPT)
    assert torch.equal(logits, expected[0])
    assert not logits.requires_grad
    assert list(model.generate(PROMPT, 3, temperature=1.0, seed=1)) == expected[1]


def test_a_model_loaded_in_inference_mode_works_outside(v3_path: Path, model: deepseek.DeepSeek) -> None:
    with torch.inference_mode():
        loaded = deepseek.load(v3_path)
        cache = loaded.new_cache(20)
    sequence = deepseek.Sequence()
    logits = loaded.prefill([PROMPT], [sequence], cache)
    assert relative_error(logits[0], model.logits(PROMPT)[-1]) < 1e-5
    loaded.decode(torch.tensor([[1]]), [sequence], cache)


# --- the sampler ---

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]).log_softmax(0)


def draws(params: deepseek.SamplingParams, count: int = 4000) -> Tensor:
    """How often each token is drawn, of ``count`` draws of one request."""
    sampler = deepseek.Sampler(hal.bind("cpu"), [params] * count)
    ids = sampler(LOGITS.expand(count, -1), torch.arange(count))
    return torch.bincount(ids, minlength=5) / count


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 5),
        ({"temperature": 2.0}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.8}, 2),  # 0.637 < 0.8 ≤ 0.637 + 0.234
        ({"min_p": 0.1}, 3),  # e^-2 = 0.135 ≥ 0.1 > e^-3
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.3}, 3),
    ],
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any], kept: int) -> None:
    request = deepseek.SamplingParams(**{"temperature": 1.0, "seed": 7, **params})
    expected = (LOGITS / request.temperature).softmax(0)
    expected[kept:] = 0
    expected /= expected.sum()
    seen = draws(request)
    assert torch.equal(seen > 0, expected > 0)
    assert float((seen - expected).abs().max()) < 0.025  # three standard deviations of 4000 draws


def test_a_requests_ids_do_not_depend_on_the_batch() -> None:
    ops = hal.bind("cpu")
    requests = [
        deepseek.SamplingParams(),
        deepseek.SamplingParams(temperature=1.0, seed=3),
        deepseek.SamplingParams(temperature=2.0, top_k=3, seed=3),
        deepseek.SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, seed=9),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([5, 0, 17, 2])
    together = deepseek.Sampler(ops, requests)(logits, offsets)
    for i, request in enumerate(requests):
        alone = deepseek.Sampler(ops, [request])(logits[i : i + 1], offsets[i : i + 1])
        assert alone.tolist() == [together[i]]
    assert together[0] == logits[0].argmax()
    assert together.dtype == torch.int64


def test_a_released_models_config_generates(tmp_path: Path) -> None:
    """V2-Lite's family, in bfloat16 as released."""
    path = deepseek.random_checkpoint(tmp_path, small("V2-Lite", torch_dtype="bfloat16"))
    model = deepseek.load(path)
    tokens = list(model.generate(PROMPT, 10, temperature=0.8, top_p=0.95, seed=1))
    assert len(tokens) == 10
    assert all(0 <= t < 101 for t in tokens)
    assert tokens == list(deepseek.load(path).generate(PROMPT, 10, temperature=0.8, top_p=0.95, seed=1))
