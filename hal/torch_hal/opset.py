"""`bind`: a device and a policy in, a frozen set of callables out.

``ops.rms_norm`` is one generated function with the op's own signature: it checks the arguments, asks the refusals
of the kernels that have any, and calls. What it does not need is not in it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import detect, native, plugins
from .compile import with_torch_op
from .device import DeviceInfo
from .errors import FallbackWarning, PolicyError, Unsupported
from .fallback import Fallback
from .frame import Trace, build_frame
from .kernel import Kernel, Trait, by_name
from .loading import Loaded
from .manifest import Manifest
from .op import PLAIN, Op, declared
from .prepare import Prepared, prepare, prepared
from .selection import Cause, Explanation, select
from .specialize import specialize
from .twins import with_twins

if TYPE_CHECKING:
    from .policy import Policy


class BoundOp(Protocol):
    """One op of an `OpSet`: call it with the op's own signature."""

    op: Op[..., Any]
    explanation: Explanation
    kernel: Kernel
    formats: dict[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def specialize(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Settle the static refusals for arguments like these, the token dimension free; keep the callable."""

    def prepare(self, *weights: Any, **call: Any) -> Prepared:
        """Weights as the chosen kernel wants them, once at load; with a call's other arguments, as the kernel that
        will take such calls wants them.
        """

    def plan(self, *args: Any, **kwargs: Any) -> Prepared:
        """The chosen kernel's schedule for one step."""


class OpSet:
    """Every op, bound to one device under one policy. It never changes; bind again to see new plugins or wishes."""

    def __init__(
        self, device: DeviceInfo, policy: Policy, explanations: dict[str, Explanation], trace: Trace | None
    ) -> None:
        self.device = device
        self.policy = policy
        self.trace = trace
        self._explanations = dict(explanations)
        for name, explanation in explanations.items():
            setattr(self, name, _bound_op(declared()[name], explanation, self))
        self._frozen = True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> BoundOp: ...

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"an op set never changes: cannot set '{name}'; bind a new one")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an op set never changes: cannot delete '{name}'")

    def __iter__(self) -> Iterator[str]:
        return iter(self._explanations)

    def __repr__(self) -> str:
        return f"<OpSet of {len(self._explanations)} ops on {self.device}, manifest {self.manifest.digest[:12]}>"

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def explain(self, op: str) -> Explanation:
        """Every candidate for ``op``, in order: chosen, next, behind, or refused and why."""
        if op not in self._explanations:
            raise KeyError(f"no op '{op}'; ops are {', '.join(self._explanations)}")
        return self._explanations[op]

    @property
    def manifest(self) -> Manifest:
        """The choices of this set, serialisable and replayable."""
        device = {
            "vendor": self.device.vendor,
            "type": self.device.type,
            "name": self.device.name,
            "arch": self.device.arch,
        }
        ops = {
            name: {
                "chain": [
                    {"kernel": k.kernel.name, "plugin": k.kernel.plugin, "version": k.kernel.version}
                    for k in explanation.chain
                ],
                "refused": {v.kernel.id: v.refused for v in explanation.verdicts if v.refused},
            }
            for name, explanation in self._explanations.items()
        }
        return Manifest(device, ops, {"torch": torch.__version__, **self.device.versions})


def bind(device: str | torch.device | DeviceInfo | None = None, policy: Policy | None = None) -> OpSet:
    """The ops of ``device`` under ``policy``.

    device: a torch device; None means the only accelerator present, else the host. policy: its fields beat the
    ``TORCH_HAL_*`` variables, which beat the file that ``TORCH_HAL_POLICY`` names.
    Raises DeviceUnavailable, PolicyError, or Unsupported where a requirement cannot be met; every other fallback
    is one `FallbackWarning` an op.
    """
    from .policy import resolve

    registry = plugins.discover()
    policy = resolve(policy)
    info = detect.find(device, registry)
    offered = _offered(registry, policy)
    trace = Trace() if policy.trace else None
    explanations = {name: select(op, info, offered[name], policy) for name, op in declared().items()}
    for name, explanation in explanations.items():
        _report_fallback(name, explanation, policy)
    return OpSet(info, policy, explanations, trace)


def explain(
    op: str, device: str | torch.device | DeviceInfo | None = None, policy: Policy | None = None
) -> Explanation:
    """Why ``op`` runs what it runs on ``device`` under ``policy``, without binding the other ops."""
    from .policy import resolve

    if op not in declared():
        raise PolicyError(f"no op '{op}'; see `torch-hal ops`")
    registry = plugins.discover()
    policy = resolve(policy)
    info = detect.find(device, registry)
    return select(declared()[op], info, _offered(registry, policy)[op], policy)


def _offered(registry: plugins.Registry, policy: Policy) -> dict[str, list[Kernel]]:
    """Every kernel by op, derived and native ones too. Raises PolicyError for a pattern that means none of them."""
    offered = by_name([*with_twins(registry.kernels, dict(declared())), *native.native_kernels()])
    absent = {plugin.name: plugin.error for plugin in registry.plugins if plugin.state != "loaded"}
    policy.check_patterns(declared(), [k for kernels in offered.values() for k in kernels], absent)
    return offered


def _report_fallback(name: str, explanation: Explanation, policy: Policy) -> None:
    """One warning, or Unsupported where the policy says so, if what should have come first was refused."""
    from .policy import names

    chosen = explanation.chosen
    assert chosen is not None
    ahead = explanation.verdicts[: explanation.verdicts.index(chosen)]
    preferred = policy.matching(policy.prefer, name)
    to_native = chosen.kernel.plugin == native.NATIVE
    missed = [
        verdict
        for verdict in ahead
        if verdict.refused
        and (
            verdict.cause in (Cause.BROKEN, Cause.LAYOUT)
            or (to_native and verdict.cause in (Cause.ARCH, Cause.MISSING))
            or (verdict.cause is not Cause.POLICY and any(names(pattern, verdict.kernel) for pattern in preferred))
        )
    ]
    if not missed:
        return
    wanted, why = missed[0].kernel.id, "; ".join(f"{v.kernel.id}: {v.refused}" for v in missed)
    message = f"{name} on {explanation.device} falls back from {wanted} to {chosen.kernel.id}: {why}"
    if policy.fallback == "error":
        raise Unsupported(f"{message} (policy.fallback is 'error')")
    warnings.warn(message, FallbackWarning, stacklevel=3)


def _bound_op(op: Op[..., Any], explanation: Explanation, ops: OpSet) -> Any:
    chain = [_compilable(loaded, op, ops.device) for loaded in explanation.chain]
    fallback = Fallback(op, ops.torch_device, ops.policy)
    bound: Any = build_frame(op, chain, ops.policy, ops.trace, fallback)
    bound.op, bound.explanation, bound.kernel = op, explanation, chain[0].kernel
    bound.formats = dict(chain[0].kernel.formats)
    bound.specialize = functools.partial(specialize, op, chain, ops.policy, ops.trace, fallback)
    if op.prepare is not None:
        bound.prepare = functools.partial(prepare, op, chain, fallback)
    if op.plan is not None:
        plan = chain[0].plan or op.plan
        bound.plan = functools.partial(_plan, op, plan, chain[0].kernel.layout if chain[0].plan else PLAIN)
    return bound


def _compilable(loaded: Loaded, op: Op[..., Any], device: DeviceInfo) -> Loaded:
    """An opaque kernel becomes a torch op of its own for compilers; eager calls keep bypassing it."""
    return loaded if Trait.TRACEABLE in loaded.kernel.traits else with_torch_op(loaded, op, device)


def _plan(op: Op[..., Any], plan: Callable[..., Any], layout: str, *args: Any, **kwargs: Any) -> Prepared:
    return prepared(f"plan of {op.name}", plan(*args, **kwargs), layout, 1)
