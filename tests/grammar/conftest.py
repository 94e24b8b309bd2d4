"""A slow and plain matcher of expressions, to hold the fast one against."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.grammar import ir


class SlowMatcher:
    """Where expressions can end in one byte string, worked out from their definitions."""

    def __init__(self, rules: ir.Rules, text: bytes) -> None:
        self.rules = rules
        self.text = text
        self.known: dict[tuple[ir.Expr, int], frozenset[int]] = {}
        self.active: set[tuple[ir.Expr, int]] = set()
        self.changed = False

    def accepts(self) -> bool:
        while True:  # until left recursion finds nothing new
            self.changed = False
            self.known = {
                key: value for key, value in self.known.items() if isinstance(key[0], ir.Ref)
            }
            ends = self.ends(ir.ref(self.rules.start), 0)
            if not self.changed:
                return len(self.text) in ends

    def ends(self, expr: ir.Expr, at: int) -> frozenset[int]:
        key = (expr, at)
        if key in self.active or (key in self.known and not isinstance(expr, ir.Ref)):
            return self.known.get(key, frozenset())
        self.active.add(key)
        found = self.work(expr, at)
        self.active.discard(key)
        if isinstance(expr, ir.Ref) and found != self.known.get(key):
            self.changed = True
        self.known[key] = found
        return found

    def work(self, expr: ir.Expr, at: int) -> frozenset[int]:
        size = len(self.text)
        if isinstance(expr, ir.Empty):
            return frozenset()
        if isinstance(expr, ir.Eps):
            return frozenset([at])
        if isinstance(expr, ir.Bytes):
            return frozenset([at + 1] if at < size and expr.mask >> self.text[at] & 1 else [])
        if isinstance(expr, ir.Literal):
            return frozenset([at + len(expr.text)] if self.text.startswith(expr.text, at) else [])
        if isinstance(expr, ir.Seq):
            places = frozenset([at])
            for part in expr.parts:
                places = frozenset(end for place in places for end in self.ends(part, place))
            return places
        if isinstance(expr, ir.Alt):
            return frozenset().union(*(self.ends(part, at) for part in expr.parts))
        if isinstance(expr, ir.And):
            return frozenset.intersection(*(self.ends(part, at) for part in expr.parts))
        if isinstance(expr, ir.Not):
            return frozenset(range(at, size + 1)) - self.ends(expr.expr, at)
        if isinstance(expr, ir.Repeat):
            places, found = frozenset([at]), frozenset()
            seen: set[tuple[int, frozenset[int]]] = set()
            count = 0
            while places and (expr.high is None or count <= expr.high):
                if count >= expr.low:
                    found |= places
                key = (min(count, expr.low), places)
                if key in seen:
                    break
                seen.add(key)
                places = frozenset(end for place in places for end in self.ends(expr.expr, place))
                count += 1
            return found
        if isinstance(expr, ir.Ref):
            return self.ends(self.rules.rules[expr.name], at)
        raise TypeError(type(expr).__name__)


def accepts(rules: ir.Rules | ir.Expr, text: str | bytes) -> bool:
    """Whether the rules match a whole text."""
    whole = rules if isinstance(rules, ir.Rules) else ir.Rules.of(rules)
    return SlowMatcher(whole, text.encode() if isinstance(text, str) else text).accepts()


@pytest.fixture(scope="session")
def slow_match() -> Callable[..., bool]:
    """Whether rules or an expression match a whole text."""
    return accepts
