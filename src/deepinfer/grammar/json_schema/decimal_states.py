"""Small automata over the text of a number: all states, minimised, without dead ends; and as expressions."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.ir import EMPTY, EPS, Expr, alt, byte_set, optional, seq, star

__all__ = ["State", "explore", "states_to_expr"]

_MAX_STATES = 20_000

State = tuple[bool, tuple[tuple[Expr, int], ...]]
"""Whether a number may end here, and for each set of bytes the number of the next state."""


def explore(
    start: object,
    moves: Callable[..., list[tuple[int, object]]],
    accepting: Callable[..., bool],
    final: Callable[..., Expr] | None = None,
) -> tuple[State, ...]:
    """All states from `start`, minimised and without dead ends.

    `final` gives what may follow a state to end the number, behind an exponent mark, as an edge to the state -1.
    """
    index: dict[object, int] = {start: 0}
    order = [start]
    rows: list[list[tuple[int, int]]] = []
    while len(rows) < len(order):
        row = []
        for byte, target in moves(order[len(rows)]):
            place = index.get(target)
            if place is None:
                place = index[target] = len(order)
                order.append(target)
                if len(order) > _MAX_STATES:
                    raise GrammarTooLarge(
                        f"bounds and divisors of one number need more than {_MAX_STATES} states; "
                        "use fewer or shorter ones",
                        resource="states",
                        limit=_MAX_STATES,
                        found=len(order),
                    )
            row.append((byte, place))
        rows.append(row)
    marks: dict[object, int] = {}
    ends = [final(node) if final else EMPTY for node in order]
    block = [
        marks.setdefault((accepting(node), end), len(marks))
        for node, end in zip(order, ends, strict=True)
    ]
    block = _fold(rows, block) or _refine(rows, block, len(marks))
    members: dict[int, int] = {}
    for node, group in enumerate(block):
        members.setdefault(group, node)
    # Groups that reach an end, backwards.
    sources: dict[int, set[int]] = {}
    alive: set[int] = set()
    initial = {group: (accepting(order[node]), ends[node]) for group, node in members.items()}
    for group, node in members.items():
        for _, target in rows[node]:
            sources.setdefault(block[target], set()).add(group)
        accepts, end = initial[group]
        if accepts or end != EMPTY:
            alive.add(group)
    frontier = list(alive)
    while frontier:
        for source in sources.get(frontier.pop(), ()):
            if source not in alive:
                alive.add(source)
                frontier.append(source)
    if block[0] not in alive:
        return ()
    numbers = {block[0]: 0}
    queue = [block[0]]
    states: list[State] = []
    while len(states) < len(queue):
        group = queue[len(states)]
        by_target: dict[int, list[int]] = {}
        for byte, target in rows[members[group]]:
            if block[target] in alive:
                by_target.setdefault(block[target], []).append(byte)
        edges: list[tuple[Expr, int]] = []
        for target, bytes_read in by_target.items():
            if target not in numbers:
                numbers[target] = len(queue)
                queue.append(target)
            edges.append((byte_set(bytes_read), numbers[target]))
        accepts, end = initial[group]
        if end != EMPTY:
            edges.append((seq(byte_set(b"eE"), end), -1))
        states.append((accepts, tuple(edges)))
    return tuple(states)


def _fold(rows: list[list[tuple[int, int]]], labels: list[int]) -> list[int] | None:
    """Groups of equal states in one pass, when no cycle but a state's edge to itself exists; else None."""
    block = [-1] * len(rows)
    groups: dict[object, int] = {}
    keys: list[object] = []
    open_ = [False] * len(rows)
    stack = [0]
    while stack:
        node = stack[-1]
        if block[node] >= 0:
            stack.pop()
            continue
        missing = [t for _, t in rows[node] if t != node and block[t] < 0]
        if missing:
            if open_[node] or any(open_[t] for t in missing):
                return None
            open_[node] = True
            stack.extend(missing)
            continue
        open_[node] = False
        edges = tuple((b, -1 if t == node else block[t]) for b, t in rows[node])
        # A state whose edges lead to one that loops where this one goes there is that state.
        for group in {target for _, target in edges if target >= 0}:
            looped = tuple((b, -1 if t == group else t) for b, t in edges)
            if keys[group] == (labels[node], looped):
                block[node] = group
                break
        else:
            key = (labels[node], edges)
            block[node] = groups.setdefault(key, len(keys))
            if block[node] == len(keys):
                keys.append(key)
        stack.pop()
    return block


def _refine(rows: list[list[tuple[int, int]]], block: list[int], count: int) -> list[int]:
    """Splits groups of states until all of a group go to the same groups (Moore)."""
    while True:
        seen: dict[object, int] = {}
        after = [
            seen.setdefault((block[node], tuple((b, block[t]) for b, t in row)), len(seen))
            for node, row in enumerate(rows)
        ]
        if len(seen) == count:
            return after
        block, count = after, len(seen)


def states_to_expr(states: tuple[State, ...]) -> Expr | None:
    """An automaton as one expression, when no cycle but a state's edge to itself is in it; else None."""
    if not states:
        return EMPTY
    done: dict[int, Expr] = {-1: EPS}
    path: set[int] = set()
    stack = [0]
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        accepting, edges = states[node]
        missing = [t for _, t in edges if t != node and t not in done]
        if missing:
            if node in path:  # came back before the targets were done: a cycle
                return None
            path.add(node)
            if any(t in path for t in missing):
                return None
            stack.extend(missing)
            continue
        path.discard(node)
        loop = [byte for byte, t in edges if t == node]
        branches = [seq(byte, done[t]) for byte, t in edges if t != node]
        rest = alt(*branches)
        if accepting:
            rest = optional(rest) if branches else EPS
        done[node] = seq(star(alt(*loop)), rest) if loop else rest
        stack.pop()
    return done[0]
