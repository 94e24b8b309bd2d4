"""Which expressions treat the characters of a kind alike."""

from __future__ import annotations

from functools import cache

from deepinfer.grammar.moves import compute_moves
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    BAG,
    CONS,
    EPS,
    LIT,
    NOT,
    REF,
    REP,
    SET,
    TAG,
    UNKNOWN,
    Node,
)
from deepinfer.grammar.slices import BOUNDARY
from deepinfer.grammar.text_kinds import wide_kinds

__all__ = ["KindTests"]

MAX_NESTING = 30
"""How deep to look into an expression."""


@cache
def _edges() -> list[list[list[tuple[int, int]]]]:
    """Of each set of wide characters, per state: (next state, the bytes that lead to it, as bits)."""
    return [
        [
            [(after, sum(1 << byte for byte in group)) for after, group in groups]
            for groups in kind.groups
        ]
        for kind in wide_kinds()
    ]


class KindTests:
    """Tests of expressions: whether they treat the wide characters of each kind alike, as their parts show.

    Args:
        store: Makes the expressions' moves.
    """

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._known: dict[int, bool] = {}

    def alike(self, node: Node, nesting: int = MAX_NESTING) -> bool:
        """Whether the characters of each kind lead to one residual expression.

        Args:
            node: The expression.
            nesting: How deep to look into it.

        Returns:
            True when they do; False may also say that it is hard to see.
        """
        found = self._known.get(node.uid)
        if found is None and nesting:
            found = self._known[node.uid] = self._by_parts(node, nesting - 1) or self._by_moves(
                node
            )
        return bool(found)

    def _by_parts(self, node: Node, nesting: int) -> bool:
        kind = node.kind
        if kind == LIT:
            return node.text[0] < 0x80
        if kind == SET:
            return node.mask < 1 << 0x80
        if kind == CONS:
            return self.alike(node.a, nesting) and (
                not node.a.nullable or self.alike(node.b, nesting)
            )
        if kind in (ALT, AND):
            return all(self.alike(part, nesting) for part in node.parts)
        if kind in (REP, NOT, REF):
            return self.alike(node.a, nesting)
        return kind in (EPS, TAG, UNKNOWN)

    def _by_moves(self, node: Node) -> bool:
        """The same by a search through the moves of the characters' bytes."""
        if node.kind in (LIT, SET, BAG, REF, CONS):
            return False
        return all(self._lead_alike(edges, node) for edges in _edges())

    def _lead_alike(self, edges: list[list[tuple[int, int]]], node: Node) -> bool:
        """Whether the characters of one kind lead to one expression, and none lets the expression end within itself."""
        target: Node | None = None
        seen = {(BOUNDARY, node)}
        stack = [(BOUNDARY, node)]
        while stack:
            inner, at = stack.pop()
            cut = at.cut or compute_moves(self._store, at)
            for after, group in edges[inner]:
                left, reached = group, []
                for mask, to in zip(cut.masks, at.targets, strict=True):
                    if mask & left:
                        reached.append(to)
                        left &= ~mask
                if left:
                    reached.append(self._store.empty)
                for to in reached:
                    if after == BOUNDARY or to is self._store.empty:
                        if target is not None and to is not target:
                            return False
                        target = to
                    elif to.nullable or to.exposed:
                        return False
                    elif (after, to) not in seen:
                        seen.add((after, to))
                        stack.append((after, to))
        return True
