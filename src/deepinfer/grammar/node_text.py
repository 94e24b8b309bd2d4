"""Nodes of the automaton as text, for debugging."""

from __future__ import annotations

from deepinfer.grammar._ir_text import bytes_to_text
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REF,
    REP,
    SET,
    UNKNOWN,
    BagNode,
    Node,
    TrieNode,
)

__all__ = ["node_text"]


def node_text(node: Node, *, limit: int = 2_000) -> str:
    """What a node still accepts; `·` separates the frames of a stack, `?rest` is the unknown rest of a cut one.

    Args:
        node: The node.
        limit: Most characters; longer text ends with "...".
    """
    out: list[str] = []
    size = 0
    stack: list[str | Node] = [node]
    while stack and size <= limit:
        item = stack.pop()
        if isinstance(item, str):
            out.append(item)
            size += len(item)
        else:
            stack.extend(reversed(_pieces(item)))
    text = "".join(out)
    return text if len(text) <= limit and not stack else text[:limit] + "..."


def _pieces(node: Node) -> list[str | Node]:
    kind = node.kind
    if kind == EMPTY:
        return ["(nothing)"]
    if kind == EPS:
        return ['""']
    if kind == SET:
        return [bytes_to_text(node.mask)]
    if kind == LIT:
        return [repr(node.text)[1:]]
    if kind == CONS:
        return [node.a, " · ", node.b]
    if kind in (ALT, AND):
        out: list[str | Node] = ["("]
        for place, part in enumerate(node.parts):
            out += [" | " if kind == ALT else " & ", part] if place else [part]
        return [*out, ")"]
    if kind == NOT:
        return ["!", node.a]
    if kind == REP:
        return ["(", node.a, f"){{{node.low},{'' if node.high < 0 else node.high}}}"]
    if kind == REF:
        return [f"<rule {node.uid}>"]
    if isinstance(node, BagNode):
        return [f"<bag {node.spec.number}{('', ' after', ' choice')[node.place]} {node.bag}>"]
    if isinstance(node, TrieNode):
        shown = [repr(s[node.skip :])[1:] for s in node.strings[node.first : node.last][:8]]
        return ["(", " | ".join(shown), " | ...)" if node.last - node.first > 8 else ")"]
    return ["?rest"] if kind == UNKNOWN else ["<end>"]
