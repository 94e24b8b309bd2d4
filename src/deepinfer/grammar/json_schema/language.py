"""Questions about small languages without rules: membership, emptiness, all strings of a finite one.

They are answered with Brzozowski derivatives, so intersections, complements and counted repeats need no automaton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal as Literal_

from deepinfer.grammar.ir import (
    ALL_BYTES,
    EMPTY,
    EPS,
    Alt,
    And,
    Bytes,
    Empty,
    Eps,
    Expr,
    Literal,
    Not,
    Repeat,
    Seq,
    alt,
    complement,
    intersect,
    literal,
    repeat,
    seq,
    walk,
)

__all__ = ["Derivatives", "is_bounded"]


class Derivatives:
    """Derivatives of expressions by bytes, remembered.

    Expressions may be nested a few hundred levels; deeper ones raise RecursionError.

    Args:
        spend: Called with each unit of work; it may raise to stop.
    """

    def __init__(self, spend: Callable[[int], None] = lambda amount: None) -> None:
        self._spend = spend
        self._nullable: dict[Expr, bool] = {}
        self._after: dict[tuple[Expr, int], Expr] = {}
        self._firsts: dict[Expr, tuple[int, ...]] = {}
        # One object for equal expressions, so that comparing them stays shallow.
        self._table: dict[Expr, Expr] = {}
        self._plain: dict[Expr, bool] = {}

    def matches(self, expr: Expr, text: bytes) -> bool:
        """Whether a language holds a string."""
        for byte in text:
            expr = self.after(expr, byte)
            if isinstance(expr, Empty):
                return False
        return self.nullable(expr)

    def is_empty(self, expr: Expr, max_states: int) -> bool | None:
        """Whether a language holds no string; None when more than `max_states` derivatives were not enough."""
        if not isinstance(expr, And | Not):
            plain = self._plain.get(expr)
            if plain is None:
                plain = not any(isinstance(node, And | Not) for node in walk(expr))
                self._plain[expr] = plain
            if plain:
                return isinstance(expr, Empty)
        found = self.witness(expr, max_states)
        return None if found is None else found is False

    def witness(self, expr: Expr, max_states: int) -> bytes | Literal_[False] | None:
        """Some string of a language; False when there is none, None when the search was given up."""
        expr = self._table.setdefault(expr, expr)
        seen = {expr}
        stack = [(expr, b"")]
        while stack:
            state, text = stack.pop()
            if self.nullable(state):
                return text
            for mask in self._classes(state):
                byte = (mask & -mask).bit_length() - 1
                target = self.after(state, byte)
                if not isinstance(target, Empty) and target not in seen:
                    if len(seen) >= max_states:
                        return None
                    seen.add(target)
                    stack.append((target, text + bytes((byte,))))
        return False

    def strings(self, expr: Expr, limit: int, max_states: int) -> list[bytes] | None:
        """All strings of a finite language, or None when there are more than `limit` or the search is too long."""
        found: list[bytes] = []
        stack = [(expr, b"")]
        steps = 0
        while stack:
            state, text = stack.pop()
            if self.nullable(state):
                found.append(text)
                if len(found) > limit:
                    return None
            for mask in self._classes(state):
                target = self.after(state, (mask & -mask).bit_length() - 1)
                if self.is_empty(target, max_states) is not False:
                    continue
                for byte in range(256):
                    if mask >> byte & 1:
                        steps += 1
                        if steps > max_states:
                            return None
                        stack.append((target, text + bytes((byte,))))
        return sorted(found)

    def nullable(self, expr: Expr) -> bool:
        """Whether a language holds the empty string."""
        known = self._nullable.get(expr)
        if known is None:
            known = self._nullable[expr] = self._is_nullable(expr)
        return known

    def _is_nullable(self, expr: Expr) -> bool:
        if isinstance(expr, Eps):
            return True
        if isinstance(expr, Seq | And):
            return all(self.nullable(part) for part in expr.parts)
        if isinstance(expr, Alt):
            return any(self.nullable(part) for part in expr.parts)
        if isinstance(expr, Not):
            return not self.nullable(expr.expr)
        if isinstance(expr, Repeat):
            return expr.low == 0 or self.nullable(expr.expr)
        return False

    def after(self, expr: Expr, byte: int) -> Expr:
        """What may follow a byte."""
        key = (expr, byte)
        known = self._after.get(key)
        if known is None:
            self._spend(4)
            known = self._derive(expr, byte)
            known = self._after[key] = self._table.setdefault(known, known)
        return known

    def _derive(self, expr: Expr, byte: int) -> Expr:
        if isinstance(expr, Bytes):
            return EPS if expr.mask >> byte & 1 else EMPTY
        if isinstance(expr, Literal):
            return literal(expr.text[1:]) if expr.text[0] == byte else EMPTY
        if isinstance(expr, Alt):
            return alt(*(self.after(part, byte) for part in expr.parts))
        if isinstance(expr, And):
            return intersect(*(self.after(part, byte) for part in expr.parts))
        if isinstance(expr, Not):
            return complement(self.after(expr.expr, byte))
        if isinstance(expr, Seq):
            branches = []
            for index, part in enumerate(expr.parts):
                branches.append(seq(self.after(part, byte), *expr.parts[index + 1 :]))
                if not self.nullable(part):
                    break
            return alt(*branches)
        if isinstance(expr, Repeat):
            high = None if expr.high is None else expr.high - 1
            rest = repeat(expr.expr, max(expr.low - 1, 0), high)
            return seq(self.after(expr.expr, byte), rest)
        if isinstance(expr, Empty | Eps):
            return EMPTY
        raise TypeError(f"{type(expr).__name__} has no derivative here")

    def _classes(self, expr: Expr) -> tuple[int, ...]:
        """A partition of all bytes; bytes of one class have the same derivative."""
        known = self._firsts.get(expr)
        if known is None:
            known = self._firsts[expr] = self._split(expr)
        return known

    def _split(self, expr: Expr) -> tuple[int, ...]:
        if isinstance(expr, Bytes):
            return tuple(mask for mask in (expr.mask, ALL_BYTES & ~expr.mask) if mask)
        if isinstance(expr, Literal):
            one = 1 << expr.text[0]
            return (one, ALL_BYTES & ~one)
        if isinstance(expr, Not | Repeat):
            return self._classes(expr.expr)
        if isinstance(expr, Alt | And):
            return _product([self._classes(part) for part in expr.parts])
        if isinstance(expr, Seq):
            parts = []
            for part in expr.parts:
                parts.append(self._classes(part))
                if not self.nullable(part):
                    break
            return _product(parts)
        return (ALL_BYTES,)


def _product(partitions: list[tuple[int, ...]]) -> tuple[int, ...]:
    classes: tuple[int, ...] = (ALL_BYTES,)
    for partition in partitions:
        if len(partition) > 1:
            classes = tuple(a & b for a in classes for b in partition if a & b)
    return classes


def is_bounded(expr: Expr) -> bool:
    """Whether an expression has no unbounded repeat and no complement, so that its language is finite."""
    return not any(
        (isinstance(node, Repeat) and node.high is None) or isinstance(node, Not)
        for node in walk(expr)
    )
