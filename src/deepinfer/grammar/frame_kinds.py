"""Walks of frames over the strings of a vocabulary by kinds of characters; see `text_kinds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.frame_entries import Keep, WalkSpace
from deepinfer.grammar.frame_walk import Found
from deepinfer.grammar.kind_tests import KindTests
from deepinfer.grammar.slices import BOUNDARY, DEAD
from deepinfer.grammar.text_kinds import ASCII_KINDS, TextKinds
from deepinfer.grammar.trie import TokenTrie

if TYPE_CHECKING:
    from deepinfer.grammar.frame_units import FrameUnits

__all__ = ["KindSpace", "KindWalk"]

Int32Array = NDArray[np.int32]

MAX_STATES = 24
"""States that one walk tests for the first time; patterns that need more are walked in other ways."""

WIDE_LEVEL = 40
"""Levels from the first on that have at least so many nodes are walked at once."""


class Level(NamedTuple):
    """A level of a trie.

    Attributes:
        low: Its first node.
        labels: Bytes on the edges to its nodes, shape [nodes], uint8.
        text: Places of the nodes that have others below and stand behind whole characters of text.
        rest: Places of the other nodes that have some below.
    """

    low: int
    labels: NDArray[np.uint8]
    text: NDArray[np.intp]
    rest: NDArray[np.intp]


class KindSpace:
    """The trie of strings by kinds, and which of its nodes stand behind whole characters of text.

    Args:
        main: The vocabulary's trie.
        kinds: The strings.
        text: Table of string text.

    Attributes:
        space: The trie.
        by_id: The string of each id, one past the last for ids that are no text; shape [ids].
        levels: Its first levels.
        num_strings: Strings in it.
        blank: The node of a blank, or -1.
        is_text: For each node, whether it stands behind whole characters of text and has others below.
        is_exact: For each node, whether it stands behind what is no text, where bytes are what they are in the tokens.
        runs: Where the same byte follows itself without a choice: by each node of such a run but the last, the last one
            and the ranks of the strings that end behind the node.
    """

    def __init__(self, main: WalkSpace, kinds: TextKinds, text: NDArray[np.uint8]) -> None:
        space = self.space = main.inner(kinds.residue)
        self.by_id = kinds.by_id
        trie = space.trie
        flat = text.ravel()
        state = np.zeros(len(trie), dtype=np.uint8)
        state[0] = BOUNDARY
        num_wide = 0
        for level in range(1, trie.num_levels + 1):
            low, high = trie.level_bounds(level)
            before = state[trie.parent[low:high]].astype(np.int32)
            state[low:high] = flat[before * 256 + trie.label_bytes[low:high]]
            if num_wide == level - 1 and high - low >= WIDE_LEVEL:
                num_wide = level
        inner = np.diff(trie.first_child) > 0
        is_text = (state == BOUNDARY) & inner
        self.is_text: list[bool] = is_text.tolist()
        self.is_exact: list[bool] = (state == DEAD).tolist()
        self.levels: list[Level] = []
        for level in range(1, num_wide + 1):
            low, high = trie.level_bounds(level)
            here, whole = inner[low:high], is_text[low:high]
            places = (np.flatnonzero(whole), np.flatnonzero(here & ~whole))
            self.levels.append(Level(low, trie.label_bytes[low:high], *places))
        self.num_strings = len(trie.leaf_nodes[0])
        self.blank = trie.find(b" ")
        self.runs = _runs(trie)
        trie.prepare()
        trie.deepest  # noqa: B018 - made on first use


def _runs(trie: TokenTrie) -> dict[int, tuple[int, list[int]]]:
    """`KindSpace.runs` of a trie."""
    out: dict[int, tuple[int, list[int]]] = {}
    children, labels, ranks = trie.children, trie.labels, trie.ranks
    for node in range(len(trie) - 1, 0, -1):
        child = children[node]
        if children[node + 1] == child + 1 and labels[child] == labels[node]:
            last, found = out.get(child, (child, []))
            out[node] = (last, [ranks[child], *found] if ranks[child] >= 0 else found)
    return out


class KindWalk:
    """Walks frames over strings by kinds.

    Args:
        units: What walks the other frames.
    """

    def __init__(self, units: FrameUnits) -> None:
        self._units = units
        states = self._states = units.states
        self._fits: dict[int, bool] = {}
        self._left = 0
        self._ascii = [states.taker(kind) for kind in ASCII_KINDS]
        self._wide = KindTests(units.nodes.store)
        self._classes: list[NDArray[np.uint8]] = []

    def fits(self, state: int, *, first: bool = False) -> bool:
        """Whether a state treats the characters of each kind alike, and whether its frames go on.

        Args:
            state: The state.
            first: Whether a walk begins in it, which may then look at so many states.

        Returns:
            False also where the walk has looked at too many states.
        """
        if first:
            self._left = MAX_STATES
        found = self._fits.get(state)
        if found is None:
            if not self._left:
                return False
            self._left -= 1
            found = self._fits[state] = self._test(state)
        return found

    def _test(self, state: int) -> bool:
        if self._units.nodes.left(state):
            return False
        row = self._states.moves_of(state)[0]
        for take in self._ascii:
            targets = take(row)
            if targets.count(targets[0]) != len(targets):
                return False
        return self._wide.alike(self._units.nodes.node(state))

    def walk(self, state: int, keep: Keep | None, found: Found, *, behind_blank: bool) -> bool:
        """Walks a frame over the vocabulary.

        Args:
            state: The frame's state.
            keep: Part of the vocabulary that counts.
            found: Takes what is found.
            behind_blank: Whether it is entered behind a blank at the beginning of strings.

        Returns:
            False, with nothing found, where characters of one kind are told apart.
        """
        if not self.fits(state, first=True):
            return False
        kinds, states, distinct = self._units.store.kinds, self._states, self._units.walk.distinct
        trie, left = kinds.space.trie, self._units.nodes.left
        if not self._classes:
            self._classes = [states.byte_class[level.labels] for level in kinds.levels]
        exits: list[int] = []
        live = np.zeros(kinds.num_strings + 1, dtype=bool)
        after = np.array([state], dtype=np.int32)
        frontier = [(kinds.blank if behind_blank else 0, state)]
        for number, (level, classes) in enumerate(zip(kinds.levels, self._classes, strict=True), 1):
            if behind_blank and number == 1:
                after = np.zeros(len(level.labels), dtype=np.int32)
                after[kinds.blank - level.low] = state
                continue
            after = states.step_all(after.take(trie.parent_in_level(number)), classes)
            leaf, ranks = trie.leaves_in_level(number)
            live[ranks] = after.take(leaf) != 0
            for one in distinct(after.take(level.text)):
                if one and not self.fits(one):
                    return False
            going = after.take(level.rest)
            for one in distinct(going):
                if one and left(one):
                    places = level.rest[going == one]
                    nodes = (places + level.low).tolist()
                    if not all(kinds.is_exact[node] for node in nodes):
                        return False  # within a character that stands for others
                    exits += nodes
                    if self._units.nodes.is_unknown(one):
                        after[places] = 0
        if kinds.levels:
            places = np.concatenate([level.text, level.rest])
            reached = after.take(places)
            places, reached = places[reached > 0], reached[reached > 0]
            frontier = list(zip((places + level.low).tolist(), reached.tolist(), strict=True))
        if not self._walk_on(frontier, live, exits):
            return False
        words = np.packbits(live[kinds.by_id], bitorder="little").view("<i4")
        words = words.astype(np.int32, copy=False)
        found.words.append(words if keep is None else words & keep.words)
        if exits:
            found.exits.at(kinds.space, keep).extend(exits)
        return True

    def _walk_on(
        self, frontier: list[tuple[int, int]], live: NDArray[np.bool_], exits: list[int]
    ) -> bool:
        """Walks on node by node; False as in `walk`."""
        kinds = self._units.store.kinds
        trie, texts, runs = kinds.space.trie, kinds.is_text, kinds.runs
        children, labels, ranks = trie.children, trie.labels, trie.ranks
        moves, classes = self._states.moves_of, self._states.classes
        left, gone = self._units.nodes.left, self._units.nodes.is_unknown
        while frontier:
            node, state = frontier.pop()
            row = moves(state)[0]
            if node in runs and row[classes[labels[node]]] == state:
                node, passed = runs[node]
                live[passed] = True
            for child in range(children[node], children[node + 1]):
                after = row[classes[labels[child]]]
                if not after:
                    continue
                if ranks[child] >= 0:
                    live[ranks[child]] = True
                if children[child] == children[child + 1]:
                    continue
                if texts[child]:
                    if not self.fits(after):
                        return False
                elif left(after):
                    if not kinds.is_exact[child]:
                        return False
                    exits.append(child)
                    if gone(after):
                        continue
                frontier.append((child, after))
        return True
