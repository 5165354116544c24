"""The text: Jane Austen's six novels, chapter by chapter, read out of a Debian package without R.

    apt-get download r-cran-janeaustenr
    python -m austen.corpus r-cran-janeaustenr_1.0.0-1_all.deb FOLDER

writes ``train.txt`` (chapters parted by a form feed), ``validation.txt`` (the last three chapters of *Emma*, which
training is steered by) and ``held_out.txt`` (the last two of *Persuasion*, which nothing but evaluation looks at).
Paragraphs are one line each, so that where a printer broke lines need not be learned.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import struct
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

DATABASE = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
TITLES = ("EMMA", "MANSFIELD PARK", "NORTHANGER ABBEY", "Persuasion", "PRIDE AND PREJUDICE", "SENSE AND SENSIBILITY")
SHA256 = "70a27d53f64b8d60d85452743ee93d5131c6fd30798284a1419ad644e30b4461"  # of the three texts, in order
CHAPTER_END = "\f"

_HEADING = re.compile(r"^chapter [ivxl\d]+$", re.MULTILINE | re.IGNORECASE)
_NOT_AUSTEN = re.compile(r"^\s*A NOTE ON THE TEXT.*", re.MULTILINE | re.DOTALL)  # by an editor, after the novel
_NO_PROSE = re.compile(r"(volume [ivx]+|finis|the end|[*\s]*|\[(End volume|At this point).*)$", re.IGNORECASE)


class Corpus(NamedTuple):
    train: str
    validation: str
    held_out: str


def read(package: str | Path) -> Corpus:
    """The three texts. Raises ValueError if they are not, byte by byte, what the model was trained on."""
    books = {title: chapters(text) for title, text in novels(Path(package)).items()}
    held_out = [books["Persuasion"].pop() for _ in range(2)][::-1]
    validation = [books["EMMA"].pop() for _ in range(3)][::-1]
    train = [chapter for book in books.values() for chapter in book]
    corpus = Corpus(CHAPTER_END.join(train), "\n\n".join(validation), "\n\n".join(held_out))
    if (found := hashlib.sha256("\0".join(corpus).encode()).hexdigest()) != SHA256:
        raise ValueError(f"{package}: not the text expected: SHA-256 {found}, not {SHA256}")
    return corpus


def chapters(novel: str) -> list[str]:
    """The chapters' paragraphs, a line each with an empty line between; no headings, no editor's notes."""
    bodies = _HEADING.split(_NOT_AUSTEN.sub("", novel))[1:]
    paragraphs = ([" ".join(p.split()) for p in re.split(r"\n\s*\n", body)] for body in bodies)
    return ["\n\n".join(p for p in chapter if not _NO_PROSE.match(p)) for chapter in paragraphs]


def novels(package: Path) -> dict[str, str]:
    """Title -> text. A lazy-load database is a row of objects, each a length and that many bytes under zlib."""
    with tarfile.open(fileobj=io.BytesIO(_member(package.read_bytes(), "data.tar"))) as tar:
        database = tar.extractfile(DATABASE)
        assert database is not None
        rest = database.read()
    found = {}
    while rest:
        decompressor = zlib.decompressobj()
        lines = _character_vector(decompressor.decompress(rest[4:]))
        found[lines[0]] = "\n".join(lines)
        rest = decompressor.unused_data
    if tuple(found) != TITLES:
        raise ValueError(f"{package}: expected {', '.join(TITLES)}, found {', '.join(found)}")
    return found


def _member(archive: bytes, prefix: str) -> bytes:
    """The file of an ``ar`` archive, which a .deb is, whose name starts with ``prefix``."""
    at = len(b"!<arch>\n")
    while at < len(archive):
        name, size = archive[at : at + 16].decode(), int(archive[at + 48 : at + 58])
        at += 60
        if name.startswith(prefix):
            return archive[at : at + size]
        at += size + size % 2
    raise ValueError(f"no {prefix} in the archive: not a Debian package")


def _character_vector(data: bytes) -> list[str]:
    """An R object that is a character vector, serialised in XDR format, version 3."""
    version, _, _, name_length = struct.unpack_from(">4i", data, 2)
    at = 18 + name_length  # past the encoding's name
    kind, count = struct.unpack_from(">2i", data, at)
    if (data[:2], version, kind & 0xFF) != (b"X\n", 3, 16):
        raise ValueError("not a serialised R character vector")
    at += 8
    strings = []
    for _ in range(count):
        length = struct.unpack_from(">4xi", data, at)[0]
        at += 8
        strings.append(data[at : at + length].decode("utf-8"))
        at += length
    return strings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="r-cran-janeaustenr_*.deb")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, text in read(arguments.package)._asdict().items():
        (arguments.folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="")
        print(f"{name}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
