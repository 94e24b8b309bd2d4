"""EBNF as GBNF and the W3C write it: `name ::= expression`.

```
root  ::= "yes" | item ("," item){0,3}   # a comment
item  ::= [a-z_] [a-z0-9_]* | 'quoted' | . | #x41 | [#x30-#x39] | (letter - [aeiou])
```

A rule ends where the next one begins, so it may run over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar import ir
from deepinfer.grammar.codepoints import ALL, CodePoints, complement, make
from deepinfer.grammar.source_text import SourceText
from deepinfer.grammar.utf8 import encode_utf8

__all__ = ["MAX_NESTING", "parse_gbnf"]

MAX_NESTING = 1_000
"""Parentheses in one another that are read."""

_COMMENT = r"\#[^\n]*|/\*.*?\*/|//[^\n]*"
_TOKENS = r"""
    (?P<space>[\s]+|{comment})
  | (?P<defines>::=)
  | (?P<hex>{hex})
  | (?P<name>[A-Za-z0-9_][A-Za-z0-9_-]*)
  | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*")
  | (?P<quoted>{quoted})
  | (?P<set>\[[^\]\\]*(?:\\.[^\]\\]*)*\])
  | (?P<bounds>\{{[ \t]*(?P<low>[0-9]*)[ \t]*(?P<comma>,?)[ \t]*(?P<high>[0-9]*)[ \t]*\}})
  | (?P<op>[()|*+?.;-])
