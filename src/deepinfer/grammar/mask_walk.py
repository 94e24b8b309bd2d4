"""Walking a trie and an automaton together: which strings of the trie keep the automaton alive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.mask_splits import TrieSplits
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.slices import CharacterSet, Residue

__all__ = ["ResidueWalk", "TrieWalk"]

Int32Array = NDArray[np.int32]
LoopSet = Callable[[int], CharacterSet | None]

NARROW = 40
"""A level with at most this many live nodes is walked in Python, which is faster there than array calls."""

DENSE_SHARE = 12
"""A level is computed for all of its nodes when more than one in so many is a child of a live one."""

DENSE_LEVEL = 64
"""Nodes of a level that is small enough to be always walked by its live nodes."""

MAX_NEW_SPLITS = 2
"""Splits of subtrees that one walk may make; the others that it could use are walked."""


class TrieWalk:
    """Walks over one trie with the states of one automaton.

    A walk goes level by level and picks the way for each level by the number of live nodes: node by node in Python
    while there are few, over arrays of live nodes while there are more, and over all nodes of the level when most are
    live. A node at which the automaton is in a state that a set of characters leads back to itself is not walked on when
    the split of its subtree by that set is there.

    Args:
        splits: The trie, and the splits of its subtrees.
        states: The automaton's transitions.
        loop_set: Set of characters that leads a state back to itself, or None.
    """

    def __init__(self, splits: TrieSplits, states: StateRows, loop_set: LoopSet) -> None:
        self.trie = splits.trie
        self._splits = splits
        self._states = states
        self._loop_set = loop_set
        self._classes: dict[int, NDArray[np.uint8]] = {}
        self.num_dense_nodes = 0

    def from_root(
        self, state: int, *, without: frozenset[int] = frozenset(), check: bool = False
    ) -> Int32Array:
        """The strings that are live from a state.

        Args:
            state: The automaton's state at the root.
            without: First bytes that are left out.
            check: Whether states may depend on frames that a truncation cut off.

        Returns:
            Ranks, shape [n], int32, in no order; the empty string is never among them.

        Raises:
            NeedsDepth: Such a state was met.
        """
        found: list[int] = []
        chunks: list[Int32Array] = []
        work = _Work(found, chunks, check)
        frontier = self._step_few([(0, state)], work, without)
        while frontier:
            if len(frontier) <= NARROW:
                frontier = self._step_few(frontier, work, frozenset())
                continue
            pairs = np.array(frontier, dtype=np.int32)
            nodes, states = pairs[:, 0], pairs[:, 1]
            while len(nodes) > NARROW:
                nodes, states = self._step_many(nodes, states, work)
            frontier = list(zip(nodes.tolist(), states.tolist(), strict=True))
        if found:
            chunks.append(np.array(found, dtype=np.int32))
        if len(chunks) == 1:
            return chunks[0]
        return np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int32)

    def _step_few(
        self, frontier: list[tuple[int, int]], work: _Work, without: frozenset[int]
    ) -> list[tuple[int, int]]:
        trie = self.trie
        children, labels, ranks = trie.children, trie.labels, trie.ranks
        find, classes, moves = labels.find, self._states.classes, self._states.moves
        fits, found = self._splits.fits, work.found
        out: list[tuple[int, int]] = []
        for node, state in frontier:
            low, high = children[node], children[node + 1]
            row, live = moves(state)
            if live is not None and len(live) <= high - low:
                for byte, after in live:
                    child = find(byte, low, high)
                    if child < 0 or byte in without:
                        continue
                    if ranks[child] >= 0:
                        found.append(ranks[child])
                    if children[child] != children[child + 1] and not (
                        fits(child) and self._take_split(child, after, work)
                    ):
                        out.append((child, after))
                continue
            for child in range(low, high):
                byte = labels[child]
                after = row[classes[byte]]
                if not after or byte in without:
                    continue
                if ranks[child] >= 0:
                    found.append(ranks[child])
                if children[child] != children[child + 1] and not (
                    fits(child) and self._take_split(child, after, work)
                ):
                    out.append((child, after))
        return out

    def _take_split(self, node: int, state: int, work: _Work) -> bool:
        """Takes the strings below a node from a split, if there is one for the state."""
        characters = self._loop_set(state)
        if characters is None:
            return False
        split = self._splits.known(node, characters)
        if split is None:
            if work.new_splits == MAX_NEW_SPLITS:
                return False
            work.new_splits += 1
            split = self._splits.make(node, characters)
        work.chunks.append(split.inside)
        moves, classes = self._states.moves, self._states.classes
        for text, ranks in split.rests:
            at = state
            for byte in text:
                at = moves(at)[0][classes[byte]]
                if not at:
                    break
            else:
                work.found += ranks
        return True

    def _step_many(
        self, nodes: Int32Array, states: Int32Array, work: _Work
    ) -> tuple[Int32Array, Int32Array]:
        trie = self.trie
        low = trie.first_child[nodes]
        count = trie.first_child[nodes + 1] - low
        inner = count > 0
        if not inner.all():
            low, count, states, nodes = low[inner], count[inner], states[inner], nodes[inner]
        if not len(nodes):
            return nodes, states
        if work.check:
            self._states.require_certain(states)
        total = int(count.sum())
        level = trie.level_of(int(low[0]))
        first, last = trie.level_bounds(level)
        if total * DENSE_SHARE > last - first >= DENSE_LEVEL:
            return self._run_dense(nodes, states, level, work)
        ends = np.cumsum(count, dtype=np.int32)
        child = np.repeat(low - ends + count, count)
        child += np.arange(total, dtype=np.int32)
        classes = self._states.byte_class[trie.label_bytes[child]]
        after = self._states.step_all(np.repeat(states, count), classes)
        alive = np.flatnonzero(after)
        nodes = child[alive]
        ranks = trie.rank[nodes]
        work.chunks.append(ranks[ranks >= 0])
        return nodes, after[alive]

    def _run_dense(
        self, nodes: Int32Array, states: Int32Array, level: int, work: _Work
    ) -> tuple[Int32Array, Int32Array]:
        """Whole levels, from one whose parents' states are in `nodes` and `states`, while they stay full."""
        trie = self.trie
        above, first = trie.level_bounds(level - 1)
        before = np.zeros(first - above, dtype=np.int32)
        before[nodes - above] = states
        while True:
            first, last = trie.level_bounds(level)
            classes = self._classes.get(level)
            if classes is None:
                classes = self._states.byte_class[trie.label_bytes[first:last]]
                self._classes[level] = classes
            after = self._states.step_all(before.take(trie.parent_in_level(level)), classes)
            self.num_dense_nodes += last - first
            leaf, ranks = trie.leaves_in_level(level)
            work.chunks.append(ranks[after.take(leaf) != 0])
            alive = np.count_nonzero(after)
            if level == trie.num_levels or alive * DENSE_SHARE < last - first or alive <= NARROW:
                at = np.flatnonzero(after)
                return (at + first).astype(np.int32), after[at]
            if work.check:
                self._states.require_certain(after)
            before = after
            level += 1


