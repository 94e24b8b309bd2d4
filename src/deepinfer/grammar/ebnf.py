"""Grammars in EBNF, in several dialects."""

from __future__ import annotations

import re
from typing import Literal

from deepinfer.core.errors import ConfigError, GrammarSyntaxError, GrammarTooLarge
from deepinfer.grammar import ir
from deepinfer.grammar.argument_checks import check_text
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.report import Report

__all__ = ["MAX_TEXT_LENGTH", "Syntax", "compile_ebnf"]

Syntax = Literal["auto", "w3c", "gbnf", "lark"]
"""Dialect of a grammar text."""

MAX_TEXT_LENGTH = 8_000_000
"""Longest grammar that is read, in code points."""

_DEFINITION = re.compile(r"^[ \t]*[A-Za-z0-9_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)


def compile_ebnf(text: str, *, start: str = "root", syntax: Syntax = "auto") -> Grammar:
    r"""A grammar from its EBNF.

    Dialects "gbnf" and "w3c" write `name ::= expression` with texts in double or single quotes, sets in brackets,
    `.`, `|`, `*`, `+`, `?`, `{n,m}`, groups, `a - b`, and comments (`#`, `//`, `/* */`); in "w3c" and "auto",
    `#x41` is a character. Dialect "lark" writes `rule: expression` and `TERMINAL: expression` as the Lark parser
    does, with `/regular expressions/flags`, `"text"i`, `"a".."z"`, `~n..m`, templates, `%import common.NAME`
    and `%ignore`, whose terminals may stand before, between and behind all others. Priorities and aliases do not
    change the language. "auto" is Lark unless some line begins with `name ::=`.

    Left and right recursion, ambiguity and empty alternatives are all allowed.

    Args:
        text: The grammar.
        start: The rule (in Lark also the terminal) to start from. In Lark, `start` stands in for an absent `root`.
        syntax: The dialect.

    Returns:
        The grammar, over UTF-8. Its report lists what was ignored or approximated, by line and column.

    Raises:
        GrammarSyntaxError: The text is malformed, or uses a rule that is not defined; `line` and `column` say where.
        UnsupportedKeyword: A regular expression or a directive in it cannot be enforced.
        GrammarTooLarge: It is too long or nested too deeply.

    Examples:
        >>> sums = compile_ebnf('root ::= root "+" digit | digit\n digit ::= [0-9]')
        >>> sums.matches("1+2+3"), sums.matches("1+")
        (True, False)
    """
    if syntax not in ("auto", "w3c", "gbnf", "lark"):
        raise ConfigError(
            f"syntax is {syntax!r}; use 'auto', 'w3c', 'gbnf' or 'lark'",
            field="syntax",
            value=syntax,
        )
    check_text("text", text)
    check_text("start", start)
    if len(text) > MAX_TEXT_LENGTH:
        raise GrammarTooLarge(
            f"the grammar has {len(text)} characters and may have {MAX_TEXT_LENGTH}; split it",
            resource="characters",
            limit=MAX_TEXT_LENGTH,
            found=len(text),
        )
    if syntax == "lark" or (syntax == "auto" and not _DEFINITION.search(text)):
        from deepinfer.grammar.ebnf_lark import parse_lark

        rules, report = parse_lark(text, start)
        return Grammar(rules, report=report, source="ebnf")
    from deepinfer.grammar.ebnf_gbnf import parse_gbnf

    parsed = parse_gbnf(text, syntax=syntax)
    if start not in parsed:
        known = ", ".join(list(parsed)[:10])
        raise GrammarSyntaxError(
            f"the start rule {start!r} is not defined; defined are {known or 'no rules'}: name one as start"
        )
    return Grammar(ir.Rules(start, _reachable(parsed, start)), report=Report(), source="ebnf")


def _reachable(rules: dict[str, ir.Expr], start: str) -> dict[str, ir.Expr]:
    """The rules that the start rule leads to, in their order."""
    found = {start}
    stack = [start]
    while stack:
        for node in ir.walk(rules[stack.pop()]):
            if isinstance(node, ir.Ref) and node.name not in found:
                found.add(node.name)
                stack.append(node.name)
    return {name: expr for name, expr in rules.items() if name in found}
