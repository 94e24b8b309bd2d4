"""From the tree of a regular expression to a byte expression, with assertions worked out exactly.

A pure part becomes an expression by itself. A part with assertions is read from right to left with the language
of everything that follows at hand, which is what a look ahead is about: `(?=x)` intersects it, `(?!x)` takes
strings away from it, `$` keeps the empty string of it. What stands before is known up to the class of the last
character, which is what `^`, word boundaries and short looks behind are about; so that language is kept once for
each such class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar import ir
from deepinfer.grammar.codepoints import ALL, CodePoints, difference, intersection
from deepinfer.grammar.regex_ast import (
    Alternatives,
    Characters,
    Concatenation,
    Filtered,
    LineEnd,
    LineStart,
    Look,
    Node,
    Repetition,
    WordBoundary,
)
from deepinfer.grammar.regex_ending import ending_in

__all__ = ["EncodeClass", "lower"]

EncodeClass = Callable[[CodePoints], ir.Expr]
"""Spellings of one character out of a set, as bytes. No spelling may begin with another one."""

_MAX_UNROLLED = 64
_MAX_BLOCKS = 32
_NEWLINE: CodePoints = ((0x0A, 0x0A),)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The language of what follows a place.

    Attributes:
        expr: The language.
        nullable: Whether nothing may follow.
    """

    expr: ir.Expr
    nullable: bool


_NO_TAIL = _Tail(ir.EMPTY, False)
_Tails = tuple[_Tail, ...]


class _NeedsAutomaton(Exception):
    """An assertion that depends on more than the languages kept here know."""


def lower(node: Node, encode_class: EncodeClass) -> ir.Expr:
    """The byte expression of the texts that a tree matches as a whole.

    Args:
        node: The tree.
        encode_class: Spellings of a set of characters. It is called once for each different set.

    Returns:
        The expression.

    Raises:
        UnsupportedKeyword: A look around cannot be worked out.
        GrammarTooLarge: Working out the assertions takes too much.
    """
    lowering = _Lowering(encode_class)
    if node.pure:
        return lowering.pure(node)
    try:
        return lowering.whole(node)
    except _NeedsAutomaton:
        from deepinfer.grammar.regex_automaton import determinise, eliminate

        return eliminate(determinise(node), lowering.encode)


