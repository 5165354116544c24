"""Sample arguments of the ops that sort tokens by expert, of grouped matrix products, and of experts in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from torch_hal.formats import FP8_KINDS, SCALE_LAYOUTS, to_fp8

Sample = Callable[[Generator, torch.dtype, int], dict[str, Any]]

EXPERTS, TOP_K, HIDDEN, ALIGNMENT = 6, 3, 256, 4
INTER, COLUMNS = 192, 160  # both end in a partial block


def _normal(generator: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _codes(generator: Generator, *shape: int) -> Tensor:
    return to_fp8(torch.randn(*shape, generator=generator) * 100, FP8_KINDS["e4m3fn"])


def _scales(generator: Generator, *shape: int) -> Tensor:
    return (torch.rand(*shape, generator=generator) + 0.5) / 1000  # the sums fit float16


def _ids(generator: Generator, tokens: int) -> Tensor:
    """Some say "no expert"; nobody asks for the last but one."""
    ids = torch.randint(-1, EXPERTS - 1, (tokens, TOP_K), generator=generator)
    return torch.where(ids == EXPERTS - 2, EXPERTS - 1, ids).to(torch.int32)


def _weights(generator: Generator, dtype: torch.dtype, tokens: int) -> Tensor:
    return torch.rand(tokens, TOP_K, generator=generator).to(torch.promote_types(dtype, torch.float32))


def _moe_align_block_size(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {"topk_ids": _ids(generator, tokens), "num_experts": EXPERTS, "block_size": ALIGNMENT}


def _ep_scatter(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    x = _normal(generator, dtype, tokens, 2 * HIDDEN)[:, :HIDDEN]
    return {"x": x, "topk_ids": _ids(generator, tokens), "num_experts": EXPERTS, "alignment": ALIGNMENT}


def _ep_scatter_fp8(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {
        **_ep_scatter(generator, dtype, tokens),
        "x": _codes(generator, tokens, HIDDEN),
        "x_scale": _scales(generator, tokens, 2),
        "scale_layout": "mn_f32_tma",
    }


def _ep_gather(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    rows = 2 * TOP_K * tokens
    output_index = torch.randperm(rows, generator=generator)[: TOP_K * tokens].view(tokens, TOP_K)
    output_index[::2, 1] = -1
    return {
        "rows": _normal(generator, dtype, rows, HIDDEN),
        "output_index": output_index.to(torch.int32),
        "topk_weights": _weights(generator, dtype, tokens),
    }


def _m_indices(runs: int) -> Tensor:
    """Runs of full, partly padded and unused rows."""
    m_indices = (torch.arange(runs) % EXPERTS).repeat_interleave(ALIGNMENT).view(runs, ALIGNMENT)
    m_indices[1::3, 2:] = -1
    m_indices[2::3] = -1
    return m_indices.flatten().to(torch.int32)


def _grouped_linear_contiguous(generator: Generator, dtype: torch.dtype, runs: int) -> dict[str, Any]:
    return {
        "x": _normal(generator, dtype, runs * ALIGNMENT, HIDDEN),
        "weight": _normal(generator, dtype, EXPERTS, COLUMNS, HIDDEN),
        "m_indices": _m_indices(runs),
        "alignment": ALIGNMENT,
    }


def _grouped_linear_masked(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {
        "x": _normal(generator, dtype, EXPERTS, rows, HIDDEN),
        "weight": _normal(generator, dtype, EXPERTS, COLUMNS, HIDDEN),
        "masked_m": (torch.arange(EXPERTS) % (rows + 1)).to(torch.int32),
        "expected_m": 2,
    }


def _fp8_grouped(generator: Generator, dtype: torch.dtype, sample: dict[str, Any], *rows: int) -> dict[str, Any]:
    """A sample with fp8 operands, with scales for rows of that shape."""
    return {
        **sample,
        "x": _codes(generator, *sample["x"].shape),
        "x_scale": SCALE_LAYOUTS["mn_f32_tma"].pack(_scales(generator, *rows, 2)),
        "weight": _codes(generator, *sample["weight"].shape),
        "weight_scale": _scales(generator, EXPERTS, 2, 2),
        "out_dtype": dtype,
        "x_scale_layout": "mn_f32_tma",
    }


def _fp8_grouped_linear_contiguous(generator: Generator, dtype: torch.dtype, runs: int) -> dict[str, Any]:
    sample = _grouped_linear_contiguous(generator, torch.float32, runs)
    return _fp8_grouped(generator, dtype, sample, runs * ALIGNMENT)


def _fp8_grouped_linear_masked(generator: Generator, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    sample = _grouped_linear_masked(generator, torch.float32, rows)
    return _fp8_grouped(generator, dtype, sample, EXPERTS, rows)


def _fused_experts_fp8_block(generator: Generator, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    return {
        "x": _normal(generator, dtype, tokens, HIDDEN),
        "w13": _codes(generator, EXPERTS, 2 * INTER, HIDDEN),
        "w13_scale": _scales(generator, EXPERTS, 4, 2),
        "w2": _codes(generator, EXPERTS, HIDDEN, INTER),
        "w2_scale": _scales(generator, EXPERTS, 2, 2),
        "topk_weights": _weights(generator, dtype, tokens),
        "topk_ids": _ids(generator, tokens),
    }


SAMPLES: dict[str, Sample] = {
    "moe_align_block_size": _moe_align_block_size,
    "ep_scatter": _ep_scatter,
    "ep_scatter_fp8": _ep_scatter_fp8,
    "ep_gather": _ep_gather,
    "grouped_linear_contiguous": _grouped_linear_contiguous,
    "grouped_linear_masked": _grouped_linear_masked,
    "fp8_grouped_linear_contiguous": _fp8_grouped_linear_contiguous,
    "fp8_grouped_linear_masked": _fp8_grouped_linear_masked,
    "fused_experts_fp8_block": _fused_experts_fp8_block,
}
