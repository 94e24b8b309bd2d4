"""Text without certain strings in it, as expressions.

Each is an intersection of all well-formed text with what a search for the strings says, so overlaps of the strings
with themselves and with each other come out right.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.core.errors import GrammarSyntaxError
from deepinfer.grammar import ir
from deepinfer.grammar.codepoints import ALL
from deepinfer.grammar.utf8 import encode_utf8

__all__ = ["encoded", "text_before", "text_without"]


def encoded(texts: Sequence[str], what: str) -> tuple[bytes, ...]:
    """The UTF-8 bytes of strings that mark something.

    Args:
        texts: The strings.
        what: What they are, for the error.

    Returns:
        Their bytes, in order.

    Raises:
        GrammarSyntaxError: One is empty, not a string, or not encodable.
    """
    out = []
    for text in texts:
        if not isinstance(text, str) or not text:
            raise GrammarSyntaxError(f"{what} is {text!r}; give a text that is not empty")
        try:
            out.append(text.encode())
        except UnicodeEncodeError:
            raise GrammarSyntaxError(
                f"{what} holds a lone surrogate, which no UTF-8 output can hold; remove it"
            ) from None
    return tuple(out)


def _all_text() -> ir.Expr:
    return ir.star(encode_utf8(ALL))


def _holds(strings: Sequence[bytes]) -> ir.Expr:
    """Byte strings in which one of the strings occurs."""
    found = ir.alt(*map(ir.literal, strings))
    return ir.seq(ir.anything(), found, ir.anything())


def text_without(strings: Sequence[bytes]) -> ir.Expr:
    """All text in which none of the strings occurs.

    Args:
        strings: The strings; none of them is empty.

    Returns:
        The expression.
    """
    if not strings:
        return _all_text()
    return ir.intersect(_all_text(), ir.complement(_holds(strings)))


def text_before(
    end: bytes, others: Sequence[bytes] = (), excludes: Sequence[bytes] = ()
) -> ir.Expr:
    """All text up to and with the first occurrence of a string.

    Args:
        end: The string.
        others: Strings of which none may be complete before `end` is.
        excludes: Strings that may not occur at all, other than inside `end`.

    Returns:
        The expression.
    """
    stops = (end, *others)
    early = ir.seq(ir.anything(), ir.alt(*map(ir.literal, stops)), ir.any_byte(), ir.anything())
    whole = ir.intersect(ir.seq(_all_text(), ir.literal(end)), ir.complement(early))
    if not excludes:
        return whole
    # The last byte of an excluded string stands before the last byte of `end`, or the two are one string.
    return ir.intersect(
        whole,
        ir.complement(
            ir.seq(ir.anything(), ir.alt(*map(ir.literal, excludes)), ir.any_byte(), ir.anything())
        ),
    )