"""
_HEX = r"\#x[0-9A-Fa-f]+\b"
_QUOTED = r"'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
_PATTERNS = {
    syntax: re.compile(_TOKENS.format(comment=comment, hex=hexadecimal, quoted=quoted), re.X | re.S)
    for syntax, comment, hexadecimal, quoted in (
        ("gbnf", _COMMENT, "(?!)", _QUOTED),
        ("auto", f"(?!{_HEX})(?:{_COMMENT})", _HEX, _QUOTED),
        ("w3c", f"(?!{_HEX})(?:{_COMMENT})", _HEX, r"'[^'\n]*'"),
    )
}


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    at: int
    bounds: tuple[int, int | None] | None = None


@dataclass(slots=True)
class _Group:
    """A rule, or a group, that is being read.

    Attributes:
        begin: Where it begins.
        branches: The alternatives that are complete.
        items: The parts of the present alternative.
        minus: Index of the part behind a minus sign, or None.
        minus_at: Where that sign stands.
    """

    begin: int
    branches: list[ir.Expr] = field(default_factory=list)
    items: list[ir.Expr] = field(default_factory=list)
    minus: int | None = None
    minus_at: int = 0

    def settle(self) -> None:
        """Takes the part behind a minus sign away from the one before it, once it is complete."""
        if self.minus is not None and len(self.items) > self.minus:
            without = self.items.pop()
            self.items[-1] = ir.intersect(self.items[-1], ir.complement(without))
            self.minus = None

    def expr(self) -> ir.Expr:
        self.settle()
        return ir.alt(*self.branches, ir.seq(*self.items))


def parse_gbnf(text: str, *, syntax: Literal["auto", "w3c", "gbnf"] = "auto") -> dict[str, ir.Expr]:
    """Parses a grammar.

    Args:
        text: The grammar.
        syntax: "gbnf": `#` always begins a comment. "w3c" and "auto": `#x41` is a character. "w3c": a text in single
            quotes has no escapes.

    Returns:
        The rules by name, in order. Every reference is defined.

    Raises:
        GrammarSyntaxError: The text is malformed, or a rule is missing or defined twice.
        GrammarTooLarge: Parentheses are nested too deeply.
    """
    return _Parser(text, syntax).parse()


class _Parser(SourceText):
    def __init__(self, text: str, syntax: str) -> None:
        super().__init__(text)
        self.syntax = syntax
        self.rules: dict[str, ir.Expr] = {}
        self.uses: dict[str, int] = {}
        self.stack: list[_Group] = []

    def tokens(self) -> Iterator[_Token]:
        pattern = _PATTERNS[self.syntax]
        at = 0
        while at < len(self.text):
            match = pattern.match(self.text, at)
            if match is None:
                self._fail_on_character(at)
            kind = match.lastgroup or ""
            if match["bounds"]:
                yield _Token("bounds", match["bounds"], at, self._bounds(match))
            elif kind != "space":
                yield _Token(kind, match[0], at)
            at = match.end()

    def _fail_on_character(self, at: int) -> NoReturn:
        what = {
            '"': "this text has no closing quote on its line",
            "'": "this text has no closing quote on its line",
            "[": "this set has no closing bracket",
            "{": "a repeat is written {n}, {n,}, {,m} or {n,m}",
            "<": "tokens and names in angle brackets are not known; write a text or a plain name",
            "/": "this comment is not closed",
        }.get(self.text[at], f"{self.text[at]!r} means nothing here; put texts in quotes")
        self.fail(what, at)

    def _bounds(self, match: re.Match[str]) -> tuple[int, int | None]:
        low, high = match["low"], match["high"]
        if not low and not high:
            self.fail("a repeat is written {n}, {n,}, {,m} or {n,m}", match.start())
        if max(len(low), len(high)) > 9:
            self.fail("a repeat bound has 9 digits at most", match.start())
        least = int(low or 0)
        most = int(high) if high else None if match["comma"] else least
        if most is not None and most < least:
            self.fail(f"{match['bounds']} has its bounds in the wrong order", match.start())
        return least, most

    def parse(self) -> dict[str, ir.Expr]:
        name: _Token | None = None
        current: str | None = None
        for token in self.tokens():
            if token.kind == "defines":
                if name is None:
                    self.fail("::= has no rule name before it", token.at)
                current = self._begin_rule(current, name)
                name = None
                continue
            if name is not None:
                self._refer(name, current)
                name = None
            if token.kind == "name":
                name = token  # a rule begins here if ::= follows
            elif current is None:
                self.fail("a grammar begins with a rule: name ::= expression", token.at)
            else:
                self._take(token)
        if name is not None:
            self._refer(name, current)
        if current is not None:
            self._end_rule(current)
        for used, at in self.uses.items():
            if used not in self.rules:
                self.fail(
                    f"rule {used!r} is used and not defined; define it or correct the name", at
                )
        return self.rules

    def _begin_rule(self, current: str | None, name: _Token) -> str:
        if current is not None:
            self._end_rule(current)
        if name.text in self.rules:
            self.fail(f"rule {name.text!r} is defined twice; join the definitions with |", name.at)
        self.rules[name.text] = ir.EMPTY
        self.stack = [_Group(name.at)]
        return name.text

    def _end_rule(self, name: str) -> None:
        if len(self.stack) > 1:
            self.fail("this group has no closing parenthesis", self.stack[-1].begin)
        self._check_minus()
        self.rules[name] = self.stack[0].expr()

    def _refer(self, name: _Token, current: str | None) -> None:
        if current is None:
            self.fail("a grammar begins with a rule: name ::= expression", name.at)
        self.uses.setdefault(name.text, name.at)
        self._put(ir.ref(name.text))

    def _put(self, expr: ir.Expr) -> None:
        top = self.stack[-1]
        top.settle()
        top.items.append(expr)

    def _check_minus(self) -> None:
        top = self.stack[-1]
        if top.minus is not None and len(top.items) <= top.minus:
            self.fail("a minus sign needs an expression behind it", top.minus_at)

    def _take(self, token: _Token) -> None:
        top = self.stack[-1]
        if token.kind in ("string", "quoted"):
            self._put(ir.literal(self._unquoted(token).encode()))
        elif token.kind == "set":
            self._put(self._encoded(self._set(token)))
        elif token.kind == "hex":
            code_point = self._hex(token.text, token.at)
            self._put(self._encoded(make([(code_point, code_point)])))
        elif token.kind == "bounds" and token.bounds is not None:
            self._repeat(*token.bounds, token)
        elif token.text in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text]
            self._repeat(low, high, token)
        elif token.text == ".":
            self._put(self._encoded(ALL))
        elif token.text == "|":
            self._check_minus()
            top.branches.append(_Group(0, items=top.items, minus=top.minus).expr())
            top.items, top.minus = [], None
        elif token.text == "(":
            if len(self.stack) > MAX_NESTING:
                raise GrammarTooLarge(
                    f"the grammar nests more than {MAX_NESTING} parentheses; name some groups as rules",
                    resource="nesting",
                    limit=MAX_NESTING,
                    found=len(self.stack),
                )
            self.stack.append(_Group(token.at))
        elif token.text == ")":
            if len(self.stack) == 1:
                self.fail("this parenthesis closes nothing; put it in quotes", token.at)
            self._check_minus()
            group = self.stack.pop()
            self._put(group.expr())
        elif token.text == "-":
            top.settle()
            if not top.items:
                self.fail("a minus sign needs an expression before it", token.at)
            top.minus, top.minus_at = len(top.items), token.at

    def _repeat(self, low: int, high: int | None, token: _Token) -> None:
        items = self.stack[-1].items
        self._check_minus()
        if not items:
            self.fail(f"{token.text} has nothing to repeat; put it in quotes", token.at)
        items[-1] = ir.repeat(items[-1], low, high)

    def _encoded(self, points: CodePoints) -> ir.Expr:
        return encode_utf8(points)

    def _hex(self, text: str, at: int) -> int:
        digits = text[2:].lstrip("0") or "0"
        if len(digits) > 6 or int(digits, 16) > 0x10FFFF:
            self.fail(f"{text} is past the last character, #x10FFFF", at)
        return int(digits, 16)

    def _unquoted(self, token: _Token) -> str:
        if token.kind == "quoted" and self.syntax == "w3c":
            return token.text[1:-1]
        pieces = []
        at, end = token.at + 1, token.at + len(token.text) - 1
        while at < end:
            stop = self.text.find("\\", at, end)
            if stop < 0:
                pieces.append(self.text[at:end])
                break
            pieces.append(self.text[at:stop])
            character, at = self.escape(stop)
            pieces.append(character)
        text = "".join(pieces)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("this text holds a lone surrogate, which no UTF-8 output can hold", token.at)
        return text

    def _set(self, token: _Token) -> CodePoints:
        at, end = token.at + 1, token.at + len(token.text) - 1
        negated = self.text.startswith("^", at)
        at += negated
        ranges: list[tuple[int, int]] = []
        while at < end:
            start = at
            first, at = self._set_member(at)
            last = first
            if self.text.startswith("-", at) and at + 1 < end:
                last, at = self._set_member(at + 1)
                if last < first:
                    self.fail("this range runs backwards; put its smaller end first", start)
            ranges.append((first, last))
        points = make(ranges)
        return complement(points) if negated else points

    def _set_member(self, at: int) -> tuple[int, int]:
        if self.text[at] == "\\":
            character, at = self.escape(at)
            return ord(character), at
        if self.syntax != "gbnf" and self.text.startswith("#x", at):
            end = at + 2
            while self.text[end] in "0123456789abcdefABCDEF":
                end += 1
            if end > at + 2:
                return self._hex(self.text[at:end], at), end
        return ord(self.text[at]), at + 1
