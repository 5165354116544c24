"""A tour in a minute, on any machine: ``python -m torch_hal_deepseek.demo``.

What devices there are, which kernel each op got and why, and a small DeepSeek that goes on with a text: the trained one
of a checkout, or elsewhere one with random weights, whose words mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import torch_hal as hal

from .counts import counts
from .model import DeepSeek, load
from .random_weights import SMALL_CONFIG, random_checkpoint
from .tokenizer import Tokenizer, load_tokenizer

TRAINED = Path(__file__).resolve().parents[1] / "austen" / "bf16"  # in a checkout; a wheel has no weights
PROMPT = "It was a truth which Anne could not deny, that "


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_hal_deepseek.demo", description=__doc__)
    parser.add_argument("--device", default="cpu", help="a torch device; default: cpu")
    parser.add_argument("--model", type=Path, help="a checkpoint that reads text; default: the repository's, if there")
    parser.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT!r}")
    parser.add_argument("--new-tokens", type=int, default=240)
    arguments = parser.parse_args()

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(f"torch-hal {hal.__version__} on torch {torch.__version__}, {torch.get_num_threads()} CPU threads\n")
    console.print(device_table())
    ops = hal.bind(arguments.device)
    console.print(selection_table(ops))
    console.print(f"{ops}\n")
    path = arguments.model or (TRAINED if TRAINED.is_dir() else None)
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            model = load(random_checkpoint(folder, SMALL_CONFIG), ops=ops)
        console.print(
            "No trained checkpoint is at hand (a checkout has one): random weights, whose words mean nothing."
        )
        prompt = torch.randint(model.config.vocab_size, (256,), generator=torch.Generator().manual_seed(0)).tolist()
        speak(console, model, prompt, min(arguments.new_tokens, 32), None)
        return
    model = load(path, ops=ops)
    tokenizer = load_tokenizer(path, model.config)
    bos = model.config.bos_token_id
    prompt = [*([] if bos is None else [bos]), *tokenizer.encode(arguments.prompt)]
    speak(console, model, prompt, arguments.new_tokens, tokenizer)


def device_table() -> Table:
    table = Table("device", "vendor", "name", "arch", "memory", title="Devices", title_justify="left")
    for device in hal.devices():
        memory = f"{device.memory_total / 2**30:.0f} GiB" if device.memory_total else "?"
        table.add_row(str(device), device.vendor, device.name, device.arch or "unprobed", memory)
    return table


def selection_table(ops: hal.OpSet) -> Table:
    """One row an op: the kernel that runs, and why none of the other candidates does."""
    title = f"Which kernel runs on {ops.device}, and why"
    table = Table("op", "kernel", "band", "why", title=title, title_justify="left")
    for name in ops:
        explanation = ops.explain(name)
        assert explanation.chosen is not None  # or `bind` had raised
        kernel = explanation.chosen.kernel
        others = [f"{v.kernel.id}: {v.refused or v.role}" for v in explanation.verdicts if v.kernel is not kernel]
        table.add_row(name, kernel.id, kernel.band.name.lower(), "; ".join(others) or "the only one on offer")
    return table


def speak(console: Console, model: DeepSeek, prompt: list[int], new_tokens: int, tokenizer: Tokenizer | None) -> None:
    """Generate, and say how fast; then check the last step's choice against one pass without a cache."""
    console.print(f"{model.config.model_type}: {counts(model.config).total / 1e6:.1f} M parameters, {model.dtype}.\n")
    sampled: dict[str, Any] = {} if tokenizer is None else {"temperature": 0.7, "top_p": 0.95, "seed": 7}
    start, tokens, times = time.perf_counter(), [], []
    for token in model.generate(prompt, max_new_tokens=new_tokens, **sampled):
        tokens.append(token)
        times.append(time.perf_counter())
    if tokenizer is None:
        console.print(f"It answers {' '.join(map(str, tokens[:16]))} …", markup=False)
    else:
        console.print(tokenizer.decode(prompt + tokens), markup=False)
    console.print(f"\nprefill  {len(prompt) / (times[0] - start):8.1f} tokens/s")
    if len(times) > 1:
        console.print(f"decode   {(len(times) - 1) / (times[-1] - times[0]):8.1f} tokens/s")
    greedy = list(model.generate(prompt, max_new_tokens=16))
    logits = model.logits(prompt + greedy[:-1])[-1]
    best, chosen = float(logits.max()), float(logits[greedy[-1]])
    if chosen < best - 0.05 * abs(best):  # more than rounding in bf16 explains
        raise SystemExit(f"the demo failed: with a cache it says {greedy[-1]}, in one pass another id is far above")
    console.print("Checked: step by step with a cache, and in one pass over all tokens, it says the same.")


if __name__ == "__main__":
    main()
