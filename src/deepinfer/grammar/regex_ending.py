"""Which strings of a regular expression end in a certain character."""

from __future__ import annotations

from deepinfer.grammar.codepoints import CodePoints, intersection
from deepinfer.grammar.regex_ast import (
    NOTHING,
    Alternatives,
    Characters,
    Concatenation,
    Filtered,
    Node,
    Repetition,
    alternatives,
    repetition,
    sequence,
)

__all__ = ["ending_in"]


def ending_in(node: Node, points: CodePoints) -> Node:
    """The strings of a pure node that are not empty and whose last character is in a set.

    Args:
        node: The node.
        points: The set.

    Returns:
        A node for them.
    """
    if not intersection(node.last, points):
        return NOTHING
    if isinstance(node, Characters):
        return Characters(intersection(node.points, points))
    if isinstance(node, Filtered):
        part = ending_in(node.part, points)
        if part is NOTHING:
            return NOTHING
        return Filtered(part, node.condition, ahead=node.ahead, negative=node.negative)
    if isinstance(node, Repetition):
        high = None if node.high is None else node.high - 1
        low = 0 if node.part.nullable else max(node.low - 1, 0)
        return sequence([repetition(node.part, low, high), ending_in(node.part, points)])
    if isinstance(node, Alternatives):
        found = (ending_in(part, points) for part in node.parts)
        return alternatives([part for part in found if part is not NOTHING])
    if not isinstance(node, Concatenation):
        raise TypeError(f"{type(node).__name__} is not pure")
    ways: list[Node] = []
    for at in range(len(node.parts) - 1, -1, -1):
        tail = ending_in(node.parts[at], points)
        if tail is not NOTHING:
            ways.append(sequence([*node.parts[:at], tail]))
        if not node.parts[at].nullable:
            break
    return alternatives(ways)
