"""Specialising an op for a layer: static refusals settled once, the rest left to the callable that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .check import FREE
from .errors import PluginError, Unsupported
from .frame import Trace, build_frame
from .loading import Loaded
from .op import PLAIN, Op

if TYPE_CHECKING:
    from .policy import Policy


def specialize(
    op: Op[..., Any],
    chain: Sequence[Loaded],
    device: torch.device,
    policy: Policy,
    trace: Trace | None,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The callable for calls like this one, whatever their free dims (tokens, sequences, leading ``...``).

    Arguments may be on ``meta``. Where validation and tracing are off and the kernel never refuses a call, it is the
    kernel itself. Raises Unsupported, with every reason, where no bound kernel can take such calls.
    """
    op.check(*args, **kwargs)
    arguments = op.bind(*args, **kwargs)
    left: list[Loaded] = []
    reasons = []
    for loaded in chain:
        reason = _refusal(op, loaded, arguments)
        if reason is not None:
            reasons.append(f"{loaded.kernel.id}: {reason}")
            continue
        left.append(replace(loaded, static=None))
        if loaded.dynamic is None:
            break
    if not left:
        raise Unsupported(f"{op.name} on {device}: no bound kernel takes such arguments. {'; '.join(reasons)}")
    if len(left) == 1 and left[0].dynamic is None and not policy.validation and trace is None:
        return left[0].run
    return build_frame(op, left, device, policy, trace)


def _refusal(op: Op[..., Any], loaded: Loaded, arguments: dict[str, Any]) -> str | None:
    """Why the kernel cannot take such calls. Its static refusal must say the same for any number of tokens."""
    layout = arguments.get("layout", PLAIN)
    if not loaded.kernel.accepts_layout(layout):
        return f"does not read layout '{layout}'"
    if loaded.static is None:
        return None
    answers = [
        loaded.static(*values.values())
        for values in (arguments, _resized(op, arguments, 1), _resized(op, arguments, 4096))
    ]
    if len({answer is None for answer in answers}) > 1:
        reason = next(answer for answer in answers if answer is not None)
        raise PluginError(
            f"kernel '{loaded.kernel.id}' of {op.name}: its static refusal depends on a free dimension ({reason}); "
            "make it a dynamic one"
        )
    return answers[0]


def _resized(op: Op[..., Any], arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """The arguments on ``meta`` with every free dim set to ``size``."""
    dims = {**op.checker.dims(arguments), **dict.fromkeys(FREE, size)}
    resized = dict(arguments)
    for spec in op.checker.specs:
        x = arguments[spec.name]
        if x is not None:
            shape = spec.resize(list(x.shape), lambda dim: op.checker.value(dim, {**arguments, **dims}), size)
            resized[spec.name] = torch.empty(shape, dtype=x.dtype, device="meta")
    return resized
