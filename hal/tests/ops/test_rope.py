from __future__ import annotations

import math

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits

from torch_hal.errors import ArgumentError
from torch_hal.ops.rope import (
    YarnScaling,
    mla_softmax_scale,
    rope,
    rope_cos_sin_cache,
    rope_inv_freq,
    yarn_mscale,
)

DEEPSEEK_YARN = YarnScaling(40, 4096, mscale=1.0, mscale_all_dim=1.0)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_rope(
    x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation, and the sum of its absolute terms, pair by pair in Python floats."""
    half = cache.shape[1] // 2
    out, terms = x.double().clone(), x.double().abs()
    for t, position in enumerate(positions.tolist()):
        for h in range(x.shape[1]):
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                a, b = x[t, h, first].item(), x[t, h, second].item()
                cos, sin = cache[position, i].item(), cache[position, half + i].item()
                out[t, h, first], out[t, h, second] = a * cos - b * sin, b * cos + a * sin
                terms[t, h, first] = abs(a * cos) + abs(b * sin)
                terms[t, h, second] = abs(b * cos) + abs(a * sin)
    return out, terms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_formula_on_the_rope_slice_of_mla(dtype: torch.dtype, interleaved: bool, rotary_dim: int) -> None:
    q, k = normal(3, 2, 192, dtype=dtype)[..., 128:], normal(3, 576, dtype=dtype, seed=1)[:, None, 512:]
    positions = torch.tensor([0, 77, 12], dtype=torch.int32)
    cache = rope_cos_sin_cache(100, rotary_dim, 10000.0)
    results = rope(q, k, positions, cache, interleaved)
    for x, y in zip((q, k), results, strict=True):
        exact, terms = exact_rope(x, positions, cache, interleaved)
        assert y.dtype == dtype and y.is_contiguous()
        assert_within(y, exact, terms, length=2)
        assert same_bits(y[..., rotary_dim:], x[..., rotary_dim:])
    terms_q, _ = rope.terms(q, k, positions, cache, interleaved)  # type: ignore[misc]
    assert torch.allclose(terms_q.double(), exact_rope(q, positions, cache, interleaved)[1], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_dot_products_depend_on_distance_alone(interleaved: bool) -> None:
    q, k = normal(1, 1, 64).expand(2, 1, 64), normal(1, 1, 64, seed=1).expand(2, 1, 64)
    cache = rope_cos_sin_cache(200, 64, 10000.0)
    rotated_q, _ = rope(q, k, torch.tensor([17, 117]), cache, interleaved)
    _, rotated_k = rope(q, k, torch.tensor([5, 105]), cache, interleaved)
    near, far = (rotated_q * rotated_k).sum(-1).flatten().tolist()
    assert near == pytest.approx(far, abs=1e-4)
    assert near != pytest.approx((q[0] * k[0]).sum().item(), abs=1e-1)


def test_position_zero_is_the_identity_and_inputs_survive() -> None:
    q, k = normal(2, 3, 64, dtype=torch.bfloat16), normal(2, 1, 64, dtype=torch.bfloat16, seed=1)
    before = q.clone(), k.clone()
    rotated = rope(q, k, torch.zeros(2, dtype=torch.int64), rope_cos_sin_cache(4, 64, 10000.0), True)
    assert torch.equal(rotated[0], q) and torch.equal(rotated[1], k)
    rope(q, k, torch.tensor([3, 2]), rope_cos_sin_cache(4, 64, 10000.0), True)
    assert same_bits(q, before[0]) and same_bits(k, before[1])


def test_zero_tokens() -> None:
    cache = rope_cos_sin_cache(4, 64, 10000.0)
    q, k = rope(normal(0, 3, 64), normal(0, 1, 64), torch.empty(0, dtype=torch.int64), cache, True)
    assert q.shape == (0, 3, 64) and k.shape == (0, 1, 64)


def test_out_of_range_positions_raise_on_the_cpu() -> None:
    q, cache = normal(1, 1, 64), rope_cos_sin_cache(4, 64, 10000.0)
    for position in (-1, 4):
        with pytest.raises(IndexError):
            rope(q, q, torch.tensor([position]), cache, True)


def test_errors_name_argument_expected_and_got() -> None:
    q, positions, cache = normal(2, 1, 32), torch.tensor([0, 1]), rope_cos_sin_cache(4, 64, 10000.0)
    with pytest.raises(ArgumentError, match=r"rope: .*the rotated part is at most the head \(R <= D\), got D=32, R=64"):
        rope(q, q, positions, cache, True)
    with pytest.raises(ArgumentError, match=r"'cos_sin_cache': expected torch.float32, got torch.bfloat16"):
        rope(q, q, positions, cache[:, :32].bfloat16(), True)
    with pytest.raises(ArgumentError, match=r"'positions': expected torch.int32 or torch.int64, got torch.float32"):
        rope(q, q, positions.float(), cache[:, :32], True)
    with pytest.raises(ArgumentError, match=r"'positions': expected \[T\] with T = 2 .*got shape \(1,\)"):
        rope(q, q, positions[:1], cache[:, :32], True)
    with pytest.raises(ArgumentError, match=r"'k': expected torch.float32, got torch.bfloat16"):
        rope(q, q.bfloat16(), positions, cache[:, :32], True)


@pytest.mark.parametrize("interleaved", [True, False])
def test_traces(interleaved: bool) -> None:
    q, k = normal(3, 2, 192, dtype=torch.bfloat16)[..., 128:], normal(3, 576, dtype=torch.bfloat16)[:, None, 512:]
    assert_traces(rope, q, k, torch.tensor([0, 3, 2]), rope_cos_sin_cache(4, 32, 10000.0), interleaved)


# The table.

# 64 rotary dims, theta 10,000, factor 40, original length 4096: what every released DeepSeek uses.
YARN_INV_FREQ = """
1 .749894209 .562341325 .421696503 .316227766 .237137371 .177827941 .133352143 .1 .0749894209 .0562341325
.0390069266 .0268793601 .0183781462 .0124479559 .00833450895 .0055 .00356199749 .0022493653 .00137051364
.000790569415 .000414990398 .000177827941 3.33380358e-5 2.5e-5 1.87473552e-5 1.40585331e-5 1.05424126e-5
7.90569415e-6 5.92843426e-6 4.44569853e-6 3.33380358e-6
"""


def test_deepseek_frequencies() -> None:
    expected = torch.tensor([float(v) for v in YARN_INV_FREQ.split()])
    torch.testing.assert_close(rope_inv_freq(64, 10000.0, DEEPSEEK_YARN), expected, rtol=1e-6, atol=0)
    plain = torch.tensor([10000.0 ** (-i / 32) for i in range(32)])
    torch.testing.assert_close(rope_inv_freq(64, 10000.0), plain, rtol=1e-6, atol=0)


def test_a_ramp_of_no_width_is_a_step() -> None:
    short = YarnScaling(4, 6)  # both ends of the ramp fall on pair 0
    ratio = rope_inv_freq(64, 10000.0, short) / rope_inv_freq(64, 10000.0)
    assert ratio[0] == 1 and (ratio[1:] == 0.25).all()


@pytest.mark.parametrize("yarn", [None, DEEPSEEK_YARN])
def test_table_is_cos_then_sin_to_the_extended_length(yarn: YarnScaling | None) -> None:
    table = rope_cos_sin_cache(163_840, 64, 10000.0, yarn=yarn)
    assert table.shape == (163_840, 64) and table.dtype == torch.float32
    frequencies = rope_inv_freq(64, 10000.0, yarn).tolist()
    for position in (0, 1, 4097, 163_839):
        for i in (0, 5, 31):
            angle = torch.tensor(position * frequencies[i], dtype=torch.float32).item()
            assert table[position, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert table[position, 32 + i].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_table_carries_the_attention_factor() -> None:
    plain = rope_cos_sin_cache(8, 64, 10000.0, yarn=DEEPSEEK_YARN)
    ratio = yarn_mscale(40, 0.707) / yarn_mscale(40, 1.0)
    scaled = rope_cos_sin_cache(8, 64, 10000.0, yarn=YarnScaling(40, 4096, mscale=0.707, mscale_all_dim=1.0))
    torch.testing.assert_close(scaled, plain * ratio)
    alone = rope_cos_sin_cache(8, 64, 10000.0, yarn=YarnScaling(40, 4096))  # mscale_all_dim 0: not divided
    torch.testing.assert_close(alone, plain * yarn_mscale(40, 1.0))
    given = rope_cos_sin_cache(8, 64, 10000.0, yarn=YarnScaling(40, 4096, attention_factor=1.5))
    torch.testing.assert_close(given, plain * 1.5)


def test_softmax_scales() -> None:
    assert yarn_mscale(40, 0.707) == pytest.approx(1.2608037774058554, rel=1e-15)
    assert yarn_mscale(40, 1.0) == pytest.approx(1.3688879454113936, rel=1e-15)
    assert yarn_mscale(1.0, 1.0) == yarn_mscale(0.5) == 1.0
    lite = YarnScaling(40, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert mla_softmax_scale(192, lite) == pytest.approx(0.11472138679292611, rel=1e-14)
    assert mla_softmax_scale(192, DEEPSEEK_YARN) == pytest.approx(0.1352337788608801, rel=1e-14)
    assert mla_softmax_scale(192) == mla_softmax_scale(192, YarnScaling(40, 4096)) == pytest.approx(192**-0.5)
