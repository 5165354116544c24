"""The command line: what it prints where, its exit codes, and the tokenizers behind it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import RELEASED, small, token_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

import torch_hal_deepseek as deepseek
from torch_hal_deepseek.cli import app
from torch_hal_deepseek.random_weights import SMALL_CONFIG
from torch_hal_deepseek.tokenizer import Bytes, TextStream, load_tokenizer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="deepseek")


@pytest.fixture(scope="module")
def bytes_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, whose end of sequence is 256."""
    config = small("V3", vocab_size=257, eos_token_id=256, torch_hal_tokenizer="bytes")
    return deepseek.random_checkpoint(tmp_path_factory.mktemp("bytes"), config)


def test_ids_in_ids_out(v3_path: Path) -> None:
    prompt = token_ids(6).tolist()
    result = run("generate", "--model", v3_path, "--ids", ",".join(map(str, prompt)), "--max-new-tokens", 5)
    expected = list(deepseek.load(v3_path).generate(prompt, 5))
    assert result.exit_code == 0
    assert [int(word) for word in result.stdout.split()] == expected
    assert re.search(r"\[5 tokens, first after [\d.]+ s, then [\d.]+ tokens/s, on cpu\]", result.stderr)


def test_text_in_text_out(bytes_path: Path) -> None:
    arguments = ("generate", "--model", bytes_path, "--prompt", "Grüße", "--max-new-tokens", 20)
    result, as_json = run(*arguments), run(*arguments, "--json")
    assert result.exit_code == as_json.exit_code == 0
    data = json.loads(as_json.stdout)
    assert data["prompt_ids"] == list("Grüße".encode())
    assert data["ids"] == list(deepseek.load(bytes_path).generate("Grüße".encode(), 20))
    assert data["text"] == Bytes().decode(data["ids"])
    assert result.stdout == data["text"] + "\n"
    assert as_json.stderr == ""
    assert (data["device"], data["dtype"]) == ("cpu", "float32")
    assert data["tokens_per_second"] > 0 < data["seconds_to_first_token"]
    assert re.fullmatch(r"[0-9a-f]{64}", data["manifest"])


def test_every_option_reaches_generation(bytes_path: Path) -> None:
    options = {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 11}
    flags: list[Any] = [x for key, value in options.items() for x in (f"--{key.replace('_', '-')}", value)]
    result = run(
        "generate", "--model", bytes_path, "--prompt", "a", "--max-new-tokens", 8, "--json",
        "--device", "cpu", "--dtype", "bfloat16", *flags,
    )  # fmt: skip
    model = deepseek.load(bytes_path, dtype=torch.bfloat16)
    data = json.loads(result.stdout)
    assert data["dtype"] == "bfloat16"
    assert data["ids"] == list(model.generate([97], 8, **options))  # type: ignore[arg-type]


def test_quantised_and_dequantised(bytes_path: Path, tmp_path: Path) -> None:
    for flags, ue8m0 in (((), False), (("--ue8m0",), True)):
        out = tmp_path / str(ue8m0)
        result = run("quantize", "--model", bytes_path, "--out", out, *flags)
        assert (result.exit_code, result.stdout.strip()) == (0, str(out))
        assert deepseek.load_config(out).quantization == deepseek.Quantization(ue8m0=ue8m0)
    arguments = ("generate", "--model", out, "--prompt", "abc", "--max-new-tokens", 12, "--json")
    for flags, options in (((), {}), (("--dequantize",), {"dequantize": True})):
        model = deepseek.load(out, **options)
        assert json.loads(run(*arguments, *flags).stdout)["ids"] == list(model.generate(b"abc", 12))
    again = run("quantize", "--model", out, "--out", tmp_path / "again")
    assert (again.exit_code, again.stderr) == (1, f"error: {out}: is quantised already\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Usage"),
        (["generate"], 2, "--model"),
        (["generate", "--model", "MODEL"], 2, "either --prompt or --ids"),
        (["generate", "--model", "MODEL", "--prompt", "a", "--ids", "1"], 2, "either --prompt or --ids"),
        (["generate", "--model", "MODEL", "--ids", "1,x"], 2, "--ids: expected integers"),
        (["generate", "--model", "MODEL", "--ids", "1", "--dtype", "int8"], 2, "--dtype"),
        (["generate", "--model", "MODEL", "--ids", "1", "--max-new-tokens", "-1"], 2, "--max-new-tokens"),
        (["generate", "--model", "MODEL", "--ids", "9" * 30], 1, "error: token ids: "),
        (["generate", "--model", "MODEL", "--ids", "1000"], 1, "error: token ids: expected 0 ≤ id < 101"),
        (["generate", "--model", "MODEL", "--ids", "1", "--top-p", "2"], 1, "error: top_p"),
        (["generate", "--model", "MODEL", "--prompt", "a"], 1, "no tokenizer.json; give token ids"),
        (["generate", "--model", "absent", "--ids", "1"], 1, "error: absent"),
        (["generate", "--model", "MODEL", "--ids", "1", "--device", "nonsense"], 1, "error: "),
        (["info", "--model", "absent"], 1, "error: absent"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, message: str, v3_path: Path) -> None:
    result = run(*[v3_path if a == "MODEL" else a for a in arguments])
    assert result.exit_code == code
    assert message in re.sub(r"\s*│?\n│?\s*", " ", result.output)
    if code == 1:
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.output


