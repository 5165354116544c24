"""Wrong routing: the wrong experts, in the wrong order, or with the wrong weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

TOP = "core/T47-E64-K6"
TOP_BF16, TOP_F32 = f"{TOP}/bfloat16/contiguous/unit/0", f"{TOP}/float32/contiguous/unit/0"
TOP_RENORM = "core/T47-E64-K6-renorm/float32/contiguous/unit/0"
GROUPS = "core/T47-E64-K6-G8-keep3"
GROUPS_F32, GROUPS_BF16 = f"{GROUPS}/float32/contiguous/unit/0", f"{GROUPS}/bfloat16/contiguous/unit/0"
GROUPS_RENORM = "core/T47-E64-K6-G8-keep3-renorm/float32/contiguous/unit/0"
SOFTMAX_WEIGHED = "return _weigh(scores, _highest(scores, top_k), renormalize, scale=1.0)"
GROUPED_WEIGHED = "return _weigh(eligible, _highest(eligible, top_k), renormalize, scale)"
HIGHEST = "torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]"
LAST_FIRST = f"scores.shape[-1] - 1 - {HIGHEST.replace('sort(scores', 'sort(scores.flip(-1)')}"
GROUP_SUM = "groups.topk(2, dim=-1).values.sum(-1)"

MUTANTS = (
    edit(
        "topk_softmax",
        "softmax_after",
        "a softmax over the chosen logits alone",
        SOFTMAX_WEIGHED,
        "ids = _highest(scores, top_k)\n"
        "    return torch.softmax(wide(logits).gather(-1, ids), -1), ids.to(torch.int32)",
        TOP_F32,
    ),
    edit(
        "topk_softmax",
        "logits",
        "gives logits for weights where it need not renormalise",
        SOFTMAX_WEIGHED,
        SOFTMAX_WEIGHED.replace("_weigh(scores", "_weigh(scores if renormalize else wide(logits)"),
        TOP_BF16,
    ),
    edit("topk_softmax", "always_renormalises", "renormalises unasked", "if renormalize:", "if True:", TOP_F32),
    edit("topk_softmax", "never_renormalises", "does not renormalise", "if renormalize:", "if False:", TOP_RENORM),
    edit(
        "topk_softmax",
        "last_of_equals",
        "of equal scores takes the highest id",
        HIGHEST,
        LAST_FIRST,
        f"{TOP}/bfloat16/contiguous/ties/0",
        "ties",
    ),
    edit(
        "topk_softmax",
        "ascending",
        "gives the chosen in ascending order",
        HIGHEST,
        f"{HIGHEST}.flip(-1)",
        TOP_F32,
        "order",
    ),
    edit(
        "topk_softmax",
        "by_id",
        "gives the chosen in order of id",
        HIGHEST,
        f"{HIGHEST}.sort(-1).values",
        TOP_BF16,
        "order",
    ),
    edit(
        "topk_softmax",
        "second_to_last",
        "starts from the second",
        HIGHEST,
        HIGHEST.replace(":count", "1 : count + 1"),
        TOP_BF16,
        "indices",
    ),
    edit(
        "topk_softmax",
        "without_maximum",
        "does not subtract the largest logit before it exponentiates",
        "scores = torch.softmax(wide(logits), dim=-1)\n    return",
        "scores = wide(logits).exp() / wide(logits).exp().sum(-1, keepdim=True)\n    return",
        f"{TOP}/float32/contiguous/offset/0",
        "indices",
    ),
    edit(
        "topk_softmax",
        "scores_in_bf16",
        "computes scores in bfloat16",
        "scores = torch.softmax(wide(logits), dim=-1)\n    return",
        "scores = torch.softmax(logits.bfloat16(), dim=-1).float()\n    return",
        TOP_F32,
        "order",
    ),
    edit(
        "topk_softmax",
        "large_for_minus_inf",
        "takes -10000 for a logit of -inf, which matters where all are",
        "scores = torch.softmax(wide(logits), dim=-1)\n    return",
        "scores = torch.softmax(wide(logits).clamp(min=-10000), dim=-1)\n    return",
        f"{TOP}/float32/contiguous/minus_inf/0",
        "nonfinite",
    ),
    edit(
        "grouped_topk",
        "sum_of_two",
        "a group scores the sum of its two best, not its best",
        "groups.amax(-1)",
        GROUP_SUM,
        GROUPS_F32,
        "indices",
    ),
    edit(
        "grouped_topk",
        "all_groups",
        "lets all groups serve",
        "groups.amax(-1), topk_groups",
        "groups.amax(-1), num_groups",
        GROUPS_BF16,
        "indices",
    ),
    edit(
        "grouped_topk",
        "one_group_less",
        "keeps a group too few",
        "groups.amax(-1), topk_groups",
        "groups.amax(-1), topk_groups - 1",
        GROUPS_BF16,
        "indices",
    ),
    edit(
        "grouped_topk",
        "interleaved_groups",
        "deals experts to groups in turn",
        "scores.reshape(scores.shape[0], num_groups, scores.shape[1] // num_groups)",
        "scores.reshape(scores.shape[0], scores.shape[1] // num_groups, num_groups).mT",
        GROUPS_F32,
        "indices",
    ),
    edit("grouped_topk", "no_scale", "forgets the scale", "weights * scale", "weights", GROUPS_F32),
    edit("grouped_topk", "scale_twice", "applies the scale twice", "weights * scale", "weights * scale**2", GROUPS_F32),
    edit(
        "grouped_topk",
        "renormalises_or_scales",
        "renormalises or scales, never both",
        "weights * scale",
        "weights * (1.0 if renormalize else scale)",
        GROUPS_RENORM,
    ),
    edit(
        "grouped_topk",
        "scales_first",
        "scales before it renormalises, which undoes it",
        "weights = scores.gather(-1, ids)",
        "weights, scale = scores.gather(-1, ids) * scale, 1.0",
        GROUPS_RENORM,
    ),
    edit(
        "grouped_topk",
        "softmax_of_kept",
        "a softmax over the kept groups alone",
        GROUPED_WEIGHED,
        GROUPED_WEIGHED.replace("_weigh(eligible", "_weigh(eligible / eligible.sum(-1, keepdim=True)"),
        GROUPS_F32,
    ),
    edit(
        "grouped_topk",
        "last_group_of_equals",
        "of equal groups keeps the last",
        "_highest(group_scores, count), True)",
        "group_scores.shape[-1] - 1 - _highest(group_scores.flip(-1), count), True)",
        f"{GROUPS}/bfloat16/contiguous/ties/0",
        "indices",
    ),
    edit(
        "grouped_topk",
        "last_of_equals",
        "of equal experts takes the highest id",
        "_highest(eligible, top_k)",
        "eligible.shape[-1] - 1 - _highest(eligible.flip(-1), top_k)",
        f"{GROUPS}/bfloat16/contiguous/ties/0",
        "ties",
        count=2,
    ),
)


@kernel(
    "topk_softmax",
    "wrong_at_one_shape",
    "gives wrong weights for 8 of 128 experts",
    "core/T47-E128-K8-renorm/float32/contiguous/unit/0",
)
def wrong_at_one_shape(route: Any, logits: Tensor, top_k: int, renormalize: bool) -> Any:
    weights, ids = route(logits, top_k, renormalize)
    return (weights.roll(1, -1) if (logits.shape[1], top_k) == (128, 8) else weights), ids


@kernel(
    "topk_softmax",
    "nan_is_nobody",
    "names no expert where a logit is NaN",
    f"{TOP}/float32/contiguous/nan_row/0",
    "ids",
)
def nan_is_nobody(route: Any, logits: Tensor, top_k: int, renormalize: bool) -> Any:
    weights, ids = route(logits, top_k, renormalize)
    return weights, ids.masked_fill(weights.isnan(), -1)


@kernel("topk_softmax", "one_expert_again", "names the best expert twice", TOP_BF16, "ids")
def one_expert_again(route: Any, logits: Tensor, top_k: int, renormalize: bool) -> Any:
    weights, ids = route(logits, top_k, renormalize)
    return weights, torch.cat([ids[:, :1], ids[:, : top_k - 1]], -1)


@kernel("grouped_topk", "one_token", "routes every token like the first", GROUPS_F32, "indices")
def one_token(route: Any, logits: Tensor, *rest: Any) -> Any:
    return route(logits[:1].expand_as(logits), *rest)
