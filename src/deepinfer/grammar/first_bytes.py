"""The bytes with which the strings of an expression may begin."""

from __future__ import annotations

from deepinfer.grammar.nodes import (
    AFTER,
    ALT,
    AND,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REP,
    SET,
    BagNode,
    Node,
    TrieNode,
)

__all__ = ["first_bytes"]

_ALL = (1 << 256) - 1


def first_bytes(node: Node, nesting: int) -> int:
    """The first bytes of an expression's strings, and perhaps more.

    Args:
        node: The expression.
        nesting: Expressions within one another that are looked at.

    Returns:
        The bytes, as bits; all of them where that is not seen, or where the end of the expression is reached at once and
        what follows is not known.
    """
    found = 0
    while node.kind == CONS:
        found |= first_bytes(node.a, nesting - 1)
        if not node.a.nullable:
            return found
        node = node.b
    kind = node.kind
    if kind == LIT:
        return found | 1 << node.text[0]
    if kind == SET:
        return found | node.mask
    if kind in (EPS, EMPTY):
        return found
    if isinstance(node, TrieNode):
        for text in node.strings[node.first : node.last]:
            if len(text) > node.skip:
                found |= 1 << text[node.skip]
        return found
    if nesting <= 0:
        return _ALL
    if kind == REP:
        return found | first_bytes(node.a, nesting - 1)
    if kind == ALT:
        for part in node.parts:
            found |= first_bytes(part, nesting - 1)
        return found
    if kind == AND:
        plain = [part for part in node.parts if part.kind != NOT]
        return found | first_bytes(plain[0], nesting - 1) if plain else _ALL
    if isinstance(node, BagNode):
        if node.place != AFTER:
            return found | first_bytes(node.pick, nesting - 1)
        separator = node.spec.separator
        return _ALL if separator.nullable else found | first_bytes(separator, nesting - 1)
    return _ALL
