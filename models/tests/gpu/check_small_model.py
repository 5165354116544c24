"""Check the trained model on real kernels: ``python models/tests/gpu/check_small_model.py [--ranks N] [--json]``.

The native model writes a text greedily; the model on the kernels that selection prefers goes through it a decode step
at a time. Its logits must be as close to those of the weights in float32 as native torch's are (rms error at most 1.25
times). In bf16 it must also choose the same bytes wherever native torch's two best logits are further apart than two
units in the last place; in FP8 a code at a tie flips with any rounding before it, so that more choices may differ, and
are counted. With several ranks, bf16 runs tensor parallel and FP8 expert parallel, so that all_reduce takes part.
Prints which kernels ran how often, agreement, bits per byte and tokens/s; exits 1 if something does not hold, or if a
kernel that should have run did not. ``--device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from austen.evaluate import bits_per_byte
from austen.ngram import HELD_OUT, HERE

import torch_hal as hal
from torch_hal.runtime import Runtime
from torch_hal_deepseek import DeepSeek, Parallel, Sequence, load

BOTH = {("fused_add_rms_norm_", "sgl_kernel"), ("mla_decode", "flash_mla")}
EXPECTED = {
    "bf16": BOTH,
    "fp8": BOTH | {("fp8_block_linear", "deep_gemm"), ("per_token_group_quant_fp8", "sgl_kernel")},
}
PROMPTS = ("It was a truth which Anne ", "Captain Wentworth ", "She had been ", "Mr. Elliot ")
ULPS = 2
NATIVE = hal.Policy(prefer={"*": "native"})


def ids_of(model: DeepSeek, text: bytes) -> list[int]:
    return [model.config.bos_token_id or 0, *text]


def choices(model: DeepSeek, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits [len(answer), W] before each id of the answer: one prefill, then a decode step an id."""
    cache, sequence = model.new_cache(len(prompt) + len(answer)), Sequence()
    steps = [model.prefill([prompt], [sequence], cache)]
    steps += [model.decode(torch.tensor([[i]]), [sequence], cache)[:, -1] for i in answer[:-1]]
    return torch.cat(steps).float().cpu()


def agreement(fast: DeepSeek, native: DeepSeek, exact: DeepSeek, count: int) -> dict[str, Any]:
    same = ties = different = 0
    errors = {"fast": 0.0, "native": 0.0}
    for prompt in PROMPTS:
        ids = ids_of(native, prompt.encode())
        text = list(native.generate(ids, max_new_tokens=count))
        ours, theirs, true = (choices(model, ids, text) for model in (fast, native, exact))
        errors["fast"] += float((ours - true).square().sum())
        errors["native"] += float((theirs - true).square().sum())
        best, second = theirs.topk(2).values.unbind(-1)
        tie = best - second <= ULPS * 2.0 ** (best.abs().log2().floor() - 7)  # bf16 keeps 8 bits
        equal = ours.argmax(-1) == theirs.argmax(-1)
        same, ties, different = (
            same + int(equal.sum()),
            ties + int((~equal & tie).sum()),
            different + int((~equal & ~tie).sum()),
        )
    ratio = (errors["fast"] / errors["native"]) ** 0.5
    return {"same": same, "differ_at_ties": ties, "differ": different, "error_ratio": ratio}


def compare(name: str, device: str, parallel: Parallel | None, count: int) -> dict[str, Any]:
    path = HERE / name
    fast = load(path, device=device, policy=hal.Policy(trace=True), parallel=parallel)
    native = load(path, device=device, policy=NATIVE, parallel=parallel)
    exact = load(path, device=device, dtype=torch.float32, dequantize=True, policy=NATIVE, parallel=parallel)
    agreed = agreement(fast, native, exact, count)
    text = HELD_OUT.read_bytes()[:8192]
    report = {"checkpoint": name, "agreement": agreed}
    report["bits_per_byte"] = {"fast": bits_per_byte(fast, text), "native": bits_per_byte(native, text)}
    assert fast.ops.trace is not None
    ran = {(op, kernel.rpartition(".")[2]): n for (op, kernel), n in fast.ops.trace.counts().items()}
    wanted = EXPECTED[name] | ({("all_reduce", "nccl")} if parallel else set()) if device != "cpu" else set()
    report["kernels"] = {f"{op}: {kernel}": n for (op, kernel), n in ran.items() if kernel != "native"}
    report["missing"] = sorted(f"{op}: {kernel}" for op, kernel in wanted - set(ran))
    report["tokens_per_second"] = {"fast": speed(fast), "native": speed(native)}
    close = agreed["error_ratio"] <= 1.25
    report["holds"] = close and not report["missing"] and (name == "fp8" or agreed["differ"] == 0)
    return report


def speed(model: DeepSeek, count: int = 64) -> float:
    """Tokens a second of `generate`, each waited for."""
    ids = ids_of(model, PROMPTS[0].encode())
    start = time.perf_counter()
    made = len(list(model.generate(ids, max_new_tokens=count)))
    return made / (time.perf_counter() - start)


def rank_main(rank: int, ranks: int, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    device = options.device if options.device == "cpu" else f"{options.device}:{rank}"
    if options.device != "cpu":
        torch.get_device_module(options.device).set_device(rank)
    info = hal.bind(device).device
    group = Runtime(info).init_process_group(rank=rank, world_size=ranks) if ranks > 1 else None
    several = {"bf16": Parallel(tp_group=group), "fp8": Parallel(ep_group=group)} if group else {}
    reports = [compare(name, device, several.get(name), options.tokens) for name in EXPECTED]
    if group:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        show(options, info, ranks, reports)
    if not all(report["holds"] for report in reports):
        sys.exit(1)


def show(options: argparse.Namespace, device: hal.DeviceInfo, ranks: int, reports: list[dict[str, Any]]) -> None:
    if options.json:
        head = {"date": datetime.date.today().isoformat(), "device": device.name, "ranks": ranks}
        print(json.dumps({**head, "versions": dict(device.versions), "reports": reports}, indent=2))
        return
    print(f"{device.name}, {ranks} rank(s)")
    for report in reports:
        print(f"{report['checkpoint']}: {'ok' if report['holds'] else 'FAIL'}")
        for key in ("agreement", "bits_per_byte", "kernels", "missing", "tokens_per_second"):
            print(f"    {key:18} {report[key]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cuda", help="a torch device type")
    parser.add_argument("--tokens", type=int, default=200, help="of each of four texts")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    if options.ranks == 1:
        rank_main(0, 1, options)
    else:
        mp.spawn(rank_main, (options.ranks, options), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
