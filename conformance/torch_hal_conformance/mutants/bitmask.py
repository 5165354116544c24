"""Wrong masks over logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import edit, kernel

BASE = "core/B17-V1000-int32"
UNIT, F32 = f"{BASE}/bfloat16/contiguous/unit/0", f"{BASE}/float32/contiguous/unit/0"
ALL = "core/B17-V1000/bfloat16/contiguous/unit/0"
STRANGERS = f"{BASE}/bfloat16/contiguous/b32_sentinels/0"
SPECIALS = f"{BASE}/float32/contiguous/specials/0"
FORBIDDEN = "(bitmask.unsqueeze(-1) >> shift & 1 == 0).flatten(1)[:, :vocab]"
NAMED = "(row.unsqueeze(-1) == indices).any(-1, keepdim=True)"
MASKED = "logits.masked_fill(_forbidden(logits, bitmask, indices), -torch.inf).contiguous()"
TWIN = "logits.masked_fill_(_forbidden(logits, bitmask, indices), -torch.inf)"


def _both(name: str, why: str, old: str, new: str, case: str) -> tuple[Any, ...]:
    return tuple(edit(op, name, why, old, new, case, "copy") for op in ("apply_token_bitmask", "apply_token_bitmask_"))


MUTANTS = (
    *_both("inverted", "forbids what is allowed", FORBIDDEN, FORBIDDEN.replace("==", "!="), UNIT),
    *_both(
        "highest_first",
        "takes a word's highest bit for its first token",
        FORBIDDEN,
        FORBIDDEN.replace(">> shift", ">> (31 - shift)"),
        UNIT,
    ),
    *_both(
        "words_in_turn",
        "takes bit t // 32 of word t % 32",
        FORBIDDEN,
        FORBIDDEN.replace("flatten(1)", "mT.flatten(1)"),
        ALL,
    ),
    *_both(
        "no_tail",
        "leaves the last tokens as they are where they do not fill a word",
        FORBIDDEN,
        f"({FORBIDDEN} & (torch.arange(vocab) < vocab // 32 * 32))",
        ALL,
    ),
    *_both(
        "first_row",
        "masks all rows with the first one's words",
        "bitmask.unsqueeze",
        "bitmask[:1].expand_as(bitmask).unsqueeze",
        ALL,
    ),
    *_both(
        "words_by_place",
        "masks a row with the words that have its place among the indices, not its number",
        "    return forbidden & ",
        "    slot = (row.unsqueeze(-1) == indices).int()\n"
        "    slot = slot.argmax(-1) if len(indices) else slot.sum(-1)\n"
        "    return forbidden[slot % max(rows, 1)] & ",
        UNIT,
    ),
    *_both("all_rows", "masks rows that nobody names", f"forbidden & {NAMED}", "forbidden", UNIT),
    *_both(
        "last_row_for_nobody",
        "an index of -1 counts from the end",
        NAMED,
        NAMED.replace("== indices", "== torch.where(indices == -1, rows - 1, indices)"),
        STRANGERS,
    ),
    *_both(
        "clamps",
        "an index beyond the last row is the last row's",
        NAMED,
        NAMED.replace("== indices", "== indices.clamp(max=rows - 1)"),
        STRANGERS,
    ),
    *_both(
        "cuts_indices",
        "cuts indices to 32 bits",
        NAMED,
        NAMED.replace("indices", "indices.int()"),
        "core/B17-V1000-int64/bfloat16/contiguous/b32_sentinels/0",
    ),
    edit(
        "apply_token_bitmask",
        "large_for_inf",
        "sets forbidden logits to the least finite number",
        MASKED,
        MASKED.replace("-torch.inf", "torch.finfo(logits.dtype).min"),
        F32,
        "copy",
    ),
    edit(
        "apply_token_bitmask",
        "adds",
        "adds -inf to what it forbids, which NaN and inf survive",
        MASKED,
        "logits + torch.zeros_like(logits).masked_fill(_forbidden(logits, bitmask, indices), -torch.inf)",
        SPECIALS,
        "copy",
    ),
    edit(
        "apply_token_bitmask_",
        "large_for_inf",
        "sets forbidden logits to the least finite number",
        TWIN,
        TWIN.replace("-torch.inf", "torch.finfo(logits.dtype).min"),
        F32,
        "copy",
    ),
    edit(
        "apply_token_bitmask_",
        "writes_a_copy",
        "masks a copy of logits with strides of their own",
        TWIN,
        TWIN.replace("logits.masked", "logits.contiguous().masked"),
        f"{BASE}/bfloat16/wide/b25_strides/0",
        "copy",
    ),
)


@kernel("apply_token_bitmask", "returns_logits", "masks logits in place and returns them", F32, "mutation")
def returns_logits(mask: Any, logits: Tensor, bitmask: Tensor, indices: Tensor | None) -> Tensor:
    return logits.copy_(mask(logits, bitmask, indices)).clone()


@kernel(
    "apply_token_bitmask_",
    "whole_words",
    "masks whole words, beyond the end of a row",
    "core/B9-V7/float32/contiguous/unit/0",
    "canary",
)
def whole_words(mask: Any, logits: Tensor, bitmask: Tensor, indices: Tensor | None) -> None:
    mask(logits, bitmask, indices)
    logits.as_strided((25,), (1,), logits.storage_offset() + logits.numel()).fill_(-torch.inf)
