"""Grammars in the dialect of the Lark parser: names looked up, terminals and rules built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import NoReturn

from deepinfer.core.errors import (
    GrammarSyntaxError,
    GrammarTooLarge,
    MissingDependency,
    UnsupportedKeyword,
)
from deepinfer.grammar import ir
from deepinfer.grammar.codepoints import make
from deepinfer.grammar.lark_items import (
    Choice,
    Definition,
    Item,
    Module,
    Name,
    Pattern,
    Quantified,
    Span,
    String,
    fold,
)
from deepinfer.grammar.lark_syntax import read_lark
from deepinfer.grammar.regex_ast import (
    Alternatives,
    Characters,
    Concatenation,
    LineEnd,
    LineStart,
    Look,
    Node,
    WordBoundary,
    alternatives,
    repetition,
    sequence,
)
from deepinfer.grammar.regex_escapes import Flags
from deepinfer.grammar.regex_lazy import settle_lazy
from deepinfer.grammar.regex_lower import lower
from deepinfer.grammar.regex_parse import parse_regex
from deepinfer.grammar.report import Report, ReportEntry
from deepinfer.grammar.unicode_classes import case_closure
from deepinfer.grammar.utf8 import encode_utf8

__all__ = ["parse_lark"]

_IGNORED = "%ignore"
_LIBRARIES = ("common", "lark", "python", "unicode")
_MAX_INSTANCES = 10_000


def parse_lark(text: str, start: str) -> tuple[ir.Rules, Report]:
    """Parses a grammar.

    Args:
        text: The grammar.
        start: The rule or terminal to start from; `start` stands in for an absent `root`.

    Returns:
        The rules that `start` leads to, and what was ignored or approximated.

    Raises:
        GrammarSyntaxError: The text is malformed, or a name in it is not defined.
        UnsupportedKeyword: A regular expression cannot be enforced, or a terminal is declared without a definition.
        GrammarTooLarge: Something is nested too deeply, or templates grow without end.
    """
    return _Builder(text).build(start)


@dataclass(slots=True)
class _Scope:
    """One text and the names that it knows.

    Attributes:
        prefix: What stands before its names in the rules.
        module: The text.
        names: Definitions by name.
        imported: Names that stand for one of another scope.
    """

    prefix: str
    module: Module
    names: dict[str, Definition] = field(default_factory=dict)
    imported: dict[str, tuple[_Scope, str]] = field(default_factory=dict)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


class _Builder:
    def __init__(self, text: str) -> None:
        self.entries: list[ReportEntry] = []
        self.libraries: dict[str, _Scope] = {}
        self.main = self._scope("", read_lark(text))
        self.nodes: dict[str, Node] = {}
        self.rules: dict[str, ir.Expr] = {}
        # Rules that are referred to and not built yet, with the arguments of templates.
        self.waiting: list[tuple[str, _Scope, Definition, dict[str, ir.Expr]]] = []
        self.instances: dict[tuple[str, tuple[ir.Expr, ...]], str] = {}

    # Names

    def _scope(self, prefix: str, module: Module) -> _Scope:
        scope = _Scope(prefix, module)
        for item in module.imports:
            scope.imported[item.alias] = (self._library(item.module, module, item.at), item.name)
        for definition in module.definitions:
            self._define(scope, definition)
            if definition.priority:
                self._note(scope, definition.at, "priority", "ignored", "every parse counts")
        return scope

    def _define(self, scope: _Scope, definition: Definition) -> None:
        source = scope.module.source
        known: Definition | None = scope.names.get(definition.name)
        if definition.mode == "new":
            if known is not None or definition.name in scope.imported:
                source.fail(
                    f"{definition.name!r} is defined twice; join the definitions with |",
                    definition.at,
                )
        elif known is None and definition.name not in scope.imported:
            source.fail(
                f"{definition.name!r} is not defined, so nothing can be changed", definition.at
            )
        elif definition.mode == "extend":
            before: Item
            if known is None:
                alias = f"{definition.name}%imported"
                scope.imported[alias] = scope.imported.pop(definition.name)
                before = Name(definition.at, alias)
            else:
                before = known.body
            body = Choice(definition.at, (before, definition.body))
            definition = Definition(
                definition.name, definition.parameters, body, definition.at, definition.priority
            )
        scope.imported.pop(definition.name, None)
        scope.names[definition.name] = definition

    def _library(self, name: str, module: Module, at: int) -> _Scope:
        if name not in _LIBRARIES:
            module.source.fail(
                f"there is no library {name!r}; libraries are {', '.join(_LIBRARIES)}: paste other definitions",
                at,
            )
        if name not in self.libraries:
            try:
                text = resources.files("lark").joinpath(f"grammars/{name}.lark").read_text("utf-8")
            except ModuleNotFoundError as error:
                raise MissingDependency(
                    "%import needs the package lark, which is not installed. Install it with: pip install lark",
                    package="lark",
                    command="pip install lark",
                ) from error
            self.libraries[name] = self._scope(f"{name}.", read_lark(text))
        return self.libraries[name]

    def _find(self, scope: _Scope, item: Name) -> tuple[_Scope, Definition]:
        name = item.name
        where = scope
        while name in where.imported:
            where, name = where.imported[name]
        definition = where.names.get(name)
        if definition is None:
            if name in where.module.declared:
                raise UnsupportedKeyword(
                    f"terminal {name!r} is declared and not defined, so nothing can be enforced; define it",
                    keyword="%declare",
                )
            scope.module.source.fail(
                f"{item.name!r} is used and not defined; define it or correct the name", item.at
            )
        given, wanted = len(item.arguments or ()), len(definition.parameters)
        if given != wanted:
            scope.module.source.fail(
                f"{item.name!r} takes {wanted} arguments and gets {given}", item.at
            )
        return where, definition

    def _note(self, scope: _Scope, at: int, keyword: str, status: str, note: str) -> None:
        if scope.prefix == "":
            line, column = scope.module.source.place(at)
            path = f"{line}:{column}"
            self.entries.append(ReportEntry(path, keyword, status, note))  # type: ignore[arg-type]

    # Terminals

    def _terminal(self, scope: _Scope, definition: Definition) -> Node:
        """The tree of a terminal; those that it uses are built first, on a stack."""
        key = scope.prefix + definition.name
        stack = [(key, scope, definition)]
        open_: set[str] = set()
        while stack:
            name, where, current = stack[-1]
            if name in self.nodes:
                stack.pop()
                continue
            needed = [
                (found[0].prefix + found[1].name, *found)
                for found in self._used_terminals(where, current.body)
            ]
            missing = [entry for entry in needed if entry[0] not in self.nodes]
            if not missing:
                self.nodes[name] = self._node(where, current.body)
                if _looks_outside(self.nodes[name]):
                    note = "a condition sees the text of its terminal only"
                    self._note(where, current.at, "look-around", "approximated", note)
                stack.pop()
                continue
            open_.add(name)
            for entry in missing:
                if entry[0] in open_:
                    where.module.source.fail(
                        f"terminal {entry[2].name!r} uses itself; make it a rule", current.at
                    )
            stack += missing
        return self.nodes[key]

    def _used_terminals(self, scope: _Scope, body: Item) -> list[tuple[_Scope, Definition]]:
        used: list[tuple[_Scope, Definition]] = []
        stack = [body]
        while stack:
            item = stack.pop()
            stack += item.children()
            if isinstance(item, Name):
                if not _is_terminal(item.name):
                    scope.module.source.fail(
                        f"a terminal cannot use the rule {item.name!r}", item.at
                    )
                used.append(self._find(scope, item))
        return used

    def _node(self, scope: _Scope, body: Item) -> Node:
        def combine(item: Item, inner: Sequence[Node]) -> Node:
            if isinstance(item, Name):
                where, definition = self._find(scope, item)
                return self.nodes[where.prefix + definition.name]
            if isinstance(item, String):
                return sequence([self._character(c, item.ignore_case) for c in item.text])
            if isinstance(item, Span):
                return Characters(make([(ord(item.first), ord(item.last))]))
            if isinstance(item, Pattern):
                return self._pattern(scope, item)
            if isinstance(item, Quantified):
                return repetition(inner[0], item.low, item.high)
            return alternatives(inner) if isinstance(item, Choice) else sequence(inner)

        return fold(body, combine)

    def _character(self, character: str, ignore_case: bool) -> Node:
        points = make([(ord(character), ord(character))])
        return Characters(case_closure(points, ascii_only=False) if ignore_case else points)

    def _pattern(self, scope: _Scope, item: Pattern) -> Node:
        flags = Flags(
            ignore_case="i" in item.flags,
            multiline="m" in item.flags,
            dot_all="s" in item.flags,
            verbose="x" in item.flags,
        )
        try:
            return parse_regex(item.pattern, "python", flags=flags)
        except GrammarSyntaxError as error:
            self._fail_inside(scope, item, str(error), error)
        except UnsupportedKeyword as error:
            line, column = scope.module.source.place(item.at)
            raise UnsupportedKeyword(
                f"line {line}, column {column}: {error}", keyword=error.keyword
            ) from error

    def _fail_inside(
        self, scope: _Scope, item: Pattern, message: str, cause: GrammarSyntaxError
    ) -> NoReturn:
        try:
            scope.module.source.fail(message, item.at + 1 + (cause.position or 0))
        except GrammarSyntaxError as error:
            raise error from cause

    # Rules

    def build(self, start: str) -> tuple[ir.Rules, Report]:
        name = start
        if name == "root" and name not in self.main.names and name not in self.main.imported:
            name = "start"
        if name not in self.main.names and name not in self.main.imported:
            known = ", ".join(list(self.main.names)[:10]) or "no rules"
            raise GrammarSyntaxError(
                f"the start rule {start!r} is not defined; defined are {known}: name one as start"
            )
        ignored = [
            _token_expr(self._anonymous(self.main, item)) for item in self.main.module.ignored
        ]
        if ignored:
            self.rules[_IGNORED] = ir.star(ir.alt(*ignored))
        begin = self._reference(self.main, Name(0, name), {})
        while self.waiting:
            key, scope, definition, arguments = self.waiting.pop()
            self.rules[key] = self._expr(scope, definition.body, arguments)
        if ignored:
            begin = ir.seq(ir.ref(_IGNORED), begin)
        return ir.Rules.of(begin, self.rules), Report(tuple(self.entries))

    def _anonymous(self, scope: _Scope, item: Item) -> Node:
        for where, definition in self._used_terminals(scope, item):
            self._terminal(where, definition)
        return self._node(scope, item)

    def _token(self, expr: ir.Expr) -> ir.Expr:
        """A terminal, and what may stand behind it."""
        return ir.seq(expr, ir.ref(_IGNORED)) if _IGNORED in self.rules else expr

    def _expr(self, scope: _Scope, body: Item, arguments: dict[str, ir.Expr]) -> ir.Expr:
        def combine(item: Item, inner: Sequence[ir.Expr]) -> ir.Expr:
            if isinstance(item, Name):
                if item.name in arguments and item.arguments is None:
                    return arguments[item.name]
                return self._reference(scope, item, dict(enumerate(inner)))
            if isinstance(item, String) and not item.ignore_case:
                return self._token(ir.literal(item.text.encode()))
            if isinstance(item, String | Span | Pattern):
                return self._token(_token_expr(self._node(scope, item)))
            if isinstance(item, Quantified):
                return ir.repeat(inner[0], item.low, item.high)
            return ir.alt(*inner) if isinstance(item, Choice) else ir.seq(*inner)

        return fold(body, combine)

    def _reference(self, scope: _Scope, item: Name, given: dict[int, ir.Expr]) -> ir.Expr:
        where, definition = self._find(scope, item)
        key = where.prefix + definition.name
        if _is_terminal(definition.name):
            if key not in self.rules:
                self.rules[key] = _token_expr(self._terminal(where, definition))
            return self._token(ir.ref(key))
        values = tuple(given.values())
        if definition.parameters:
            instance = (key, values)
            if instance not in self.instances:
                if len(self.instances) >= _MAX_INSTANCES:
                    raise GrammarTooLarge(
                        f"the templates have more than {_MAX_INSTANCES} instances; does one grow without end?",
                        resource="instances",
                        limit=_MAX_INSTANCES,
                        found=len(self.instances) + 1,
                    )
                self.instances[instance] = f"{key}{{{len(self.instances)}}}"
            key = self.instances[instance]
        if key not in self.rules:
            self.rules[key] = ir.EMPTY  # filled in by build
            arguments = dict(zip(definition.parameters, values, strict=True))
            self.waiting.append((key, where, definition, arguments))
        return ir.ref(key)


def _token_expr(node: Node) -> ir.Expr:
    """The byte expression of a terminal: its preferred matches."""
    return lower(settle_lazy(node), encode_utf8)


def _looks_outside(node: Node) -> bool:
    """Whether a condition stands at an end of a tree, where it would see the text around."""
    if node.pure:
        return False
    stack = [(node, True, True)]
    while stack:
        part, at_start, at_end = stack.pop()
        if isinstance(part, LineStart | LineEnd | WordBoundary) and (at_start or at_end):
            return True
        if isinstance(part, Look) and (at_end if part.ahead else at_start):
            return True
        if isinstance(part, Concatenation):
            for index, child in enumerate(part.parts):
                before = all(other.nullable for other in part.parts[:index])
                behind = all(other.nullable for other in part.parts[index + 1 :])
                stack.append((child, at_start and before, at_end and behind))
        elif isinstance(part, Alternatives):
            stack += [(child, at_start, at_end) for child in part.parts]
        elif not part.pure and not isinstance(part, Look) and hasattr(part, "part"):
            stack.append((part.part, at_start, at_end))
    return False
