"""The kernels bound and compiled on the host, over stand-ins of their libraries: adapters, refusals and the core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hal as hal
from torch_hal.formats import SCALE_LAYOUTS
from torch_hal.kernel import Kernel, Requires
from torch_hal_cuda.kernels import KERNELS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PLUGIN = "cuda_on_host"


class OnHost:
    """The plugin's kernels as they are, but asking for no hardware."""

    @hal.hookimpl
    def torch_hal_kernels(self) -> Iterable[Kernel]:
        return [dataclasses.replace(kernel, requires=Requires()) for kernel in KERNELS]


@pytest.fixture
def ops(sgl_kernel: None, deep_gemm: ModuleType) -> Iterator[hal.OpSet]:
    hal.register(OnHost(), PLUGIN)
    try:
        yield hal.bind("cpu", hal.Policy(trace=True))
    finally:
        hal.unregister(PLUGIN)
        torch._dynamo.reset()


def norm(ops: hal.OpSet) -> tuple[Any, ...]:
    return torch.randn(3, 64, dtype=BF16), torch.randn(3, 64, dtype=BF16), torch.randn(64, dtype=BF16), 1e-6


def quant(ops: hal.OpSet) -> tuple[Any, ...]:
    return torch.randn(5, 256, dtype=BF16), 128, "e4m3fn", "mn_f32_tma", 1e-10


def linear(ops: hal.OpSet) -> tuple[Any, ...]:
    (weight, scale), layout = ops.fp8_block_linear.prepare(torch.randn(72, 256).to(FP8), torch.rand(1, 2))
    scales = ops.fp8_block_linear.formats["x_scale_layout"]
    return (
        torch.randn(5, 256).to(FP8),
        SCALE_LAYOUTS[scales].pack(torch.rand(5, 2)),
        weight,
        scale,
        BF16,
        scales,
        layout,
    )


def decode(ops: hal.OpSet) -> tuple[Any, ...]:
    lens = [70, 0, 2]
    table, seq_lens = torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor(lens, dtype=torch.int32)
    (plan,), layout = ops.mla_decode.plan(seq_lens, lens, 4, 2, 64)
    q, cache = torch.randn(3, 2, 4, 576, dtype=BF16), torch.randn(6, 64, 576, dtype=BF16)
    return q[..., :512], q[..., 512:], cache, table, seq_lens, 0.1, plan, layout


CASES: list[tuple[str, str, Callable[[hal.OpSet], tuple[Any, ...]]]] = [
    ("fused_add_rms_norm_", "sgl_kernel", norm),
    ("fused_add_rms_norm", "sgl_kernel", norm),
    ("per_token_group_quant_fp8", "sgl_kernel", quant),
    ("fp8_block_linear", "deep_gemm", linear),
    ("mla_decode", "flash_mla", decode),
]


def results(function: Callable[..., Any], op: hal.Op[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    values = [a.clone() if name in op.mutates else a for name, a in zip(op.signature.parameters, args, strict=False)]
    result = function(*values)
    if op.mutates:
        return tuple(values[: len(op.mutates)])
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(("name", "kernel", "make"), CASES)
def test_bound_traced_and_compiled(
    ops: hal.OpSet, name: str, kernel: str, make: Callable[[hal.OpSet], tuple[Any, ...]]
) -> None:
    op, run, args = hal.ops.declared()[name], getattr(ops, name), make(ops)
    assert run.kernel.name == kernel and f"chosen   {PLUGIN}.{kernel}" in str(ops.explain(name))
    eager = results(run, op, args)
    for actual, expected in zip(eager, results(op.reference, op, args), strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-6, atol=2**-6)
    assert ops.trace is not None and ops.trace.counts() == {(name, f"{PLUGIN}.{kernel}"): 1}
    plain = getattr(hal.bind("cpu"), name)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled, op, args), eager, strict=True):
        assert torch.equal(actual.float(), expected.float())


def test_refused_calls_reach_the_reference_with_one_warning(ops: hal.OpSet) -> None:
    x, residual, weight, eps = norm(ops)
    with pytest.warns(hal.FallbackWarning, match="weight is torch.float32: the kernel would read its bytes"):
        ops.fused_add_rms_norm_(x, residual, weight.float(), eps)
    args = list(linear(ops))
    args[1], args[5] = args[1].contiguous(), "row_f32"
    with pytest.warns(hal.FallbackWarning, match="reads mn_f32_tma"):
        assert ops.fp8_block_linear(*args).shape == (5, 72)


def test_specialised_layers_keep_the_kernel(ops: hal.OpSet) -> None:
    for name, _, make in CASES:
        args = make(ops)
        layer = getattr(ops, name).specialize(*args)
        results(layer, hal.ops.declared()[name], args)
    assert ops.trace is not None
    assert {kernel for _, kernel in ops.trace.counts()} == {f"{PLUGIN}.{kernel}" for _, kernel, _ in CASES}
