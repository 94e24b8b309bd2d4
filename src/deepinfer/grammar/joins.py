"""Unions in normal form: what can be said with fewer parts is joined.

Joining is what keeps the states few: byte sets and counters become one, stacks with one top share it, and stacks over
one rest become a single stack with a union on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.grammar.nodes import ALT, CONS, EPS, LIT, REP, SET, Node

if TYPE_CHECKING:
    from deepinfer.grammar.node_store import NodeStore

__all__ = ["join", "join_tails", "one_byte"]

_JOINED_FRAMES = 64


def join(store: NodeStore, parts: list[Node]) -> list[Node]:
    """Merge byte sets, counters of one body, and stacks with one rest or one top."""
    kinds = {part.kind for part in parts}
    if SET in kinds:
        parts = _merge_sets(store, parts)
    if REP in kinds:
        parts = _merge_counters(store, parts)
    if CONS in kinds:
        parts = _merge_stacks(store, parts)
    if EPS in kinds and len(parts) > 1:
        others = [part for part in parts if part.kind != EPS]
        if any(part.nullable for part in others):
            parts = others
    return parts


def _merge_sets(store: NodeStore, parts: list[Node]) -> list[Node]:
    mask = 0
    rest = []
    for part in parts:
        if part.kind == SET:
            mask |= part.mask
        else:
            rest.append(part)
    return [*rest, store.byte_set(mask)]


def _merge_counters(store: NodeStore, parts: list[Node]) -> list[Node]:
    bodies: dict[int, list[Node]] = {}
    rest = []
    for part in parts:
        if part.kind == REP:
            bodies.setdefault(part.a.uid, []).append(part)
        else:
            rest.append(part)
    for same in bodies.values():
        if len(same) == 1:
            rest.append(same[0])
            continue
        same.sort(key=_low)
        body, low, high = same[0].a, same[0].low, same[0].high
        for part in same[1:]:
            if high < 0 or part.low <= high + 1:
                high = -1 if high < 0 or part.high < 0 else max(high, part.high)
            else:
                rest.append(store.rep(body, low, high))
                low, high = part.low, part.high
        rest.append(store.rep(body, low, high))
    return rest


def _merge_stacks(store: NodeStore, parts: list[Node]) -> list[Node]:
    # Tops first: it keeps the number of different tops small, which bounds the work of ambiguous grammars.
    heads: dict[int, list[Node]] = {}
    for part in parts:
        if part.kind == CONS:
            heads.setdefault(part.a.uid, []).append(part)
    out = []
    for part in parts:
        if part.kind != CONS:
            same = heads.get(part.uid)
            if same is None:
                out.append(part)
            else:
                same.append(part)
    tails: dict[int, list[Node]] = {}
    for same in heads.values():
        if len(same) > 1:
            rests = [part.b if part.kind == CONS else store.eps for part in same]
            out.append(store.cons(same[0].a, join_tails(store, rests)))
        elif same[0].a.recursive:
            out.append(same[0])
        else:
            tails.setdefault(same[0].b.uid, []).append(same[0])
    for same in tails.values():
        if len(same) == 1:
            out.append(same[0])
        else:
            out.append(store.cons(store.alt([part.a for part in same]), same[0].b))
    return out


def join_tails(store: NodeStore, nodes: list[Node]) -> Node:
    """Union of tails, joined in their upper frames only: bounded work however deep the stacks are."""
    if store.nesting < _JOINED_FRAMES:
        store.nesting += 1
        try:
            return store.alt(nodes)
        finally:
            store.nesting -= 1
    flat: dict[int, Node] = {}
    for node in nodes:
        for part in node.parts if node.kind == ALT else (node,):
            flat[part.uid] = part
    if len(flat) == 1:
        return next(iter(flat.values()))
    return store.plain_alt(list(flat.values()), joined=False)


def one_byte(body: Node, mask: int) -> bool:
    """Whether each byte of a set is a string of an expression, and begins no other string of it."""
    if body.kind == SET:
        return not mask & ~body.mask
    if body.kind != ALT:
        return False
    covered = 0
    for part in body.parts:
        if part.kind == SET:
            covered |= part.mask
            continue
        first = part
        while first.kind == CONS:
            first = first.a
        if first.kind not in (LIT, SET):
            return False
        if mask & (first.mask if first.kind == SET else 1 << first.text[0]):
            return False
    return not mask & ~covered


def _low(node: Node) -> int:
    return node.low
