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
import warnings
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
    outcomes = run(options.ranks)
    if options.json:
        print(json.dumps(_report(device, outcomes), indent=2))
    else:
        print(f"{device.name}, {device.arch}, {', '.join(f'{k} {v}' for k, v in device.versions.items())}")
        for op, kernel, name, holds, seen in outcomes:
            print(f"{'ok  ' if holds else 'FAIL'} {op:26} {kernel:11} {name:30} {seen}")
    failed = sum(not outcome[3] for outcome in outcomes)
    print(f"{len(outcomes)} checks, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def run(ranks: int) -> list[Outcome]:
    """Every outcome: on the first GPU, on the last while another is current, and over several."""
    with process_group("nccl"):
        outcomes = [outcome for case in CASES for outcome in check(case, torch.device("cuda:0"))]
    if (last := torch.cuda.device_count() - 1) > 0:
        outcomes += _on_another(torch.device("cuda", last))
    if ranks > 1:
        outcomes.append((REDUCE.op, REDUCE.kernel, f"{ranks} ranks", *_on_ranks(ranks)))
    return outcomes


def _on_another(device: torch.device) -> list[Outcome]:
    """The kernels on a GPU while another is current; DeepGEMM, which serves one a process, must say so."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hal.FallbackWarning)
        for case in (case for case in CASES if case not in (REDUCE, LINEAR)):
            outcomes += [(op, kernel, f"{device}: {name}", *rest) for op, kernel, name, *rest in check(case, device)]
        refused = {v.kernel.name: v.refused or "" for v in hal.explain(LINEAR.op, device).verdicts}
    reason = refused[LINEAR.kernel]
    return [*outcomes, (LINEAR.op, LINEAR.kernel, f"{device}: refused", "one device a process" in reason, reason)]


def _on_ranks(ranks: int) -> tuple[bool, str]:
    try:
        mp.spawn(_rank, (ranks,), nprocs=ranks)
    except Exception as error:
        return False, str(error).strip().splitlines()[-1]
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
