"""The paged latent cache: one pool of pages for every layer, and who owns which page."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """A sequence's share of the cache: its pages in order, and how many tokens they hold."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


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
    ) -> None:
        self.page_size = page_size
        self.pool = torch.zeros(config.num_hidden_layers, pages, page_size, config.kv_width, dtype=dtype, device=device)
        self._free = list(range(pages))[::-1]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Make room for ``tokens`` more. Raises CacheFull, leaving all as it was, if pages run out."""
        needed = pages_for(sequence.length + tokens, self.page_size) - len(sequence.pages)
        if needed > self.free_pages:
            raise CacheFull(f"{tokens} more tokens need {needed} pages of {self.page_size}, {self.free_pages} are free")
        sequence.pages += [self._free.pop() for _ in range(needed)]

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's pages back; it is empty afterwards."""
        self._free += reversed(sequence.pages)
        sequence.pages, sequence.length = [], 0

    def slots(self, sequence: Sequence, begin: int, end: int) -> Tensor:
        """Where positions begin ≤ i < end of a sequence lie: int64 on the host."""
        positions = torch.arange(begin, end)
        pages = torch.tensor(sequence.pages, dtype=torch.int64)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size
