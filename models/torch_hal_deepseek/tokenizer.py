"""Text to token ids and back: a checkpoint's ``tokenizer.json``, or bytes where its config says so."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from .config import Config
from .errors import ConfigError
from .headers import read_json_file


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Bytes:
    """Ids 0..255 are the bytes of UTF-8; higher ones, such as an end of sequence, are no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class File:
    """A ``tokenizer.json``, read by the tokenizers package. ``bos``: an id that every prompt starts with, or None."""

    def __init__(self, path: Path, bos: int | None) -> None:
        from tokenizers import Tokenizer as Implementation

        self.implementation, self.bos = Implementation.from_file(str(path)), bos

    def encode(self, text: str) -> list[int]:
        ids = list(self.implementation.encode(text).ids)
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    def decode(self, ids: list[int]) -> str:
        return str(self.implementation.decode(ids))


def load_tokenizer(path: str | Path, config: Config) -> Tokenizer:
    """The tokenizer of the checkpoint in ``path``. Raises ConfigError saying what is missing."""
    file = Path(path) / "tokenizer.json"
    if file.is_file():
        settings = Path(path) / "tokenizer_config.json"
        prepends = settings.is_file() and read_json_file(settings, ConfigError).get("add_bos_token")
        try:
            return File(file, config.bos_token_id if prepends else None)
        except ImportError:
            raise ConfigError(f"{file}: reading it needs the tokenizers package: pip install tokenizers") from None
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise ConfigError(f"{file}: {error}") from error
    if config.torch_hal_tokenizer == "bytes":
        return Bytes()
    raise ConfigError(f"{path}: no tokenizer.json; give token ids instead of text")


class TextStream:
    """Turns ids into text as they come, holding back what is not a whole character yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context = 0  # decoding starts here: an id's text may depend on the one before
        self.shown = 0  # ids before here were given out

    def push(self, token: int) -> str:
        """The text that ``token`` completes, often empty."""
        self.ids.append(token)
        return self._take(hold_back=True)

    def finish(self) -> str:
        """What was held back."""
        return self._take(hold_back=False)

    def _take(self, hold_back: bool) -> str:
        before = self.tokenizer.decode(self.ids[self.context : self.shown])
        text = self.tokenizer.decode(self.ids[self.context :])
        if hold_back and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return text[len(before) :]