class _Lowering:
    """One tree on its way.

    Args:
        encode_class: Spellings of a set of characters.
    """

    def __init__(self, encode_class: EncodeClass) -> None:
        self._encode_class = encode_class
        self._encoded: dict[CodePoints, ir.Expr] = {}
        self._exprs: dict[Node, ir.Expr] = {}
        # What the character before a place may be: block 0 is the start of the text, where there is none.
        self.blocks: list[CodePoints] = []
        self._steps = 0

    def encode(self, points: CodePoints) -> ir.Expr:
        found = self._encoded.get(points)
        if found is None:
            found = self._encoded[points] = self._encode_class(points) if points else ir.EMPTY
        return found

    # Pure parts

    def pure(self, node: Node) -> ir.Expr:
        """The expression of a pure part; children first, on a stack."""
        done = self._exprs
        stack: list[tuple[Node, bool]] = [(node, False)]
        while stack:
            current, ready = stack.pop()
            if current in done:
                continue
            children = _children(current)
            if children and not ready:
                stack.append((current, True))
                stack += [(child, False) for child in children]
                continue
            done[current] = self._combine(current, [done[child] for child in children])
        return done[node]

    def _combine(self, node: Node, parts: Sequence[ir.Expr]) -> ir.Expr:
        if isinstance(node, Characters):
            return self.encode(node.points)
        if isinstance(node, Concatenation):
            return ir.seq(*parts)
        if isinstance(node, Alternatives):
            return ir.alt(*parts)
        if isinstance(node, Repetition):
            return ir.repeat(parts[0], node.low, node.high)
        if not isinstance(node, Filtered):
            raise TypeError(f"{type(node).__name__} is not pure")
        body, condition = parts
        if node.ahead:
            having = ir.seq(condition, ir.anything())
        else:
            # Characters must be read from the start of the text: bytes before an end say too little.
            having = ir.seq(self.any_text(), condition)
        return ir.intersect(body, ir.complement(having) if node.negative else having)

    def any_text(self) -> ir.Expr:
        return ir.star(self.encode(ALL))

    # Parts with assertions

    def whole(self, node: Node) -> ir.Expr:
        """The expression of a whole tree."""
        self.blocks = _blocks(node)
        return self.tails(node, (_Tail(ir.EPS, True),) * (1 + len(self.blocks)))[0].expr

    def tails(self, node: Node, after: _Tails) -> _Tails:
        """For each class of the character before: the language of the node and of what follows it."""
        self._steps += 1
        if self._steps > 20_000:
            raise GrammarTooLarge(
                "the regular expression has too many look-arounds and anchors inside repeats; simplify it",
                resource="steps",
                limit=20_000,
                found=self._steps,
            )
        if node.pure:
            return self._pure_tails(node, after)
        if isinstance(node, Concatenation):
            for part in reversed(node.parts):
                after = self.tails(part, after)
            return after
        if isinstance(node, Alternatives):
            ways = [self.tails(part, after) for part in node.parts]
            return tuple(_either(column) for column in zip(*ways, strict=True))
        if isinstance(node, Repetition):
            return self._repeated(node, after)
        if isinstance(node, LineStart):
            return tuple(
                tail if at == 0 or not difference(self.blocks[at - 1], node.after) else _NO_TAIL
                for at, tail in enumerate(after)
            )
        if isinstance(node, LineEnd):
            return tuple(self._line_end(node, tail) for tail in after)
        if isinstance(node, WordBoundary):
            return tuple(self._boundary(node, at, tail) for at, tail in enumerate(after))
        if isinstance(node, Look):
            return self._look(node, after)
        raise TypeError(f"{type(node).__name__} has no language")

    def _pure_tails(self, node: Node, after: _Tails) -> _Tails:
        inner = {
            tail
            for tail, block in zip(after[1:], self.blocks, strict=True)
            if intersection(block, node.last)
        }
        if not inner:  # the empty string, or nothing
            return after if node.nullable else (_NO_TAIL,) * len(after)
        if len(inner) == 1:
            behind = next(iter(inner))
            whole = self._joined(node, behind)
            if not node.nullable:
                return (whole,) * len(after)
            if all(tail == behind for tail in after):
                return (whole,) * len(after)
            some = self._joined(ending_in(node, ALL), behind)
            return tuple(whole if tail == behind else _either([tail, some]) for tail in after)
        by_tail: dict[_Tail, list[CodePoints]] = {}
        for tail, block in zip(after[1:], self.blocks, strict=True):
            if intersection(block, node.last):
                by_tail.setdefault(tail, []).append(block)
        ways = []
        for tail, blocks in by_tail.items():
            points = tuple(sorted(part for block in blocks for part in block))
            ways.append(self._joined(ending_in(node, points), tail))
        some = _either(ways)
        return tuple(_either([tail, some]) if node.nullable else some for tail in after)

    def _joined(self, node: Node, tail: _Tail) -> _Tail:
        if isinstance(tail.expr, ir.Empty):
            return _NO_TAIL
        return _Tail(ir.seq(self.pure(node), tail.expr), node.nullable and tail.nullable)

    def _repeated(self, node: Repetition, after: _Tails) -> _Tails:
        high = node.low if node.high is None else node.high
        if node.high is None or high > _MAX_UNROLLED:
            raise _NeedsAutomaton
        current = after
        for _ in range(high - node.low):
            once = self.tails(node.part, current)
            current = tuple(map(_either, zip(after, once, strict=True)))
        for _ in range(node.low):
            current = self.tails(node.part, current)
        return current

    def _line_end(self, node: LineEnd, tail: _Tail) -> _Tail:
        ways = [_Tail(ir.EPS, True)] if tail.nullable else []
        if node.final_newline and not node.before:
            ways.append(_Tail(ir.intersect(tail.expr, self.encode(_NEWLINE)), False))
        if node.before:
            line = ir.seq(self.encode(node.before), ir.anything())
            ways.append(_Tail(ir.intersect(tail.expr, line), False))
        return _either(ways)

    def _boundary(self, node: WordBoundary, at: int, tail: _Tail) -> _Tail:
        behind_word = at > 0 and not difference(self.blocks[at - 1], node.word)
        wants_word = behind_word == node.negative
        word = ir.seq(self.encode(node.word), ir.anything())
        if wants_word:
            return _Tail(ir.intersect(tail.expr, word), False)
        return _Tail(ir.intersect(tail.expr, ir.complement(word)), tail.nullable)

    def _look(self, node: Look, after: _Tails) -> _Tails:
        if not node.ahead:
            return tuple(
                tail if self._behind(node.part, at) != node.negative else _NO_TAIL
                for at, tail in enumerate(after)
            )
        rest = (_Tail(ir.anything(), True),) * len(after)
        found = []
        for condition, tail in zip(self.tails(node.part, rest), after, strict=True):
            expr, nullable = condition.expr, condition.nullable
            if node.negative:
                expr, nullable = ir.complement(expr), not nullable
            found.append(_Tail(ir.intersect(tail.expr, expr), tail.nullable and nullable))
        return tuple(found)

    def _behind(self, part: Node, at: int) -> bool:
        """Whether a look behind holds after a character of a block: it may read one character at most."""
        if isinstance(part, Alternatives):
            return any(self._behind(way, at) for way in part.parts)
        if isinstance(part, LineStart):
            return at == 0 or not difference(self.blocks[at - 1], part.after)
        if part.pure and part.nullable:
            return True
        if part.pure and part.max_length == 1:
            return at > 0 and not difference(self.blocks[at - 1], _single(part))
        raise _NeedsAutomaton


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Concatenation | Alternatives):
        return node.parts
    if isinstance(node, Repetition):
        return (node.part,)
    if isinstance(node, Filtered):
        return (node.part, node.condition)
    return (node.part,) if isinstance(node, Look) else ()


