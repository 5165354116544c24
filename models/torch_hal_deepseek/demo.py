"""A tour in a minute, on any machine: ``python -m torch_hal_deepseek.demo``.

What devices there are, which kernel each op got and why, and a small DeepSeek with random weights that generates
from a checkpoint written a moment before. It shows that all the parts work together; what it says means nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import torch_hal as hal

from .counts import counts
from .model import DeepSeek, load
from .random_weights import random_checkpoint

# DeepSeek-V3's structure on a laptop's scale: latent attention with a compressed query, YaRN positions, a dense layer,
# then experts in groups, chosen by sigmoid scores with a correction bias, beside a shared one.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_hal_deepseek.demo", description=__doc__)
    parser.add_argument("--device", default="cpu", help="a torch device; default: cpu")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(f"torch-hal {hal.__version__} on torch {torch.__version__}, {torch.get_num_threads()} CPU threads\n")
    console.print(device_table())
    ops = hal.bind(arguments.device)
    console.print(selection_table(ops))
    console.print(f"{ops}\n")
    with tempfile.TemporaryDirectory() as folder:
        model = load(random_checkpoint(folder, CONFIG), ops=ops)
    console.print(f"DeepSeek-V3 in small: {counts(model.config).total / 1e6:.1f} M random weights, {model.dtype}.")
    generate(console, model, arguments.prompt_tokens, arguments.new_tokens)


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


def generate(console: Console, model: DeepSeek, prompt_tokens: int, new_tokens: int) -> None:
    """Generate greedily, and say how fast; then check the last step against one pass without a cache."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (prompt_tokens,), generator=generator).tolist()
    start = time.perf_counter()
    tokens, times = [], []
    for token in model.generate(prompt, max_new_tokens=new_tokens):
        tokens.append(token)
        times.append(time.perf_counter())
    console.print(f"Prompt of {prompt_tokens} random tokens; it answers {' '.join(map(str, tokens[:16]))} …")
    console.print(f"prefill  {prompt_tokens / (times[0] - start):8.1f} tokens/s")
    if len(times) > 1:
        console.print(f"decode   {(len(times) - 1) / (times[-1] - times[0]):8.1f} tokens/s")
    again = int(model.logits(prompt + tokens[:-1])[-1].argmax())
    if again != tokens[-1]:
        raise SystemExit(f"the demo failed: the last token is {tokens[-1]} with a cache and {again} in one pass")
    console.print(f"The last token, {again}, is also what one pass over all tokens gives.")


if __name__ == "__main__":
    main()
