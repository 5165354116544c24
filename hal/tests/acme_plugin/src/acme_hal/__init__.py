"""A third party's whole plugin: what it offers, named but not imported until it is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from torch_hal import Band, Kernel, Requires, Trait, hookimpl


@hookimpl
def torch_hal_kernels() -> Iterable[Kernel]:
    yield Kernel(
        "rms_norm",
        "acme",
        run="acme_hal.norm:rms_norm",
        static="acme_hal.norm:refuse_static",
        requires=Requires(vendor="cpu"),
        traits=frozenset({Trait.DETERMINISTIC, Trait.TRACEABLE}),
        band=Band.TUNED,
    )
