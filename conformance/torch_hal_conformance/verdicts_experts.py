"""The verdict on experts that quantise on the way: as sharp as the codes are sure.

The bound of `fused_experts_fp8_block` lets every code of an activation be its neighbour, which hides errors of a few
per cent. Where x and every activation are exactly what their codes stand for, no arithmetic comes near the middle of
two codes, and nothing is let but the rounding of an expert's output to x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_hal.formats import BLOCK, FP8_KINDS, Fp8Kind, ceil_to_ue8m0, to_fp8
from torch_hal.op import Op

from .verdict import Evidence, Score, bounded, unit_roundoff
from .verdicts_rows import among


def fp8_experts(evidence: Evidence) -> Score:
    """A row of x that holds inf or NaN has an unspecified result."""
    finite = evidence.arguments["x"].isfinite().all(-1)
    outputs = Experts(**_named(evidence)).exact_outputs()
    if outputs is not None:
        evidence = replace(evidence, exact=replace(evidence.exact, middles=[_rounded_outputs(evidence, outputs)]))
    return bounded(among(evidence, finite))


def _named(evidence: Evidence) -> dict[str, Any]:
    arguments = evidence.op.bind(**evidence.arguments)
    return {name: arguments[name] for name in Experts.__dataclass_fields__}


def _rounded_outputs(evidence: Evidence, outputs: Tensor) -> Tensor:
    """T: the 2-norm over a token's experts of outputs [T, K, D], in units of x's dtype rather than of a code.

    Twice: an output may be rounded before it is weighted and after. An expert that is named twice errs twice alike.
    """
    op: Op[..., Any] = evidence.op
    ids: Tensor = evidence.arguments["topk_ids"]
    repeats = (ids[:, :, None] == ids[:, None]).sum(-1, keepdim=True)
    assert op.intermediate_dtype is not None
    units = unit_roundoff(evidence.arguments["x"].dtype) / unit_roundoff(op.intermediate_dtype)
    return (2 * repeats * outputs.square()).sum(1).sqrt() * units


@dataclass(frozen=True)
class Experts:
    """The arguments of `fused_experts_fp8_block`."""

    x: Tensor
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    ue8m0: bool

    def exact_outputs(self) -> Tensor | None:
        """Experts' weighted outputs [T, K, D], if quantisation is exact throughout; else None."""
        kind = next(kind for kind in FP8_KINDS.values() if kind.dtype == self.w13.dtype)
        x = self.x.double()
        if not x.numel() or not is_exact(x, kind, self.ue8m0):
            return None
        outputs = x.new_zeros(*self.topk_ids.shape, x.shape[1])
        for expert in torch.unique(self.topk_ids).tolist():
            if not 0 <= expert < self.w13.shape[0]:
                continue
            token, k = torch.nonzero(self.topk_ids == expert, as_tuple=True)
            activated = self._activated(x[token], expert)
            if not is_exact(activated, kind, self.ue8m0):
                return None
            down = activated @ _matrix(self.w2[expert], self.w2_scale[expert]).mT
            outputs[token, k] = down * self.topk_weights[token, k, None].double()
        return outputs

    def _activated(self, x: Tensor, expert: int) -> Tensor:
        gate, up = (
            x @ _matrix(codes, scales).mT
            for codes, scales in zip(self.w13[expert].chunk(2), self.w13_scale[expert].chunk(2), strict=True)
        )
        return torch.nn.functional.silu(gate) * up


def _matrix(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes [N, K] with a scale for every 128×128 stand for."""
    scale = scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.double() * scale[: codes.shape[0], : codes.shape[1]]


def is_exact(x: Tensor, kind: Fp8Kind, ue8m0: bool) -> bool:
    """Whether codes and scales of x [..., K] float64, in groups of 128, stand for x itself."""
    for group in torch.split(x, BLOCK, -1):
        scale = group.abs().amax(-1, keepdim=True).clamp(min=1e-10) / kind.quant_max
        if ue8m0:
            scale = ceil_to_ue8m0(scale).double()
        if not torch.equal(to_fp8(group / scale, kind).double() * scale, group):
            return False
    return True
