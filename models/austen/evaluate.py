"""How well the small model predicts the held-out text, beside the n-gram model, and how well its MTP layer drafts.

python -m austen.evaluate            # bf16 and fp8
python -m austen.evaluate FOLDER...  # other checkpoints with byte vocabularies
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from torch_hal_deepseek import DeepSeek, draft_acceptance, load

from .ngram import HELD_OUT, HERE, ORDER, KneserNey
from .ngram import load as load_counts

CHECKPOINTS = HERE / "bf16", HERE / "fp8"
OVERLAP = 256  # tokens that a window starts with and does not predict, so that all but the first have a context


def bits_per_byte(model: DeepSeek, text: bytes, overlap: int = OVERLAP) -> float:
    """Of ``text`` after a begin of sequence, in windows as long as the model's positions."""
    ids = torch.tensor([model.config.bos_token_id, *text])
    window, predicted, nats = model.config.max_positions, 0, 0.0
    while predicted < len(text):
        start = max(0, predicted - overlap)
        logits = model.logits(ids[start : start + window][: len(text) - start])[predicted - start :]
        targets = ids[predicted + 1 :][: len(logits)].to(logits.device)
        nats += float(F.cross_entropy(logits, targets, reduction="sum"))
        predicted += len(logits)
    return nats / math.log(2) / len(text)


def acceptance(model: DeepSeek, text: bytes) -> float:
    """The share of drafted bytes that the model would have chosen too, over windows of ``text`` side by side."""
    window = model.config.max_positions
    ids = torch.tensor([model.config.bos_token_id, *text])
    parts = [part for part in ids.split(window) if len(part) > 2]
    drafts = [len(part) - 2 for part in parts]
    rates = [draft_acceptance(model, part) for part in parts]
    return sum(rate * count for rate, count in zip(rates, drafts, strict=True)) / sum(drafts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="*", default=CHECKPOINTS, help="default: bf16 and fp8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bytes", type=int, help="how many of the held-out text's; default: all")
    arguments = parser.parse_args()
    text = HELD_OUT.read_bytes()[: arguments.bytes]
    print(f"{HELD_OUT.name}, {len(text)} bytes")
    print(f"order-{ORDER} n-gram  {KneserNey(load_counts()).bits_per_byte(text):.4f} bits per byte", flush=True)
    for path in arguments.checkpoints:
        model = load(path, device=arguments.device, mtp=True)
        bits, accepted = bits_per_byte(model, text), acceptance(model, text)
        print(f"{path.name:<14} {bits:.4f} bits per byte, {accepted:.1%} of drafts accepted", flush=True)


if __name__ == "__main__":
    main()
