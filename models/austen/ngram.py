"""The rival: an order-3 byte model (each byte given the three before it) of the same training text.

    python -m austen.ngram r-cran-janeaustenr_1.0.0-1_all.deb  # counts the text into ngram_counts.gz; the figure
    python -m austen.ngram                                     # the figure from ngram_counts.gz

Smoothing is interpolated Kneser-Ney, one absolute discount an order (Kneser and Ney, 1995; Chen and Goodman, 1999,
section 2.7): the longest context uses counts, shorter ones how many different bytes precede a sequence. The file
holds the counts of all four-byte sequences, of which shorter ones follow.
"""

from __future__ import annotations

import argparse
import gzip
import math
import struct
from collections import Counter
from pathlib import Path

from .corpus import read

HERE = Path(__file__).resolve().parent
COUNTS = HERE / "ngram_counts.gz"
HELD_OUT = HERE / "held_out.txt"
ORDER = 3
_RECORD = struct.Struct(f"<{ORDER + 1}sI")


def count(text: bytes) -> Counter[bytes]:
    """How often each sequence of ORDER + 1 bytes comes."""
    return Counter(map(bytes, zip(*(text[i:] for i in range(ORDER + 1)), strict=False)))


def save(counts: Counter[bytes], path: Path = COUNTS) -> None:
    records = b"".join(_RECORD.pack(*item) for item in sorted(counts.items()))
    path.write_bytes(gzip.compress(records, mtime=0))


def load(path: Path = COUNTS) -> Counter[bytes]:
    return Counter(dict(_RECORD.iter_unpack(gzip.decompress(path.read_bytes()))))


class KneserNey:
    """P(byte | up to ORDER bytes before it)."""

    def __init__(self, counts: Counter[bytes]) -> None:
        self.counts = {ORDER: counts}
        for order in range(ORDER - 1, -1, -1):  # in how many different bytes' company each shorter sequence is seen
            self.counts[order] = Counter(gram[1:] for gram in self.counts[order + 1])
        self.total: dict[int, Counter[bytes]] = {}
        self.kinds: dict[int, Counter[bytes]] = {}
        self.discount: dict[int, float] = {}
        for order, grams in self.counts.items():
            self.total[order], self.kinds[order] = Counter(), Counter(gram[:-1] for gram in grams)
            for gram, n in grams.items():
                self.total[order][gram[:-1]] += n
            once, twice = (sum(n == times for n in grams.values()) for times in (1, 2))
            self.discount[order] = once / (once + 2 * twice) if once and twice else 0.5

    def probability(self, context: bytes, byte: bytes) -> float:
        p = 1 / 256
        for order in range(min(ORDER, len(context)) + 1):
            history = context[len(context) - order :]
            if total := self.total[order][history]:
                discount = self.discount[order]
                kept = max(self.counts[order][history + byte] - discount, 0)
                p = (kept + discount * self.kinds[order][history] * p) / total
        return p

    def bits_per_byte(self, text: bytes) -> float:
        bits = (-math.log2(self.probability(text[max(0, i - ORDER) : i], text[i : i + 1])) for i in range(len(text)))
        return sum(bits) / len(text)


def held_out_bits_per_byte() -> float:
    """The figure to beat."""
    return KneserNey(load()).bits_per_byte(HELD_OUT.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?", help="r-cran-janeaustenr_*.deb: count its training text")
    package = parser.parse_args().package
    if package is not None:
        save(count(read(package).train.encode()))
    print(f"order-{ORDER} byte n-gram: {held_out_bits_per_byte():.4f} bits per byte on {HELD_OUT.name}")


if __name__ == "__main__":
    main()
