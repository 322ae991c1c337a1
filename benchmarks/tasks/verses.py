"""Pairs of short English and Spanish sentences, from two translations of one book, verse by verse.

Reads the texts of the SWORD project (both in the public domain) and knows words; nothing of models.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Pair", "aligned_parts", "read_verses", "vocabulary"]

Words = tuple[str, ...]

_BLOCK, _VERSE = struct.Struct("<III"), struct.Struct("<IIH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What two translations say in one part of a verse.

    Attributes:
        verse: its number.
        english: words.
        spanish: words.
    """

    verse: int
    english: Words
    spanish: Words


def read_verses(folder: Path) -> list[str]:
    """Return the text of each verse in order; verse `i` of one text is verse `i` of the other."""
    return [verse for part in ("ot", "nt") for verse in _read_part(folder / part)]


def aligned_parts(english: Sequence[str], spanish: Sequence[str], *, max_words: int) -> list[Pair]:
    """Return the parts of verses that are short on both sides, each pair once.

    A verse is cut at full stops, colons, semicolons, question and exclamation marks, and left out
    where the two sides then don't have the same number of parts.
    """
    verses: dict[tuple[Words, Words], int] = {}
    for number, texts in enumerate(zip(english, spanish, strict=True)):
        ours, theirs = map(_parts, texts)
        if len(ours) != len(theirs):
            continue
        for pair in zip(ours, theirs, strict=True):
            if max(map(len, pair)) <= max_words:
                verses.setdefault(pair, number)
    return [
        Pair(verse=verses[ours, theirs], english=ours, spanish=theirs) for ours, theirs in verses
    ]


def vocabulary(sentences: Iterable[Words], *, size: int, first: int) -> dict[str, int]:
    """Return a number for each of the `size` most frequent words, from `first` on."""
    counts = Counter(word for sentence in sentences for word in sentence)
    return {word: number for number, (word, _) in enumerate(counts.most_common(size), first)}


def _parts(verse: str) -> list[Words]:
    parts = (tuple(re.findall(r"\w+", part.lower())) for part in re.split(r"[.:;?!]", verse))
    return [part for part in parts if part]


def _read_part(path: Path) -> Iterator[str]:
    """Read one testament in SWORD's zText: an index of compressed blocks, and one of verses."""
    blocks, verses, text = (
        path.with_suffix(kind).read_bytes() for kind in (".bzs", ".bzv", ".bzz")
    )
    books: dict[int, bytes] = {}
    for block, start, num_bytes in _VERSE.iter_unpack(verses):
        if num_bytes and block not in books:
            offset, compressed_bytes, _ = _BLOCK.unpack_from(blocks, _BLOCK.size * block)
            books[block] = zlib.decompress(text[offset : offset + compressed_bytes])
        verse = books[block][start : start + num_bytes] if num_bytes else b""
        yield _without_markup(verse.decode())


def _without_markup(verse: str) -> str:
    verse = re.sub(r"<(note|title).*?</\1>", "", verse, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", "", verse)
