"""What each kernel refuses, and that every refusal can be asked of shapes alone and inside a compiled graph."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_hal.formats import SCALE_LAYOUTS
from torch_hal.kernel import load
from torch_hal_cuda import limits
from torch_hal_cuda.kernels import KERNELS

BF16, F16, F32, FP8, FNUZ = (
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
)  # fmt: skip
meta = functools.partial(torch.empty, device="meta")


def slices(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """The middle columns of a matrix 6 wider than ``shape``: dense rows that do not start on 16 bytes."""
    return meta(*shape[:-1], shape[-1] + 6, dtype=dtype)[..., 3:-3]


def shifted(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A dense tensor that starts on an odd element."""
    return meta(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)


def norm(
    x: Tensor | None = None, residual: Tensor | None = None, weight: Tensor | None = None, dtype: torch.dtype = BF16
) -> tuple[Any, ...]:
    x = meta(4, 64, dtype=dtype) if x is None else x
    residual = torch.empty_like(x) if residual is None else residual
    return x, residual, meta(x.shape[-1], dtype=x.dtype) if weight is None else weight, 1e-6


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (norm(), None),
        (norm(dtype=F16), None),
        (norm(dtype=F32), None),
        (norm(meta(4, 63, dtype=BF16)), None),
        (norm(meta(64, dtype=BF16)), None),
        (norm(dtype=torch.float64), "x is torch.float64: takes bfloat16, float16 and float32"),
        (norm(weight=meta(64)), "weight is torch.float32: the kernel would read its bytes as torch.bfloat16"),
        (norm(meta(4, 24577, dtype=BF16)), "keeps a row of at most 24576"),
    ],
)
def test_fused_add_rms_norm_static(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.fused_add_rms_norm_static(*args), reason)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (norm(), None),
        (norm(meta(0, 64, dtype=BF16)), None),
        (norm(slices(4, 64)), "x has strides (70, 1): takes contiguous tensors"),
        (norm(residual=meta(64, 4, dtype=BF16).t()), "residual has strides (1, 4)"),
        (norm(weight=meta(128, dtype=BF16)[::2]), "weight has strides (2,)"),
        (norm(shifted(4, 64)), "x has offset 1: must start on 16 bytes"),
        (norm(meta(2**20, 2**12, dtype=BF16)), "4294967296 elements: offsets are 32-bit"),
    ],
)
def test_fused_add_rms_norm_dynamic(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.fused_add_rms_norm_dynamic(*args), reason)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((meta(3, 256, dtype=BF16), 128, "e4m3fn", "row_f32", 1e-10), None),
        ((meta(2, 3, 256, dtype=F16), 16, "e4m3fn", "row_f32", 1e-10), None),
        ((meta(3, 256, dtype=F32), 128), "x is torch.float32"),
        ((meta(3, 256, dtype=BF16), 256), "group_size = 256: takes 16, 32, 64 and 128"),
        ((meta(3, 256, dtype=BF16), 128, "e4m3fnuz"), "makes e4m3fn"),
        ((meta(3, 256, dtype=BF16), 128, "e4m3fn", "row_f32", 1e-4), "eps = 0.0001: built with 1e-10"),
        ((meta(3, 256, dtype=BF16), 128, "e4m3fn", "mn_ue8m0"), "'mn_ue8m0': writes row_f32 and mn_f32_tma"),
        ((meta(2, 3, 256, dtype=BF16), 128, "e4m3fn", "mn_f32_tma"), "x has 3 dimensions"),
        ((meta(3, 256, dtype=BF16), 128, "e4m3fn", "row_f32", 1e-10, True), "another scale than the rounded one"),
    ],
)
def test_group_quant_static(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.group_quant_static(*args), reason)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (meta(3, 256, dtype=BF16), None),
        (slices(3, 256), "takes contiguous tensors"),
        (shifted(3, 256), "must start on 16 bytes"),
        (meta(2**19, 2**12, dtype=BF16), "2147483648 elements: offsets are 32-bit"),
    ],
)
def test_group_quant_dynamic(x: Tensor, reason: str | None) -> None:
    assert_refusal(limits.group_quant_dynamic(x, 128), reason)


