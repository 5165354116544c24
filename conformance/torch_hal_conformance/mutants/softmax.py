"""What goes wrong behind any softmax: the same mistakes in each of the three attentions."""

from __future__ import annotations

from . import Mutant, edit

VARLEN = "core/mixed-H2-Dk192-Dv128-causal/bfloat16/contiguous"
DECODE = "core/few-H16-s1-L512-R64-page64/bfloat16/contiguous"
FP8 = "core/few-H16-s1-L512-R64-page64-ds_mla/bfloat16/contiguous"
# Many keys of almost equal weight.
UNIFORM = {
    "mha_varlen": "core/blocks-H2-Dk192-Dv128-causal/bfloat16/contiguous/uniform/0",
    "mla_decode": "core/newest-H16-s1-L512-R64-page64/bfloat16/contiguous/uniform/0",
    "mla_decode_fp8": "core/newest-H16-s1-L512-R64-page64-ds_mla/bfloat16/contiguous/uniform/0",
}
SCORES = "(q @ k.mT * scale).masked_fill(hidden, -torch.inf)"
WEIGHTS = "scores.softmax(-1).masked_fill"
LSE = "lse = scores.logsumexp(-1)\n"
OUT = "    p, lse = _softmax(q, k, limits, scale)\n    return p @ v, lse\n"
LIMITS = ">= limits[..., None]"
PIECES = """\
    pieces = [slice(i, i + 32) for i in range(0, k.shape[1], 32)]
    weights = [_softmax(q, k[:, piece], limits - piece.start, scale) for piece in pieces]
    lses = torch.stack([lse for _, lse in weights])
    lse = lses.logsumexp(0)
    shares = {shares}
    return sum(share[..., None] * (p @ v[:, piece]) for share, (p, _), piece in zip(shares, weights, pieces)), lse
"""
TRUNCATED = """\
    p, lse = _softmax(q, k, limits, scale)
    top = p.amax(-1, keepdim=True).clamp(min=1e-30)
    weights = ((p / top).view(torch.int32) & -65536).view(torch.float32)
    return weights @ v * top, lse
"""
IN_BF16 = """\
    p, lse = _softmax(q, k, limits, scale)
    out = torch.zeros_like(p @ v)
    for j in range(v.shape[1]):
        out = (out + p[..., j, None] * v[:, None, j]).bfloat16().to(out.dtype)
    return out, lse
"""


def weighing(op: str, base: str) -> tuple[Mutant, ...]:
    """Wrong scores and weights of one op, whose base shape's cases begin so."""

    def wrong(name: str, why: str, old: str, new: str, case: str, check: str = "bound") -> Mutant:
        return edit(op, name, why, old, new, case, check, module="_attention")

    unit, empty = f"{base}/unit/0", f"{base}/b31_padding/0"
    return (
        wrong("no_scale", "forgets the softmax scale", SCORES, SCORES.replace(" * scale", ""), unit),
        wrong("own_scale", "scales by the keys' width", SCORES, SCORES.replace("scale", "q.shape[-1] ** -0.5"), unit),
        wrong("base_two", "takes powers of two", SCORES, SCORES.replace("scale", "scale * 0.6931471805599453"), unit),
        wrong(
            "scores_in_bf16",
            "rounds the scores",
            SCORES,
            SCORES.replace(" * scale)", " * scale).bfloat16().to(q.dtype)"),
            UNIFORM[op],
        ),
        wrong(
            "mask_of_a_thousand",
            "masks with -1000, for it to be finite",
            SCORES,
            "torch.where(hidden, torch.where(limits > 0, -1000.0, -torch.inf)[..., None].to(q), q @ k.mT * scale)",
            f"{base}/negative/0",
        ),
        wrong(
            "last_tile_left_out",
            "looks at whole tiles of 64 keys",
            LIMITS,
            ">= torch.where(limits > 64, limits // 64 * 64, limits)[..., None]",
            f"{base}/recent/0",
        ),
        wrong(
            "no_maximum",
            "exponentiates without taking off the maximum",
            WEIGHTS,
            "(scores.exp() / scores.exp().sum(-1, keepdim=True)).masked_fill",
            f"{base}/shifted/0",
            "nonfinite",
        ),
        wrong(
            "maximum_from_zero",
            "starts its running maximum at 0",
            WEIGHTS,
            "((e := (scores - scores.amax(-1, True).clamp(min=0)).exp()) / e.sum(-1, True)).masked_fill",
            f"{base}/negative/0",
            "nonfinite",
        ),
        wrong(
            "empty_is_nan",
            "a query without keys gives NaN",
            f"{WEIGHTS}(lse.isneginf()[..., None], 0)",
            "scores.softmax(-1)",
            empty,
            "nonfinite",
        ),
        wrong(
            "empty_lse_is_positive",
            "a query without keys gets an lse of +inf",
            OUT,
            OUT.replace("v, lse", "v, lse.masked_fill(lse.isinf(), torch.inf)"),
            empty,
            "nonfinite",
        ),
        wrong("log2_lse", "gives the lse in base 2", LSE, LSE[:-1] + " * 1.4426950408889634\n", unit),
        wrong("lse_of_weights", "gives the maximum for the lse", LSE, "lse = scores.amax(-1)\n", unit),
        wrong("lse_in_bf16", "rounds the lse", OUT, OUT.replace("v, lse", "v, lse.bfloat16().to(lse.dtype)"), unit),
        wrong(
            "truncates_weights",
            "truncates weights, relative to the largest, to bfloat16, where it should round",
            OUT,
            TRUNCATED,
            UNIFORM[op],
        ),
        wrong(
            "normalised_after_rounding",
            "rounds the sum of weighted values, and again when it has divided by the sum of weights",
            OUT,
            OUT.replace("p @ v", "(p @ v * (total := lse.exp().clamp(min=1e-30)[..., None])).bfloat16() / total"),
            UNIFORM[op],
        ),
        wrong("sums_in_bf16", "adds up the values in bfloat16", OUT, IN_BF16, UNIFORM[op]),
        wrong(
            "pieces_alike",
            "joins pieces of 32 keys as if each weighed as much",
            OUT,
            PIECES.format(shares="lses.isfinite().to(lse.dtype) / lses.isfinite().sum(0).clamp(min=1)"),
            unit,
        ),
        wrong(
            "pieces_of_nothing",
            "joins pieces of 32 keys, and gives NaN where all are empty",
            OUT,
            PIECES.format(shares="(lses - lse).exp()"),
            empty,
            "nonfinite",
        ),
        wrong(
            "first_piece_alone",
            "splits the keys, and forgets all pieces but the first",
            OUT,
            PIECES.format(shares="lses[:1].isfinite().to(lse.dtype)"),
            f"{base}/recent/0",
        ),
    )


MUTANTS = (*weighing("mha_varlen", VARLEN), *weighing("mla_decode", DECODE), *weighing("mla_decode_fp8", FP8))
