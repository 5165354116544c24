"""What of torch holds for a whole process: a backend may change it for itself, but not for the suite that judges it.

Imported before any backend is, so that `BEGINNING` is how torch itself begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

_TINY = torch.tensor(1e-40)  # a subnormal number


@dataclass(frozen=True)
class State:
    """Settings that change what other kernels, or native torch, compute."""

    default_dtype: Any
    default_device: Any
    grad: bool
    inference: bool
    deterministic: tuple[bool, bool]
    fill: bool
    matmul_precision: str
    flushes_denormals: bool
    threads: int
    random: int

    @classmethod
    def now(cls) -> State:
        return cls(
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            fill=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            matmul_precision=torch.get_float32_matmul_precision(),
            flushes_denormals=bool((_TINY * 1.0 == 0).item()),
            threads=torch.get_num_threads(),
            random=hash(torch.get_rng_state().numpy().tobytes()),
        )

    def changes(self, after: State) -> list[str]:
        """What differs, as a person should read it."""
        found = []
        for field in fields(self):
            before, now = getattr(self, field.name), getattr(after, field.name)
            if before != now:
                name = field.name.replace("_", " ")
                found.append("random numbers" if field.name == "random" else f"{name}: {before} before, {now} after")
        return found

    def restore(self) -> None:
        """Everything but random numbers, of which nothing here depends, and inference mode, which is a scope."""
        torch.set_default_dtype(self.default_dtype)
        torch.set_default_device(None if self.default_device == torch.device("cpu") else self.default_device)
        torch.set_grad_enabled(self.grad)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_flush_denormal(self.flushes_denormals)
        torch.set_num_threads(self.threads)


BEGINNING = State.now()


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Within, torch is as it began, whatever a backend made of it when it was imported."""
    before = State.now()
    torch.set_float32_matmul_precision(BEGINNING.matmul_precision)
    torch.set_default_dtype(BEGINNING.default_dtype)
    torch.set_flush_denormal(BEGINNING.flushes_denormals)
    try:
        yield
    finally:
        before.restore()
