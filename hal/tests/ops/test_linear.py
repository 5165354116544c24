from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bounds import DTYPES, assert_traces, assert_within, same_bits
from fp8_codec import decode
from torch import Tensor

import torch_hal as hal
from torch_hal.errors import ArgumentError
from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, to_fp8
from torch_hal.ops.linear import absorbed_bmm, fp8_block_linear, linear, router_gemm
from torch_hal.ops.quant import per_token_group_quant_fp8


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dot(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Σ aᵢbᵢ and Σ |aᵢbᵢ| in Python floats."""
    products = [p * q for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    return sum(products), sum(abs(p) for p in products)


def exact_linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [[dot(row, column) for column in weight] for row in x]
    both = torch.tensor(pairs, dtype=torch.float64).reshape(len(x), len(weight), 2)
    return both[..., 0], both[..., 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_formula_on_a_strided_slice(dtype: torch.dtype) -> None:
    x, weight = normal(4, 576, dtype=dtype)[:, :512] + 1, normal(6, 1024, dtype=dtype, seed=1)[:, ::2]
    y, (exact, terms) = linear(x, weight), exact_linear(x, weight)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, exact, terms, length=512)
    assert_within(linear(x.T.contiguous().T, weight), exact, terms, length=512)
    assert torch.allclose(linear.terms(x, weight).double(), terms, rtol=1e-5)  # type: ignore[misc]


def test_linear_accumulates_in_float32() -> None:
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert linear(ones, ones).item() == 4096  # a bfloat16 sum of ones sticks at 256


@pytest.mark.parametrize("shape", [(0, 8), (8,), (2, 3, 8), (2, 0, 8)])
def test_linear_any_leading_shape(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(5, 8)
    y = linear(x, weight)
    assert y.shape == (*shape[:-1], 5)
    torch.testing.assert_close(y.reshape(-1, 5), x.reshape(-1, 8) @ weight.T)
    assert torch.equal(linear(normal(2, 0), normal(5, 0)), torch.zeros(2, 5))


class FusedQkvA:
    """A plugin with a kernel like ``dsv3_fused_a_gemm``: bfloat16, K % 256 == 0, N % 16 == 0, 1 to 16 tokens."""

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterator[hal.Kernel]:
        def static(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
            if x.dtype != torch.bfloat16 or weight.shape[0] % 16 or weight.shape[1] % 256:
                return "takes bfloat16, N % 16 == 0 and K % 256 == 0"
            return None

        def dynamic(x: Tensor, weight: Tensor, layout: str = "plain") -> str | None:
            return None if 1 <= x.shape[0] <= 16 else f"takes 1 to 16 tokens, got {x.shape[0]}"

        def run(x: Tensor, weight: Tensor, layout: str = "plain") -> Tensor:
            self.calls.append(x.shape[0])
            return (x.float() @ weight.T.float()).to(x.dtype)  # which reads [K, N], column-major: no copy of the weight

        yield hal.Kernel("linear", "fused_a", run=run, static=static, dynamic=dynamic)

    def __init__(self) -> None:
        self.calls: list[int] = []


def test_fused_qkv_a_is_a_linear_with_kernels_of_its_own() -> None:
    """One product gives what q_a, latent and rotary key are alone; a small-batch kernel hands larger ones over."""
    plugin = FusedQkvA()
    hal.register(plugin, "fused_a_test")
    try:
        ops = hal.bind("cpu")
        parts = [normal(n, 256, dtype=torch.bfloat16, seed=n) for n in (48, 32, 16)]
        fused, x = torch.cat(parts), normal(17, 256, dtype=torch.bfloat16)
        layer = ops.linear.specialize(normal(1, 256, dtype=torch.bfloat16).to("meta"), fused)
        with pytest.warns(hal.FallbackWarning, match=r"takes 1 to 16 tokens, got 17"):
            results = {tokens: layer(x[:tokens], fused) for tokens in (1, 16, 17)}
        for tokens, result in results.items():
            for y, weight in zip(result.split([48, 32, 16], dim=-1), parts, strict=True):
                assert_within(y, *exact_linear(x[:tokens], weight), length=256)
        assert plugin.calls == [1, 16]
        ops.linear(x[:1], fused[:40])  # another shape: refused too
        assert plugin.calls == [1, 16]
    finally:
        hal.unregister("fused_a_test")


def test_plain_prepare_is_the_weight_itself() -> None:
    weight, scale = normal(5, 8), normal(1, 1)
    assert linear.prepare is not None and linear.prepare(weight)[0] is weight
    assert fp8_block_linear.prepare is not None
    assert all(a is b for a, b in zip(fp8_block_linear.prepare(weight, scale), (weight, scale), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_router_gemm_returns_float32(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, weight = normal(3, 320, dtype=dtype)[:, :256], normal(6, 256, dtype=weight_dtype or dtype, seed=1)
    logits, (exact, terms) = router_gemm(x, weight), exact_linear(x, weight)
    assert logits.dtype == torch.float32
    assert_within(logits, exact, terms, length=256)
    assert router_gemm(x[:0], weight).shape == (0, 6)


def test_router_gemm_does_not_round_to_the_inputs_dtype() -> None:
    ones = torch.ones(1, 257, dtype=torch.bfloat16)
    assert router_gemm(ones, ones).item() == 257  # 256 in bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_bmm_formula_on_slices_of_kv_b(dtype: torch.dtype) -> None:
    """Both of MLA's absorbed projections, cut from kv_b_proj as a model cuts them: strided, one column-major."""
    heads, nope, value, latent = 3, 16, 8, 24
    kv_b = normal(heads * (nope + value), latent, dtype=dtype, seed=1).reshape(heads, nope + value, latent)
    w_k, w_v = kv_b[:, :nope], kv_b[:, nope:].transpose(1, 2)
    q_nope = normal(5, heads, nope + 8, dtype=dtype)[..., :nope]
    for x, weight in ((q_nope, w_k), (normal(5, heads, latent, dtype=dtype), w_v)):
        y = absorbed_bmm(x, weight)
        assert y.dtype == dtype and y.is_contiguous() and y.shape == (5, heads, weight.shape[2])
        for h in range(heads):
            assert_within(y[:, h], *exact_linear(x[:, h], weight[h].T), length=x.shape[2])
    assert absorbed_bmm(q_nope[:0], w_k).shape == (0, heads, latent)


def test_dense_errors_name_argument_expected_and_got() -> None:
    x, weight = normal(3, 64), normal(5, 64)
    with pytest.raises(ArgumentError, match=r"linear: argument 'weight': expected \[N, K\] with K = 64.*shape \(5, 32"):
        linear(x, weight[:, :32])
    with pytest.raises(ArgumentError, match=r"'weight': expected torch.float32, got torch.bfloat16"):
        linear(x, weight.bfloat16())
    with pytest.raises(ArgumentError, match=r"router_gemm: argument 'x': expected rank 2 \[T, D\], got shape \(64,\)"):
        router_gemm(x[0], weight)
    with pytest.raises(ArgumentError, match=r"absorbed_bmm: argument 'weight': expected \[H, K, N\] with H = 3"):
        absorbed_bmm(normal(2, 3, 8), normal(4, 8, 5))


# fp8 blocks.


def codes(*shape: int, kind: str = "e4m3fn", seed: int = 0) -> Tensor:
    return to_fp8(normal(*shape, seed=seed) * 50, FP8_KINDS[kind])


def decoded(x: Tensor, kind: str) -> Tensor:
    """float64 values by the tests' own codec."""
    table = torch.tensor([decode(code, kind) for code in range(256)], dtype=torch.float64)
    return table[x.contiguous().view(torch.uint8).long()]


def distinct(rows: int, columns: int) -> Tensor:
    """Scales of which no two are alike."""
    return (1 + torch.arange(rows * columns, dtype=torch.float32) / 64).reshape(rows, columns)


def exact_blocks(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, element by element: scales looked up for each (m, n, k)."""
    k_block, n_block = torch.arange(x.shape[1]) // 128, torch.arange(w.shape[0]) // 128
    scaled_x = x * x_scale.double()[:, k_block]
    scaled_w = w * w_scale.double()[n_block][:, k_block]
    return scaled_x @ scaled_w.T, scaled_x.abs() @ scaled_w.abs().T


def case(m: int = 5, n: int = 200, k: int = 320, kind: str = "e4m3fn") -> dict[str, Any]:
    blocks = -(-k // 128)
    return {
        "x": codes(m, k + 64, kind=kind)[:, :k],
        "x_scale": distinct(m, blocks),
        "weight": codes(n, k, kind=kind, seed=1),
        "weight_scale": distinct(-(-n // 128), blocks).flip(1),
        "out_dtype": torch.float32,
    }


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_formula_with_partial_blocks(kind: str, dtype: torch.dtype) -> None:
    call = case(kind=kind)
    call["weight_scale"] /= 2**10  # within float16's range
    y = fp8_block_linear(**{**call, "out_dtype": dtype})
    exact, terms = exact_blocks(
        decoded(call["x"], kind), call["x_scale"], decoded(call["weight"], kind), call["weight_scale"]
    )
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, exact, terms, length=320)
    assert torch.allclose(fp8_block_linear.terms(**call).double(), terms, rtol=1e-5)  # type: ignore[misc]


def test_576_rows_have_five_scales_the_last_for_64() -> None:
    call = case(2, 576, 128)
    assert call["weight_scale"].shape == (5, 1)
    before = fp8_block_linear(**call)
    call["weight_scale"][4] *= 2
    after = fp8_block_linear(**call)
    assert torch.equal(after[:, :512], before[:, :512]) and torch.equal(after[:, 512:], 2 * before[:, 512:])


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
@pytest.mark.parametrize("m", [0, 1, 5, 8])
def test_every_scale_layout_gives_the_same(name: str, m: int) -> None:
    """Distinct scales, and six groups, hence more than one packed word along K."""
    call = case(m, 130, 768)
    call["x_scale"] = 2.0 ** torch.arange(m * 6, dtype=torch.float32).reshape(m, 6).remainder(17)
    expected = fp8_block_linear(**call)
    stored = SCALE_LAYOUTS[name].pack(call["x_scale"])
    assert torch.equal(fp8_block_linear(**{**call, "x_scale": stored, "x_scale_layout": name}), expected)
    assert expected.shape == (m, 130)


def test_zero_k_and_zero_n() -> None:
    assert torch.equal(fp8_block_linear(**case(3, 4, 0)), torch.zeros(3, 4))
    assert fp8_block_linear(**case(3, 0, 128)).shape == (3, 0)


def test_nan_stays_in_its_row_and_zero_codes_give_zero() -> None:
    call = case()
    call["x"].view(torch.uint8)[1, 7] = 0x7F
    call["x"].view(torch.uint8)[2] = 0
    y = fp8_block_linear(**call)
    assert y[1].isnan().all() and not y[[0, 2, 3, 4]].isnan().any() and not y[2].any()


def test_after_quantisation_the_product_is_close_to_the_unquantised_one() -> None:
    x, weight = normal(4, 256), codes(130, 256, seed=1)
    scale = distinct(2, 2) / 1000
    y = fp8_block_linear(*per_token_group_quant_fp8(x, 128), weight, scale, torch.float32)
    exact, terms = exact_blocks(x.double(), torch.ones(4, 2), decoded(weight, "e4m3fn"), scale)
    assert ((y - exact).abs() <= terms * (2**-4 + 2**-10)).all()  # half a unit of three mantissa bits in each x


def test_float64_scales_make_it_an_oracle() -> None:
    call = case()
    exact, _ = exact_blocks(
        decoded(call["x"], "e4m3fn"), call["x_scale"], decoded(call["weight"], "e4m3fn"), call["weight_scale"]
    )
    scales = {k: call[k].double() for k in ("x_scale", "weight_scale")}
    for codes_as in ({}, {k: call[k].double() for k in ("x", "weight")}):
        y = fp8_block_linear.reference(**{**call, **scales, **codes_as, "out_dtype": torch.float64})
        torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x_scale_layout": "row_fp32"},
            r"'x_scale_layout': expected the layout is one of row_f32, mn_f32, mn_f32_tma",
        ),
        ({"x_scale_layout": "mn_f32_tma"}, r"expected x_scale has its layout's strides .*got .*strides \(3, 1\)"),
        ({"x_scale_layout": "mn_ue8m0"}, r"expected x_scale has its layout's dtype .*got .*torch.float32"),
        ({"x_scale": SCALE_LAYOUTS["mn_f32_tma"].pack(distinct(5, 3))}, r"layout's strides .*strides \(1, 8\)"),
        ({"x_scale": distinct(5, 5)}, r"one scale for each row and 128 columns .*got .*\(5, 5\)"),  # groups of 64
        ({"x_scale": distinct(1, 3)}, r"'x_scale': expected \[M, _\] with M = 5 .*got shape \(1, 3\)"),
        ({"weight_scale": distinct(1, 3)}, r"'weight_scale': expected .*ceil_div\(N,BLOCK\) = 2 .*got shape \(1, 3\)"),
        ({"weight_scale": distinct(2, 3).T}, r"'weight_scale': expected .*got shape \(3, 2\)"),
        ({"weight_scale": distinct(2, 3).bfloat16()}, r"'weight_scale': expected torch.float32, got torch.bfloat16"),
        ({"weight": codes(200, 320, kind="e4m3fnuz")}, r"'weight': expected torch.float8_e4m3fn, got .*e4m3fnuz"),
        ({"x": normal(5, 320)}, r"'x': expected torch.float8_e4m3fn or torch.float8_e4m3fnuz, got torch.float32"),
        ({"out_dtype": torch.float8_e4m3fn}, r"'out_dtype': expected the result is bfloat16.*got out_dtype="),
    ],
)
def test_fp8_errors_name_argument_expected_and_got(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"fp8_block_linear: argument .*{message}"):
        fp8_block_linear(**{**case(), **change})


def test_traces() -> None:
    x, weight = normal(4, 576, dtype=torch.bfloat16)[:, :512], normal(6, 512, dtype=torch.bfloat16, seed=1)
    assert_traces(linear, x, weight)
    assert_traces(router_gemm, x, weight)
    assert_traces(absorbed_bmm, normal(5, 3, 24)[..., :16], normal(3, 16, 8))
    call = case()
    for name in ("row_f32", "mn_f32_tma"):
        stored = SCALE_LAYOUTS[name].pack(call["x_scale"])
        assert_traces(fp8_block_linear, **{**call, "x_scale": stored, "x_scale_layout": name})


def test_inputs_survive() -> None:
    call = case()
    copies = {k: v.clone() for k, v in call.items() if isinstance(v, Tensor)}
    fp8_block_linear(**call)
    assert all(same_bits(call[k], v) for k, v in copies.items())
