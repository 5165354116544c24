"""From candidates to a choice: every kernel gets a verdict with its reason, in one order that never depends on luck.

Order: what device and policy allow → what the user prefers → declared band → direct before derived → plugin name →
yield order. Explaining and choosing run this same code.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .device import DeviceInfo
from .errors import FATAL, Unsupported, describe
from .kernel import Kernel, Library, Trait
from .loading import Loaded, load_kernel
from .op import PLAIN, Op
from .probing import probe_library

if TYPE_CHECKING:
    from .policy import Policy


class Cause(enum.StrEnum):
    """Which rule a refusal comes from."""

    DEVICE = "device"  # another vendor's: never a candidate here
    ARCH = "arch"  # this vendor's, another arch or lacking feature
    MISSING = "missing"  # its library is not installed
    POLICY = "policy"  # denied, or another one is required
    TRAIT = "trait"  # does not declare what the policy asks for
    BROKEN = "broken"  # its library's probe, its import or its signature failed
    LAYOUT = "layout"  # would strand prepared weights


@dataclass(frozen=True)
class Verdict:
    """What selection says of one kernel: its place and, if refused, the cause and the reason."""

    kernel: Kernel
    refused: str | None = None
    cause: Cause | None = None
    loaded: Loaded | None = field(default=None, repr=False, compare=False)
    role: str = ""  # "chosen", "next" (may be handed calls) or "behind" (never reached)
    wish: str = ""  # what the policy says of it, where that decided its place

    def why(self) -> str:
        """In words, what puts a kernel that was not refused where it stands."""
        notes = [self.wish] if self.wish else []
        if self.role == "behind":
            notes.append("kernels before it take every call")
        elif self.loaded is not None and self.loaded.refuses:
            notes.append("may refuse a call")
        if self.kernel.derived_from:
            notes.append(f"copies around {self.kernel.derived_from}")
        return ", ".join(notes)

    def to_dict(self) -> dict[str, Any]:
        kernel = self.kernel
        return {
            "kernel": kernel.name,
            "plugin": kernel.plugin,
            "band": kernel.band.name.lower(),
            "state": "refused" if self.refused else self.role,
            "reason": self.refused or self.why(),
            "cause": str(self.cause) if self.cause else "",
            "derived_from": kernel.derived_from or "",
            "refusals": [kind for kind in ("static", "dynamic") if getattr(kernel, kind)],
            "layout": kernel.layout,
        }


@dataclass(frozen=True)
class Explanation:
    """Why an op runs what it runs on a device: every candidate, in order, chosen or why not."""

    op: str
    device: DeviceInfo
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.role == "chosen"), None)

    @property
    def chain(self) -> tuple[Loaded, ...]:
        """The chosen kernel and, in order, those it may hand a call to."""
        return tuple(v.loaded for v in self.verdicts if v.loaded is not None and v.role in ("chosen", "next"))

    def refusals(self) -> str:
        return "; ".join(f"{v.kernel.id}: {v.refused}" for v in self.verdicts if v.refused) or "no kernel was offered"

    def to_dict(self) -> dict[str, Any]:
        return {"op": self.op, "device": str(self.device), "kernels": [v.to_dict() for v in self.verdicts]}

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}:"]
        for verdict in self.verdicts:
            state = "refused" if verdict.refused else verdict.role
            reason = verdict.refused or ", ".join(filter(None, [verdict.kernel.band.name.lower(), verdict.why()]))
            lines.append(f"  {state:8} {verdict.kernel.id:24} {reason}")
        return "\n".join(lines)


def select(op: Op[..., Any], device: DeviceInfo, kernels: Iterable[Kernel], policy: Policy) -> Explanation:
    """Judge every kernel of ``op`` and choose. Raises Unsupported, with every reason, if none may serve."""
    ordered = sorted(kernels, key=functools.partial(_rank, op=op, policy=policy))
    pinned = policy.pinned.get(op.name, ())
    required = list(pinned) or policy.matching(policy.require, op.name)
    settled: list[Verdict] = []
    unanswered = {PLAIN}  # layouts in which a call may still get past the kernels chosen so far
    for verdict in [_settle_device(kernel, device, policy, op, required) for kernel in ordered]:
        if verdict.refused is None and unanswered:
            verdict = _settle_code(verdict.kernel, device, op)
            if (loaded := verdict.loaded) is not None:
                role = "next" if any(v.role == "chosen" for v in settled) else "chosen"
                verdict = Verdict(verdict.kernel, loaded=loaded, role=role, wish=_wish(verdict.kernel, op, policy))
                unanswered |= {verdict.kernel.layout} if loaded.prepare else set()
                unanswered -= {x for x in unanswered if not loaded.refuses and verdict.kernel.accepts_layout(x)}
        elif verdict.refused is None:
            verdict = Verdict(verdict.kernel, role="behind")
        settled.append(verdict)
    explanation = Explanation(op.name, device, tuple(_drop_stranded(settled)))
    chain = tuple(f"{loaded.kernel.plugin}.{loaded.kernel.name}" for loaded in explanation.chain)
    if not chain or (pinned and chain != tuple(pinned)):
        wish = f" (the policy {'pins' if pinned else 'requires'} {', '.join(required)})" if required else ""
        found = f"no kernel may serve{wish}" if not chain else f"would run {', '.join(chain)}{wish}"
        raise Unsupported(f"{op.name} on {device}: {found}. {explanation.refusals()}")
    return explanation


def _wish(kernel: Kernel, op: Op[..., Any], policy: Policy) -> str:
    """What the policy says in favour of a kernel."""
    from .policy import names

    if op.name in policy.pinned:
        return "the policy pins it"
    for rules, verb in ((policy.require, "requires"), (policy.prefer, "prefers")):
        if any(names(pattern, kernel) for pattern in policy.matching(rules, op.name)):
            return f"the policy {verb} it"
    return ""


def _rank(kernel: Kernel, op: Op[..., Any], policy: Policy) -> tuple[Any, ...]:
    from .policy import names

    wishes = [*policy.pinned.get(op.name, ()), *policy.matching(policy.prefer, op.name)]
    wishes += policy.matching(policy.require, op.name)
    wish = next((i for i, pattern in enumerate(wishes) if names(pattern, kernel)), len(wishes))
    return (wish, -kernel.band, kernel.derived_from is not None, kernel.plugin, kernel.position)


def _settle_device(
    kernel: Kernel, device: DeviceInfo, policy: Policy, op: Op[..., Any], required: list[str]
) -> Verdict:
    """What device and policy say, without importing anything."""
    from .policy import names

    try:
        reason = kernel.requires.refuse(device)
        missing = (
            kernel.requires.library.missing()
            if reason is None and isinstance(kernel.requires.library, Library)
            else None
        )
    except Exception as error:
        return Verdict(kernel, f"its requirements raised {describe(error)}", Cause.BROKEN)
    if reason is not None:
        foreign = kernel.requires.vendor not in (None, device.vendor)
        return Verdict(kernel, reason, Cause.DEVICE if foreign else Cause.ARCH)
    if missing is not None:
        return Verdict(kernel, missing, Cause.MISSING)
    if any(names(pattern, kernel) for pattern in policy.matching(policy.deny, op.name)):
        return Verdict(kernel, "denied by policy", Cause.POLICY)
    if required and not any(names(pattern, kernel) for pattern in required):
        return Verdict(kernel, f"the policy wants {', '.join(required)}", Cause.POLICY)
    for wanted, trait in ((policy.deterministic, Trait.DETERMINISTIC), (policy.graph_safe, Trait.GRAPH_SAFE)):
        if wanted and trait not in kernel.traits:
            return Verdict(kernel, f"the policy asks for {trait}, which it does not declare", Cause.TRAIT)
    return Verdict(kernel)


def _settle_code(kernel: Kernel, device: DeviceInfo, op: Op[..., Any]) -> Verdict:
    """What the kernel's library and code say: probe, import, check signatures."""
    library = kernel.requires.library
    if isinstance(library, Library) and (reason := probe_library(library, device)) is not None:
        return Verdict(kernel, reason, Cause.BROKEN)
    try:
        loaded = load_kernel(kernel, op)
    except FATAL:
        raise
    except BaseException as error:
        return Verdict(kernel, f"loading it raised {describe(error)}", Cause.BROKEN)
    return Verdict(kernel, loaded=loaded)


def _drop_stranded(verdicts: list[Verdict]) -> list[Verdict]:
    """Refuse a preparing kernel that may turn a call away to nobody who reads its layout."""
    kept = [v for v in verdicts if v.loaded is not None]
    result = []
    for verdict in verdicts:
        layout = verdict.kernel.layout
        if verdict.loaded and verdict.kernel.prepare and layout != PLAIN and verdict.kernel.dynamic:
            partners = [
                v for v in kept if v is not verdict and v.kernel.accepts_layout(layout) and not v.kernel.dynamic
            ]
            if not partners:
                verdict = Verdict(
                    verdict.kernel,
                    f"may refuse a call on weights in its layout '{layout}', which no other kernel reads",
                    Cause.LAYOUT,
                )
        result.append(verdict)
    if not any(v.role == "chosen" for v in result):
        first = next((i for i, v in enumerate(result) if v.loaded is not None), None)
        if first is not None:
            result[first] = Verdict(result[first].kernel, loaded=result[first].loaded, role="chosen")
    return result
