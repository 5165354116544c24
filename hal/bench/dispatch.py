"""What a call costs before the kernel runs, beside a plain call and torch.library, in one process.

    python hal/bench/dispatch.py [--json] [--rounds N]

Every variant is timed in turn, round after round; a figure is the median over rounds, and ratios are taken within
a round. "no-op" kernels return their first argument, so they show the dispatch alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_hal as hal

TARGETS = {
    "specialized_added_us": 0.15,
    "specialized_dynamic_added_us": 1.0,
    "unspecialized_added_us": 1.0,
    "native_over_reference": 1.05,
    "native_validated_over_reference": 1.15,
    "import_seconds_beyond_torch": 0.15,
    "discover_and_list_seconds": 0.1,
}


def noop(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def never(x: Tensor, weight: Tensor, eps: float) -> str | None:
    return "too many rows" if x.shape[0] > 1_000_000 else None


class Bench:
    """A plugin with two no-op kernels, one of which may refuse."""

    @hal.hookimpl
    def torch_hal_kernels(self) -> list[hal.Kernel]:
        return [
            hal.Kernel("rms_norm", "noop", run=noop, band=hal.Band.LIBRARY),
            hal.Kernel("rms_norm", "noop_dynamic", run=lambda x, weight, eps: x, dynamic=never, band=hal.Band.LIBRARY),
        ]


def variants() -> dict[str, Callable[[], Any]]:
    """Name -> one call."""
    x, weight, eps = torch.randn(1, 2048), torch.randn(2048), 1e-6
    hal.register(Bench(), "bench")

    def bound(kernel: str, validation: bool) -> hal.OpSet:
        return hal.bind(
            "cpu",
            hal.Policy(require={"rms_norm": ("native", kernel)}, prefer={"rms_norm": kernel}, validation=validation),
        )

    plain, checked = bound("noop", False), bound("noop", True)
    dynamic, native, native_checked = bound("noop_dynamic", False), bound("native", False), bound("native", True)
    specialized = plain.rms_norm.specialize(x.to("meta"), weight.to("meta"), eps)
    specialized_dynamic = dynamic.rms_norm.specialize(x.to("meta"), weight.to("meta"), eps)
    reference = hal.ops.rms_norm.reference
    custom = torch.library.custom_op("torch_hal_bench::noop", mutates_args=())(_like)
    custom.register_fake(_like)
    library = torch.library.Library("torch_hal_bench", "FRAGMENT")
    library.define("defined(Tensor x, Tensor weight, float eps) -> Tensor")
    library.impl("defined", _like, "CPU")
    variants.library = library  # type: ignore[attr-defined]  # keeps the registration alive
    defined = torch.ops.torch_hal_bench.defined.default
    return {
        "plain": lambda: noop(x, weight, eps),
        "specialized": lambda: specialized(x, weight, eps),
        "specialized_dynamic": lambda: specialized_dynamic(x, weight, eps),
        "unspecialized": lambda: plain.rms_norm(x, weight, eps),
        "unspecialized_dynamic": lambda: dynamic.rms_norm(x, weight, eps),
        "validated": lambda: checked.rms_norm(x, weight, eps),
        "plain_empty_like": lambda: _like(x, weight, eps),
        "torch_library_define_impl": lambda: defined(x, weight, eps),
        "torch_library_custom_op": lambda: custom(x, weight, eps),
        "reference_rms_norm": lambda: reference(x, weight, eps),
        "native_rms_norm": lambda: native.rms_norm(x, weight, eps),
        "native_rms_norm_validated": lambda: native_checked.rms_norm(x, weight, eps),
    }


def _like(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def measure(rounds: int) -> dict[str, Any]:
    """Median microseconds of each variant, and the ratios and differences that the targets speak of."""
    calls = variants()
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, call in calls.items():
                number = 400 if "rms_norm" in name or "torch_library" in name else 4000
                times[name].append(timeit.timeit(call, number=number) / number * 1e6)

    def paired(a: str, b: str, combine: Callable[[float, float], float]) -> float:
        return statistics.median(combine(x, y) for x, y in zip(times[a], times[b], strict=True))

    def difference(a: str, b: str) -> float:
        return paired(a, b, lambda x, y: x - y)

    def ratio(a: str, b: str) -> float:
        return paired(a, b, lambda x, y: x / y)

    return {
        "microseconds": {name: statistics.median(values) for name, values in times.items()},
        "specialized_added_us": difference("specialized", "plain"),
        "specialized_dynamic_added_us": difference("specialized_dynamic", "plain"),
        "unspecialized_added_us": difference("unspecialized", "plain"),
        "unspecialized_dynamic_added_us": difference("unspecialized_dynamic", "plain"),
        "validation_added_us": difference("validated", "unspecialized"),
        "native_over_reference": ratio("native_rms_norm", "reference_rms_norm"),
        "native_validated_over_reference": ratio("native_rms_norm_validated", "reference_rms_norm"),
        "define_impl_over_plain": ratio("torch_library_define_impl", "plain_empty_like"),
        "custom_op_over_plain": ratio("torch_library_custom_op", "plain_empty_like"),
    }


def start_up(rounds: int = 7) -> dict[str, float]:
    """Seconds of import and of discovery, each in fresh interpreters."""
    code = (
        "import time, torch; a = time.perf_counter(); import torch_hal; b = time.perf_counter();"
        "from torch_hal import plugins; plugins.discover().kernels; c = time.perf_counter(); print(b - a, c - b)"
    )
    runs = [
        [float(v) for v in subprocess.check_output([sys.executable, "-c", code], text=True).split()]
        for _ in range(rounds)
    ]
    imports, listings = zip(*runs, strict=True)
    return {
        "import_seconds_beyond_torch": statistics.median(imports),
        "discover_and_list_seconds": statistics.median(listings),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds (default 25)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(arguments.rounds) | start_up()
    result |= {
        "targets": TARGETS,
        "met": {name: result[name] <= limit for name, limit in TARGETS.items()},
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for name, value in result["microseconds"].items():
        print(f"{name:28} {value:8.3f} us")
    for name, limit in TARGETS.items():
        print(f"{name:32} {result[name]:8.3f}  target {limit:<5} {'met' if result['met'][name] else 'MISSED'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
