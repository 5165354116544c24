"""Specialising an op for a layer: static refusals settled once, the rest left to the callable that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .errors import PluginError, Unsupported
from .fallback import Fallback
from .frame import Trace, build_frame
from .kernel import Kernel
from .loading import Loaded
from .op import PLAIN, Op

if TYPE_CHECKING:
    from .policy import Policy


def specialize(
    op: Op[..., Any],
    chain: Sequence[Loaded],
    policy: Policy,
    trace: Trace | None,
    fallback: Fallback,
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
    refused: list[tuple[Kernel, str]] = []
    for loaded in chain:
        reason = static_refusal(op, loaded, arguments, fallback)
        if reason is not None:
            refused.append((loaded.kernel, reason))
            continue
        if not left:
            fallback.report(loaded.kernel, refused, "a layer", stacklevel=2)
        # A validating frame keeps the static refusal, to catch calls that differ in what was settled here.
        left.append(loaded if policy.validation else replace(loaded, static=None))
        if loaded.dynamic is None:
            break
    if not left:
        reasons = "; ".join(f"{kernel.id}: {why}" for kernel, why in refused)
        raise Unsupported(f"{op.name} on {fallback.device}: no bound kernel takes such arguments. {reasons}")
    if len(left) == 1 and left[0].dynamic is None and not policy.validation and trace is None:
        return left[0].run
    return build_frame(op, left, policy, trace, fallback)


def static_refusal(op: Op[..., Any], loaded: Loaded, arguments: dict[str, Any], fallback: Fallback) -> str | None:
    """Why the kernel cannot take such calls. Its static refusal must say the same for any number of tokens."""
    layout = arguments.get("layout", PLAIN)
    if not loaded.kernel.accepts_layout(layout):
        return f"does not read layout '{layout}'"
    if loaded.static is None:
        return None
    try:
        answers = [
            loaded.static(*values.values())
            for values in (arguments, _resized(op, arguments, 1), _resized(op, arguments, 4096))
        ]
    except Exception as error:
        return fallback.failed(error, loaded.kernel)
    if len({answer is None for answer in answers}) > 1:
        reason = next(answer for answer in answers if answer is not None)
        raise PluginError(
            f"kernel '{loaded.kernel.id}' of {op.name}: its static refusal depends on a free dimension ({reason}); "
            "make it a dynamic one"
        )
    return answers[0]


def _resized(op: Op[..., Any], arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """The arguments on ``meta`` with every free dim set to ``size``."""
    dims = {**op.checker.dims(arguments), **dict.fromkeys(op.free, size)}
    resized = dict(arguments)
    for spec in op.checker.specs:
        x = arguments[spec.name]
        if x is not None and not (spec.prepared and arguments.get("layout", PLAIN) != PLAIN):
            shape = spec.resize(list(x.shape), lambda dim: op.checker.value(dim, {**arguments, **dims}), size)
            if shape != list(x.shape):  # what is fixed keeps its strides
                resized[spec.name] = torch.empty(shape, dtype=x.dtype, device="meta")
    return resized
