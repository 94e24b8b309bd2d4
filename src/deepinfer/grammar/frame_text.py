"""Which states take every string text, as their expressions show without a look at their transitions."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    CONS,
    EPS,
    LIT,
    NOT,
    REP,
    SET,
    Node,
    TrieNode,
)

__all__ = ["TextStates"]

_ALL = (1 << 256) - 1
_SPARE = sum(1 << byte for byte in range(32, 127) if byte not in b'"\\')
"""Characters of string text that tell whether an expression can be escaped from."""

_MAX_NESTING = 40


class TextStates:
    """Tests whether any sequence of characters of string text, the last perhaps cut short, is live from a state.

    What must occur somewhere in a string may still come whatever came before, and what must not be the whole string is
    avoided by one more character. Both are seen in the expression, where a search through the states that text leads to
    may be long.

    Args:
        automaton: The automaton.
        loops: Whether each character of string text leads a state back to itself.
    """

    def __init__(self, automaton: Automaton, loops: Callable[[int], bool]) -> None:
        self._automaton = automaton
        self._loops = loops
        self._known: dict[int, bool] = {}
        self._frames: dict[int, bool] = {}
        self._bytes: dict[int, int] = {}
        self._closed: dict[int, bool] = {}

    def holds(self, state: int) -> bool:
        """Whether all text is live and stays above the unknown rest.

        Args:
            state: Frames over an unknown rest.

        Returns:
            True when it is certain; False says nothing.
        """
        found = self._known.get(state)
        if found is None:
            node = self._automaton.node_of(state)
            parts = node.parts if node.kind == ALT else (node,)
            found = self._known[state] = all(
                self._is_closed(part, _MAX_NESTING) for part in parts
            ) and any(map(self._starts, parts))
        return found

    def _starts(self, stack: Node) -> bool:
        """Whether all text is a beginning of what a stack accepts."""
        if stack.kind != CONS:
            return False
        head = stack.a
        while head.kind == CONS:
            if not self._automaton.is_live(head.b):
                return False
            head = head.a
        return self._automaton.is_live(stack.b) and self._takes(head, _MAX_NESTING)

    def _takes(self, frame: Node, nesting: int) -> bool:
        """Whether all text is a beginning of a string of a frame."""
        found = self._frames.get(frame.uid)
        if found is not None or not nesting:
            return bool(found)
        found = False
        if frame.kind == REP:
            found = frame.high < 0 and self._repeats(frame)
        elif frame.kind == ALT:
            found = any(self._takes(part, nesting - 1) for part in frame.parts)
        elif frame.kind == CONS:
            found = self._automaton.is_live(frame.b) and self._takes(frame.a, nesting - 1)
        elif frame.kind == AND:
            others = [part for part in frame.parts if part.kind != NOT]
            if len(others) == 1 and others[0].kind == REP and self._takes(others[0], nesting - 1):
                used = 0
                for part in frame.parts:
                    if part.kind == NOT:
                        used |= self._used(part.a, nesting - 1)
                found = bool(_SPARE & ~used)
        self._frames[frame.uid] = found
        return found

    def _repeats(self, frame: Node) -> bool:
        """Whether each character of text is one copy of a repeat."""
        store = self._automaton.store
        closed = store.cons(store.literal(b'"'), store.unknown)
        return self._loops(self._automaton.state_of(store.cons(store.rep(frame.a, 0, -1), closed)))

    def _used(self, node: Node, nesting: int) -> int:
        """Bytes outside of which no string of an expression has any, as bits."""
        kind = node.kind
        if kind == SET:
            return node.mask
        if kind == EPS:
            return 0
        if kind == LIT:
            return _bits(node.text)
        found = self._bytes.get(node.uid)
        if found is not None or not nesting:
            return _ALL if found is None else found
        if isinstance(node, TrieNode):
            found = _bits(b"".join(node.strings[node.first : node.last]))
        elif kind in (ALT, AND):
            parts = [part for part in node.parts if part.kind != NOT or kind == ALT]
            found = 0 if parts else _ALL
            for part in parts:
                found |= self._used(part, nesting - 1)
        elif kind == CONS:
            found = self._used(node.a, nesting - 1) | self._used(node.b, nesting - 1)
        elif kind == REP:
            found = self._used(node.a, nesting - 1)
        else:
            found = _ALL
        self._bytes[node.uid] = found
        return found

    def _is_closed(self, node: Node, nesting: int) -> bool:
        """Whether every string of an expression holds a byte that is no text; what is not known holds none."""
        kind = node.kind
        if kind == LIT:
            return any(map(_is_no_text, node.text))
        if kind == CONS and (node.a.kind == LIT or (node.a.kind == REP and not node.a.low)):
            if any(map(_is_no_text, node.a.text if node.a.kind == LIT else b"")):
                return True
            return self._is_closed(node.b, nesting)
        found = self._closed.get(node.uid)
        if found is not None or not nesting:
            return bool(found)
        found = False
        if kind == CONS:
            found = self._is_closed(node.a, nesting - 1) or self._is_closed(node.b, nesting - 1)
        elif kind == ALT:
            found = all(self._is_closed(part, nesting - 1) for part in node.parts)
        elif kind == REP:
            found = node.low > 0 and self._is_closed(node.a, nesting - 1)
        elif kind == SET:
            found = all(_is_no_text(byte) for byte in range(256) if node.mask >> byte & 1)
        self._closed[node.uid] = found
        return found

    def forget(self) -> None:
        """Drops what was worked out."""
        for kept in (self._known, self._frames, self._bytes, self._closed):
            kept.clear()


def _bits(text: bytes) -> int:
    found = 0
    for byte in set(text):
        found |= 1 << byte
    return found


def _is_no_text(byte: int) -> bool:
    """Whether a byte ends string text, or begins an escape."""
    return byte < 32 or byte in b'"\\'
