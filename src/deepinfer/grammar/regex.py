"""Regular expressions as grammars."""

from __future__ import annotations

from deepinfer.core.errors import ConfigError, EmptyLanguage
from deepinfer.grammar import ir
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.regex_ast import ANY_TEXT, sequence
from deepinfer.grammar.regex_escapes import Flags, Flavor
from deepinfer.grammar.regex_lower import EncodeClass, lower
from deepinfer.grammar.regex_parse import parse_regex
from deepinfer.grammar.utf8 import encode_utf8

__all__ = ["compile_regex", "regex_to_expr"]


def regex_to_expr(
    pattern: str,
    flavor: Flavor = "json-schema",
    *,
    search: bool = False,
    encode_class: EncodeClass = encode_utf8,
    flags: Flags = Flags(),  # noqa: B008
) -> ir.Expr:
    r"""The byte expression of a regular expression.

    Args:
        pattern: The pattern.
        flavor: "json-schema" (ECMA-262 with the `u` flag) or "python" (`re` for `str`).
        search: Whether the pattern may match anywhere in the text, as `pattern` does in JSON Schema; else it must
            match the whole text.
        encode_class: Spellings of one character out of a set; the default is UTF-8. Strings may have several
            spellings, but no spelling of a character may begin with a spelling of another one.
        flags: Options that hold from the start of the pattern.

    Returns:
        The spellings of all texts that the pattern matches.

    Raises:
        GrammarSyntaxError: The pattern is malformed; `position` says where.
        UnsupportedKeyword: It uses a back-reference, a conditional, an atomic group or quantifier, or a look-around
            that cannot be worked out; `keyword` says which.
        GrammarTooLarge: It is too long, nested too deeply, or its look-arounds take too much.
    """
    if flavor not in ("json-schema", "python"):
        raise ConfigError(
            f"flavor is {flavor!r}; use 'json-schema' or 'python'", field="flavor", value=flavor
        )
    node = parse_regex(pattern, flavor, flags=flags)
    if search:
        node = ANY_TEXT if node.pure and node.nullable else sequence([ANY_TEXT, node, ANY_TEXT])
    return lower(node, encode_class)


def compile_regex(pattern: str, *, flavor: Flavor = "json-schema", search: bool = False) -> Grammar:
    r"""A grammar of the texts that a regular expression matches.

    Flavour "json-schema" is ECMA-262 with the `u` flag: `\d` and `\w` are ASCII, `$` is the very end,
    `\p{...}` and `\u{...}` are known. Beyond the standard it takes what is not ambiguous: escaped punctuation,
    a lone brace or closing bracket, `(?P<name>...)`, and `(?i)` at the start. Flavour "python" is `re` for
    `str`: `\d`, `\w` and `\s` follow Unicode, `$` also holds before a final line feed, `\A`, `\Z`, `(?x)` and
    `{,n}` are known.

    Anchors, word boundaries and look-arounds are exact wherever they stand. Lazy quantifiers match the same texts as
    greedy ones. Letter case follows this Python's Unicode data.

    Args:
        pattern: The pattern.
        flavor: "json-schema" or "python".
        search: Whether the pattern may match anywhere in the output. False: it must match the whole output.

    Returns:
        The grammar, over UTF-8.

    Raises:
        GrammarSyntaxError: The pattern is malformed; `position` says where.
        UnsupportedKeyword: It uses a back-reference, a conditional, an atomic group or quantifier, or a look-around
            that cannot be worked out.
        GrammarTooLarge: It is too long, nested too deeply, or its look-arounds take too much.
        EmptyLanguage: It matches nothing. What only the automaton can find out is refused when it is built.

    Examples:
        >>> version = compile_regex(r"v\d+(\.\d+){0,2}")
        >>> version.matches("v1.12"), version.matches("v1.")
        (True, False)
    """
    expr = regex_to_expr(pattern, flavor, search=search)
    if isinstance(expr, ir.Empty):
        raise EmptyLanguage(
            f"the regular expression {pattern[:80]!r} matches no text; look for an anchor in its middle"
        )
    return Grammar(ir.Rules.of(expr), source="regex")
