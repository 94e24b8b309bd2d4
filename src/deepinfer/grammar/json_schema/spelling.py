r"""How decoded text is spelled inside JSON quotes, as expressions over bytes.

A character has up to three spellings: itself, a short escape such as `\n`, and `\uXXXX` (a pair of them past
U+FFFF). `Spelling.CANONICAL` keeps those that JSON writers emit: itself where that is allowed, `\"`, `\\`, the
short escapes of control characters, `\uXXXX` for other control characters, and both spellings of a character
past ASCII. `Spelling.ANY` has all of them. Both are fixed sets of spellings for each character, so unions,
intersections and complements of decoded languages carry over to their spellings.
"""

from __future__ import annotations

import enum
import functools

from deepinfer.grammar.codepoints import ALL, CodePoints, difference, intersection, make
from deepinfer.grammar.ir import EMPTY, Expr, alt, byte_set, literal, seq, star
from deepinfer.grammar.utf8 import encode_utf8

__all__ = ["Spelling", "free_string", "spell_class", "spell_text"]

_SHORT = {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}
_CONTROLS: CodePoints = ((0, 0x1F),)
_MUST_ESCAPE = make([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_PLAIN = difference(ALL, _MUST_ESCAPE)
# U+007F too: some writers escape it.
_PAST_ASCII: CodePoints = difference(ALL, ((0, 0x7E),))


class Spelling(enum.Enum):
    """Which spellings of a character count.

    CANONICAL: what JSON writers emit. ANY: every spelling that JSON allows. TEXT: the character itself in UTF-8,
    without any escape (for reasoning about decoded strings, never for output).
    """

    CANONICAL = "canonical"
    ANY = "any"
    TEXT = "text"


@functools.lru_cache(maxsize=4096)
def spell_class(points: CodePoints, spelling: Spelling) -> Expr:
    """One character out of a set, spelled in JSON.

    Args:
        points: The set of code points.
        spelling: Which spellings count.

    Returns:
        The expression; it matches exactly one character.
    """
    if spelling is Spelling.TEXT:
        return encode_utf8(points)
    short = {code: text for code, text in _SHORT.items() if _holds(points, code)}
    if spelling is Spelling.ANY:
        if _holds(points, 0x2F):
            short[0x2F] = b"\\/"
        coded = points
    else:
        rest = difference(_CONTROLS, make((code, code) for code in _SHORT))
        coded = intersection(points, make((*rest, *_PAST_ASCII)))
    letters = byte_set(text[1] for text in short.values())
    escapes = alt(letters, seq(literal(b"u"), _coded(coded)))
    return alt(encode_utf8(intersection(points, _PLAIN)), seq(literal(b"\\"), escapes))


def _holds(points: CodePoints, code: int) -> bool:
    return any(first <= code <= last for first, last in points)


def spell_text(text: str, spelling: Spelling) -> Expr:
    """A fixed text, spelled in JSON, without the quotes.

    Args:
        text: The decoded text. A lone surrogate is spelled by its escape.
        spelling: Which spellings count.

    Returns:
        The expression.
    """
    if spelling is not Spelling.ANY and _is_plain(text):
        return literal(text.encode())
    return seq(*(_character(character, spelling) for character in text))


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


@functools.lru_cache(maxsize=4096)
def _character(character: str, spelling: Spelling) -> Expr:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        if spelling is Spelling.TEXT:
            return EMPTY
        return seq(literal(b"\\u"), _units(((code, code),)))
    return spell_class(((code, code),), spelling)


@functools.cache
def free_string() -> Expr:
    """Any JSON string with its quotes, in every spelling. Lone surrogates are no text, so their escapes are left out."""
    quote = literal(b'"')
    return seq(quote, star(spell_class(ALL, Spelling.ANY)), quote)


def _coded(points: CodePoints) -> Expr:
    r"""What follows `\u` for the characters of a set: four digits, or eight as a surrogate pair past U+FFFF."""
    parts = [_units(intersection(points, ((0, 0xFFFF),)))]
    for first, last in intersection(points, ((0x10000, 0x10FFFF),)):
        for (high_first, high_last), (low_first, low_last) in _pairs(
            first - 0x10000, last - 0x10000
        ):
            parts.append(
                seq(
                    _units(((0xD800 + high_first, 0xD800 + high_last),)),
                    literal(b"\\u"),
                    _units(((0xDC00 + low_first, 0xDC00 + low_last),)),
                )
            )
    return alt(*parts)


def _pairs(first: int, last: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Splits a range of 20-bit numbers into products of ranges of their 10-bit halves."""
    out = []
    high_first, low_first = divmod(first, 1024)
    high_last, low_last = divmod(last, 1024)
    if high_first == high_last:
        return [((high_first, high_first), (low_first, low_last))]
    if low_first:
        out.append(((high_first, high_first), (low_first, 1023)))
        high_first += 1
    if low_last != 1023:
        out.append(((high_last, high_last), (0, low_last)))
        high_last -= 1
    if high_first <= high_last:
        out.append(((high_first, high_last), (0, 1023)))
    return out


def _units(ranges: CodePoints) -> Expr:
    """16-bit numbers of ranges in four hexadecimal digits (surrogates are taken as they are)."""
    return alt(*(_hex(first, last, 4) for first, last in ranges))


@functools.lru_cache(maxsize=4096)
def _hex(first: int, last: int, width: int) -> Expr:
    """Numbers of a range in `width` hexadecimal digits; at most `width` deep."""
    if width == 0:
        return literal(b"")
    unit = 16 ** (width - 1)
    first_digit, first_rest = divmod(first, unit)
    last_digit, last_rest = divmod(last, unit)
    if first_digit == last_digit:
        return seq(_digit(first_digit, first_digit), _hex(first_rest, last_rest, width - 1))
    parts = []
    if first_rest:
        parts.append(seq(_digit(first_digit, first_digit), _hex(first_rest, unit - 1, width - 1)))
        first_digit += 1
    if last_rest != unit - 1:
        parts.append(seq(_digit(last_digit, last_digit), _hex(0, last_rest, width - 1)))
        last_digit -= 1
    if first_digit <= last_digit:
        parts.append(seq(_digit(first_digit, last_digit), _hex(0, unit - 1, width - 1)))
    return alt(*parts)


def _digit(first: int, last: int) -> Expr:
    text = "".join(f"{value:x}{value:X}" for value in range(first, last + 1))
    return byte_set(set(text.encode()))
