"""The walk of one frame from some places in tries: tokens that fit, and where the frame is left."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.frame_entries import Keep, Places, WalkSpace
from deepinfer.grammar.frame_loops import StateLoops
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.mask_splits import MIN_STRINGS
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.mask_walk import DENSE_LEVEL, DENSE_SHARE, MAX_NEW_SPLITS, NARROW
from deepinfer.grammar.trie import TokenTrie

__all__ = ["FrameWalk", "Found"]

SPARSE_NODES, MANY_CHILDREN = 160, 2000
"""So many nodes with so many children are still walked one by one when few bytes are live."""

FEW_CHILDREN = 4
"""The moves of a state met for the first time are worked out for so many bytes alone."""

MAX_OPEN = 8
"""States whose tokens are worked out one within the other."""

Int32Array = NDArray[np.int32]
Frontier = list[tuple[int, int]]


@dataclass(slots=True)
class Found:
    """What the walk of one frame collects.

    Attributes:
        tokens: Strings that fit: (space, part of the vocabulary that counts, ranks in the space).
        exits: Where the frame may be left.
        loops: By trie and state that many bytes lead back to itself: nodes reached by whole characters of them, whose
            subtrees were not walked.
        words: Ready masks of more strings that fit, each shape [words].
        new_splits: Splits made.
    """

    tokens: list[tuple[WalkSpace, Keep | None, Int32Array]] = field(default_factory=list)
    exits: Places = field(default_factory=Places)
    loops: dict[tuple[int, int, int], tuple[WalkSpace, int, Keep | None, list[int]]] = field(
        default_factory=dict
    )
    words: list[Int32Array] = field(default_factory=list)
    new_splits: int = 0


class FrameWalk:
    """Walks frames.

    Args:
        states: The automaton's transitions.
        nodes: Its states taken apart.
        loops: Which bytes and characters lead a state back to itself.

    Attributes:
        open: States whose strings of a whole trie are being worked out; nothing is left for them.
    """

    def __init__(
        self,
        states: StateRows,
        nodes: FrameNodes,
        loops: StateLoops,
    ) -> None:
        self._states = states
        self._nodes = nodes
        self._loop_set = loops.characters
        self._loop_bytes = loops.bytes_of
        self.num_dense_nodes = 0
        self.open: set[tuple[int, WalkSpace]] = set()
        self._flags = np.zeros(256, dtype=bool)

    def walk(
        self,
        space: WalkSpace,
        keep: Keep | None,
        frontier: Frontier,
        found: Found,
        without: frozenset[int] = frozenset(),
    ) -> None:
        """Walks on from some nodes, each with a state of the frame.

        Args:
            space: The trie.
            keep: Part of the vocabulary that counts.
            frontier: (node, state) of one level, or of several.
            found: Takes what is found.
            without: First bytes that are left out in the first step.
        """
        ranks: list[int] = []
        while frontier:
            if len(frontier) <= NARROW or without or self._is_sparse(space.trie, frontier):
                frontier = self._step_few(space, keep, frontier, found, ranks, without)
                without = frozenset()
                continue
            pairs = np.array(frontier, dtype=np.int32)
            nodes, states = pairs[:, 0], pairs[:, 1]
            while len(nodes) > NARROW:
                nodes, states = self._step_many(space, keep, nodes, states, found)
            frontier = list(zip(nodes.tolist(), states.tolist(), strict=True))
        if ranks:
            found.tokens.append((space, keep, np.array(ranks, dtype=np.int32)))

    def _is_sparse(self, trie: TokenTrie, frontier: Frontier) -> bool:
        """Whether a level of not so few nodes has far more children than can be live."""
        if len(frontier) > SPARSE_NODES:
            return False
        moves, children = self._states.moves_of, trie.children
        if any(moves(state)[1] is None for state in {state for _, state in frontier}):
            return False
        return sum([children[node + 1] - children[node] for node, _ in frontier]) > MANY_CHILDREN

    def arrive(
        self,
        space: WalkSpace,
        keep: Keep | None,
        child: Int32Array,
        after: Int32Array,
        found: Found,
    ) -> None:
        """Walks on from nodes that are reached now.

        Args:
            space: The trie.
            keep: Part of the vocabulary that counts.
            child: The nodes, shape [n], int32.
            after: Their states, live, shape [n], int32.
            found: Takes what is found.
        """
        child, after = self._reach(space, keep, child, after, found)
        if len(child):
            frontier = list(zip(child.tolist(), after.tolist(), strict=True))
            self.walk(space, keep, frontier, found)

    def _reach(
        self,
        space: WalkSpace,
        keep: Keep | None,
        child: Int32Array,
        after: Int32Array,
        found: Found,
    ) -> tuple[Int32Array, Int32Array]:
        trie = space.trie
        ranks = trie.rank[child]
        ranks = ranks[ranks >= 0]
        if len(ranks):
            found.tokens.append((space, keep, ranks))
        inner = trie.first_child[child] != trie.first_child[child + 1]
        child, after = child[inner], after[inner]
        if not len(child):
            return child, after
        return self._sort_out(space, keep, child, after, found)

    def _step_few(
        self,
        space: WalkSpace,
        keep: Keep | None,
        frontier: Frontier,
        found: Found,
        ranks: list[int],
        without: frozenset[int],
    ) -> Frontier:
        trie = space.trie
        children, labels, trie_ranks = trie.children, trie.labels, trie.ranks
        lows, highs = trie.rank_lows, trie.rank_highs
        find, classes, moves = labels.find, self._states.classes, self._states.moves_of
        left, gone, step = self._nodes.left, self._nodes.is_unknown, self._nodes.step
        has_moves = self._states.has_moves
        out: Frontier = []
        for node, state in frontier:
            low, high = children[node], children[node + 1]
            if low == high:
                continue
            pairs: list[tuple[int, int]]
            if high - low <= FEW_CHILDREN and not has_moves(state):
                pairs = [(c, after) for c in range(low, high) if (after := step(state, labels[c]))]
            else:
                row, live = moves(state)
                if live is not None and len(live) <= high - low:
                    pairs = [
                        (c, after) for byte, after in live if (c := find(byte, low, high)) >= 0
                    ]
                else:
                    pairs = [
                        (c, after) for c in range(low, high) if (after := row[classes[labels[c]]])
                    ]
            for child, after in pairs:
                if without and labels[child] in without:
                    continue
                if trie_ranks[child] >= 0:
                    ranks.append(trie_ranks[child])
                if children[child] == children[child + 1]:
                    continue
                if left(after):
                    found.exits.at(space, keep).append(child)
                    if gone(after):
                        continue
                if highs[child] - lows[child] < MIN_STRINGS or not self.skip(
                    space, keep, child, after, found
                ):
                    out.append((child, after))
        return out

    def skip(
        self, space: WalkSpace, keep: Keep | None, node: int, state: int, found: Found
    ) -> bool:
        """Takes the strings below a node from a split, or leaves them for later, when its state loops.

        Args:
            space: The trie.
            keep: Part of the vocabulary that counts.
            node: The node.
            state: Its state.
            found: Takes what is found.

        Returns:
            Whether the subtree is settled; otherwise it must be walked.
        """
        if space.root is not None:
            members = self._loop_bytes(state)
            if (
                members
                and space.paths.is_over(node, members)
                and (state, space) not in self.open
                and len(self.open) < MAX_OPEN
            ):
                self._loop(space, state, keep, found).append(node)
                return True
        characters = self._loop_set(state)
        if characters is None:
            return False
        if space.splits.fits(node):
            split = space.splits.known(node, characters)
            if split is None and found.new_splits < MAX_NEW_SPLITS:
                found.new_splits += 1
                split = space.splits.make(node, characters)
            if split is not None:
                if len(split.inside):
                    found.tokens.append((space, keep, split.inside))
                residue = split.residue
                if residue is not None:
                    self.walk(space.inner(residue), keep, [(0, state)], found)
                return True
        return False

    @staticmethod
    def _loop(space: WalkSpace, state: int, keep: Keep | None, found: Found) -> list[int]:
        key = (id(space), state, id(keep))
        entry = found.loops.get(key)
        if entry is None:
            entry = found.loops[key] = (space, state, keep, [])
        return entry[3]

    def _step_many(
        self,
        space: WalkSpace,
        keep: Keep | None,
        nodes: Int32Array,
        states: Int32Array,
        found: Found,
    ) -> tuple[Int32Array, Int32Array]:
        trie = space.trie
        low = trie.first_child[nodes]
        count = trie.first_child[nodes + 1] - low
        total = int(count.sum())
        level = trie.level_of(int(low[0]))
        first, last = trie.level_bounds(level)
        if total * DENSE_SHARE > last - first >= DENSE_LEVEL and self._one_level(nodes, trie):
            return self._step_dense(space, keep, nodes, states, level, found)
        ends = np.cumsum(count, dtype=np.int32)
        child = np.repeat(low - ends + count, count)
        child += np.arange(total, dtype=np.int32)
        classes = self._states.byte_class[trie.label_bytes[child]]
        after = self._states.step_all(np.repeat(states, count), classes)
        alive = np.flatnonzero(after)
        return self._reach(space, keep, child[alive], after[alive], found)

    @staticmethod
    def _one_level(nodes: Int32Array, trie: TokenTrie) -> bool:
        low, high = trie.level_bounds(trie.level_of(int(nodes[0])))
        return bool(nodes.min() >= low and nodes.max() < high)

    def _step_dense(
        self,
        space: WalkSpace,
        keep: Keep | None,
        nodes: Int32Array,
        states: Int32Array,
        level: int,
        found: Found,
    ) -> tuple[Int32Array, Int32Array]:
        """As `_step_many`, over all nodes of the level below."""
        trie = space.trie
        above, first = trie.level_bounds(level - 1)
        last = trie.level_bounds(level)[1]
        before = np.zeros(first - above, dtype=np.int32)
        before[nodes - above] = states
        classes = self._states.byte_class[trie.label_bytes[first:last]]
        after = self._states.step_all(before.take(trie.parent_in_level(level)), classes)
        self.num_dense_nodes += last - first
        leaf, ranks = trie.leaves_in_level(level)
        ranks = ranks[after.take(leaf) != 0]
        if len(ranks):
            found.tokens.append((space, keep, ranks))
        inner = trie.first_child[first:last] != trie.first_child[first + 1 : last + 1]
        at = np.flatnonzero((after != 0) & inner)
        child, after = (at + first).astype(np.int32), after[at]
        if not len(child):
            return child, after
        return self._sort_out(space, keep, child, after, found)

    def _sort_out(
        self,
        space: WalkSpace,
        keep: Keep | None,
        child: Int32Array,
        after: Int32Array,
        found: Found,
    ) -> tuple[Int32Array, Int32Array]:
        """Takes exits, pushed frames and loops out of a level."""
        for state in self.distinct(after):
            if self._nodes.left(state):
                here = after == state
                found.exits.at(space, keep).extend(child[here].tolist())
                if self._nodes.is_unknown(state):
                    after = np.where(here, np.int32(0), after)
                    continue
            members = self._loop_bytes(state) if space.root is not None else 0
            if members and (state, space) not in self.open and len(self.open) < MAX_OPEN:
                looping = (after == state) & space.paths.over(child, members)
                if looping.any():
                    self._loop(space, state, keep, found).extend(child[looping].tolist())
                    after = np.where(looping, np.int32(0), after)
        alive = after != 0
        return child[alive], after[alive]

    def distinct(self, states: Int32Array) -> list[int]:
        """The distinct ones of some states, shape [n], int32, at least one."""
        top = int(states.max())
        if top >= len(self._flags):
            self._flags = np.zeros(max(top + 1, 2 * len(self._flags)), dtype=bool)
        self._flags[states] = True
        out: list[int] = np.flatnonzero(self._flags[: top + 1]).tolist()
        self._flags[out] = False
        return out
