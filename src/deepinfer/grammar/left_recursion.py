"""Removal of left recursion: rules that begin with themselves, openly or behind parts that may be empty.

The rules of one left-recursive component are linear equations: each rule is a base that does not begin with a rule of
the component, plus, for each rule of the component, that rule followed by a rest. Their least solution is the bases
followed by the closure of the matrix of rests (Rosenkrantz 1967); the closure becomes new, right-recursive rules, or
a star where the component is a single rule. A rest that ends in its own rule, as in `e = e "+" e | n`, is cut to end
in the base instead, which is the same language without the ambiguity: `n ("+" n)*`.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge
from deepinfer.grammar._ir_nodes import (
    Alt,
    And,
    Bag,
    Bytes,
    Empty,
    Eps,
    Expr,
    Literal,
    Not,
    Ref,
    Repeat,
    Seq,
)
from deepinfer.grammar.ir import EMPTY, EPS, alt, repeat, seq, star
from deepinfer.grammar.rule_graph import fold, left_references, nullable_node, quick_nullable

__all__ = ["LeftRecursion"]

_MAX_NESTING = 200


class LeftRecursion:
    """Rewrites rules until none begins with itself.

    Args:
        rules: The rules; not changed.
        nullable: Which rules match the empty string.

    Attributes:
        rules: The rewritten rules, new ones included.
    """

    def __init__(self, rules: Mapping[str, Expr], nullable: Mapping[str, bool]) -> None:
        self.rules: dict[str, Expr] = dict(rules)
        self._nullable_rules = dict(nullable)
        self._nullable: dict[int, bool] = {}
        self._left: dict[int, frozenset[str]] = {}
        self._kept: list[Expr] = []
        self._stripped: dict[str, str] = {}

    def is_nullable(self, expr: Expr) -> bool:
        """Whether an expression matches the empty string."""
        found = self._nullable.get(id(expr))
        if found is None:
            self._kept.append(expr)

            def value(node: Expr, children: list[bool]) -> bool:
                return nullable_node(node, children, self._nullable_rules)

            found = fold(expr, value, self._nullable, quick_nullable)
        return found

    def first_rules(self, expr: Expr) -> frozenset[str]:
        """Rules with which a string of the expression may begin."""
        found = self._left.get(id(expr))
        if found is None:
            self._kept.append(expr)
            found = left_references(expr, self.is_nullable, self._left)
        return found

    def _fresh(self, name: str) -> str:
        while name in self.rules:
            name += "'"
        return name

    def _nonempty_rule(self, name: str) -> str:
        """A rule with the strings of a rule except the empty one."""
        found = self._stripped.get(name)
        if found is None:
            found = self._stripped[name] = self._fresh(name + " nonempty")
            self._nullable_rules[found] = False
            self.rules[found] = Empty()
            self.rules[found] = self._split(self.rules[name], frozenset(), 0)[0]
        return found

    def _split(
        self, expr: Expr, component: frozenset[str], nesting: int
    ) -> tuple[Expr, dict[str, Expr]]:
        """The nonempty strings as a base, and a rest for each rule of the component that may come first."""
        if nesting > _MAX_NESTING:
            raise GrammarTooLarge(
                f"a left-recursive rule nests more than {_MAX_NESTING} expressions at its beginning;"
                " rewrite it with a repetition",
                resource="nesting",
                limit=_MAX_NESTING,
            )
        if isinstance(expr, Ref):
            if expr.name in component:
                return EMPTY, {expr.name: EPS}
            if self.is_nullable(expr):
                return Ref(self._nonempty_rule(expr.name)), {}
            return expr, {}
        if isinstance(expr, Eps | Empty):
            return EMPTY, {}
        plain = not (component & self.first_rules(expr))
        if isinstance(expr, Bytes | Literal) or (plain and not self.is_nullable(expr)):
            return expr, {}
        if isinstance(expr, Alt):
            bases = []
            rests: dict[str, Expr] = {}
            for part in expr.parts:
                base, rest = self._split(part, component, nesting + 1)
                bases.append(base)
                for name, tail in rest.items():
                    rests[name] = alt(rests.get(name, EMPTY), tail)
            return alt(*bases), rests
        if isinstance(expr, Seq):
            bases = []
            rests = {}
            for place, part in enumerate(expr.parts):
                after = seq(*expr.parts[place + 1 :])
                base, rest = self._split(part, component, nesting + 1)
                bases.append(seq(base, after))
                for name, tail in rest.items():
                    rests[name] = alt(rests.get(name, EMPTY), seq(tail, after))
                if not self.is_nullable(part):
                    break
            return alt(*bases), rests
        if isinstance(expr, Repeat):
            high = None if expr.high is None else expr.high - 1
            after = repeat(expr.expr, max(expr.low - 1, 0), high)
            base, rest = self._split(expr.expr, component, nesting + 1)
            return seq(base, after), {name: seq(tail, after) for name, tail in rest.items()}
        if isinstance(expr, Bag):
            if not plain:
                raise GrammarSyntaxError(
                    "a rule begins with itself through a bag of members; put something before the bag"
                )
            return Bag(
                expr.members,
                expr.separator,
                expr.clauses,
                max(1, expr.low),
                expr.high,
                expr.ordered,
            ), {}
        if isinstance(expr, And | Not) and plain:
            return And((expr, Not(EPS))), {}
        raise GrammarSyntaxError(
            "an intersection or complement holds a recursive rule; move the operation inside the rule"
        )

    def remove(self, component: list[str]) -> None:
        """Rewrite the rules of one left-recursive component."""
        names = frozenset(component)
        parts = {name: self._split(self.rules[name], names, 0) for name in component}
        solved: dict[str, Expr] = {}
        if len(component) == 1:
            name = component[0]
            base, rests = parts[name]
            short = alt(base, EPS) if self._nullable_rules[name] else base
            rest = self._split(rests.get(name, EMPTY), frozenset(), 0)[0]
            pieces = []
            for piece in rest.parts if isinstance(rest, Alt) else (rest,):
                last = piece.parts[-1] if isinstance(piece, Seq) else piece
                if last == Ref(name):
                    last = short
                elif name in self._stripped and last == Ref(self._stripped[name]):
                    last = base
                before = piece.parts[:-1] if isinstance(piece, Seq) else ()
                pieces.append(seq(*before, last))
            if base in pieces:
                # The rule is closed under concatenation: repeating it adds nothing.
                pieces = [p for p in pieces if not _repeats(p, name, base)]
            solved[name] = seq(base, star(alt(*pieces)))
        else:
            solved = self._solve(component, parts)
        for name in component:
            body = solved[name]
            if self._nullable_rules[name]:
                known = self._stripped.get(name)
                if known is not None:
                    self.rules[known] = body
                body = alt(body, EPS)
            self.rules[name] = body
        self._left.clear()
        self._nullable.clear()

    def _solve(
        self, component: list[str], parts: Mapping[str, tuple[Expr, dict[str, Expr]]]
    ) -> dict[str, Expr]:

        rest: dict[tuple[str, str], Expr] = {}
        unit: dict[str, set[str]] = {name: {name} for name in component}
        for to in component:
            for of, tail in parts[to][1].items():
                # `to` is `of` followed by the tail; an empty tail makes strings of `of` strings of `to`.
                if self.is_nullable(tail):
                    unit[of].add(to)
                rest[of, to] = self._split(tail, frozenset(), 0)[0]
        for middle in component:
            for of in component:
                if middle in unit[of]:
                    unit[of] |= unit[middle]
        closure = {(of, to): self._fresh(f"{of} then {to}") for of in component for to in component}
        bodies: dict[str, Expr] = {}
        for (of, to), name in closure.items():
            options: list[Expr] = [EPS] if of == to else []
            for first in unit[of]:
                for second in component:
                    step = rest.get((first, second), EMPTY)
                    options.append(seq(step, Ref(closure[second, to])))
            bodies[name] = alt(*options)
            self._nullable_rules[name] = of == to
        self.rules.update(bodies)
        solved = {}
        for to in component:
            options = []
            for of in component:
                for middle in component:
                    if to in unit[middle]:
                        options.append(seq(parts[of][0], Ref(closure[of, middle])))
            solved[to] = alt(*options)
        return solved


def _repeats(piece: Expr, name: str, base: Expr) -> bool:
    """Whether a piece is a rule, any number of times, and then its base."""
    if not isinstance(piece, Seq) or piece.parts[-1] != base:
        return False
    return all(part == Ref(name) for part in piece.parts[:-1])
