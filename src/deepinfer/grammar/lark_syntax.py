"""The reader of Lark grammars: text to definitions and directives, names not looked up yet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.lark_items import (
    Choice,
    Definition,
    Import,
    Item,
    Module,
    Name,
    Pattern,
    Quantified,
    Span,
    String,
    Succession,
)
from deepinfer.grammar.source_text import SourceText

__all__ = ["MAX_NESTING", "read_lark"]

MAX_NESTING = 200
"""Groups in one another that are read."""


_TOKEN = re.compile(
    r"""
    (?P<space>[\s]+|//[^\n]*|\#[^\n]*)
  | (?P<arrow>->)
  | (?P<dots>\.\.)
  | (?P<directive>%[a-z]+)
  | (?P<modified>[!?]+(?=_?[a-z]))
  | (?P<name>_*[A-Za-z][A-Za-z0-9_]*)
  | (?P<number>[+-]?[0-9]+)
  | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*"i?)
  | (?P<regexp>/(?![/*])[^/\\\n]*(?:\\.[^/\\\n]*)*/[imslux]*|/(?![/*])[^/\\]*(?:\\[\s\S][^/\\]*)*/[imslu]*x[imslux]*)
  | (?P<op>[()\[\]{}|*+?~:,.])
""",
    re.X,
)


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    at: int
    first: bool  # on its line


@dataclass(slots=True)
class _Group:
    kind: str
    begin: int
    branches: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    arguments: list[Item] = field(default_factory=list)

    def finish(self) -> Item:
        last = self.items[0] if len(self.items) == 1 else Succession(self.begin, tuple(self.items))
        if not self.branches:
            return last
        return Choice(self.begin, (*self.branches, last))


def read_lark(text: str) -> Module:
    """Reads a grammar.

    Args:
        text: The grammar.

    Returns:
        What it says; names are not looked up yet.

    Raises:
        GrammarSyntaxError: The text is malformed.
        GrammarTooLarge: Groups are nested too deeply.
    """
    return _Reader(text).read()


class _Reader(SourceText):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.module = Module(self)
        self.tokens: list[_Token] = []
        self.at = 0

    def read(self) -> Module:
        self._tokenise()
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "directive":
                self._directive(token)
            else:
                self._definition("new")
        return self.module

    def _tokenise(self) -> None:
        at, first = 0, True
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                character = self.text[at]
                what = {
                    '"': "this text has no closing quote on its line",
                    "/": "this regular expression has no closing slash on its line",
                    "'": "texts stand in double quotes",
                    "<": "special tokens are not known here; write a text",
                }.get(character, f"{character!r} means nothing here; put texts in double quotes")
                self.fail(what, at)
            kind = match.lastgroup or ""
            if kind == "space":
                first = first or "\n" in match[0]
            else:
                self.tokens.append(_Token(kind, match[0], at, first))
                first = False
            at = match.end()

    # Tokens

    def _peek(self, ahead: int = 0) -> _Token:
        if self.at + ahead < len(self.tokens):
            return self.tokens[self.at + ahead]
        return _Token("end", "", len(self.text), True)

    def _next(self, *kinds: str) -> _Token:
        token = self._peek()
        if kinds and token.kind not in kinds and token.text not in kinds:
            found = repr(token.text) if token.text else "the end"
            self.fail(f"expected {' or '.join(kinds)}, found {found}", token.at)
        self.at += 1
        return token

    def _take(self, text: str) -> bool:
        if self._peek().text == text:
            self.at += 1
            return True
        return False

    def _begins_statement(self) -> bool:
        """Whether the next token is the first one of a definition or directive."""
        token = self._peek()
        if not token.first:
            return False
        if token.kind in ("end", "directive"):
            return True
        ahead = 1 if token.kind == "modified" else 0
        if self._peek(ahead).kind != "name":
            return False
        ahead += 1
        if self._peek(ahead).text == "{":
            while self._peek(ahead).text not in ("}", ""):
                ahead += 1
            ahead += 1
        if self._peek(ahead).text == "." and self._peek(ahead + 1).kind == "number":
            ahead += 2
        return self._peek(ahead).text == ":"

    # Statements

    def _definition(self, mode: str) -> None:
        if self._peek().kind == "modified":
            self.at += 1
        name = self._next("name")
        parameters: list[str] = []
        if self._take("{"):
            parameters.append(self._next("name").text)
            while self._take(","):
                parameters.append(self._next("name").text)
            self._next("}")
        priority = self._take(".")
        if priority:
            self._next("number")
        self._next(":")
        body = self._expression()
        self.module.definitions.append(
            Definition(name.text, tuple(parameters), body, name.at, priority, mode)
        )

    def _directive(self, token: _Token) -> None:
        self.at += 1
        if token.text == "%import":
            self._import(token)
        elif token.text == "%ignore":
            self.module.ignored.append(self._expression())
        elif token.text == "%declare":
            while self._peek().kind == "name" and not self._begins_statement():
                name = self._next("name")
                self.module.declared[name.text] = name.at
        elif token.text in ("%override", "%extend"):
            self._definition(token.text[1:])
        else:
            self.fail(
                f"{token.text} is not known; directives are %import, %ignore, %declare, %override, %extend",
                token.at,
            )

    def _import(self, token: _Token) -> None:
        if self._peek().text in (".", ".."):
            self.fail("imports from files are not read; paste the definitions", token.at)
        parts = [self._next("name")]
        while self._take("."):
            parts.append(self._next("name"))
        if self._take("("):
            module = ".".join(part.text for part in parts)
            while True:
                name = self._next("name")
                self.module.imports.append(Import(module, name.text, name.text, name.at))
                if not self._take(","):
                    break
            self._next(")")
            return
        if len(parts) < 2:
            self.fail("an import is written %import module.NAME", token.at)
        module = ".".join(part.text for part in parts[:-1])
        last = parts[-1]
        alias = self._next("name").text if self._take("->") else last.text
        self.module.imports.append(Import(module, last.text, alias, last.at))

    # Expressions

    def _expression(self) -> Item:
        stack = [_Group("", self._peek().at)]
        while True:
            if len(stack) == 1 and self._begins_statement():
                return stack[0].finish()
            token = self._peek()
            if token.kind == "end":
                self.fail(f"this {stack[-1].kind} is not closed", stack[-1].begin)
            self.at += 1
            self._step(token, stack)

    def _step(self, token: _Token, stack: list[_Group]) -> None:
        top = stack[-1]
        if token.kind == "name":
            if self._peek().text == "{" and not self._peek().first:
                self.at += 1
                self._push(stack, _Group("{", token.at, items=[]))
                stack[-1].arguments.append(Name(token.at, token.text))
            else:
                top.items.append(Name(token.at, token.text))
        elif token.kind == "string":
            self._string(token, top)
        elif token.kind == "regexp":
            body, _, flags = token.text[1:].rpartition("/")
            top.items.append(Pattern(token.at, body, flags))
        elif token.text in ("(", "["):
            self._push(stack, _Group(token.text, token.at))
        elif token.text in (")", "]", "}", ","):
            self._close(token, stack)
        elif token.text == "|":
            top.branches.append(_Group("", token.at, items=top.items).finish())
            top.items = []
        elif token.text in ("*", "+", "?", "~"):
            self._quantify(token, top)
        elif token.kind == "arrow":
            self._next("name")
        else:
            self.fail(f"{token.text!r} cannot stand here", token.at)

    def _push(self, stack: list[_Group], group: _Group) -> None:
        if len(stack) > MAX_NESTING:
            raise GrammarTooLarge(
                f"the grammar nests more than {MAX_NESTING} groups; name some of them as rules",
                resource="nesting",
                limit=MAX_NESTING,
                found=len(stack),
            )
        stack.append(group)

    def _close(self, token: _Token, stack: list[_Group]) -> None:
        group = stack[-1]
        closing = {"(": ")", "[": "]", "{": "}", "": ""}[group.kind]
        if token.text != closing and not (token.text == "," and group.kind == "{"):
            self.fail(f"{token.text!r} closes nothing; put it in double quotes", token.at)
        if token.text == ",":
            group.arguments.append(group.finish())
            group.items, group.branches = [], []
            return
        stack.pop()
        inner = group.finish()
        if group.kind == "[":
            inner = Quantified(group.begin, inner, 0, 1)
        elif group.kind == "{":
            head, *arguments = group.arguments
            if not isinstance(head, Name):
                raise TypeError("a template begins with its name")
            inner = Name(head.at, head.name, (*arguments, inner))
        stack[-1].items.append(inner)

    def _quantify(self, token: _Token, top: _Group) -> None:
        if not top.items:
            self.fail(f"{token.text} has nothing to repeat; put it in double quotes", token.at)
        low, high = 0, None
        if token.text == "~":
            low = high = self._count()
            if self._take(".."):
                high = self._count()
            if high < low:
                self.fail(f"~{low}..{high} has its bounds in the wrong order", token.at)
        elif token.text == "+":
            low = 1
        elif token.text == "?":
            high = 1
        top.items[-1] = Quantified(token.at, top.items[-1], low, high)

    def _count(self) -> int:
        number = self._next("number")
        if len(number.text) > 9 or number.text.startswith("-"):
            self.fail("a repeat bound goes from 0 to 999999999", number.at)
        return int(number.text)

    def _string(self, token: _Token, top: _Group) -> None:
        text, ignore_case = self._unquoted(token)
        if self._take(".."):
            last = self._next("string")
            end, _ = self._unquoted(last)
            if len(text) != 1 or len(end) != 1 or end < text:
                self.fail("a range goes from one character up to another one", token.at)
            top.items.append(Span(token.at, text, end))
        else:
            top.items.append(String(token.at, text, ignore_case))

    def _unquoted(self, token: _Token) -> tuple[str, bool]:
        end = token.at + len(token.text.removesuffix("i")) - 1
        at = token.at + 1
        pieces = []
        while at < end:
            if self.text[at] != "\\":
                stop = self.text.find("\\", at, end)
                stop = end if stop < 0 else stop
                pieces.append(self.text[at:stop])
                at = stop
            elif self.text[at + 1] in 'Uuxnftr\\"':
                character, at = self.escape(at)
                pieces.append(character)
            else:  # Lark keeps the backslash of every other escape
                pieces.append(self.text[at : at + 2])
                at += 2
        return "".join(pieces), token.text.endswith("i")
