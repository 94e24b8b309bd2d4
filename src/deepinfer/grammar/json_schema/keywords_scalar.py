"""Keywords of numbers and strings."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.json_schema.formats import APPROXIMATED, FORMATS
from deepinfer.grammar.json_schema.formula import (
    Compare,
    Format,
    Formula,
    Length,
    Multiple,
    Pattern,
    Whole,
)
from deepinfer.grammar.json_schema.pattern import pattern_expr
from deepinfer.grammar.json_schema.spelling import Spelling
from deepinfer.grammar.json_schema.values import to_fraction

if TYPE_CHECKING:
    from deepinfer.grammar.json_schema.algebra import Algebra
    from deepinfer.grammar.json_schema.nodes import Node

__all__ = ["INTEGER", "WRITTEN_INTEGER", "count", "number", "string"]

INTEGER = Multiple(Fraction(1))
WRITTEN_INTEGER = Whole()


def count(algebra: Algebra, node: Node, keyword: str) -> int | None:
    """The value of a keyword that counts, or None when it is absent.

    Raises:
        GrammarSyntaxError: It is no whole number >= 0.
    """
    if keyword not in node.schema or not algebra.active(node, keyword):
        return None
    value = node.schema[keyword]
    number = to_fraction(value)
    if number is None or number.denominator != 1 or number < 0:
        raise algebra.malformed(node, keyword, "a whole number >= 0")
    return int(number)


def number(algebra: Algebra, node: Node) -> list[Formula]:
    """Formulas of the keywords of numbers."""
    schema = node.schema
    parts: list[Formula] = []
    for keyword, exclusive, above in (
        ("minimum", "exclusiveMinimum", True),
        ("maximum", "exclusiveMaximum", False),
    ):
        strict = schema.get(exclusive) is True  # draft 4
        if keyword in schema and algebra.active(node, keyword):
            parts.append(Compare(_number(algebra, node, keyword), strict, above))
        if (
            exclusive in schema
            and not isinstance(schema[exclusive], bool)
            and algebra.active(node, exclusive)
        ):
            parts.append(Compare(_number(algebra, node, exclusive), True, above))
    if "multipleOf" in schema and algebra.active(node, "multipleOf"):
        divisor = _number(algebra, node, "multipleOf")
        if divisor <= 0:
            raise algebra.malformed(node, "multipleOf", "a number > 0")
        parts.append(Multiple(divisor))
    return parts


def _number(algebra: Algebra, node: Node, keyword: str) -> Fraction:
    value = to_fraction(node.schema[keyword])
    if value is None:
        raise algebra.malformed(node, keyword, "a number")
    return value


def string(algebra: Algebra, node: Node) -> list[Formula]:
    """Formulas of the keywords of strings."""
    schema = node.schema
    parts: list[Formula] = []
    low, high = count(algebra, node, "minLength"), count(algebra, node, "maxLength")
    if low:
        parts.append(Length(low, None))
    if high is not None:
        parts.append(Length(0, high))
    if "pattern" in schema and algebra.active(node, "pattern"):
        found = checked_pattern(algebra, node, "pattern", schema["pattern"])
        if found is not None:
            parts.append(found)
    if "format" in schema and algebra.active(node, "format"):
        parts += _format(algebra, node)
    return parts


def checked_pattern(algebra: Algebra, node: Node, keyword: str, source: object) -> Pattern | None:
    """A pattern after a look whether it can be compiled; None when it is left aside."""
    if not isinstance(source, str):
        raise algebra.malformed(node, keyword, "a regular expression")
    try:
        pattern_expr(source, Spelling.CANONICAL)
    except (UnsupportedKeyword, GrammarTooLarge) as error:
        algebra.skip(node, keyword, f"pattern {source!r}: {error}")
        return None
    except GrammarSyntaxError as error:
        algebra.skip(node, keyword, f"pattern {source!r} is malformed: {error}")
        return None
    return Pattern(source)


def _format(algebra: Algebra, node: Node) -> list[Formula]:
    name = node.schema["format"]
    dialect = node.resource.dialect
    asserted = algebra.assert_formats if dialect.assert_formats is None else dialect.assert_formats
    if not isinstance(name, str):
        raise algebra.malformed(node, "format", "a format's name")
    if not asserted:
        algebra.uses.note(node, "format", "ignored", "formats are annotations here")
        return []
    if name in FORMATS:
        if FORMATS[name] is None:
            algebra.skip(node, "format", f"format {name!r} is no regular language")
            return []
        if name in APPROXIMATED:
            algebra.uses.note(node, "format", "approximated", APPROXIMATED[name])
        return [Format(name)]
    algebra.uses.note(node, "format", "ignored", f"format {name!r} is not known")
    return []
