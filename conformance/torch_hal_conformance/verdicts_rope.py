"""The verdict on rotary embeddings: rotated dims within their bound, the others untouched."""

from __future__ import annotations

from .memory import same_bits
from .verdict import Evidence, Failure, Score, bounded


def rotated(evidence: Evidence) -> Score:
    """E and R of q and k; beyond the cache's width every bit is the argument's."""
    score = bounded(evidence)
    width = evidence.arguments["cos_sin_cache"].shape[1]
    for name, y in zip(("q", "k"), evidence.got, strict=True):
        before, after = evidence.arguments[name][..., width:], y[..., width:]
        if not same_bits(after, before):
            changed = f"{int((after != before).sum())} of {after.numel()} elements"
            raise Failure("copy", f"{name}[..., {width}:] is not rotated: expected a copy, but {changed} differ")
    return score
