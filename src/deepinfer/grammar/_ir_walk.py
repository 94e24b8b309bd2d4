"""Walks over expressions, and expressions as flat lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepinfer.grammar._ir_nodes import (
    Alt,
    And,
    Bag,
    Bytes,
    Empty,
    Eps,
    Expr,
    Literal,
    Member,
    Not,
    Ref,
    Repeat,
    Seq,
)

KINDS: tuple[type[Expr], ...] = (
    Empty,
    Eps,
    Bytes,
    Literal,
    Seq,
    Alt,
    And,
    Not,
    Repeat,
    Ref,
    Bag,
)
_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node object below `roots`, children before parents, each once.

    Yields:
        Nodes in post-order. Two equal nodes that are different objects are both yielded.
    """
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        children = node.children()
        if not children:
            yield node
            continue
        stack.append((node, True))
        stack.extend((child, False) for child in reversed(children) if id(child) not in seen)


def rebuild(kind: type[Expr], data: tuple[Any, ...], children: tuple[Expr, ...]) -> Expr:
    """The node of a kind with these fields and children, taken as they are (no normalisation)."""
    if kind is Bytes or kind is Literal or kind is Ref:
        return kind(*data)
    if kind is Seq or kind is Alt or kind is And:
        return kind(children)
    if kind is Not:
        return Not(children[0])
    if kind is Repeat:
        return Repeat(children[0], *data)
    if kind is Bag:
        kinds, clauses, low, high, ordered = data
        members = tuple(Member(e, *k) for e, k in zip(children[1:], kinds, strict=True))
        return Bag(members, children[0], clauses, low, high, ordered)
    return kind()


def flatten(*roots: Expr) -> tuple[tuple[Any, ...], ...]:
    """Nodes as a flat list of plain values: (kind, data, indices of the children), children first.

    Equal sub-expressions share one entry; the roots are the last entries in order, repeated where needed.
    """
    index: dict[int, int] = {}
    entries: dict[tuple[Any, ...], int] = {}
    flat: list[tuple[Any, ...]] = []
    for node in walk(*roots):
        entry = (
            _KIND_INDEX[type(node)],
            node.data(),
            tuple(index[id(child)] for child in node.children()),
        )
        place = entries.get(entry)
        if place is None:
            place = entries[entry] = len(flat)
            flat.append(entry)
        index[id(node)] = place
    flat.append(tuple(index[id(root)] for root in roots))
    return tuple(flat)


def unflatten(flat: tuple[tuple[Any, ...], ...]) -> tuple[Expr, ...]:
    """The roots that `flatten` was given."""
    nodes: list[Expr] = []
    for kind, data, children in flat[:-1]:
        nodes.append(rebuild(KINDS[kind], data, tuple(nodes[c] for c in children)))
    return tuple(nodes[root] for root in flat[-1])


def restore(flat: tuple[tuple[Any, ...], ...]) -> Expr:
    """The one root that `flatten` was given."""
    return unflatten(flat)[0]
