"""The outgoing moves of nodes: which bytes lead to which residual expression.

Each node's moves are computed once, from those of its parts, with an explicit stack: the nesting of a grammar is no
limit.
"""

from __future__ import annotations

from deepinfer.core.errors import InvariantBroken
from deepinfer.grammar.bag_nodes import bag_body, bag_moves, bag_target
from deepinfer.grammar.cuts import Cut
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
    SET,
    BagNode,
    Node,
    TrieNode,
)

__all__ = ["Moves", "compute_moves", "target_of"]

FEW_PARTS = 8
"""Alternatives of which the moves of one byte are worked out alone: of more, other bytes will be asked for too."""

_MAX_NESTING = 50

Moves = tuple[Cut, tuple[Node, ...]]


def compute_moves(store: NodeStore, node: Node) -> Cut:
    """Compute `cut` and `targets` of a node unless they are there.

    Returns:
        The node's `cut`.

    Raises:
        GrammarTooLarge: A bound of the store's budget is passed.
        InvariantBroken: A rule begins with itself; left recursion must be removed before.
    """
    stack = [node]
    rules: set[int] = set()
    while stack:
        top = stack[-1]
        if top.cut is not None:
            stack.pop()
            continue
        missing = None
        if top.kind == CONS:
            if top.a.cut is None:
                missing = top.a
            elif top.a.nullable and top.b.cut is None:
                missing = top.b
        else:
            for part in _needed(store, top):
                if part.cut is None:
                    missing = part
                    break
            if top.kind == REF and missing is not None:
                if top.uid in rules:
                    raise InvariantBroken(
                        "a rule of the grammar begins with itself after left recursion was removed;"
                        " report this grammar"
                    )
                rules.add(top.uid)
        if missing is not None:
            stack.append(missing)
            continue
        cut, top.targets = _compute(store, top)
        # Set last: whoever sees the cut finds the targets.
        top.cut = cut
        stack.pop()
    return _cut(node)


def _cut(node: Node) -> Cut:
    if node.cut is None:
        raise InvariantBroken("moves of a part are missing; report this grammar")
    return node.cut


def _needed(store: NodeStore, node: Node) -> tuple[Node, ...]:
    kind = node.kind
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
        targets = store.push_all(head.targets, tail)
        if not head.nullable or not tail.targets:
            return _cut(head), targets
        return _union(store, [_cut(head), _cut(tail)], [targets, tail.targets])
    if kind == LIT:
        return store.cuts.cut((1 << node.text[0],)), (store.literal(node.text[1:]),)
    if isinstance(node, TrieNode):
        return _branches(store, node)
    if kind == ALT:
        parts = node.parts
        return _union(store, [_cut(part) for part in parts], [part.targets for part in parts])
    if kind == REP:
        low = node.low - 1 if node.low else 0
        rest = store.rep(node.a, low, node.high - 1 if node.high > 0 else -1)
        return _cut(node.a), store.push_all(node.a.targets, rest)
    if kind == AND:
        parts = node.parts
        cut, cells = store.cuts.product([_cut(part) for part in parts])
        both = [store.conj([parts[part].targets[place] for part, place in cell]) for cell in cells]
        return store.cuts.grouped(cut, both, store.empty)
    if kind == NOT:
        cut = store.cuts.rest(_cut(node.a))
        opposite = [store.neg(target) for target in node.a.targets]
        if len(cut.masks) > len(opposite):
            opposite.append(store.all)
        return store.cuts.grouped(cut, opposite, store.empty)
    if kind == REF:
        return _cut(node.a), node.a.targets
    if kind == BAG and isinstance(node, BagNode):
        return bag_moves(store, node)
    raise InvariantBroken(f"a node of kind {kind} has no moves; report this grammar")


