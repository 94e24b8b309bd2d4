"""Finite sets of strings, such as declared keys and the values of an enum, walked without an automaton."""

from __future__ import annotations

from deepinfer.grammar.nodes import ALT, CONS, EPS, LIT, REP, SET, TRIE, Node, TrieNode

__all__ = ["Branch", "Keys", "strings_of"]

MAX_STRINGS = 2000
"""Strings of a set that is still walked as such."""

MANY_STRINGS = 64

MAX_SET = 8
"""Bytes of a set that counts as so many strings of one byte."""

MAX_NESTING = 40


class Branch:
    """Strings that share a beginning: a node of a tree that is made where a walk goes.

    Args:
        strings: Distinct strings in ascending order.
        first: The strings from here ...
        last: ... up to here, excluded, share their first `depth` bytes.
        depth: Bytes that were read.
    """

    __slots__ = ("_below", "_depth", "_first", "_last", "_strings", "ends", "name")

    def __init__(self, strings: list[bytes], first: int, last: int, depth: int) -> None:
        self.ends = len(strings[first]) == depth
        # Equal names are equal strings; large sets have none.
        self.name = tuple(strings) if not depth and len(strings) <= MANY_STRINGS else None
        self._strings = strings
        self._first = first + self.ends
        self._last = last
        self._depth = depth
        self._below: dict[int, Branch] | None = None

    @property
    def below(self) -> dict[int, Branch]:
        """What follows each byte that can come."""
        found = self._below
        if found is None:
            found = {}
            strings, depth, at, last = self._strings, self._depth, self._first, self._last
            while at < last:
                byte, first = strings[at][depth], at
                at += 1
                while at < last and strings[at][depth] == byte:
                    at += 1
                found[byte] = Branch(strings, first, at, depth + 1)
            self._below = found
        return found


class Keys:
    """Strings with what follows each, such as the keys of an object; walked together.

    Args:
        pairs: (string, what is left of a bag's member behind it).
    """

    def __init__(self, pairs: list[tuple[bytes, Node]]) -> None:
        rests: dict[bytes, list[Node]] = {}
        for text, rest in pairs:
            rests.setdefault(text, []).append(rest)
        self.strings = sorted(rests)
        self.rests = [rests[text] for text in self.strings]
        self._tags = [sum_tags(nodes) for nodes in self.rests]
        self._groups: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = {}

    def below(self, first: int, last: int, depth: int) -> list[tuple[int, int, int, int]]:
        """How a range of the strings goes on behind its first bytes.

        Args:
            first: First string of the range.
            last: One past the last.
            depth: Bytes that were read, the same in all of them.

        Returns:
            For each byte: the byte, the range, and the members of the bag that it belongs to, as bits.
        """
        key = (first, last, depth)
        found = self._groups.get(key)
        if found is None:
            found = []
            strings, tags = self.strings, self._tags
            at = first + (len(strings[first]) == depth)
            while at < last:
                byte, start, members = strings[at][depth], at, 0
                while at < last and strings[at][depth] == byte:
                    members |= tags[at]
                    at += 1
                found.append((byte, start, at, members))
            self._groups[key] = found
        return found


def sum_tags(nodes: list[Node]) -> int:
    """The members of a bag that occur in some nodes, as bits."""
    tags = 0
    for node in nodes:
        tags |= node.tags
    return tags


def strings_of(node: Node) -> Branch | None:
    """The strings of an expression that is seen at once to have few.

    Args:
        node: The expression.

    Returns:
        Their tree; None where the language is infinite, large or not seen to be small.
    """
    found = _strings(node, MAX_NESTING)
    if not found:
        return None
    strings = sorted(set(found)) if len(found) > 1 else found
    return Branch(strings, 0, len(strings), 0)


def _strings(node: Node, nesting: int) -> list[bytes] | None:
    kind = node.kind
    if kind == LIT:
        return [node.text]
    if kind == EPS:
        return [b""]
    if isinstance(node, TrieNode):
        if node.last - node.first > MAX_STRINGS:
            return None
        return [text[node.skip :] for text in node.strings[node.first : node.last]]
    if not nesting or kind == TRIE:
        return None
    if kind == SET:
        if node.mask.bit_count() > MAX_SET:
            return None
        return [bytes((byte,)) for byte in range(256) if node.mask >> byte & 1]
    if kind == REP:
        if node.low != 0 or node.high != 1:
            return None
        inner = _strings(node.a, nesting - 1)
        return None if inner is None else [b"", *inner]
    if kind == ALT:
        out: list[bytes] = []
        for part in node.parts:
            inner = _strings(part, nesting - 1)
            if inner is None or len(out) + len(inner) > MAX_STRINGS:
                return None
            out += inner
        return out
    if kind == CONS:
        heads = _strings(node.a, nesting - 1)
        tails = None if heads is None else _strings(node.b, nesting - 1)
        if heads is None or tails is None or len(heads) * len(tails) > MAX_STRINGS:
            return None
        return [head + tail for head in heads for tail in tails]
    return None
