"""The routed experts that a rank holds: their weights packed in two, which one op multiplies with.

Shapes, as suffixes: T tokens · D hidden · E experts · K experts of a token · I intermediate
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_hal.formats import BLOCK

from .errors import CheckpointError
from .layers import Build
from .parallel import Span, share
from .weights import SCALE, STORED, Targets, adapt, codes, wants_ue8m0


class Names(NamedTuple):
    """One expert's tensors, or all experts' in two, as transformers packs them: gate is then up's tensor too."""

    gate: str
    up: str
    down: str

    @classmethod
    def of(cls, module: str) -> Names:
        return cls(*(f"{module}.{part}_proj.weight" for part in ("gate", "up", "down")))


class Experts:
    """Experts in the model's dtype. Their sum is to be taken over the ranks that hold the rest of each, or others.

    With ``build.fuse_shared_expert``, the shared expert is the one past the last.
    """

    unit = 1  # ranks share intermediates in multiples of it

    def __init__(self, build: Build, prefix: str) -> None:
        c = build.config
        self.build, self.ops, self.prefix = build, build.ops, prefix
        self.experts = build.ranks.experts
        self.count = self.experts.size + build.fuse_shared_expert
        self.hidden = Span.all(c.hidden_size)
        self.inner = share(f"{prefix}.experts", c.moe_intermediate_size, build.ranks.expert_tp, self.unit)
        self.allocate()

    def allocate(self) -> None:
        self.w13_EID = self.build.empty(self.count, 2 * self.inner.size, self.hidden.size)  # gate first
        self.w2_EDI = self.build.empty(self.count, self.hidden.size, self.inner.size)

    def targets(self) -> Targets:
        """Experts lie in checkpoints one by one, or packed as transformers holds them."""
        packed = is_packed(self.build, self.prefix)
        if packed is not None:
            whole, inner = self.inner.whole, self.inner
            gate, up = inner.within(2 * whole, 0), inner.within(2 * whole, whole)
            yield from self.place(packed, slice(self.experts.size), gate, up, self.experts)
        else:
            for e in range(self.experts.whole):
                names, local = Names.of(f"{self.prefix}.experts.{e}"), e - self.experts.begin
                if 0 <= local < self.experts.size:
                    yield from self.place(names, local, self.inner, self.inner)
                else:
                    yield from ((name, None) for name in self.tensors(names))
        if self.build.fuse_shared_expert:
            yield from self.place(Names.of(f"{self.prefix}.shared_experts"), self.count - 1, self.inner, self.inner)

    def place(self, names: Names, at: int | slice, gate: Span, up: Span, *lead: Span) -> Targets:
        """Where the tensors of the expert, or experts, ``at`` go; lead: of a dimension before rows and columns."""
        size, room = self.inner.size, self.inner.room
        targets = self.build.targets
        yield from targets(names.gate, self.w13_EID[at, ..., :size, :], *lead, gate, self.hidden)
        yield from targets(names.up, self.w13_EID[at, ..., room : room + size, :], *lead, up, self.hidden)
        yield from targets(names.down, self.w2_EDI[at, ..., :size], *lead, self.hidden, self.inner)

    def tensors(self, names: Names) -> list[str]:
        """Everything that the checkpoint holds of an expert."""
        return [n + suffix for n in names for suffix in (("", SCALE) if self.build.stored_fp8(n) else ("",))]

    def prepare(self) -> None:
        (self.w13_EID, self.w2_EDI), self.layout = self.ops.fused_experts.prepare(self.w13_EID, self.w2_EDI)

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """ids: counted from this rank's first expert; others contribute nothing."""
        return self.ops.fused_experts(  # type: ignore[no-any-return]
            x_TD, self.w13_EID, self.w2_EDI, weights_TK, ids_TK, self.layout
        )


class Fp8Experts(Experts):
    """The same with FP8 weights and a scale for every block of 128×128."""

    unit = BLOCK

    def allocate(self) -> None:
        new, width, inner = self.build.empty, self.hidden.size, self.inner.room
        padded = inner != self.inner.size
        self.w13_EID = new(self.count, 2 * inner, width, dtype=STORED, padded=padded)
        self.w2_EDI = new(self.count, width, inner, dtype=STORED, padded=padded)
        blocks_D, blocks_I = -(-width // BLOCK), inner // BLOCK
        self.w13_scale = new(self.count, 2 * blocks_I, blocks_D, dtype=torch.float32)
        self.w2_scale = new(self.count, blocks_D, blocks_I, dtype=torch.float32)

    def place(self, names: Names, at: int | slice, gate: Span, up: Span, *lead: Span) -> Targets:
        size, room = self.inner.size, self.inner.room
        gate_scale, up_scale = self.w13_scale[at].chunk(2, dim=-2)
        w13, w2 = self.w13_EID, self.w2_EDI
        yield from codes(names.gate, w13[at, ..., :size, :], gate_scale, *lead, gate, self.hidden)
        yield from codes(names.up, w13[at, ..., room : room + size, :], up_scale, *lead, up, self.hidden)
        yield from codes(names.down, w2[at, ..., :size], self.w2_scale[at], *lead, self.hidden, self.inner)

    def prepare(self) -> None:
        op, quantization = self.ops.fused_experts_fp8_block, self.build.config.quantization
        assert quantization is not None
        self.ue8m0 = wants_ue8m0(op)
        w13, w2 = (
            adapt(self.ops, weight, scale, self.ue8m0)
            for weight, scale in ((self.w13_EID, self.w13_scale), (self.w2_EDI, self.w2_scale))
        )
        weights, self.layout = op.prepare(w13, self.w13_scale, w2, self.w2_scale)
        self.w13_EID, self.w13_scale, self.w2_EDI, self.w2_scale = weights
        self.ue8m0 |= quantization.ue8m0

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        weights = (self.w13_EID, self.w13_scale, self.w2_EDI, self.w2_scale)
        return self.ops.fused_experts_fp8_block(  # type: ignore[no-any-return]
            x_TD, *weights, weights_TK, ids_TK, self.ue8m0, self.layout
        )


def is_packed(build: Build, prefix: str) -> Names | None:
    """The names of packed experts, if the checkpoint has them so. Raises CheckpointError if it has both forms."""
    gate_up, down = (f"{prefix}.experts.{part}_proj" for part in ("gate_up", "down"))
    if gate_up not in build.names:
        return None
    if (single := Names.of(f"{prefix}.experts.0").gate) in build.names:
        raise CheckpointError(f"{single}: duplicated, for {gate_up} holds it too")
    return Names(gate_up, gate_up, down)


def experts(build: Build, prefix: str) -> Experts:
    """FP8 if the checkpoint has all of the layer's experts so; if it has but some, those are dequantised."""
    packed = is_packed(build, prefix)
    names = [packed] if packed else [Names.of(f"{prefix}.experts.{e}") for e in range(build.config.n_routed_experts)]
    if build.fuse_shared_expert:
        names.append(Names.of(f"{prefix}.shared_experts"))
    return (Fp8Experts if build.stays_fp8(*(n for group in names for n in group)) else Experts)(build, prefix)
