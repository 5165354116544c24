"""Mixture of experts: a router sends each token to K of E experts; shared experts see every token.

Shapes, as suffixes: T tokens · D hidden · E experts · K experts of a token · I intermediate
"""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import Tensor

from .config import Config
from .errors import CheckpointError
from .layers import MLP, Build, Targets


class Router:
    """Which experts a token goes to, and with which weights. Logits and bias are float32: bf16 reorders experts.

    The weights carry the routed scaling factor. Three methods, by config:

    * ``greedy`` (V2-Lite): the K most probable of a softmax over all experts.
    * ``group_limited_greedy`` (V2): so, but only within the groups whose best expert is most probable.
    * ``noaux_tc`` (V3): sigmoid scores; a bias, learned to balance the load, sways the choice but not the weights;
      groups are ranked by their two best experts.

    V2's own code either renormalises the K weights or scales them, V3's does both; transformers' V2 never
    renormalises (all released V2 models have ``norm_topk_prob`` false, where this makes no difference).
    """

    def __init__(self, build: Build) -> None:
        c = build.config
        self.ops = build.ops
        self.weight_ED = build.wide(c.n_routed_experts, c.hidden_size)
        self.bias_E = build.wide(c.n_routed_experts) if c.topk_method == "noaux_tc" else None
        self.choose: Callable[[Tensor], tuple[Tensor, Tensor]] = self._method(c)

    def targets(self, prefix: str) -> Targets:
        yield f"{prefix}.weight", self.weight_ED
        if self.bias_E is not None:
            yield f"{prefix}.e_score_correction_bias", self.bias_E

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, K], expert ids [T, K])"""
        return self.choose(self.ops.router_gemm(x_TD, self.weight_ED))

    def _method(self, c: Config) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        k, groups, kept = c.num_experts_per_tok, c.n_group, c.topk_group
        if c.topk_method == "noaux_tc":
            renormalize, scale = c.norm_topk_prob, c.routed_scaling_factor
            return lambda logits: self.ops.biased_grouped_topk(logits, self.bias_E, k, groups, kept, renormalize, scale)
        renormalize = c.norm_topk_prob and k > 1
        scale = 1.0 if renormalize else c.routed_scaling_factor
        if c.topk_method == "greedy" and scale == 1.0:
            return lambda logits: self.ops.topk_softmax(logits, k, renormalize)
        return lambda logits: self.ops.grouped_topk(logits, k, groups, kept, renormalize, scale)


class MoE:
    """Routed experts, packed in two weights, and the shared experts, which form one MLP."""

    def __init__(self, build: Build) -> None:
        c = build.config
        self.ops, self.build = build.ops, build
        self.router = Router(build)
        self.w13_EID = build.empty(c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size)  # gate first
        self.w2_EDI = build.empty(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
        self.shared = MLP(build, c.n_shared_experts * c.moe_intermediate_size) if c.n_shared_experts else None

    def targets(self, prefix: str, names: Container[str]) -> Targets:
        """Experts lie in checkpoints one by one, or packed as transformers holds them; ``names`` tells which."""
        yield from self.router.targets(f"{prefix}.gate")
        packed = f"{prefix}.experts.gate_up_proj"
        if packed in names:
            if (single := f"{prefix}.experts.0.gate_proj.weight") in names:
                raise CheckpointError(f"{single}: duplicated, for {packed} holds it too")
            yield packed, self.w13_EID
            yield f"{prefix}.experts.down_proj", self.w2_EDI
        else:
            for e in range(self.w13_EID.shape[0]):
                gate_ID, up_ID = self.w13_EID[e].chunk(2)
                yield f"{prefix}.experts.{e}.gate_proj.weight", gate_ID
                yield f"{prefix}.experts.{e}.up_proj.weight", up_ID
                yield f"{prefix}.experts.{e}.down_proj.weight", self.w2_EDI[e]
        if self.shared is not None:
            yield from self.shared.targets(f"{prefix}.shared_experts")

    def prepare(self) -> None:
        (self.w13_EID, self.w2_EDI), self.layout = self.ops.fused_experts.prepare(self.w13_EID, self.w2_EDI)
        if self.shared is not None:
            self.shared.prepare()

    def __call__(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD)
        routed_TD: Tensor = self.ops.fused_experts(x_TD, self.w13_EID, self.w2_EDI, weights_TK, ids_TK, self.layout)
        if self.shared is None:
            return routed_TD
        return self.ops.shared_expert_add(routed_TD, self.shared(x_TD), 1.0)  # type: ignore[no-any-return]
