"""A byte trie in level order, built with numpy: what token masks are walked over."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import run_starts

__all__ = ["TokenTrie"]

Int32Array = NDArray[np.int32]

_FIELDS = ("label_bytes", "parent", "first_child", "rank", "rank_low", "rank_high", "level_start")


class TokenTrie:
    """A trie over distinct byte strings, its nodes numbered level by level.

    The nodes of a level are contiguous and in the order of their byte strings, and so are the children of a node: its
    children are the range `first_child[node] : first_child[node + 1]`, with ascending labels. A string's *rank* is its
    place among all strings in byte order; the strings below a node are the ranks `rank_low[node] : rank_high[node]`.

    Args:
        label_bytes: Byte on the edge into each node, shape [nodes], uint8; 0 for the root, node 0.
        parent: Parent of each node, shape [nodes], int32; 0 for the root.
        first_child: Shape [nodes + 1], int32.
        rank: Rank of the string that ends at each node, shape [nodes], int32; -1 where none does.
        rank_low: First rank below each node, shape [nodes], int32.
        rank_high: One past the last rank below each node, shape [nodes], int32.
        level_start: First node of each level and, last, the number of nodes, shape [levels + 1], int32; the root is
            level 0.
    """

    def __init__(
        self,
        label_bytes: NDArray[np.uint8],
        parent: Int32Array,
        first_child: Int32Array,
        rank: Int32Array,
        rank_low: Int32Array,
        rank_high: Int32Array,
        level_start: Int32Array,
    ) -> None:
        self.label_bytes = label_bytes
        self.parent = parent
        self.first_child = first_child
        self.rank = rank
        self.rank_low = rank_low
        self.rank_high = rank_high
        self.level_start = level_start
        # Twins of the arrays whose single elements Python reads fast.
        self.labels = label_bytes.tobytes()
        self.children = array("i", first_child.tobytes())
        self.ranks = array("i", rank.tobytes())
        self.rank_lows = array("i", rank_low.tobytes())
        self.rank_highs = array("i", rank_high.tobytes())
        self._starts: list[int] = level_start.tolist()
        self._levels: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], Int32Array]] = {}

    @classmethod
    def build(cls, strings: Sequence[bytes]) -> TokenTrie:
        """Builds the trie level by level.

        Args:
            strings: Distinct byte strings in ascending order; an empty one is at the root.

        Returns:
            The trie.
        """
        count = len(strings)
        length = np.fromiter(map(len, strings), dtype=np.int32, count=count)
        flat = np.frombuffer(b"".join(strings), dtype=np.uint8)
        offset = np.zeros(count, dtype=np.int64)
        np.cumsum(length[:-1], out=offset[1:])
        labels, parents, ranks = [np.zeros(1, np.uint8)], [np.zeros(1, np.int32)], []
        lows, highs = [np.zeros(1, np.int32)], [np.full(1, count, np.int32)]
        ranks.append(np.full(1, 0 if count and not length[0] else -1, np.int32))
        starts = [0, 1]
        active = np.flatnonzero(length > 0).astype(np.int32)
        owner = np.zeros(len(active), dtype=np.int32)  # node of each active string so far
        level = 0
        while len(active):
            byte = flat[offset[active] + level]
            new = np.empty(len(active), dtype=bool)
            new[0] = True
            new[1:] = (byte[1:] != byte[:-1]) | (owner[1:] != owner[:-1])
            at = np.flatnonzero(new)
            base = starts[-1]
            node = np.cumsum(new, dtype=np.int32) + np.int32(base - 1)
            labels.append(byte[at])
            parents.append(owner[at])
            ends = np.append(at[1:], len(active)) - 1
            lows.append(active[at])
            highs.append(active[ends] + np.int32(1))
            whole = length[active] == level + 1
            here = np.full(len(at), -1, dtype=np.int32)
            here[node[whole] - base] = active[whole]
            ranks.append(here)
            starts.append(base + len(at))
            level += 1
            active, owner = active[~whole], node[~whole]
        parent = np.concatenate(parents)
        num_nodes = len(parent)
        first_child = np.ones(num_nodes + 1, dtype=np.int32)
        counts = np.bincount(parent[1:], minlength=num_nodes)
        np.cumsum(counts, out=first_child[1:])
        first_child[1:] += 1
        return cls(
            np.concatenate(labels),
            parent,
            first_child,
            np.concatenate(ranks),
            np.concatenate(lows),
            np.concatenate(highs),
            np.asarray(starts, dtype=np.int32),
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that `from_arrays` takes.

        Returns:
            Name to array, as in the constructor.
        """
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> TokenTrie:
        """Makes a trie of the arrays of another one.

        Args:
            arrays: What `arrays` returned.

        Returns:
            The trie.
        """
        return cls(*(arrays[name] for name in _FIELDS))

    @cached_property
    def leaf_nodes(self) -> tuple[Int32Array, Int32Array]:
        """Nodes at which a string ends, ascending, and the ranks of those strings; each shape [strings], int32."""
        nodes = np.flatnonzero(self.rank >= 0).astype(np.int32)
        return nodes, self.rank[nodes]

    @cached_property
    def deepest(self) -> NDArray[np.int32]:
        """Bytes from the root to the end of the longest string at or below each node, shape [nodes], int32."""
        out = np.zeros(len(self), dtype=np.int32)
        for level in range(self.num_levels, 0, -1):
            first, last = self.level_bounds(level)
            here = out[first:last]
            np.maximum(here, np.where(self.rank[first:last] >= 0, level, 0), out=here)
            above = self.parent[first:last]
            start = np.flatnonzero(run_starts(above))
            out[above[start]] = np.maximum.reduceat(here, start)
        return out

    def level_of(self, node: int) -> int:
        """The level of a node; the root is level 0."""
        return bisect_right(self._starts, node) - 1

    def level_bounds(self, level: int) -> tuple[int, int]:
        """First node of a level, and one past its last."""
        return self._starts[level], self._starts[level + 1]

    def parent_in_level(self, level: int) -> NDArray[np.int64]:
        """Place of each parent in the level above, shape [nodes of the level], int64."""
        return self._level(level)[0]

    def leaves_in_level(self, level: int) -> tuple[NDArray[np.int64], Int32Array]:
        """Places in a level at which a string ends, and the ranks of those strings, each shape [strings]."""
        return self._level(level)[1:]

    def prepare(self) -> None:
        """Makes the arrays of every level now rather than in the first walk that wants them."""
        for level in range(1, self.num_levels + 1):
            self._level(level)

    def _level(self, level: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Int32Array]:
        found = self._levels.get(level)
        if found is None:
            first, last = self.level_bounds(level)
            rank = self.rank[first:last]
            leaf = np.flatnonzero(rank >= 0)
            parent = self.parent[first:last].astype(np.int64) - self._starts[level - 1]
            found = self._levels[level] = parent, leaf, rank[leaf]
        return found

    def find(self, prefix: bytes) -> int:
        """The node of a byte string.

        Args:
            prefix: Any bytes.

        Returns:
            The node, or -1 when no string begins with the prefix.
        """
        node = 0
        for byte in prefix:
            node = self.labels.find(byte, self.children[node], self.children[node + 1])
            if node < 0:
                return -1
        return node

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_levels(self) -> int:
        """Levels below the root: the length of the longest string."""
        return len(self.level_start) - 2

    def __repr__(self) -> str:
        return f"TokenTrie({len(self)} nodes, {self.num_levels} levels)"
