"""Patterns of schemas as expressions over spelled text."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from deepinfer.grammar.codepoints import CodePoints
from deepinfer.grammar.ir import Expr
from deepinfer.grammar.json_schema.spelling import Spelling, spell_class

__all__ = ["pattern_expr"]


@functools.lru_cache(maxsize=512)
def pattern_expr(source: str, spelling: Spelling) -> Expr:
    """Texts in which a pattern matches somewhere.

    Args:
        source: The pattern, in the flavour of JSON Schema.
        spelling: How the texts are spelled.

    Returns:
        The expression, without quotes.

    Raises:
        GrammarSyntaxError: The pattern does not parse.
        UnsupportedKeyword: It has a construct that no regular language has.
        GrammarTooLarge: It is too large.
    """
    from deepinfer.grammar.regex import regex_to_expr

    def encode(points: Iterable[tuple[int, int]]) -> Expr:
        ranges: CodePoints = tuple(points)
        return spell_class(ranges, spelling)

    return regex_to_expr(source, "json-schema", search=True, encode_class=encode)
