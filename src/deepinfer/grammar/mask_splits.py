"""Subtrees of a trie split by a set of characters, made when a walk first wants them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.slices import BOUNDARY, DEAD, CharacterSet, Residue, residue_of
from deepinfer.grammar.trie import TokenTrie

__all__ = ["Split", "TrieSplits"]

MIN_STRINGS = 24
MAX_STRINGS = 256
"""Subtrees with fewer strings than the first are walked; with more than the second they take too long to split."""


@dataclass
class Split:
    """The strings below a node, by what they are behind it.

    Attributes:
        inside: Ranks of those that are characters of the set behind the node, the last of which may be incomplete;
            shape [n], int32.
        rests: What follows the longest sequence of whole characters behind the node in the others, with their ranks.
    """

    inside: NDArray[np.int32]
    rests: list[tuple[bytes, list[int]]]

    @cached_property
    def residue(self) -> Residue | None:
        """The rests as a trie of their own; None without any."""
        pairs = [(text, rank) for text, ranks in self.rests for rank in ranks]
        return residue_of(pairs) if pairs else None


class TrieSplits:
    """The splits of one trie, shared by everything that walks it.

    Args:
        trie: The trie.
    """

    def __init__(self, trie: TokenTrie) -> None:
        self.trie = trie
        self._splits: dict[tuple[int, str], Split] = {}
        self._lock = threading.Lock()

    def fits(self, node: int) -> bool:
        """Whether a node's subtree has a size that is worth splitting."""
        trie = self.trie
        return MIN_STRINGS <= trie.rank_highs[node] - trie.rank_lows[node] <= MAX_STRINGS

    def known(self, node: int, characters: CharacterSet) -> Split | None:
        """The split of a node's subtree, or None when it was not made yet.

        Args:
            node: The node.
            characters: The set.

        Returns:
            The split, or None.
        """
        return self._splits.get((node, characters.name))

    def make(self, node: int, characters: CharacterSet) -> Split:
        """The split of a node's subtree.

        Args:
            node: The node.
            characters: The set.

        Returns:
            The split.
        """
        key = (node, characters.name)
        with self._lock:
            found = self._splits.get(key)
            if found is None:
                found = self._splits[key] = self._make(node, characters)
        return found

    def _make(self, node: int, characters: CharacterSet) -> Split:
        trie, table = self.trie, characters.table.tolist()
        inside: list[int] = []
        rests: dict[bytes, list[int]] = {}
        stack = [(node, BOUNDARY, b"")]
        while stack:
            at, state, rest = stack.pop()
            for child in range(trie.children[at], trie.children[at + 1]):
                byte = trie.labels[child]
                after = table[state][byte]
                left = b"" if after == BOUNDARY else rest + bytes((byte,))
                if trie.ranks[child] >= 0:
                    if after != DEAD:
                        inside.append(trie.ranks[child])
                    else:
                        rests.setdefault(left, []).append(trie.ranks[child])
                stack.append((child, after, left))
        return Split(np.array(inside, dtype=np.int32), list(rests.items()))

    def __len__(self) -> int:
        return len(self._splits)