def _branches(store: NodeStore, node: TrieNode) -> Moves:
    strings, first, last, skip = node.strings, node.first, node.last, node.skip
    if len(strings[first]) == skip:
        first += 1
    masks = []
    targets = []
    while first < last:
        byte = strings[first][skip]
        # The end of the strings with this byte: doubling steps, then halving ones.
        step = 1
        while first + step < last and strings[first + step][skip] == byte:
            step *= 2
        low, high = first + step // 2, min(first + step, last)
        while low < high:
            middle = (low + high) // 2
            if strings[middle][skip] == byte:
                low = middle + 1
            else:
                high = middle
        masks.append(1 << byte)
        targets.append(store.trie(strings, first, low, skip + 1))
        first = low
    return store.cuts.cut(tuple(masks)), tuple(targets)


def _union(store: NodeStore, cuts: list[Cut], lists: list[tuple[Node, ...]]) -> Moves:
    cut, cells = store.cuts.union(cuts)
    targets = []
    joined = False
    for cell in cells:
        if len(cell) == 1:
            part, place = cell[0]
            targets.append(lists[part][place])
        else:
            joined = True
            targets.append(store.alt([lists[part][place] for part, place in cell]))
    if not joined:
        return cut, tuple(targets)
    return store.cuts.grouped(cut, targets, store.empty)


def target_of(store: NodeStore, node: Node, byte: int, nesting: int = 0) -> Node:
    """Where one byte leads, without the moves of the other bytes where that is possible.

    Args:
        store: Store of the node.
        node: The node.
        byte: The byte.
        nesting: Calls of this function within one another so far.

    Returns:
        The same node as the moves of `node` hold for that byte.

    Raises:
        GrammarTooLarge: A bound of the store's budget is passed.
    """
    if node.cut is None and nesting < _MAX_NESTING:
        kind = node.kind
        if kind == LIT:
            text = node.text
            return store.literal(text[1:]) if text[0] == byte else store.empty
        if kind == CONS:
            return _stack_target(store, node, byte, nesting)
        if kind == ALT and len(node.parts) <= FEW_PARTS:
            return _any_target(store, node, byte, nesting)
        if kind == AND:
            return _common_target(store, node, byte, nesting)
        if kind == NOT:
            return store.neg(target_of(store, node.a, byte, nesting + 1))
        if kind == REF:
            return target_of(store, node.a, byte, nesting + 1)
        if kind == REP:
            first = target_of(store, node.a, byte, nesting + 1)
            if first is store.empty:
                return first
            low = node.low - 1 if node.low else 0
            return store.push(first, store.rep(node.a, low, node.high - 1 if node.high > 0 else -1))
        if isinstance(node, BagNode):
            body = bag_body(store, node)
            first = target_of(store, body, byte, nesting + 1)
            if body is not node.pick or first is store.empty:
                return first
            return bag_target(store, node, first)
    cut = node.cut or compute_moves(store, node)
    for mask, target in zip(cut.masks, node.targets, strict=True):
        if mask >> byte & 1:
            return target
    return store.empty


def _any_target(store: NodeStore, node: Node, byte: int, nesting: int) -> Node:
    found = []
    for part in node.parts:
        head = part.a if part.kind == CONS else part
        kind = head.kind
        if (kind == LIT and head.text[0] != byte) or (kind == SET and not head.mask >> byte & 1):
            continue  # as most do
        target = target_of(store, part, byte, nesting + 1)
        if target is not store.empty:
            found.append(target)
    return found[0] if len(found) == 1 else store.alt(found)


def _stack_target(store: NodeStore, node: Node, byte: int, nesting: int) -> Node:
    found = []
    while node.cut is None and node.kind == CONS:
        head, tail = node.a, node.b
        first = target_of(store, head, byte, nesting + 1)
        if first is not store.empty:
            found.append(store.push(first, tail))
        if not head.nullable:
            break
        node = tail
    else:
        found.append(target_of(store, node, byte, nesting + 1))
    return found[0] if len(found) == 1 else store.alt(found)


def _common_target(store: NodeStore, node: Node, byte: int, nesting: int) -> Node:
    found = []
    for part in node.parts:
        target = target_of(store, part, byte, nesting + 1)
        if target is store.empty:
            return target
        found.append(target)
    return store.conj(found)
