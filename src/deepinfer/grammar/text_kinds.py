"""The strings of a vocabulary by what kinds of characters they hold: most patterns tell few characters apart.

Up to its first quote, backslash, or byte that is no text, a string is written with one letter for all small letters but x, one
for all large ones but X, one digit, and one character for all of two, three and four bytes that are not white space. A hundred
thousand strings become five thousand, and a walk over these decides about all of them, for a state that treats the
characters of a kind alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.slices import BOUNDARY, DEAD, CharacterSet, Residue
from deepinfer.grammar.trie import TokenTrie

__all__ = ["ASCII_KINDS", "TextKinds", "wide_kinds"]

ASCII_KINDS = (
    b"abcdefghijklmnopqrstuvwyz",
    b"ABCDEFGHIJKLMNOPQRSTUVWYZ",
    b"0123456789",
)
"""Characters of one byte that are taken together; the first of each stands for all. Language tags tell x from the rest."""

_TWO = rb"[\xc2-\xdf][\x80-\xbf]"
_THREE = rb"(?:\xe0[\xa0-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]|\xed[\x80-\x9f])[\x80-\xbf]"
_FOUR = rb"(?:\xf0[\x90-\xbf]|[\xf1-\xf3][\x80-\xbf]|\xf4[\x80-\x8f])[\x80-\xbf]{2}"
_BLANK = (
    rb"\xc2\xa0|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80|\xef\xbb\xbf"
)
_TEXT = re.compile(rb"(?:[\x20!#-\[\]-\x7f]|" + _TWO + b"|" + _THREE + b"|" + _FOUR + b")*")
_WIDE = re.compile(b"(" + _BLANK + b")|" + _TWO + b"|" + _THREE + b"|" + _FOUR)
_EXAMPLES = {2: "é".encode(), 3: "中".encode(), 4: "😀".encode()}


class TextKinds:
    """Strings by kinds.

    Args:
        strings: The distinct strings of a vocabulary.
        string_of_id: Rank of the string of each id, -1 for ids that are no text; shape [ids], int32.

    Attributes:
        residue: The strings as they are written here, each with the ranks of those that it stands for.
        by_id: As `string_of_id`, for these strings, their number for ids that are no text.
    """

    def __init__(self, strings: Sequence[bytes], string_of_id: NDArray[np.int32]) -> None:
        table = bytearray(range(256))
        for kind in ASCII_KINDS:
            for byte in kind:
                table[byte] = kind[0]
        names = bytes(table)
        ranks: dict[bytes, list[int]] = {}
        match = _TEXT.match
        for rank, text in enumerate(strings):
            found = match(text)
            end = found.end() if found else 0
            head = text[:end].translate(names)
            if not head.isascii():
                head = _WIDE.sub(_example, head)
            ranks.setdefault(head + text[end:], []).append(rank)
        texts = sorted(ranks)
        groups = [ranks[text] for text in texts]
        count = np.fromiter(map(len, groups), np.int32, len(groups))
        offset = np.zeros(len(groups) + 1, np.int32)
        np.cumsum(count, out=offset[1:])
        flat = np.fromiter((rank for group in groups for rank in group), np.int32, len(strings))
        self.residue = Residue(TokenTrie.build(texts), offset, flat)
        kind_of_rank = np.full(len(strings) + 1, len(texts), np.int32)  # the last is -1's
        kind_of_rank[flat] = np.repeat(np.arange(len(texts), dtype=np.int32), count)
        self.by_id: NDArray[np.intp] = kind_of_rank[string_of_id].astype(np.intp)


def _example(match: re.Match[bytes]) -> bytes:
    return match.group(1) or _EXAMPLES[match.end() - match.start()]


@cache
def wide_kinds() -> tuple[CharacterSet, ...]:
    """The characters of two, three and four bytes that are not white space, as sets."""
    one, two, three, a0, e0, e1, e2, e3, ed, ef, at80, g80, g81, bb, f0, f4 = range(2, 18)
    table = np.zeros((18, 256), dtype=np.uint8)
    rows: dict[int, dict[int, Sequence[int]]] = {
        BOUNDARY: {
            a0: [0xC2],
            one: range(0xC3, 0xE0),
            e0: [0xE0],
            e1: [0xE1],
            e2: [0xE2],
            e3: [0xE3],
            two: [*range(0xE4, 0xED), 0xEE],
            ed: [0xED],
            ef: [0xEF],
            f0: [0xF0],
            three: range(0xF1, 0xF4),
            f4: [0xF4],
        },
        one: {BOUNDARY: range(0x80, 0xC0)},
        two: {one: range(0x80, 0xC0)},
        three: {two: range(0x80, 0xC0)},
        a0: {BOUNDARY: _but(0xA0)},
        e0: {one: range(0xA0, 0xC0)},
        e1: {one: _but(0x9A), at80: [0x9A]},
        e2: {one: _but(0x80, 0x81), g80: [0x80], g81: [0x81]},
        e3: {one: _but(0x80), at80: [0x80]},
        ed: {one: range(0x80, 0xA0)},
        ef: {one: _but(0xBB), bb: [0xBB]},
        at80: {BOUNDARY: _but(0x80)},
        g80: {BOUNDARY: _but(*range(0x80, 0x8B), 0xA8, 0xA9, 0xAF)},
        g81: {BOUNDARY: _but(0x9F)},
        bb: {BOUNDARY: _but(0xBF)},
        f0: {two: range(0x90, 0xC0)},
        f4: {two: range(0x80, 0x90)},
    }
    for state, moves in rows.items():
        for after, members in moves.items():
            table[state, list(members)] = after
    out = []
    for low, high in ((0xC2, 0xE0), (0xE0, 0xF0), (0xF0, 0xF5)):
        part = table.copy()
        part[BOUNDARY, :low] = DEAD
        part[BOUNDARY, high:] = DEAD
        out.append(CharacterSet(f"characters from {low:#x} on but white space", part))
    return tuple(out)


def _but(*others: int) -> list[int]:
    return [byte for byte in range(0x80, 0xC0) if byte not in others]
