"""Regular expressions whose assertions stand in repeats: a deterministic automaton, and an expression of it."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar import ir
from deepinfer.grammar.codepoints import CodePoints, contains, union
from deepinfer.grammar.regex_ast import LineStart, Node, WordBoundary
from deepinfer.grammar.regex_program import END, START, Program, Threads

__all__ = ["Dfa", "determinise", "eliminate"]

_MAX_STATES = 320
_MAX_EDGES = 60_000


class Dfa:
    """A deterministic automaton over classes of characters; state 0 is the start.

    Args:
        edges: For each state, the next state by class; absent is dead.
        accepting: The accepting states.
        classes: The classes.

    Attributes:
        edges: As given.
        accepting: As given.
        classes: As given.
    """

    def __init__(
        self, edges: list[dict[int, int]], accepting: set[int], classes: list[CodePoints]
    ) -> None:
        self.edges = edges
        self.accepting = accepting
        self.classes = classes

    def minimised(self) -> Dfa:
        """The smallest automaton of the same language, without states that lead nowhere.

        Returns:
            The automaton.
        """
        live = self._live()
        block = {state: int(state in self.accepting) for state in live}
        count = len(set(block.values()))
        while True:
            signatures: dict[tuple[object, ...], int] = {}
            refined = {}
            for state in sorted(live):
                moves = tuple(
                    (cls, block[to]) for cls, to in sorted(self.edges[state].items()) if to in live
                )
                refined[state] = signatures.setdefault((block[state], moves), len(signatures))
            block = refined
            if len(signatures) == count:
                break
            count = len(signatures)
        edges: list[dict[int, int]] = [{} for _ in range(count)]
        for state in live:
            edges[block[state]] = {
                cls: block[to] for cls, to in self.edges[state].items() if to in live
            }
        return Dfa(edges, {block[state] for state in live & self.accepting}, self.classes)

    def _live(self) -> set[int]:
        sources: dict[int, list[int]] = {}
        for state, moves in enumerate(self.edges):
            for to in moves.values():
                sources.setdefault(to, []).append(state)
        live = set(self.accepting)
        stack = list(live)
        while stack:
            for source in sources.get(stack.pop(), ()):
                if source not in live:
                    live.add(source)
                    stack.append(source)
        return live


def determinise(root: Node) -> Dfa:
    """The automaton of a regular expression with any assertions.

    Args:
        root: The tree.

    Returns:
        The smallest automaton; without states when nothing matches.

    Raises:
        UnsupportedKeyword: Looks are nested in a way that cannot be worked out.
        GrammarTooLarge: The program, its threads or the automaton grow too large.
    """
    program = Program(root)
    # What came before matters only as far as an assertion asks for it.
    kinds: dict[int, int] = {START: START}
    signatures: dict[tuple[bool, ...], int] = {}
    asked = [
        points
        for instruction in program.code
        for points in (
            instruction.node.after
            if isinstance(instruction.node, LineStart)
            else instruction.node.word
            if isinstance(instruction.node, WordBoundary)
            else None,
        )
        if points is not None
    ]
    for cls, part in enumerate(program.classes):
        inside = tuple(contains(points, part[0][0]) for points in asked)
        kinds[cls] = signatures.setdefault(inside, cls)

    State = tuple[int, Threads, tuple[Threads, ...]]
    start: State = (
        START,
        program.begin(program.start),
        tuple(program.begin(at) for at in program.behinds),
    )
    index: dict[State, int] = {start: 0}
    order = [start]
    edges: list[dict[int, int]] = []
    accepting: set[int] = set()
    while len(edges) < len(order):
        before, threads, behinds = order[len(edges)]
        _, matched = program.advance(threads, before, END, behinds)
        if program.accepts(matched, before, behinds):
            accepting.add(len(edges))
        moves: dict[int, int] = {}
        for cls in range(len(program.classes)):
            after, _ = program.advance(threads, before, cls, behinds)
            if not after:
                continue
            looks = tuple(
                program.advance(behind, before, cls, behinds)[0]
                for behind, at in zip(behinds, program.behinds, strict=True)
            )
            state = (kinds[cls], after, looks)
            if state not in index:
                if len(order) >= _MAX_STATES:
                    raise GrammarTooLarge(
                        f"the look-arounds in repeats need more than {_MAX_STATES} states; simplify the pattern",
                        resource="states",
                        limit=_MAX_STATES,
                        found=len(order) + 1,
                    )
                index[state] = len(order)
                order.append(state)
            moves[cls] = index[state]
        edges.append(moves)
    return Dfa(edges, accepting, program.classes).minimised()


def eliminate(dfa: Dfa, encode_class: Callable[[CodePoints], ir.Expr]) -> ir.Expr:
    """An expression of an automaton, state by state taken out.

    Args:
        dfa: The automaton.
        encode_class: Spellings of a set of characters.

    Returns:
        The expression.

    Raises:
        GrammarTooLarge: The expression grows too large.
    """
    if not dfa.edges:
        return ir.EMPTY
    begin, end = -1, -2
    into: dict[int, dict[int, ir.Expr]] = {state: {} for state in range(len(dfa.edges))}
    out: dict[int, dict[int, ir.Expr]] = {state: {} for state in range(len(dfa.edges))}
    into[end], out[begin] = {}, {}

    def join(source: int, target: int, expr: ir.Expr) -> None:
        known = out[source].get(target)
        joined = expr if known is None else ir.alt(known, expr)
        out[source][target] = into[target][source] = joined

    for state, moves in enumerate(dfa.edges):
        by_target: dict[int, list[CodePoints]] = {}
        for cls, to in moves.items():
            by_target.setdefault(to, []).append(dfa.classes[cls])
        for to, parts in by_target.items():
            join(state, to, encode_class(union(*parts)))
        if state in dfa.accepting:
            join(state, end, ir.EPS)
    join(begin, 0, ir.EPS)
    remaining = set(range(len(dfa.edges)))
    work = 0
    while remaining:
        state = min(remaining, key=lambda s: (len(into[s]) * len(out[s]), s))
        remaining.discard(state)
        loop = out[state].pop(state, None)
        into[state].pop(state, None)
        middle = ir.EPS if loop is None else ir.star(loop)
        work += len(into[state]) * len(out[state])
        if work > _MAX_EDGES:
            raise GrammarTooLarge(
                "the look-arounds in repeats make the expression too large; simplify the pattern",
                resource="edges",
                limit=_MAX_EDGES,
                found=work,
            )
        for source, first in into[state].items():
            del out[source][state]
            for target, last in out[state].items():
                join(source, target, ir.seq(first, middle, last))
        for target in out[state]:
            del into[target][state]
        del into[state], out[state]
    return out[begin].get(end, ir.EMPTY)
