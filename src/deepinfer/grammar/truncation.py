"""States cut below their top frames, for results that hold whatever stands below."""

from __future__ import annotations

from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import ALT, CONS, REP, BagNode, Node

__all__ = ["saturate", "truncate"]


def saturate(store: NodeStore, node: Node) -> Node:
    """The node with counters above the store's limit replaced by "more than the limit".

    Intersections stay as they are: whether they can still be completed may hang on the exact count.
    """
    limit = store.counter_limit
    if not node.counted:
        return node
    if isinstance(node, BagNode):
        bag = node.spec.saturate(node.bag, limit)
        return store.bag_node(node.spec, bag, node.place, node.pick, node.nullable)
    if node.kind == REP:
        low = min(node.low, limit + 1)
        return store.rep(node.a, low, -1 if node.high > limit else node.high)
    if node.kind == ALT:
        return store.alt([saturate(store, part) for part in node.parts])
    if node.kind == CONS:
        frames = []
        while node.kind == CONS:
            frames.append(node.a)
            node = node.b
        result = saturate(store, node)
        for frame in reversed(frames):
            result = store.cons(saturate(store, frame), result)
        return result
    return node


def truncate(store: NodeStore, node: Node, depth: int) -> Node:
    """The top frames of a node over an unknown rest, counters saturated.

    Args:
        store: Store of the node.
        node: The node.
        depth: Frames to keep, at least 1.

    Returns:
        A node whose moves agree with those of `node` until the unknown rest is exposed.
    """
    done: dict[tuple[Node, int], Node] = {}
    stack = [(node, depth)]
    while stack:
        item = stack[-1]
        if item in done:
            stack.pop()
            continue
        part, left = item
        if part.depth <= left and not part.counted:
            done[item] = part
        elif left == 0:
            done[item] = store.unknown
        elif part.kind == CONS:
            below = (part.b, left - 1)
            if below not in done:
                stack.append(below)
                continue
            done[item] = store.cons(saturate(store, part.a), done[below])
        elif part.kind == ALT:
            missing = [(p, left) for p in part.parts if (p, left) not in done]
            if missing:
                stack.extend(missing)
                continue
            done[item] = store.alt([done[p, left] for p in part.parts])
        else:
            done[item] = saturate(store, part)
    return done[node, depth]
