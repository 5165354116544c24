"""Wrong rotations."""

from __future__ import annotations

from . import edit

BASE = "core/T17-H4-Hk1-D64-R64-P50"
F32 = f"{BASE}/float32/contiguous/unit/0"
BF16 = f"{BASE}/bfloat16/contiguous/unit/0"

MUTANTS = (
    edit(
        "rope",
        "halves_for_pairs",
        "rotates half-split pairs where they are interleaved",
        "cos, sin, interleaved) for x in (q, k)",
        "cos, sin, False) for x in (q, k)",
        F32,
    ),
    edit(
        "rope",
        "pairs_for_halves",
        "rotates interleaved pairs where they are half-split",
        "cos, sin, interleaved) for x in (q, k)",
        "cos, sin, True) for x in (q, k)",
        "core/T17-H4-Hk1-D64-R64-P50-no_interleaved/float32/contiguous/unit/0",
    ),
    edit(
        "rope",
        "turns_back",
        "turns the other way",
        "(a * cos - b * sin, b * cos + a * sin)",
        "(a * cos + b * sin, b * cos - a * sin)",
        BF16,
    ),
    edit(
        "rope",
        "sine_for_cosine",
        "reads sines first",
        ".unsqueeze(1).chunk(2, dim=-1)",
        ".unsqueeze(1).chunk(2, dim=-1)[::-1]",
        F32,
    ),
    edit(
        "rope",
        "next_position",
        "a row of the table too far",
        "index_select(0, positions)",
        "index_select(0, (positions + 1) % cos_sin_cache.shape[0])",
        F32,
        "nonfinite",
    ),
    edit(
        "rope",
        "key_stays",
        "forgets the key",
        "narrow(q_out, q), narrow(k_out, k)",
        "narrow(q_out, q), k.clone(memory_format=torch.contiguous_format)",
        BF16,
    ),
    edit(
        "rope",
        "rest_is_lost",
        "zeroes what is not rotated",
        "torch.cat((joined, rest), dim=-1)",
        "torch.cat((joined, rest * 0), dim=-1)",
        f"{BASE}/bfloat16/contiguous/b35_partial_rotary/0",
    ),
    edit(
        "rope",
        "rotates_the_rest",
        "rotates the last dims of a head, not the first",
        "rotated, rest = x[..., : 2 * half], x[..., 2 * half :]",
        "rest, rotated = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]",
        f"{BASE}/float32/contiguous/b35_partial_rotary/0",
    ),
    edit(
        "rope",
        "table_in_bf16",
        "rounds the table to bfloat16",
        "wide(cos_sin_cache.index_select",
        "wide(cos_sin_cache.bfloat16().index_select",
        F32,
    ),
)