class _Work:
    """What one walk has found so far."""

    __slots__ = ("check", "chunks", "found", "new_splits")

    def __init__(self, found: list[int], chunks: list[Int32Array], check: bool) -> None:
        self.found = found
        self.chunks = chunks
        self.check = check
        self.new_splits = 0


class ResidueWalk:
    """A walk over what is left of tokens behind a common beginning, which gives the tokens.

    Args:
        residue: The tokens by their rests.
        states: The automaton's transitions.
        loop_set: As for `TrieWalk`.
    """

    def __init__(self, residue: Residue, states: StateRows, loop_set: LoopSet) -> None:
        self._residue = residue
        self._walk = TrieWalk(residue.splits, states, loop_set)
        self._count = np.diff(residue.offset)
        self._single = len(residue.ranks) == len(residue.offset) - 1

    def from_root(self, state: int, check: bool) -> Int32Array:
        """The tokens whose rest is live from a state.

        Args:
            state: The state.
            check: As in `TrieWalk.from_root`.

        Returns:
            Their ranks in the trie that was split, shape [n], int32.

        Raises:
            NeedsDepth: As in `TrieWalk.from_root`.
        """
        rests = self._walk.from_root(state, check=check)
        if self._single or not len(rests):
            return self._residue.ranks[rests]
        low, count = self._residue.offset[rests], self._count[rests]
        ends = np.cumsum(count, dtype=np.int32)
        at = np.repeat(low - ends + count, count)
        at += np.arange(len(at), dtype=np.int32)
        return self._residue.ranks[at]
