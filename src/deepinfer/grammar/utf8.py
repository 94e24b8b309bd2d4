"""Sets of code points as byte expressions: well-formed UTF-8 and nothing else.

Overlong forms, surrogates and values past U+10FFFF never match (Unicode Standard, table 3-7).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer.grammar.codepoints import CodePoints, make

if TYPE_CHECKING:
    from deepinfer.grammar.ir import Expr

__all__ = ["byte_sequences", "encode_utf8"]

# The last code point of each length in bytes.
_LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)

ByteRanges = tuple[tuple[int, int], ...]
"""One inclusive range of bytes for each byte of a sequence."""


def byte_sequences(points: CodePoints) -> list[ByteRanges]:
    """Splits a set of code points into products of byte ranges.

    Args:
        points: The set.

    Returns:
        Sequences of one to four byte ranges, ascending, disjoint; together they hold the encodings of the set.
    """
    out: list[ByteRanges] = []
    for first, last in points:
        for end in _LENGTH_ENDS:
            if first > last:
                break
            if first <= end:
                _split(first, min(last, end), out)
                first = end + 1
    return out


def _split(first: int, last: int, out: list[ByteRanges]) -> None:
    """Appends the products of one range whose ends have encodings of the same length."""
    low, high = chr(first).encode(), chr(last).encode()
    # A product needs every byte but the first differing one to run over all continuation bytes.
    for keep in range(1, len(low)):
        tail_bits = 6 * (len(low) - keep)
        tail = (1 << tail_bits) - 1
        if first >> tail_bits != last >> tail_bits:
            if first & tail:
                _split(first, first | tail, out)
                _split((first | tail) + 1, last, out)
                return
            if last & tail != tail:
                _split(first, (last & ~tail) - 1, out)
                _split(last & ~tail, last, out)
                return
    out.append(tuple(zip(low, high, strict=True)))


def encode_utf8(points: Iterable[tuple[int, int]]) -> Expr:
    """The UTF-8 encodings of the code points of a set.

    Args:
        points: Ranges `(first, last)`, both inclusive; surrogates among them are left out.

    Returns:
        An expression that matches exactly one character; `Empty` for the empty set.
    """
    return _encode(make(points))


@functools.lru_cache(maxsize=1024)
def _encode(points: CodePoints) -> Expr:
    return _branches(tuple(byte_sequences(points)))


def _branches(sequences: tuple[ByteRanges, ...]) -> Expr:
    """Alternatives that share branches where their tails are the same; at most four deep."""
    from deepinfer.grammar.ir import alt, byte_set, seq

    tails_of: dict[int, list[ByteRanges]] = {}
    for first, *tail in sequences:
        for lead in range(first[0], first[1] + 1):
            tails_of.setdefault(lead, []).append(tuple(tail))
    leads_of: dict[tuple[ByteRanges, ...], list[int]] = {}
    for lead, tails in tails_of.items():
        leads_of.setdefault(tuple(tails), []).append(lead)
    return alt(
        *(
            byte_set(leads) if tails == ((),) else seq(byte_set(leads), _branches(tails))
            for tails, leads in leads_of.items()
        )
    )
