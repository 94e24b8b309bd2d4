"""Grammars put together from others."""

from __future__ import annotations

from deepinfer.core.errors import EmptyLanguage
from deepinfer.grammar import ir
from deepinfer.grammar._ir_walk import rebuild
from deepinfer.grammar.argument_checks import check_part
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.report import Report

__all__ = ["Assembly", "concatenate", "either"]


class Assembly:
    """Rules collected from several grammars, under names that do not meet.

    Attributes:
        rules: The rules so far.
        report: The entries of all parts, in order.
    """

    def __init__(self) -> None:
        self.rules: dict[str, ir.Expr] = {}
        self.report = Report()
        self._known: dict[ir.Rules, ir.Expr] = {}

    def add(self, grammar: Grammar) -> ir.Expr:
        """Takes a grammar in.

        Args:
            grammar: The grammar.

        Returns:
            An expression that matches what it matches, next to `rules`.
        """
        check_part(
            "grammar", grammar, Grammar, "make one with compile_regex, choices or another front end"
        )
        rules = grammar.rules
        if rules in self._known:
            return self._known[rules]
        self.report += grammar.report
        prefix = f"{len(self._known)}/"
        done: dict[int, ir.Expr] = {}
        for node in ir.walk(*rules.rules.values()):
            if isinstance(node, ir.Ref):
                done[id(node)] = ir.ref(prefix + node.name)
                continue
            children = node.children()
            renamed = tuple(done[id(child)] for child in children)
            same = all(new is old for new, old in zip(renamed, children, strict=True))
            done[id(node)] = node if same else rebuild(type(node), node.data(), renamed)
        for name, expr in rules.rules.items():
            self.rules[prefix + name] = done[id(expr)]
        self._known[rules] = ir.ref(prefix + rules.start)
        return self._known[rules]

    def grammar(self, start: ir.Expr, source: str) -> Grammar:
        """The whole.

        Args:
            start: Where it begins, over the rules taken in.
            source: Kind of input.

        Returns:
            The grammar.

        Raises:
            EmptyLanguage: Nothing can match.
        """
        if isinstance(start, ir.Empty):
            raise EmptyLanguage("no text can match; look for a part without alternatives")
        return Grammar(ir.Rules.of(start, self.rules), report=self.report, source=source)


def concatenate(*grammars: Grammar) -> Grammar:
    """Outputs of several grammars, one after the other.

    Args:
        *grammars: The grammars, in order; none at all gives the empty output.

    Returns:
        The grammar; `first + second` is the same.
    """
    assembly = Assembly()
    return assembly.grammar(ir.seq(*map(assembly.add, grammars)), "sequence")


def either(*grammars: Grammar) -> Grammar:
    """Outputs of any one of several grammars.

    Args:
        *grammars: The grammars.

    Returns:
        The grammar; `first | second` is the same.

    Raises:
        EmptyLanguage: There are none.
    """
    assembly = Assembly()
    return assembly.grammar(ir.alt(*map(assembly.add, grammars)), "choice")
