"""Nodes of bags: where a bag stands between and inside its members."""

from __future__ import annotations

from deepinfer.core.errors import InvariantBroken
from deepinfer.grammar.bag_state import BagSpec, BagState
from deepinfer.grammar.cuts import Cut
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import AFTER, ALT, CHOICE, CONS, START, TAG, BagNode, Node

__all__ = ["bag_after", "bag_body", "bag_moves", "bag_start", "bag_target"]


def bag_start(store: NodeStore, spec: BagSpec) -> Node:
    """The node of a bag from its beginning; the empty language when it cannot be completed."""
    members = [store.cons(node, store.tag(index)) for index, node in enumerate(spec.members)]
    spec.union = store.alt(members)
    end = spec.complete(spec.start)
    if end and spec.full(spec.start):
        return store.eps
    if not end:
        single = spec.separator.live is False
        if not (spec.allowed(spec.start) if single else spec.completable(spec.start)):
            return store.empty
    return store.bag_node(spec, spec.start, START, spec.union, end)


def bag_after(store: NodeStore, spec: BagSpec, bag: BagState) -> Node:
    """The node after a member.

    Args:
        store: Store of the nodes.
        spec: The bag.
        bag: What has occurred; the bag must be completable from it.

    Returns:
        What may follow: a separator and another member, or the end.
    """
    end = spec.complete(bag)
    if end and (spec.separator.live is False or spec.full(bag)):
        return store.eps
    return store.bag_node(spec, bag, AFTER, spec.union, end)


def bag_body(store: NodeStore, node: BagNode) -> Node:
    """What must be computed before the moves of a bag's node: its separators, or what is left of its members."""
    if node.body is None:
        spec, bag = node.spec, node.bag
        if node.place != AFTER:
            allowed = node.pick.tags & spec.allowed(bag)
            node.body = node.pick
            if not allowed:
                node.body = store.empty
            elif allowed & (allowed - 1) == 0:
                # Only one member is left: from here on it is an expression like any other.
                node.body = _closed(store, spec, bag, node.pick, allowed)
            return node.body
        node.body = store.empty
        if spec.allowed(bag):
            choice = store.bag_node(spec, bag, CHOICE, spec.union, False)
            node.body = store.cons(spec.separator, choice)
    return node.body


def bag_moves(store: NodeStore, node: BagNode) -> tuple[Cut, tuple[Node, ...]]:
    """Moves of a bag's node, once those of its body are known."""
    body = node.body
    if body is None or body.cut is None:
        raise InvariantBroken("moves of a bag's body are missing; report this grammar")
    if body is not node.pick:
        return body.cut, body.targets
    spec, bag = node.spec, node.bag
    targets = [_pick(store, spec, bag, pick) for pick in body.targets]
    return store.cuts.grouped(body.cut, targets, store.empty)


def bag_target(store: NodeStore, node: BagNode, pick: Node) -> Node:
    """Where one move of what is left of a bag's members leads."""
    return _pick(store, node.spec, node.bag, pick)


def _pick(store: NodeStore, spec: BagSpec, bag: BagState, pick: Node) -> Node:
    """A member that has begun: the members that `pick` still allows, each followed by the rest of the bag."""
    allowed = pick.tags & spec.allowed(bag)
    if not allowed:
        return store.empty
    if not pick.ends & allowed:
        return store.bag_node(spec, bag, CHOICE, pick, False)
    return _closed(store, spec, bag, pick, allowed)


def _closed(store: NodeStore, spec: BagSpec, bag: BagState, pick: Node, allowed: int) -> Node:
    """`pick` with the ends of the allowed members replaced by what follows them."""
    parts = []
    while allowed:
        bit = allowed & -allowed
        allowed ^= bit
        after = spec.advance(bag, bit.bit_length() - 1)
        if after is not None:
            parts.append(_close(store, pick, bit, bag_after(store, spec, after)))
    return store.alt(parts) if len(parts) > 1 else parts[0]


def _close(store: NodeStore, pick: Node, bit: int, after: Node) -> Node:
    """`pick` with the end of one member replaced by what follows it, and all other members dropped."""
    frames = []
    while pick.kind == CONS:
        frames.append(pick.a)
        pick = pick.b
    if pick.kind == TAG:
        result = after
    elif pick.kind == ALT:
        result = store.alt([_close(store, p, bit, after) for p in pick.parts if p.tags & bit])
    else:
        return store.empty
    for frame in reversed(frames):
        result = store.cons(frame, result)
    return result