def linear(
    m: int = 8, n: int = 256, k: int = 512, kind: torch.dtype = FP8, out: torch.dtype = BF16,
    scales: str = "mn_f32_tma", **changed: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    given = {
        "x": meta(m, k, dtype=kind),
        "x_scale": SCALE_LAYOUTS[scales].pack(meta(m, -(-k // 128))),
        "weight": meta(n, k, dtype=kind),
        "weight_scale": meta(-(-n // 128), -(-k // 128)),
    }
    return *(given | changed).values(), out, scales, "plain"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (linear(), None),
        (linear(n=576, k=7168), None),
        (linear(n=8, k=16), None),
        (linear(kind=FNUZ), "x is torch.float8_e4m3fnuz: takes e4m3fn"),
        (linear(out=F16), "out_dtype = torch.float16: writes bfloat16"),
        (linear(scales="row_f32"), "x_scale_layout = 'row_f32': reads mn_f32_tma"),
        (linear(n=100), "N = 100, K = 512: takes N % 8 == 0 and K > 0"),
        (linear(k=0), "N = 256, K = 0"),
    ],
)
def test_fp8_block_linear_static(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.fp8_block_linear_static(*args), reason)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (linear(), None),
        (linear(m=1), None),
        (linear(x=meta(8, 1024, dtype=FP8)[:, 256:768]), None),
        (linear(x=slices(8, 512, dtype=FP8)), "x has strides (518, 1): rows must start on 16 bytes"),
        (linear(x=shifted(8, 512, dtype=FP8)), "x has offset 1"),
        (linear(x=meta(512, 8, dtype=FP8).t()), "x has strides (1, 8): rows must be dense"),
        (linear(weight=meta(512, 256, dtype=FP8).t()), "weight has strides (1, 256): rows must be dense"),
        (linear(k=24), "rows must start on 16 bytes"),
        (linear(weight_scale=meta(2, 8)[:, :4]), "weight_scale has strides (8, 1): must be dense; see prepare"),
        (linear(weight_scale=meta(4, 2).t()), None),
        (linear(x_scale=meta(4 * 8 + 1)[1:].view(4, 8).t()), "x_scale has offset 1"),
    ],
)
def test_fp8_block_linear_dynamic(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.fp8_block_linear_dynamic(*args), reason)


def decode(
    dtype: torch.dtype = BF16, latent: int = 512, rope: int = 64, page: int = 64, batch: int = 3, queries: int = 1,
    heads: int = 16, scale: float = 0.1, plan: Tensor | None = None, **changed: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    given = {
        "q_nope": meta(batch, queries, heads, latent, dtype=dtype),
        "q_pe": meta(batch, queries, heads, rope, dtype=dtype),
        "cache": meta(9, page, latent + rope, dtype=dtype),
        "page_table": meta(batch, 4, dtype=torch.int32),
        "seq_lens": meta(batch, dtype=torch.int32),
    }
    return *(given | changed).values(), scale, plan, "plain"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (decode(), None),
        (decode(F16, heads=128, queries=4), None),
        (decode(F32), "takes both bfloat16 or both float16"),
        (decode(cache=meta(9, 64, 576, dtype=FP8)), "the cache torch.float8_e4m3fn"),
        (decode(latent=256), "L = 256, R = 64: takes 512 and 64"),
        (decode(page=32), "pages of 32: takes pages of 64"),
        (decode(scale=0.0), "scale = 0.0: multiplies the mask's -inf by it"),
        (decode(scale=-1.0), "scale = -1.0"),
    ],
)
def test_mla_decode_static(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.mla_decode_static(*args), reason)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (decode(), None),
        (decode(cache=meta(9, 5, 64, 576, dtype=BF16)[:, 2]), None),
        (decode(cache=slices(9, 64, 576)), "cache has strides (37248, 582, 1): rows must start on 16 bytes"),
        (decode(page_table=meta(4, 3, dtype=torch.int32).t()), "page_table has strides (1, 3): rows must be dense"),
        (decode(page_table=meta(3, 9, dtype=torch.int32)[:, :4]), None),
        (decode(seq_lens=meta(6, dtype=torch.int32)[::2]), "seq_lens has stride (2,)"),
        (decode(plan=meta(9, dtype=torch.int32)[1:]), "plan has offset 1"),
        (decode(batch=2**15, heads=128), "offsets of partial results are 32-bit"),
    ],
)
def test_mla_decode_dynamic(args: tuple[Any, ...], reason: str | None) -> None:
    assert_refusal(limits.mla_decode_dynamic(*args), reason)


def test_all_reduce_refuses_a_group_of_another_backend() -> None:
    x = torch.ones(2)
    assert (
        limits.all_reduce_static(x, "nobody's") is None
    )  # the kernel raises the caller's error, as the reference does
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        reason = limits.all_reduce_static(x, group)
        assert reason is not None and reason.startswith(f"group '{group}' serves CUDA tensors with ")
    finally:
        dist.destroy_process_group()


_EXAMPLES = {
    "fused_add_rms_norm_": norm(),
    "per_token_group_quant_fp8": (meta(3, 256, dtype=BF16), 128, "e4m3fn", "row_f32", 1e-10),
    "fp8_block_linear": linear(),
    "mla_decode": decode(),
}


@pytest.mark.parametrize("op", _EXAMPLES)
def test_refusals_trace_into_a_compiled_graph(op: str) -> None:
    (kernel,) = (kernel for kernel in KERNELS if kernel.op == op)
    refusals = [load(target) for target in (kernel.static, kernel.dynamic) if target is not None]
    args = _EXAMPLES[op]

    def accepted(x: Tensor) -> Tensor:
        return x + all(refuse(*args) is None for refuse in refusals)

    torch._dynamo.reset()
    assert torch.compile(accepted, fullgraph=True, backend="eager")(torch.zeros(())) == 1


def assert_refusal(actual: str | None, expected: str | None) -> None:
    assert (actual is None) if expected is None else (actual is not None and expected in actual), actual
