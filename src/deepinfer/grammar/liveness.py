"""Dead ends: nodes from which nothing can be accepted any more.

Only intersections and complements make them, and bags all of whose members are such: everything else is built from parts
that are not empty. A search goes through the moves of a node, shortest way to acceptance first, until it finds a node that is known to be live. What it
learns stays on the nodes, so most later questions are answered at once.
"""

from __future__ import annotations

import heapq

from deepinfer.grammar.moves import compute_moves
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import ALT, CONS, Node

__all__ = ["is_live", "prune"]


def is_live(store: NodeStore, node: Node, max_states: int) -> bool:
    """Whether the language of a node is not empty.

    Args:
        store: Store of the node.
        node: The node.
        max_states: Nodes that a search visits at most. A search that ends there answers True.

    Returns:
        The exact answer, or True where the bound was reached; kept as `node.live`.
    """
    if node.live is not None:
        return node.live
    chain = []
    while node.kind == CONS and node.live is None:
        chain.append(node)
        node = node.b
    known = node.live if node.live is not None else _decide(store, node, max_states)
    for link in reversed(chain):
        if known:
            head = link.a
            known = head.live if head.live is not None else _decide(store, head, max_states)
        link.live = known
    return bool(known)


def _decide(store: NodeStore, node: Node, max_states: int) -> bool:
    if node.kind == ALT:
        for part in node.parts:
            if is_live(store, part, max_states):
                node.live = True
                return True
        node.live = False
        return False
    return _search(store, node, max_states)


def _search(store: NodeStore, start: Node, max_states: int) -> bool:
    parent: dict[Node, Node | None] = {start: None}
    queue = [(start.least, 0, start)]
    order = 0
    while queue:
        node = heapq.heappop(queue)[2]
        if len(parent) > max_states:
            start.live = True
            return True
        if node.cut is None:
            compute_moves(store, node)
        for target in node.targets:
            if target.live is False or target in parent:
                continue
            parent[target] = node
            if target.live or target.nullable:
                step: Node | None = target
                while step is not None:
                    step.live = True
                    step = parent[step]
                return True
            order -= 1
            heapq.heappush(queue, (target.least, order, target))
    for node in parent:
        node.live = False
    return False


def prune(store: NodeStore, node: Node, max_states: int) -> Node:
    """The node without dead parts; the empty node when all of it is dead."""
    if node.live is None:
        is_live(store, node, max_states)
    if node.live is False:
        return store.empty
    if node.kind == ALT and any(part.live is not True for part in node.parts):
        return store.alt([part for part in node.parts if is_live(store, part, max_states)])
    return node
