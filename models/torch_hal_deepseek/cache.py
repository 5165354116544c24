"""The paged latent cache: one pool of pages for every layer, and who owns which page."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .config import Config
from .errors import CacheFull

PAGE_SIZE = 64  # tokens; what decode kernels are built for


def pages_for(tokens: int, page_size: int = PAGE_SIZE) -> int:
    """How many pages ``tokens`` need."""
    return -(-tokens // page_size)


@dataclass(eq=False)
class Sequence:
    """A sequence's share of one cache: its pages in order, and how many tokens they hold.

    It belongs to the cache that gave it its first page until that one takes them back (`KVCache.release`).
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    owner: object = field(default=None, repr=False)  # the cache's `KVCache.identity`; None: nobody's yet


def count(what: str, value: Any, least: int = 0) -> int:
    """``value``, if it is an integer ≥ ``least``; else a ValueError that says ``what`` it is."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what}: expected an integer ≥ {least}, got {value!r}")
    return value


def check_distinct(sequences: ListLike[Sequence]) -> None:
    """Raise ValueError if a step has a sequence twice: both parts would go to the same place."""
    first: dict[int, int] = {}
    for i, sequence in enumerate(sequences):
        if (before := first.setdefault(id(sequence), i)) != i:
            raise ValueError(f"sequences: {before} and {i} are the same Sequence, expected each once in a step")


class KVCache:
    """``pool`` [layers, pages, page_size, L + R]: a page id means the same page in every layer.

    Zeroed once, since kernels may load, though never use, rows past a sequence's end.
    """

    def __init__(
        self,
        config: Config,
        pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = PAGE_SIZE,
        layers: int | None = None,
    ) -> None:
        """layers: None: the model's; one more if it drafts, which `DeepSeek.new_cache` knows."""
        self.page_size = count("page_size", page_size, 1)
        layers = config.num_hidden_layers if layers is None else count("layers", layers, 1)
        with torch.inference_mode(False):  # else steps outside of that mode could not write to it
            self.pool = torch.zeros(
                layers, count("pages", pages), page_size, config.kv_width, dtype=dtype, device=device
            )
        self.identity = object()
        self._free = list(range(pages))[::-1]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Make room for ``tokens`` more; as `reserve_all`."""
        self.reserve_all([sequence], [tokens])

    def reserve_all(self, sequences: ListLike[Sequence], tokens: ListLike[int]) -> None:
        """Make room for tokens[b] more in sequence b, or, raising CacheFull, for none if pages run out.

        Raises ValueError for a sequence of another cache, or one that comes twice.
        """
        check_distinct(sequences)
        needed = []
        for sequence, more in zip(sequences, tokens, strict=True):
            self.check_owner(sequence)
            pages = pages_for(sequence.length + count("tokens", more), self.page_size) - len(sequence.pages)
            if pages > 0 and sequence.pages and sequence.owner is None:
                raise ValueError("sequence: has pages that this KVCache did not give it, and cannot get more")
            needed.append(max(pages, 0))
        if sum(needed) > self.free_pages:
            raise CacheFull(
                f"{sum(tokens)} more tokens need {sum(needed)} pages of {self.page_size}, {self.free_pages} are free"
            )
        for sequence, pages in zip(sequences, needed, strict=True):
            if pages:
                sequence.owner = self.identity
                sequence.pages += [self._free.pop() for _ in range(pages)]

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's pages back; it is empty afterwards, and any cache's. Raises ValueError if not its own."""
        self.check_owner(sequence)
        if sequence.pages and sequence.owner is None:
            raise ValueError("sequence: has pages that this KVCache did not give it")
        self._free += reversed(sequence.pages)
        sequence.pages, sequence.length, sequence.owner = [], 0, None

    def check_owner(self, sequence: Sequence) -> None:
        """Raise ValueError for a sequence of another cache."""
        if sequence.owner is not None and sequence.owner is not self.identity:
            raise ValueError("sequence: belongs to another KVCache, expected one of this cache, or a new one")

    def slots(self, sequence: Sequence, begin: int, end: int) -> Tensor:
        """Where positions begin ≤ i < end of a sequence lie: int64 on the host."""
        self.check_owner(sequence)
        positions = torch.arange(begin, end)
        pages = torch.tensor(sequence.pages, dtype=torch.int64)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size
