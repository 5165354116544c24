"""Wrong routing with a bias."""

from __future__ import annotations

from . import edit
from .routing import GROUP_SUM

BASE = "core/T47-E64-K8-G8-keep4"
F32, BF16 = f"{BASE}/float32/contiguous/unit/0", f"{BASE}/bfloat16/contiguous/unit/0"
NEGATIVE = f"{BASE}/float32/contiguous/b30_masked_groups/0"
TIES = f"{BASE}/bfloat16/contiguous/ties/0"
DENSE = "core/T47-E64-K8-G8-keep4-no_renorm/bfloat16/contiguous/unit/0"
WEIGHED = "return _weigh(scores, _highest(eligible, top_k), renormalize, scale)"
SUM = "(weights.sum(-1, keepdim=True) + RENORM_EPS)"

MUTANTS = (
    edit(
        "biased_grouped_topk",
        "bias_in_weights",
        "weights carry the bias",
        WEIGHED,
        WEIGHED.replace("_weigh(scores", "_weigh(biased"),
        F32,
    ),
    edit(
        "biased_grouped_topk",
        "no_bias",
        "chooses without the bias",
        "biased = scores + bias",
        "biased = scores + 0 * bias",
        BF16,
        "indices",
    ),
    edit(
        "biased_grouped_topk",
        "takes_bias_off",
        "finds a score by taking the bias off again, and loses digits",
        "biased = scores + bias\n",
        "biased = scores + bias\n    scores = biased - bias\n",
        f"{BASE}/float32/contiguous/fine_bias/0",
    ),
    edit(
        "biased_grouped_topk",
        "bias_in_bf16",
        "rounds the bias to bfloat16",
        "biased = scores + bias\n",
        "biased = scores + bias.bfloat16().to(bias.dtype)\n",
        f"{BASE}/bfloat16/contiguous/fine_bias/0",
        "indices",
    ),
    edit(
        "biased_grouped_topk",
        "best_alone",
        "a group scores its best alone",
        GROUP_SUM,
        "groups.amax(-1)",
        F32,
        "indices",
    ),
    edit(
        "biased_grouped_topk",
        "groups_without_bias",
        "a group scores its two best without their bias",
        f"_keep_groups({GROUP_SUM}",
        "_keep_groups(_grouped(scores, num_groups).topk(2, dim=-1).values.sum(-1)",
        F32,
        "indices",
    ),
    edit(
        "biased_grouped_topk",
        "zero_for_dropped",
        "experts of dropped groups count as 0, more than a negative score",
        "groups, -torch.inf)",
        "groups, 0.0)",
        NEGATIVE,
        "indices",
    ),
    edit("biased_grouped_topk", "never_renormalises", "does not renormalise", "if renormalize:", "if False:", F32),
    edit("biased_grouped_topk", "always_renormalises", "renormalises unasked", "if renormalize:", "if True:", DENSE),
    edit(
        "biased_grouped_topk",
        "no_eps",
        "renormalises without the 1e-20",
        SUM,
        "weights.sum(-1, keepdim=True)",
        f"{BASE}/float32/contiguous/eps/0",
    ),
    edit("biased_grouped_topk", "no_scale", "forgets the scale", "weights * scale", "weights", BF16),
    edit("biased_grouped_topk", "scale_twice", "scales twice", "weights * scale", "weights * scale**2", BF16),
    edit(
        "biased_grouped_topk",
        "scales_first",
        "scales before it renormalises, which undoes it",
        "weights = scores.gather(-1, ids)",
        "weights, scale = scores.gather(-1, ids) * scale, 1.0",
        F32,
    ),
    edit(
        "biased_grouped_topk",
        "softmax",
        "scores by a softmax",
        "scores = torch.sigmoid(wide(logits))",
        "scores = torch.softmax(wide(logits), -1)",
        F32,
        "indices",
    ),
    edit(
        "biased_grouped_topk",
        "last_of_equals",
        "of equal experts takes the highest id",
        "_highest(eligible, top_k)",
        "eligible.shape[-1] - 1 - _highest(eligible.flip(-1), top_k)",
        TIES,
        "ties",
        count=2,
    ),
    edit(
        "biased_grouped_topk",
        "last_group_of_equals",
        "of equal groups keeps the last",
        "_highest(group_scores, count), True)",
        "group_scores.shape[-1] - 1 - _highest(group_scores.flip(-1), count), True)",
        TIES,
        "indices",
    ),
)
