"""What is said when calls, or a layer's, get past the kernel that came first: one warning an op and op set."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import FallbackWarning, Unsupported, describe
from .kernel import Kernel
from .native import NATIVE
from .op import Op

if TYPE_CHECKING:
    from .policy import Policy

_RAISED = "its refusal raised "


class Fallback:
    """One bound op's memory of having warned, shared by its frame and those of all its layers."""

    def __init__(self, op: Op[..., Any], device: torch.device, policy: Policy) -> None:
        self.op, self.device, self.policy = op, device, policy
        self.warned = False

    def failed(self, error: Exception, kernel: Kernel) -> str:
        """A refusal that raises counts as one, unless the user asked for this very kernel."""
        from .policy import names

        if any(names(pattern, kernel) for pattern in self.policy.matching(self.policy.require, self.op.name)):
            raise error
        return f"{_RAISED}{describe(error)}"

    def report(self, kernel: Kernel, refused: Sequence[tuple[Kernel, str]], what: str, stacklevel: int) -> None:
        """Warn once when ``what`` (a call, a layer) reaches the reference, or gets past what the user prefers or a
        refusal that failed.
        """
        from .policy import names

        wishes = self.policy.matching(self.policy.prefer, self.op.name)
        notable = (
            kernel.plugin == NATIVE
            or any(why.startswith(_RAISED) for _, why in refused)
            or any(names(pattern, other) for pattern in wishes for other, _ in refused)
        )
        if not refused or self.warned or not notable:
            return
        reasons = "; ".join(f"{other.id}: {why}" for other, why in refused)
        path = f"from {refused[0][0].id} to {kernel.id}"
        message = f"{self.op.name} on {self.device} falls back {path} for {what}: {reasons}"
        if self.policy.fallback == "error":
            raise Unsupported(f"{message} (policy.fallback is 'error')")
        self.warned = True
        warnings.warn(message, FallbackWarning, stacklevel=stacklevel + 1)
