"""Wrong attention over packed sequences. What is wrong with its softmax is in `softmax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import Mutant, edit, kernel

BASE = "core/mixed-H2-Dk192-Dv128-causal"
BF16 = f"{BASE}/bfloat16/contiguous"
SMALL = "core/mixed-H3-Dk24-Dv40-causal/bfloat16/contiguous"
RECENT = f"{BF16}/recent/0"
UNIT = f"{BF16}/unit/0"
CAUSAL = "(len_k - len_q)[sequence, None] + place + 1"
CALL = "    return varlen(attend, (q, k, v, cu_q, cu_k), max_q, max_k, scale, causal)\n\n\ndef plan"
Results = tuple[Tensor, Tensor]
Attention = Callable[..., Results]


def wrong(name: str, why: str, old: str, new: str, case: str, check: str = "bound") -> Mutant:
    return edit("mha_varlen", name, why, old, new, case, check, module="_attention")


MUTANTS = (
    wrong("top_left", "aligns the causal mask at the top left", CAUSAL, "place + 1", RECENT),
    wrong("sees_next", "a query sees the key after its own", CAUSAL, CAUSAL.replace("1", "2"), RECENT),
    wrong("never_sees_itself", "a query does not see its own key", CAUSAL, CAUSAL.replace(" + 1", ""), RECENT),
    wrong("never_causal", "sees every key", "    if causal:  # the last query sees every key", "    if False:", RECENT),
    wrong(
        "always_causal",
        "never sees a later key",
        "    if causal:  # the last query sees every key",
        "    if True:",
        "core/mixed-H4-Dk192-Dv128-no_causal/float16/contiguous/recent/0",
    ),
    wrong(
        "first_sequence",
        "every sequence reads the first one's keys",
        "return rows, limits, cu_k[sequence], num_keys",
        "return rows, limits, 0 * cu_k[sequence], num_keys",
        UNIT,
        "nonfinite",
    ),
    wrong(
        "keys_at_queries",
        "looks for a sequence's keys where its queries are",
        "return rows, limits, cu_k[sequence], num_keys",
        "return rows, limits, cu_q[sequence], num_keys",
        UNIT,
        "nonfinite",
    ),
    wrong(
        "one_key_short",
        "leaves out each sequence's last key",
        "    num_keys = len_k[sequence]\n",
        "    num_keys = len_k[sequence] - 1\n",
        RECENT,
    ),
    wrong(
        "one_key_long",
        "sees the first key of the next sequence",
        "    num_keys = len_k[sequence]\n",
        "    num_keys = len_k[sequence] + 1\n",
        "core/mixed-H4-Dk192-Dv128-no_causal/bfloat16/contiguous/unit/0",
        "nonfinite",
    ),
    wrong(
        "reads_past_the_end",
        "reads what lies past a sequence, and weighs it by 0",
        "wide(x[index].masked_fill(absent, 0))",
        "wide(x[index])",
        UNIT,
        "nonfinite",
    ),
    wrong(
        "first_head",
        "all heads read the first one's keys and values",
        "out_i, lse_i = attend(q_i, k_i, v_i,",
        "out_i, lse_i = attend(q_i, k_i[:1], v_i[:1],",
        UNIT,
    ),
    wrong(
        "next_head",
        "values of the head after the keys'",
        "out_i, lse_i = attend(q_i, k_i, v_i,",
        "out_i, lse_i = attend(q_i, k_i, v_i.roll(1, 0),",
        UNIT,
    ),
    wrong(
        "value_columns_left_out",
        "writes whole tiles of 16 columns",
        "out_i, lse_i = attend(q_i, k_i, v_i,",
        "out_i, lse_i = attend(q_i, k_i, v_i.where(torch.arange(value_dim) < value_dim // 16 * 16, 0),",
        f"{SMALL}/unit/0",
    ),
    wrong(
        "key_columns_left_out",
        "multiplies whole tiles of 16 columns",
        "k_i, v_i = (wide(",
        "k = k.where(torch.arange(k.shape[2]) < k.shape[2] // 16 * 16, 0)\n        k_i, v_i = (wide(",
        f"{SMALL}/unit/0",
    ),
    edit(
        "mha_varlen",
        "scale_of_value_dim",
        "scales by the values' width",
        CALL,
        CALL.replace(" scale,", " v.shape[-1] ** -0.5,"),
        UNIT,
    ),
    wrong(
        "longest_for_all",
        "aligns every sequence's mask like that with the longest prefix",
        CAUSAL,
        CAUSAL.replace("[sequence, None]", ".amax()"),
        RECENT,
    ),
)


@kernel(
    "mha_varlen", "other_rows_unwritten", "does not write rows of no sequence", f"{BF16}/b31_padding/0", "nonfinite"
)
def other_rows_unwritten(attention: Attention, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *rest: Any) -> Results:
    results = attention(q, k, v, cu_q, *rest)
    written = torch.arange(len(q)) < cu_q[-1]
    out, lse = (torch.empty_like(x) for x in results)
    out[written], lse[written] = results[0][written], results[1][written]
    return out, lse


@kernel("mha_varlen", "lse_of_heads_first", "gives the lse as a view of [heads, tokens]", UNIT, "strides")
def lse_of_heads_first(attention: Attention, *args: Any) -> Results:
    out, lse = attention(*args)
    return out, lse.mT.contiguous().mT


@kernel("mha_varlen", "lse_in_another_order", "fills the lse [tokens, heads] as [heads, tokens]", UNIT, "nonfinite")
def lse_in_another_order(attention: Attention, *args: Any) -> Results:
    out, lse = attention(*args)
    return out, lse.mT.contiguous().view(lse.shape)


@kernel("mha_varlen", "no_lse", "gives no lse", UNIT, "outputs")
def no_lse(attention: Attention, *args: Any) -> Tensor:
    return attention(*args)[0]


@kernel("mha_varlen", "scales_in_place", "multiplies the queries by the scale where they lie", UNIT, "mutation")
def scales_in_place(attention: Attention, q: Tensor, *rest: Any) -> Results:
    results = attention(q, *rest)
    q *= rest[6]
    return results


@kernel("mha_varlen", "no_float32", "starts nothing for float32", f"{BASE}/float32/contiguous/unit/0", "nonfinite")
def no_float32(attention: Attention, q: Tensor, *rest: Any) -> Results:
    out, lse = attention(q, *rest)
    return (torch.empty_like(out), torch.empty_like(lse)) if q.dtype == torch.float32 else (out, lse)


@kernel(
    "mha_varlen", "packed_keys", "takes the keys for contiguous", f"{BASE}/bfloat16/rows/b25_strides/0", "nonfinite"
)
def packed_keys(attention: Attention, q: Tensor, k: Tensor, *rest: Any) -> Results:
    _, heads, width = k.shape
    return attention(q, k.as_strided(k.shape, (heads * width, width, 1)), *rest)
