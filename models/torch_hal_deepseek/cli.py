"""``python -m torch_hal_deepseek``: generate text, describe a checkpoint, make a random one."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torch_hal import HalError

from .config import load_config
from .counts import counts
from .model import DeepSeek, load
from .random_weights import random_checkpoint
from .tokenizer import TextStream, Tokenizer, load_tokenizer

app = typer.Typer(
    help="DeepSeek V2 and V3 on any device with torch-hal kernels, chosen as TORCH_HAL_* variables say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Dtype(enum.StrEnum):
    """What weights and activations may be computed in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


Model = Annotated[Path, typer.Option("--model", help="Directory of the checkpoint.", metavar="DIR")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids to continue instead: 1,2,3")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="How many tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that make up this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens this likely, relative to the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal text.")] = None,
    device: Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1, musa.")] = "cpu",
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the checkpoint's.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt."""
    if (prompt is None) == (ids is None):
        raise typer.BadParameter("give either --prompt or --ids")
    with _errors_on_stderr():
        tokenizer = None if prompt is None else load_tokenizer(model, load_config(model))
        prompt_ids = tokenizer.encode(prompt) if tokenizer and prompt is not None else _parse_ids(ids or "")
        loaded = load(model, device=device, dtype=getattr(torch, dtype) if dtype else None)
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        tokens = loaded.generate(prompt_ids, max_new_tokens, **sampling)  # type: ignore[arg-type]
        result = _run(loaded, tokens, tokenizer, show=not as_json)
    if as_json:
        print(json.dumps({"prompt_ids": prompt_ids, **result}))
    else:
        count, speed, first = len(result["ids"]), result["tokens_per_second"], result["seconds_to_first_token"]
        rate = f"{speed:.1f} tokens/s" if speed else "no rate"
        print(f"[{count} tokens, first after {first:.2f} s, then {rate}, on {result['device']}]", file=sys.stderr)


@app.command()
def info(model: Model, as_json: Json = False) -> None:
    """Describe a checkpoint's configuration and count its parameters."""
    with _errors_on_stderr():
        config = load_config(model)
    counted = dataclasses.asdict(counts(config))
    if as_json:
        print(json.dumps({"config": config.model_dump(), "counts": counted}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model} ({config.model_type})", title_justify="left")
    table.add_column("elements")
    table.add_column("count", justify="right")
    for name, value in counted.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)


@app.command("random")
def make_random(
    config: Annotated[Path, typer.Option(help="A config.json, or a directory that holds one.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.")] = 0,
) -> None:
    """Write a checkpoint with random weights."""
    with _errors_on_stderr():
        random_checkpoint(out, load_config(config), seed)
    print(out)


def _run(model: DeepSeek, tokens: Iterator[int], tokenizer: Tokenizer | None, show: bool) -> dict[str, Any]:
    """Iterate, printing as tokens come if ``show``; what happened, for --json."""
    stream = TextStream(tokenizer) if tokenizer else None
    ids: list[int] = []
    pieces: list[str] = []
    started = first = time.perf_counter()

    def emit(piece: str) -> None:
        pieces.append(piece)
        if show:
            print(piece, end="", flush=True)

    for token in tokens:
        first = time.perf_counter() if not ids else first
        ids.append(token)
        if stream is None:
            emit(f"{token} ")
        elif token not in model.config.eos_ids:
            emit(stream.push(token))
    ended = time.perf_counter()
    emit(stream.finish() if stream else "")
    if show:
        print()
    return {
        "ids": ids,
        "text": "".join(pieces) if stream else None,
        "seconds_to_first_token": first - started,
        "tokens_per_second": (len(ids) - 1) / (ended - first) if len(ids) > 1 else None,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "manifest": model.ops.manifest.digest,
    }


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--ids: expected integers such as 1,2,3, got {text!r}") from None


@contextmanager
def _errors_on_stderr() -> Iterator[None]:
    """What a user can mend is one line on stderr and exit code 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (HalError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
