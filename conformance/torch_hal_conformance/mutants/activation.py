"""Wrong activations."""

from __future__ import annotations

from . import edit

BF16 = "core/M17-d352/bfloat16/contiguous/unit/0"
F32 = "core/M17-d352/float32/contiguous/unit/0"

MUTANTS = (
    edit("silu_and_mul", "up_first", "takes up for the gate", "activation(gate) * up", "activation(up) * gate", BF16),
    edit(
        "silu_and_mul",
        "rounds_twice",
        "rounds the activated gate before the product",
        "narrow(gated(wide(x), silu), x)",
        "narrow(wide(narrow(silu(wide(x).chunk(2, -1)[0]), x)) * wide(x).chunk(2, -1)[1], x)",
        BF16,
    ),
    edit("silu_and_mul", "gelu", "another activation", "gated(wide(x), silu), x", "gated(wide(x), gelu), x", F32),
    edit(
        "silu_and_mul",
        "interleaved",
        "takes gate and up from alternating columns",
        "x.chunk(2, dim=-1)",
        "(x[..., ::2], x[..., 1::2])",
        F32,
    ),
    edit(
        "gelu_and_mul",
        "tanh",
        "the tanh approximation",
        "gated(wide(x), gelu), x",
        "gated(wide(x), _gelu_tanh), x",
        F32,
    ),
    edit("gelu_and_mul", "up_first", "takes up for the gate", "activation(gate) * up", "activation(up) * gate", BF16),
    edit("gelu_tanh_and_mul", "erf", "the exact GELU", 'gelu(x, approximate="tanh")', "gelu(x)", F32),
    edit(
        "gelu_tanh_and_mul",
        "sum",
        "adds up where it multiplies",
        "activation(gate) * up",
        "activation(gate) + up",
        BF16,
    ),
)
