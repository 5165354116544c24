"""Train the small model: two minutes on one H200.

    python -m austen.train r-cran-janeaustenr_1.0.0-1_all.deb austen/bf16

Needs torch and safetensors only. Writes a Hugging Face checkpoint (``config.json``, ``model.safetensors``) into the
folder, and what it prints also into a .log file of the folder's name beside it. The weights kept are those of the best
step on the validation text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .architecture import BOS, CONFIG, EOS, DeepSeekV3, Gate
from .corpus import CHAPTER_END, read

# As DeepSeek-V3 was trained: how much the loss two tokens ahead weighs, in the first two thirds of the steps and in the
# last; and by how much the routers' biases move after a batch, until the last tenth, when the routing is left alone.
MTP_WEIGHTS = 0.3, 0.1
BALANCE_STEP = 1e-3


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(arguments.device)
    config = CONFIG | dict(json.loads(arguments.config))
    corpus = read(arguments.package)
    train, validation = encode(corpus.train).to(device), encode(corpus.validation).to(device)
    model = DeepSeekV3(config, arguments.dropout).to(device)
    log = Log(Path(f"{arguments.folder}.log"))
    log(f"{vars(arguments)}\n{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} training tokens")
    fit(model, train, validation, arguments, log)
    write(model, config, arguments.folder)
    files = sorted(arguments.folder.iterdir())
    log(", ".join(f"{file.name} {file.stat().st_size:,} bytes" for file in files))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="r-cran-janeaustenr_*.deb")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--config", default="{}", help="JSON: what to change in architecture.CONFIG")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32, help="sequences")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.3, help="weight decay, of matrices")
    parser.add_argument("--every", type=int, default=250, help="steps between validations")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Log:
    """Prints, to a file as well."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self.path = path

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            print(line, file=file)


def encode(text: str) -> Tensor:
    """Bytes, each chapter between a begin and an end."""
    chapters = text.split(CHAPTER_END)
    return torch.tensor([i for chapter in chapters for i in (BOS, *chapter.encode("utf-8"), EOS)])


def fit(model: DeepSeekV3, train: Tensor, validation: Tensor, arguments: argparse.Namespace, log: Log) -> None:
    a = arguments
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": a.decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=a.rate, betas=(0.9, 0.95), fused=train.is_cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / a.steps))
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    loss = torch.compile(model.loss) if a.compile else model.loss
    best: tuple[float, dict[str, Tensor]] = (math.inf, {})
    started = time.perf_counter()
    for step in range(1, a.steps + 1):
        with torch.autocast(train.device.type, torch.bfloat16):
            next_nats, second_nats = loss(sample(train, a.batch, a.length))
        (next_nats + MTP_WEIGHTS[step > a.steps * 2 / 3] * second_nats).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        balance = [gate.rebalance(BALANCE_STEP if step < 0.9 * a.steps else 0.0) for gate in gates]
        if step % a.every == 0 or step == a.steps:
            bits = validate(model, validation, a.length)
            if bits[0] < best[0]:
                best = (bits[0], {name: tensor.clone() for name, tensor in model.state_dict().items()})
            log(
                f"step {step:5}  {time.perf_counter() - started:6.1f} s  bits/byte: training "
                f"{next_nats.item() / math.log(2):.4f}, validation {bits[0]:.4f} and {bits[1]:.4f} two ahead; "
                f"largest load {', '.join(f'{load:.2f}' for load in map(float, balance))}"
            )
    model.load_state_dict(best[1])
    log(f"kept the step of {best[0]:.4f} bits/byte on the validation text")


def rate(progress: float) -> float:
    """Of the learning rate: a linear rise over 3 %, then half a cosine down to 1 %."""
    return min(progress / 0.03, 0.505 + 0.495 * math.cos(math.pi * min(progress, 1.0)))


def sample(tokens: Tensor, batch: int, length: int) -> Tensor:
    """Sequences from anywhere: [batch, length + 1]."""
    starts = torch.randint(len(tokens) - length, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length + 1, device=tokens.device)]


@torch.no_grad()
def validate(model: DeepSeekV3, tokens: Tensor, length: int) -> tuple[float, float]:
    """Bits per token, one and two ahead, over sequences side by side."""
    model.eval()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        nats = [float(n) for n in model.loss(tokens.unfold(0, length + 1, length))]
    model.train()
    return nats[0] / math.log(2), nats[1] / math.log(2)


def write(model: DeepSeekV3, config: dict[str, Any], folder: Path) -> None:
    """bfloat16, but for the routers' biases. What the prediction layer shares with the model is not written twice."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: tensor.detach().cpu().to(torch.float32 if name.endswith("_bias") else torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
