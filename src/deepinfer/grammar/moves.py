"""The outgoing moves of nodes: which bytes lead to which residual expression.

Each node's moves are computed once, from those of its parts, with an explicit stack: the nesting of a grammar is no
limit.
"""

from __future__ import annotations

from deepinfer.core.errors import InvariantBroken
from deepinfer.grammar._ir_nodes import ALL_BYTES
from deepinfer.grammar.bag_nodes import bag_body, bag_moves
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    BAG,
    CONS,
    LIT,
    NOT,
    REF,
    REP,
    BagNode,
    Moves,
    Node,
)


def moves_of(store: NodeStore, node: Node) -> Moves:
    """Moves of a node: disjoint byte sets and targets; computed and kept on the first call.

    Raises:
        GrammarTooLarge: A bound of the store's budget is passed.
        InvariantBroken: A rule begins with itself; left recursion must be removed before.
    """
    if node.moves is not None:
        return node.moves
    stack = [node]
    open_: set[int] = set()
    while stack:
        top = stack[-1]
        if top.moves is not None:
            stack.pop()
            continue
        missing = [part for part in _needed(store, top) if part.moves is None]
        if not missing:
            top.moves = _compute(store, top)
            stack.pop()
            open_.discard(top.uid)
            continue
        if top.uid in open_:
            raise InvariantBroken(
                "a rule of the grammar begins with itself after left recursion was removed; report this grammar"
            )
        open_.add(top.uid)
        stack.extend(missing)
    return node.moves or ()


def _needed(store: NodeStore, node: Node) -> tuple[Node, ...]:
    kind = node.kind
    if kind == CONS:
        head = node.a
        return (head, node.b) if head.nullable else (head,)
    if kind in (ALT, AND):
        return node.parts
    if kind in (REP, NOT, REF):
        return (node.a,)
    if isinstance(node, BagNode):
        return (bag_body(store, node),)
    return ()


def _compute(store: NodeStore, node: Node) -> Moves:
    kind = node.kind
    if kind == CONS:
        head, tail = node.a, node.b
        push = store.push
        own = tuple([(mask, push(target, tail)) for mask, target in head.moves or ()])
        return union(store, (own, tail.moves or ())) if head.nullable else own
    if kind == LIT:
        return ((1 << node.text[0], store.literal(node.text[1:])),)
    if kind == ALT:
        return union(store, tuple([part.moves or () for part in node.parts]))
    if kind == REP:
        low = node.low - 1 if node.low else 0
        rest = store.rep(node.a, low, node.high - 1 if node.high > 0 else -1)
        push = store.push
        return tuple([(mask, push(target, rest)) for mask, target in node.a.moves or ()])
    if kind == AND:
        return _product(store, node.parts)
    if kind == NOT:
        return _inverted(store, node.a.moves or ())
    if kind == REF:
        return node.a.moves or ()
    if kind == BAG and isinstance(node, BagNode):
        return bag_moves(store, node)
    return ()


def _inverted(store: NodeStore, moves: Moves) -> Moves:
    rest = ALL_BYTES
    out = []
    for mask, target in moves:
        rest &= ~mask
        opposite = store.neg(target)
        if opposite is not store.empty:
            out.append((mask, opposite))
    if rest:
        out.append((rest, store.all))
    return tuple(out)


def _product(store: NodeStore, parts: tuple[Node, ...]) -> Moves:
    cells: list[tuple[int, tuple[Node, ...]]] = [(ALL_BYTES, ())]
    for part in parts:
        moves = part.moves or ()
        refined = []
        for mask, targets in cells:
            for other, target in moves:
                common = mask & other
                if common:
                    refined.append((common, (*targets, target)))
        cells = refined
    out: dict[Node, int] = {}
    for mask, targets in cells:
        both = store.conj(targets)
        if both is not store.empty:
            out[both] = out.get(both, 0) | mask
    return tuple([(mask, target) for target, mask in out.items()])


def union(store: NodeStore, lists: tuple[Moves, ...]) -> Moves:
    """Moves of a union, from the moves of its parts."""
    seen = 0
    disjoint = True
    for moves in lists:
        for mask, _ in moves:
            if seen & mask:
                disjoint = False
            seen |= mask
    if disjoint:
        return tuple([move for moves in lists for move in moves])
    # Targets by equal masks first: most overlaps are whole masks, as of literals with one first byte.
    by_mask: dict[int, list[Node]] = {}
    for moves in lists:
        for mask, target in moves:
            known = by_mask.get(mask)
            if known is None:
                by_mask[mask] = [target]
            else:
                known.append(target)
    cells: list[tuple[int, list[Node]]] = []
    for mask, targets in by_mask.items():
        rest = mask
        for place in range(len(cells)):
            cell, members = cells[place]
            common = cell & rest
            if not common:
                continue
            if common != cell:
                cells.append((cell & ~common, members))
            cells[place] = (common, members + targets)
            rest &= ~common
            if not rest:
                break
        if rest:
            cells.append((rest, targets))
    out: dict[Node, int] = {}
    for mask, targets in cells:
        target = targets[0] if len(targets) == 1 else store.alt(targets)
        out[target] = out.get(target, 0) | mask
    return tuple([(mask, target) for target, mask in out.items()])
