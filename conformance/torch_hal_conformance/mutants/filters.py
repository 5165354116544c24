"""Wrong filters over probabilities."""

from __future__ import annotations

from . import edit

BASE = "core/B37-V1000/float32/contiguous"
UNIT = f"{BASE}/unit/0"
KEEP = "kept = torch.where(wide(probs) < pivot, 0.0, probs)"
IDENTITY = "return torch.where(identity.unsqueeze(-1), probs, renormalised)"
TOTAL = "torch.where(total == 0, 1.0, total)"
RANK = "rank = (top_k.to(torch.int64) - 1)"
ABOVE = "above = descending.to(torch.float64).cumsum(-1) - descending"
PIVOT = "pivot = probs.amax(-1, keepdim=True) * min_p.clamp(max=1).unsqueeze(-1).to(probs.dtype)"

MUTANTS = (
    edit("top_k_renorm", "one_more", "keeps one more", RANK, RANK.replace(" - 1", ""), UNIT),
    edit("top_k_renorm", "one_less", "keeps one less", RANK, RANK.replace("- 1", "- 2"), UNIT),
    edit(
        "top_k_renorm",
        "first_rows",
        "the first row's number for all",
        RANK,
        RANK.replace("top_k.to", "top_k[:1].expand_as(top_k).to"),
        UNIT,
    ),
    edit(
        "top_k_renorm",
        "drops_equals",
        "drops those that equal the lowest kept but come after it",
        "return _keep(probs, pivot, identity=(top_k",
        "order = probs.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)\n"
        "    probs = torch.where((order <= rank) | ((top_k <= 0) | (top_k >= vocab)).unsqueeze(-1), probs, 0.0)\n"
        "    return _keep(probs, pivot, identity=(top_k",
        f"{BASE}/ties/0",
    ),
    edit("top_k_renorm", "not_renormalised", "does not renormalise", f"kept / {TOTAL}", "kept", UNIT),
    edit(
        "top_k_renorm",
        "zero_keeps_one",
        "a number of 0 keeps the highest, not all",
        "identity=(top_k <= 0)",
        "identity=(top_k < 0)",
        UNIT,
        "identity",
    ),
    edit(
        "top_k_renorm",
        "always_renormalises",
        "renormalises rows that it leaves as they are",
        IDENTITY,
        "return torch.where(identity.unsqueeze(-1), probs / probs.sum(-1, keepdim=True), renormalised)",
        UNIT,
        "identity",
    ),
    edit(
        "top_k_renorm",
        "nothing_by_nothing",
        "divides a row of zeros by their sum",
        TOTAL,
        "total",
        f"{BASE}/degenerate/0",
        "nonfinite",
    ),
    edit(
        "top_k_renorm",
        "hides_nan",
        "keeps what is at least as large, which NaN is not",
        KEEP,
        "kept = torch.where(wide(probs) >= pivot, probs, 0.0)",
        f"{BASE}/degenerate/0",
        "nonfinite",
    ),
    edit(
        "top_p_renorm",
        "without_crossing",
        "leaves out the token that crosses the bound",
        ABOVE,
        "above = descending.to(torch.float64).cumsum(-1)",
        UNIT,
    ),
    edit(
        "top_p_renorm",
        "strict",
        "keeps while those above sum to less, not to at most",
        "above <= top_p",
        "above < top_p",
        f"{BASE}/boundary/0",
    ),
    edit(
        "top_p_renorm",
        "drops_equals",
        "drops those that equal the lowest kept but come after it",
        "return _keep(probs, descending.gather(-1, count - 1), identity=top_p >= 1)",
        "order = probs.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)\n"
        "    kept = torch.where(order < count, probs, 0.0)\n"
        "    return _keep(kept, kept.new_zeros(1), identity=top_p >= 1)",
        f"{BASE}/ties/0",
    ),
    edit(
        "top_p_renorm",
        "cumulates_in_float32",
        "cumulates in float32",
        ABOVE,
        "above = descending.cumsum(-1) - descending",
        f"{BASE}/fine_sums/0",
    ),
    edit(
        "top_p_renorm",
        "keeps_nothing",
        "a bound below 0 keeps nothing",
        ".clamp(min=1)\n    return",
        "\n    probs = torch.where(count > 0, probs, 0.0)\n    count = count.clamp(min=1)\n    return",
        UNIT,
    ),
    edit("top_p_renorm", "not_renormalised", "does not renormalise", f"kept / {TOTAL}", "kept", UNIT),
    edit(
        "top_p_renorm",
        "first_rows",
        "the first row's bound for all",
        "above <= top_p",
        "above <= top_p[:1].expand_as(top_p)",
        UNIT,
    ),
    edit(
        "top_p_renorm",
        "always_filters",
        "filters with bounds of 1 and more too",
        "identity=top_p >= 1",
        "identity=top_p > 2",
        UNIT,
        "identity",
    ),
    edit(
        "min_p_renorm",
        "absolute",
        "takes the bound as it is, not times the highest",
        PIVOT,
        "pivot = min_p.clamp(max=1).unsqueeze(-1)",
        UNIT,
    ),
    edit("min_p_renorm", "strict", "drops what equals the bound", KEEP, KEEP.replace("<", "<="), f"{BASE}/boundary/0"),
    edit(
        "min_p_renorm",
        "highest_of_all",
        "takes the highest probability of all rows",
        "probs.amax(-1, keepdim=True) * min_p",
        "probs.amax() * min_p",
        UNIT,
    ),
    edit("min_p_renorm", "not_clamped", "a bound above 1 keeps nothing", ".clamp(max=1)", "", UNIT),
    edit("min_p_renorm", "not_renormalised", "does not renormalise", f"kept / {TOTAL}", "kept", UNIT),
    edit(
        "min_p_renorm",
        "share_of_sum",
        "keeps what is at least the bound's share of all",
        PIVOT,
        PIVOT.replace("probs.amax(-1, keepdim=True)", "probs.sum(-1, keepdim=True)"),
        UNIT,
    ),
)
