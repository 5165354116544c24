"""``python -m torch_hal_deepseek``: generate text, describe a checkpoint, quantise it, make a random one."""

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

from .checkpoint import INDEX
from .config import load_config, parse_config
from .counts import counts
from .model import DeepSeek, load
from .quantize import quantize_checkpoint
from .random_weights import SMALL_CONFIG, random_checkpoint
from .tokenizer import TextStream, Tokenizer, load_tokenizer

READER_GONE = 141  # what a shell reports for a program that ended since nobody read on: 128 + SIGPIPE

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
    dtype: Annotated[Dtype | None, typer.Option(help="Of all that is not FP8. Default: the checkpoint's.")] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Turn FP8 weights into --dtype.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt."""
    if (prompt is None) == (ids is None):
        raise typer.BadParameter("give either --prompt or --ids")
    with _errors_on_stderr():
        tokenizer = None if prompt is None else load_tokenizer(model, load_config(model))
        prompt_ids = tokenizer.encode(prompt) if tokenizer and prompt is not None else _parse_ids(ids or "")
        loaded = load(model, device=device, dtype=getattr(torch, dtype) if dtype else None, dequantize=dequantize)
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        tokens = loaded.generate(prompt_ids, max_new_tokens, **sampling)  # type: ignore[arg-type]
        result = _run(loaded, tokens, tokenizer, show=not as_json)
        if as_json:
            print(json.dumps({"prompt_ids": prompt_ids, **result}))
            return
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
        else:
            print(_table(f"{model} ({config.model_type})", counted), end="")


@app.command("random")
def make_random(
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json, or a directory that holds one. Default: V3's structure on a laptop's scale."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds give equal weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint in a directory with files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with random weights."""
    with _errors_on_stderr():
        shape = parse_config(SMALL_CONFIG) if config is None else load_config(config)
        if out.is_dir() and any(out.iterdir()):
            if not force:
                raise ValueError(f"{out}: is not empty: give another --out, or --force to replace the checkpoint there")
            for stale in (*out.glob("*.safetensors"), out / INDEX):  # else both would be read
                stale.unlink(missing_ok=True)
        random_checkpoint(out, shape, seed)
        result = {"path": str(out), "model_type": shape.model_type, "seed": seed, "parameters": counts(shape).total}
        print(json.dumps(result) if as_json else out)


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    ue8m0: Annotated[bool, typer.Option("--ue8m0", help="Scales that are powers of two, as V3.1 has them.")] = False,
) -> None:
    """Write the checkpoint's FP8 twin: e4m3 with a scale for every 128×128, as V3 has it."""
    with _errors_on_stderr():
        quantize_checkpoint(model, out, ue8m0=ue8m0)
        print(out)


def _table(title: str, counted: dict[str, int]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")  # a directory may be named like markup
    table.add_column("elements")
    table.add_column("count", justify="right")
    for name, value in counted.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return captured.get()


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
    except BrokenPipeError:
        raise typer.Exit(READER_GONE) from None
    except (HalError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
