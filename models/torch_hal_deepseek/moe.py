"""Mixture of experts: a router sends each token to K of E experts; shared experts see every token.

Shapes, as suffixes: T tokens · D hidden · E experts · K experts of a token · I intermediate
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from .batch import Decode, Prefill
from .config import Config
from .experts import experts
from .layers import MLP, Build
from .parallel import Group
from .weights import Part, Targets


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

    def __init__(self, build: Build, prefix: str) -> None:
        c = build.config
        self.ops, self.prefix = build.ops, prefix
        self.weight_ED = build.wide(c.n_routed_experts, c.hidden_size)
        self.bias_E = build.wide(c.n_routed_experts) if c.topk_method == "noaux_tc" else None
        self.choose: Callable[[Tensor], tuple[Tensor, Tensor]] = self._method(c)

    def targets(self) -> Targets:
        yield f"{self.prefix}.weight", Part.entire(self.weight_ED)
        if self.bias_E is not None:
            yield f"{self.prefix}.e_score_correction_bias", Part.entire(self.bias_E)

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
    """Routed experts, and the shared experts, which form one MLP. Sum it over the ranks that share intermediates.

    Where experts are spread over ranks and all of these have the same tokens, each lets its experts see them all, and
    the results are added up. Where ranks have tokens of their own, these travel to the experts, and results back.
    """

    def __init__(self, build: Build, prefix: str) -> None:
        c, self.ranks = build.config, build.ranks
        self.ops = build.ops
        self.router = Router(build, f"{prefix}.gate")
        self.experts = experts(build, prefix)
        self.fused = build.fuse_shared_expert
        self.shared: MLP | None = None
        if c.n_shared_experts and not self.fused:
            self.shared = MLP(build, f"{prefix}.shared_experts", c.n_shared_experts * c.moe_intermediate_size)
        # What is summed over tp_group anyway need not be summed before.
        self.sum = build.sum_over(self.ranks.ep if self.ranks.ep.name != self.ranks.tp.name else Group())

    def targets(self) -> Targets:
        yield from self.router.targets()
        yield from self.experts.targets()
        if self.shared is not None:
            yield from self.shared.targets()

    def prepare(self) -> None:
        self.experts.prepare()
        if self.shared is not None:
            self.shared.prepare()

    def __call__(self, x_TD: Tensor, batch: Prefill | Decode) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD)
        if self.ranks.own_tokens:
            routed_TD = self._travel(x_TD, weights_TK, ids_TK, batch.capacity)
        else:
            ids_TK = ids_TK - self.ranks.experts.begin if self.ranks.ep.size > 1 else ids_TK
            if self.fused:
                weights_TK = F.pad(weights_TK, (0, 1), value=1.0)
                ids_TK = F.pad(ids_TK, (0, 1), value=self.experts.count - 1)
            routed_TD = self.sum(self.experts(x_TD, weights_TK, ids_TK))
        if self.shared is None:
            return routed_TD
        return self.ops.shared_expert_add(routed_TD, self.shared(x_TD), 1.0)  # type: ignore[no-any-return]

    def _travel(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, capacity: int) -> Tensor:
        """Runs of ``capacity`` rows, the same on all ranks, so that no rank waits to hear how many tokens come."""
        rows = [capacity] * self.ranks.ep.size
        how = (list(self.ranks.experts_per_rank), rows, rows, self.ranks.ep.name)
        x_ND, ids_NK, weights_NK = self.ops.ep_dispatch(x_TD, ids_TK, weights_TK, *how)
        return self.ops.ep_combine(self.experts(x_ND, weights_NK, ids_NK), ids_TK, *how)  # type: ignore[no-any-return]
