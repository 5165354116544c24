"""Check the CUDA backend's kernels on a real GPU: ``python backends/tests/cuda/check_on_gpu.py [--json] [--ranks N]``.

Each kernel is bound, explained, right against its op's reference in float64, traced, repeatable, compiled whole, a
registered torch op, and captured in a graph that is replayed on new values; then come its own corner cases. Prints a
table; exits 1 if anything failed, 2 if there is no NVIDIA GPU. ``--ranks N`` repeats all_reduce over N GPUs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing as mp
from gpu_cases import CASES, LINEAR, REDUCE
from gpu_checks import Outcome, check, process_group

import torch_hal as hal
from torch_hal.errors import DeviceUnavailable
from torch_hal.plugins import discover


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print outcomes, device and versions as JSON")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs over which all_reduce is checked as well")
    options = parser.parse_args()
    _add_plugin()
    try:
        device = hal.bind("cuda:0").device
    except DeviceUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    if not options.json:
        print(f"{device.name}, {device.arch}, {', '.join(f'{k} {v}' for k, v in device.versions.items())}")
    outcomes = []
    for outcome in run(options.ranks):
        outcomes.append(outcome)
        op, kernel, name, holds, seen = outcome
        if not options.json:
            print(f"{'ok  ' if holds else 'FAIL'} {op:26} {kernel:11} {name:30} {seen}", flush=True)
    if options.json:
        print(json.dumps(_report(device, outcomes), indent=2))
    failed = sum(not outcome[3] for outcome in outcomes)
    print(f"{len(outcomes)} checks, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def run(ranks: int) -> Iterator[Outcome]:
    """Every outcome, as it comes: on the first GPU, on the last while another is current, and over several."""
    with process_group("nccl"):
        for case in CASES:
            yield from check(case, torch.device("cuda:0"))
    if (last := torch.cuda.device_count() - 1) > 0:
        yield from _on_another(torch.device("cuda", last))
    if ranks > 1:
        yield REDUCE.op, REDUCE.kernel, f"{ranks} ranks", *_on_ranks(ranks)


def _on_another(device: torch.device) -> Iterator[Outcome]:
    """The kernels on a GPU while another is current; DeepGEMM, which serves one a process, must say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hal.FallbackWarning)
        for case in (case for case in CASES if case not in (REDUCE, LINEAR)):
            for op, kernel, name, *rest in check(case, device):
                yield op, kernel, f"{device}: {name}", *rest
        reasons = {v.kernel.name: v.refused or "" for v in hal.explain(LINEAR.op, device).verdicts}
    reason = reasons[LINEAR.kernel]
    yield LINEAR.op, LINEAR.kernel, f"{device}: refused", "one device a process" in reason, reason


def _on_ranks(ranks: int, seconds: float = 120) -> tuple[bool, str]:
    """One process a GPU; those that have not ended in time are ended."""
    processes = mp.spawn(_rank, (ranks,), nprocs=ranks, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(timeout=1):
            if time.monotonic() > deadline:
                return False, f"hangs: not done after {seconds:.0f} s"
    except Exception as error:
        return False, str(error).strip().splitlines()[-1]
    finally:
        for process in processes.processes:
            process.kill()
    return True, "sums, a graph's replays and compiled sums agree with float64 on every rank"


def _rank(rank: int, ranks: int) -> None:
    """One rank: the sum of what every rank holds, eager, compiled and replayed."""
    from torch_hal.runtime import Runtime

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    torch.cuda.set_device(rank)
    _add_plugin()
    ops = hal.bind(f"cuda:{rank}", hal.Policy(require={"all_reduce": "nccl"}))
    runtime = Runtime(ops.device)
    group = runtime.init_process_group(rank=rank, world_size=ranks)
    held = [REDUCE.make(ops, 10 + r)[0] for r in range(ranks)]
    exact = sum(x.double() for x in held)
    x = held[rank].clone()
    graph = runtime.capture(lambda: ops.all_reduce(x, group))
    x.fill_(torch.nan)
    graph.results.fill_(torch.nan)
    x.copy_(held[rank])
    graph.replay()
    compiled = torch.compile(lambda x: ops.all_reduce(x, group), fullgraph=True)
    bound = ranks * torch.finfo(x.dtype).eps / 2 * sum(x.double().abs() for x in held)
    for out in (ops.all_reduce(x, group), compiled(x), graph.results):
        assert ((out.double() - exact).abs() <= bound).all()
    del graph  # NCCL waits for graphs that hold its work before it ends a communicator
    torch.distributed.destroy_process_group()


def _add_plugin() -> None:
    """From a source tree without metadata the plugin is named by hand."""
    if not any(plugin.name == "cuda" for plugin in discover().plugins):
        import torch_hal_cuda

        hal.register(torch_hal_cuda, "cuda")


def _report(device: hal.DeviceInfo, outcomes: list[Outcome]) -> dict[str, Any]:
    fields = ("op", "kernel", "check", "holds", "seen")
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.name,
        "arch": device.arch,
        "versions": dict(device.versions),
        "outcomes": [dict(zip(fields, outcome, strict=True)) for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())
