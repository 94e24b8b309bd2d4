"""Lazy quantifiers where a token ends with its preferred match: `".*?"` stops at the first quote."""

from __future__ import annotations

from deepinfer.grammar.regex_ast import (
    EPSILON,
    Alternatives,
    Concatenation,
    Filtered,
    Look,
    Node,
    Repetition,
    alternatives,
    repetition,
    sequence,
)

__all__ = ["settle_lazy"]


def settle_lazy(node: Node) -> Node:
    """Makes lazy repeats stop as soon as what follows them can match.

    A tokeniser takes the preferred match of a terminal, so `x*?` followed by `y` means that no `y` begins inside the
    repeat: `(?:(?!y)x)*y`. Where a match is only asked for, lazy and greedy repeats are the same, and this is
    not needed.

    Args:
        node: The tree of a whole terminal.

    Returns:
        A tree of the texts that are preferred matches.
    """
    return _settle(node, EPSILON) if _has_lazy(node) else node


def _has_lazy(node: Node) -> bool:
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, Repetition):
            if part.lazy:
                return True
            stack.append(part.part)
        elif isinstance(part, Concatenation | Alternatives):
            stack += part.parts
        elif isinstance(part, Filtered | Look):
            stack.append(part.part)
    return False


def _settle(node: Node, after: Node) -> Node:
    """The node, before `after`; as deep in calls as the tree, which is bounded."""
    if isinstance(node, Concatenation):
        parts: list[Node] = []
        for part in reversed(node.parts):
            parts.insert(0, _settle(part, after))
            after = sequence([part, after])
        return sequence(parts)
    if isinstance(node, Alternatives):
        return alternatives([_settle(part, after) for part in node.parts])
    if isinstance(node, Filtered):
        look = Look(node.condition, ahead=node.ahead, negative=node.negative, position=0)
        apart = (look, node.part) if node.ahead else (node.part, look)
        return _settle(Concatenation(apart), after)
    if not isinstance(node, Repetition):
        return node
    again = sequence([repetition(node.part, 0, None), after])
    part = _settle(node.part, again)
    if not node.lazy:
        return repetition(part, node.low, node.high)
    high = None if node.high is None else node.high - node.low
    stop = Look(after, ahead=True, negative=True, position=0)
    more = repetition(sequence([stop, part]), 0, high)
    return sequence([repetition(part, node.low, node.low), more])