def test_info(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED["V3"]))
    data = json.loads(run("info", "--model", tmp_path, "--json").stdout)
    assert data["counts"]["total"] == 671_026_419_200
    assert data["config"]["kv_lora_rank"] == 512
    table = run("info", "--model", tmp_path)
    assert table.exit_code == 0
    assert "671,026,419,200" in table.stdout


def test_random(tmp_path: Path, v3_path: Path) -> None:
    result = run("random", "--config", v3_path, "--out", tmp_path / "new", "--seed", 1)
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "new"))
    assert (tmp_path / "new/model.safetensors").read_bytes() == (v3_path / "model.safetensors").read_bytes()


def test_random_needs_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deepseek.parse_config(SMALL_CONFIG).model_type == "deepseek_v3"
    monkeypatch.setattr("torch_hal_deepseek.cli.SMALL_CONFIG", small("V3"))  # the real one takes seconds
    out = tmp_path / "new"
    data = json.loads(run("random", "--out", out, "--json").stdout)
    config = deepseek.load_config(out)
    expected = deepseek.counts(config).total
    assert data == {"path": str(out), "model_type": "deepseek_v3", "seed": 0, "parameters": expected}
    assert config == deepseek.parse_config(small("V3"))


def test_random_replaces_only_what_it_is_told_to(tmp_path: Path, v3_path: Path) -> None:
    deepseek.random_checkpoint(tmp_path, small("V3"), max_shard_bytes=150_000)
    (tmp_path / "notes.txt").write_text("mine")
    arguments = ("random", "--config", v3_path, "--out", tmp_path, "--seed", 1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: {tmp_path}: is not empty")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert run(*arguments, "--force").exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    ids = token_ids(5)
    assert torch.equal(deepseek.load(tmp_path).logits(ids), deepseek.load(v3_path).logits(ids))


@pytest.mark.parametrize("name", ["[/b]", "[red]", "[link=x"])
def test_a_directory_may_be_named_like_markup(
    name: str, v3_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(v3_path)
    result = run("info", "--model", path)
    assert result.exit_code == 0
    assert name in result.stdout.replace("\n", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    deepseek.load(path)  # whose progress bar names it


@pytest.mark.parametrize("command", ["generate --ids 1,2,3 --max-new-tokens 200", "generate --ids 1 --json", "info"])
def test_a_reader_may_go_away(command: str, v3_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-m", "torch_hal_deepseek", name, "--model", str(v3_path), *options],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=100,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 141
    assert "Broken pipe" not in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_colour() -> None:
    """As a program: help on stdout, exit code 0, and no escape codes under NO_COLOR even on a claimed terminal."""
    env = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "torch_hal_deepseek", "generate", "--help"],
        env=env, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for option in ("--model", "--prompt", "--ids", "--temperature", "--seed", "--json"):
        assert option in done.stdout
    assert "\x1b[" not in done.stdout


# --- tokenizers ---


@pytest.fixture
def words(v3_path: Path, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer of bytes in its own alphabet, as DeepSeek's is."""
    for file in v3_path.iterdir():
        shutil.copy(file, tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:99]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "bos_token_id": 100}))
    return tmp_path


def test_a_tokenizer_file_is_used(words: Path) -> None:
    result = run("generate", "--model", words, "--prompt", "abc", "--max-new-tokens", 6, "--json")
    data = json.loads(result.stdout)
    tokenizer = Tokenizer.from_file(str(words / "tokenizer.json"))
    assert data["prompt_ids"] == tokenizer.encode("abc").ids
    assert data["text"] == tokenizer.decode(data["ids"])


def test_a_beginning_of_sequence_goes_first_where_the_tokenizer_says_so(words: Path) -> None:
    config = deepseek.load_config(words)
    without = load_tokenizer(words, config).encode("abc")
    (words / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert load_tokenizer(words, config).encode("abc") == [100, *without]


def test_broken_tokenizer_settings_are_named(words: Path) -> None:
    for content in ("[]", "{", "[" * 100_000):
        (words / "tokenizer_config.json").write_text(content)
        with pytest.raises(deepseek.ConfigError, match=r"tokenizer_config\.json: not "):
            load_tokenizer(words, deepseek.load_config(words))


def test_a_broken_tokenizer_file_is_named(words: Path) -> None:
    (words / "tokenizer.json").write_text("{}")
    result = run("generate", "--model", words, "--prompt", "abc")
    assert result.exit_code == 1
    assert f"{words / 'tokenizer.json'}: " in result.stderr


def test_streams_hold_back_half_characters() -> None:
    stream = TextStream(Bytes())
    pieces = [stream.push(b) for b in "aü€😀".encode()]
    assert pieces == ["a", "", "ü", "", "", "€", "", "", "", "😀"]
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""
