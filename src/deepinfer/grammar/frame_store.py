"""What the grammars over one vocabulary share: the walks of frames that are the same expression.

White space, strings, numbers, dates and whatever else many schemas hold are walked by the first of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.errors import InvariantBroken
from deepinfer.grammar.byte_loops import ByteNodes
from deepinfer.grammar.frame_entries import Entry, EntryStore, WalkSpace
from deepinfer.grammar.frame_kinds import KindSpace
from deepinfer.grammar.frame_tokens import Tokens, TokenSets
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REP,
    SET,
    TRIE,
    UNKNOWN,
    Node,
    TrieNode,
)
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameStore", "Shapes", "StringTokens", "Unit"]

MAX_SHARED_BYTES = 128 << 20
"""Memory of what the grammars over one vocabulary share; past it, later ones begin anew."""

StringTokens = dict[tuple[object, Entry], tuple[tuple[int, ...], Entry | None]]
"""Ids and exits of finite sets of strings."""

MAX_SHAPE = 20_000
"""Nodes of an expression that is shared."""

MAX_STRINGS = 200
"""Strings of a set that is shared."""

MAX_NESTING = 100

_BLANKS = ((0xC2, 0xA0), (0xE1, 0x9A), (0xE2, 0x80), (0xE2, 0x81), (0xE3, 0x80), (0xEF, 0xBB))
"""First two bytes of white space."""


@dataclass(eq=False, slots=True)
class Unit:
    """What one frame does with the tokens from one entry.

    Attributes:
        tokens: Those that end inside of it, or at its end.
        exits: Where it may be left, or None.
    """

    tokens: Tokens
    exits: Entry | None


class FrameStore:
    """Walks of frames over one vocabulary.

    Several threads may use it at once: they only add to it, and what two of them add under one key is the same.

    Args:
        vocab: The vocabulary.

    Attributes:
        main: The vocabulary's trie.
        entries: Where frames are entered.
        root: The entry at the beginning of all tokens.
        sets: Makes sets of tokens.
        units: By the number of a frame's expression and its entry.
        strings: What finite sets of strings do, by the set and the entry.
        wide: Whether many tokens begin in a frame, by its expression's number and whether it is a set or repeat.
        size_bytes: Estimated memory.
        weights: Strings that begin with each byte, 0 for white space.
        led_node: The node of a blank, by which half of a vocabulary may begin.
        led: The entry behind it; None when nothing follows.
        kinds: The strings by kinds of characters.
        led_ranks: First and one past the last rank of the strings that begin with it.
    """

    def __init__(self, vocab: TokenVocab) -> None:
        self._vocab = vocab
        self.main = WalkSpace(vocab.splits, paths=vocab.byte_loops.paths)
        self.entries = EntryStore(vocab)
        self.root = self.entries.entry([(self.main, (0,), None)])
        self.main.root = self.root
        self.main.by_byte = ByteNodes(self.main.trie, self.main.paths)
        self.sets = TokenSets(vocab, self.entries)
        self.units: dict[tuple[int, Entry], Unit] = {}
        self.strings: StringTokens = {}
        self.wide: dict[tuple[int, bool], bool] = {}
        self.size_bytes = 0
        trie = vocab.trie
        self.weights = [0] * 256
        for node in range(trie.children[0], trie.children[1]):
            if trie.labels[node] not in b" \t\n\r":
                self.weights[trie.labels[node]] = trie.rank_highs[node] - trie.rank_lows[node]
        self.led_node = trie.find(b" ")
        self.led: Entry | None = None
        self.led_ranks = (0, 0)
        if self.led_node > 0 and trie.children[self.led_node] < trie.children[self.led_node + 1]:
            space = self.main.behind((self.led_node,))
            space.by_byte = ByteNodes(space.trie, space.paths)
            self.led_ranks = (trie.rank_lows[self.led_node], trie.rank_highs[self.led_node])
            self.led = space.root = self.entries.entry([(space, (0,), None)])
        self.kinds = KindSpace(self.main, vocab.text_kinds, vocab.slices[0].characters.table)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._count = itertools.count(1)

    @classmethod
    def of(cls, vocab: TokenVocab) -> FrameStore:
        """The store of a vocabulary; a new one when that takes too much memory."""
        store: FrameStore | None = vocab.shared.get("frames")
        if store is None or store.is_full:
            store = vocab.shared["frames"] = cls(vocab)
        return store

    def holding(self, first: int, second: int) -> NDArray[np.int32]:
        """Mask of the tokens in which two bytes that begin a character follow each other, shape [words], int32."""
        by_byte = self.main.by_byte
        if by_byte is None:
            raise InvariantBroken("the vocabulary's trie is not sorted by bytes; report this")
        below = by_byte.pair(first, second)[1]
        return self._vocab.byte_loops.holding(first, second, below)

    def find_pairs(self) -> None:
        """Finds white space of more than one byte in all strings, which patterns often leave out."""
        for first, second in _BLANKS:
            self.holding(first, second)
            if self.led is not None and (by_byte := self.led.segments[0][0].by_byte) is not None:
                by_byte.pair(first, second)

    @property
    def is_full(self) -> bool:
        """Whether it takes too much memory."""
        return self.size_bytes > MAX_SHARED_BYTES

    def number(self, expression: tuple[object, ...]) -> int:
        """A number for an expression that is written with the numbers of its parts."""
        found = self._numbers.get(expression)
        return self._numbers.setdefault(expression, next(self._count)) if found is None else found

    def put(self, shape: int, entry: Entry, unit: Unit) -> None:
        """Keeps a unit."""
        self.units[shape, entry] = unit
        self.size_bytes += unit_bytes(unit)


def unit_bytes(unit: Unit) -> int:
    """Memory of a unit, estimated."""
    size = unit.tokens.size_bytes + 400
    if unit.exits is not None:
        size += sum(
            60 * len(nodes) + (150_000 if keep else 0) for _, nodes, keep in unit.exits.segments
        )
    return size


class Shapes:
    """The numbers of one grammar's nodes in a store: nodes of two grammars with equal numbers are the same expression.

    Args:
        store: The store.
    """

    def __init__(self, store: FrameStore) -> None:
        self._store = store
        self._known: dict[int, int] = {}
        self._left = 0

    def of(self, node: Node) -> int:
        """The number of a node; 0 for one that holds bags or rules, -1 for one that is too large."""
        found = self._known.get(node.uid)
        if found is None:
            self._left = MAX_SHAPE
            found = self._number(node, MAX_NESTING)
        return found

    def _number(self, node: Node, nesting: int) -> int:
        found = self._known.get(node.uid)
        if found is not None:
            return found
        self._left -= 1
        kind = node.kind
        parts: tuple[object, ...] | None
        if kind == LIT:
            parts = (node.text,)
        elif kind == SET:
            parts = (node.mask,)
        elif kind in (EPS, EMPTY, UNKNOWN):
            parts = ()
        elif isinstance(node, TrieNode) and node.last - node.first <= MAX_STRINGS:
            parts = tuple([text[node.skip :] for text in node.strings[node.first : node.last]])
        elif not nesting or self._left < 0 or kind == TRIE:
            return -1  # not kept: from another node there may be room for it
        elif kind in (ALT, AND):
            numbers = sorted([self._number(part, nesting - 1) for part in node.parts])
            if numbers[0] < 0:
                return -1
            parts = tuple(numbers) if numbers[0] else None
        elif kind == CONS:
            head = self._number(node.a, nesting - 1)
            tail = self._number(node.b, nesting - 1) if head else 0
            if min(head, tail) < 0:
                return -1 if head and tail else 0
            parts = (head, tail) if tail else None
        elif kind in (REP, NOT):
            inner = self._number(node.a, nesting - 1)
            if inner < 0:
                return -1
            bounds = (node.low, node.high) if kind == REP else ()
            parts = (inner, *bounds) if inner else None
        else:
            parts = None
        number = 0 if parts is None else self._store.number((kind, *parts))
        self._known[node.uid] = number
        return number

    def forget(self) -> None:
        """Drops what was worked out."""
        self._known.clear()