def _either(tails: Sequence[_Tail]) -> _Tail:
    expr = ir.alt(*(tail.expr for tail in tails))
    return _Tail(expr, any(tail.nullable for tail in tails))


def _single(part: Node) -> CodePoints:
    """The characters of a pure part of one character at most."""
    ended = ending_in(part, ALL)
    if isinstance(ended, Characters):
        return ended.points
    return ()


def _blocks(node: Node) -> list[CodePoints]:
    """The coarsest classes of characters that tell every condition on the character before apart."""
    sets: set[CodePoints] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, LineStart):
            sets.add(current.after)
        elif isinstance(current, WordBoundary):
            sets.add(current.word)
        elif isinstance(current, Look) and not current.ahead:
            ways = [current.part]
            while ways:
                way = ways.pop()
                if isinstance(way, Alternatives) and not (way.pure and way.max_length == 1):
                    ways += way.parts
                elif way.pure and way.max_length == 1:
                    sets.add(_single(way))
                elif isinstance(way, LineStart):
                    sets.add(way.after)
        stack += _children(current)
    blocks: list[CodePoints] = [ALL]
    for points in sorted(sets):
        parts = [(intersection(block, points), difference(block, points)) for block in blocks]
        blocks = [part for pair in parts for part in pair if part]
        if len(blocks) > _MAX_BLOCKS:
            raise GrammarTooLarge(
                f"the looks behind tell more than {_MAX_BLOCKS} classes of characters apart; simplify them",
                resource="classes",
                limit=_MAX_BLOCKS,
                found=len(blocks),
            )
    return blocks
