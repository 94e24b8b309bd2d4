"""What single frames do with the tokens of a vocabulary, from the places where they are entered; remembered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import pack_few, pack_ids
from deepinfer.grammar.frame_entries import Entry, EntryStore, Keep, Places, WalkSpace
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.frame_walk import Found, FrameWalk
from deepinfer.grammar.mask_slices import SliceTests
from deepinfer.grammar.mask_splits import MIN_STRINGS
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.nodes import Node
from deepinfer.grammar.slices import CharacterSet, Slice
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["BagUnit", "FrameUnits", "Tokens", "Unit"]

Int32Array = NDArray[np.int32]

MAX_BAG_NODES = 1500
"""Nodes at which the members of a bag may still be several; with more the state is walked as a whole."""

FEW_IDS = 48
"""Ids that are packed one by one, which is faster for so few."""

DENSE_IDS = 1500
"""A frame's tokens are kept as a whole mask from so many on."""


@dataclass(eq=False)
class Tokens:
    """Some ids as a mask, or as the words that hold them."""

    words: Int32Array | None = None
    index: Int32Array | None = None
    values: Int32Array | None = None

    def add_to(self, out: Int32Array) -> None:
        """Sets the bits in a row."""
        if self.words is not None:
            out |= self.words
        if self.index is not None and self.values is not None:
            out[self.index] |= self.values

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return self.words is None and (self.index is None or not len(self.index))

    @property
    def size_bytes(self) -> int:
        """Memory."""
        return sum(a.nbytes for a in (self.words, self.index, self.values) if a is not None)


NO_TOKENS = Tokens()


@dataclass(eq=False)
class Unit:
    """What one frame does with the tokens from one entry.

    Attributes:
        tokens: Those that end inside of it, or at its end.
        exits: Where it may be left, or None.
    """

    tokens: Tokens
    exits: Entry | None


@dataclass(eq=False)
class BagUnit:
    """What the members of a bag do with the tokens from one entry, up to where the member is known.

    Attributes:
        groups: Tokens by the members that may be the one that began, as bits.
        known: (member as a bit, what is left of it, where it became known).
    """

    groups: list[tuple[int, Tokens]] = field(default_factory=list)
    known: list[tuple[int, Node, Entry]] = field(default_factory=list)


class FrameUnits:
    """Walks frames, each once for each entry.

    Args:
        automaton: The automaton.
        vocab: The vocabulary.

    Attributes:
        nodes: The automaton's states taken apart.
        entries: Where frames are entered.
        root: The entry at the beginning of all tokens.
        size_bytes: Memory of what is remembered, estimated.
    """

    def __init__(self, automaton: Automaton, vocab: TokenVocab) -> None:
        self._vocab = vocab
        self.nodes = FrameNodes(automaton)
        self._states = StateRows(automaton)
        self._tests = [
            (part, SliceTests(self._states, part.characters, cut_off=True)) for part in vocab.slices
        ]
        self._loops: dict[int, CharacterSet | None] = {}
        self._walk = FrameWalk(
            self._states,
            self.nodes,
            self._loop_set,
            vocab.slices[0].characters,
            vocab.whole_text,
        )
        self._main = WalkSpace(vocab.splits)
        self.entries = EntryStore(vocab)
        self.root = self.entries.entry([(self._main, (0,), None)])
        self._units: dict[tuple[int, Entry], Unit] = {}
        self._bags: dict[tuple[int, Entry], BagUnit | None] = {}
        self.size_bytes = 0
        self._empty = np.zeros(vocab.num_words, dtype=np.int32)

    @property
    def num_dense_nodes(self) -> int:
        """Nodes visited by walks over whole levels of the vocabulary's trie so far."""
        return self._walk.num_dense_nodes

    def is_wide(self, state: int) -> bool:
        """Whether a state has many live bytes."""
        return self._states.moves_of(state)[1] is None

    def _loop_set(self, state: int) -> CharacterSet | None:
        """The largest set of characters that leads a state back to itself without leaving its frames."""
        if state in self._loops:
            return self._loops[state]
        found = None
        if not self.nodes.left(state):
            for part, tests in self._tests:
                if tests.may_hold(state) and tests.loops(state):
                    found = part.characters
                    break
        self._loops[state] = found
        return found

    def unit(self, state: int, entry: Entry) -> Unit:
        """What the frames of a state do.

        Args:
            state: Frames over an unknown rest.
            entry: Where they are entered.

        Returns:
            The tokens that end in them, and where they are left.
        """
        key = (state, entry)
        unit = self._units.get(key)
        if unit is not None:
            return unit
        found = Found()
        words: list[Int32Array] = []
        if self.nodes.left(state):
            for space, nodes, keep in entry.segments:
                found.exits.at(space, keep).extend(nodes)
        loops = self._loop_set(state) is not None
        for space, nodes, keep in entry.segments if not self.nodes.is_unknown(state) else ():
            if space.is_main and not nodes[0]:
                self._from_root(state, keep, found, words)
                nodes = nodes[1:]
            frontier = [
                (node, state)
                for node in nodes
                if not (loops and self._walk.skip(space, keep, node, state, found))
            ]
            self._walk.walk(space, keep, frontier, found)
        self._follow_loops(found, words)
        unit = Unit(self._tokens(found, words), self.entries.of(found.exits))
        self._units[key] = unit
        self.size_bytes += unit.tokens.size_bytes + 400
        if unit.exits is not None:
            self.size_bytes += sum(60 * len(nodes) for _, nodes, _ in unit.exits.segments)
        return unit

    def _from_root(
        self, state: int, keep: Keep | None, found: Found, words: list[Int32Array]
    ) -> None:
        """Walks a frame over the whole vocabulary."""
        characters = self._loop_set(state)
        part = next((p for p, _ in self._tests if p.characters is characters), None)
        if part is None:
            text = self._tests[0][0]
            most = self._most_text(state)
            if most and text.outside is not None:
                counted = self._vocab.text_words(most)
                words.append(counted if keep is None else counted & keep.words)
                self._walk.walk(self._main.inner(text.outside), keep, [(0, state)], found)
            else:
                self._walk.walk(self._main, keep, [(0, state)], found)
            return
        words.append(self._slice_words(part, keep))
        rests = self._main.inner(part.rests)
        self._walk.walk(rests, keep, [(0, state)], found)
        if not part.covers_start:
            first = frozenset(part.characters.first_bytes)
            self._walk.walk(self._main, keep, [(0, state)], found, first)

    def _most_text(self, state: int) -> int:
        """Characters of string text that fit from a state which counts them and takes any; 0 for other states."""
        loop, most = self.nodes.uncounted(state)
        return most if loop and self._loop_set(loop) is self._tests[0][0].characters else 0

    def _slice_words(self, part: Slice, keep: Keep | None) -> Int32Array:
        words = self._vocab.slice_words(part)
        return words if keep is None else words & keep.words

    def _follow_loops(self, found: Found, words: list[Int32Array]) -> None:
        """Takes the subtrees in which string text leads states back to themselves from those states' own tokens."""
        for state, keep, nodes in found.loops.values():
            below = self._below(nodes, keep)
            base = self.unit(state, self.root)
            whole = self._empty.copy()
            base.tokens.add_to(whole)
            words.append(whole & below.words)
            if base.exits is not None:
                for space, places, own in base.exits.segments:
                    both = self.entries.both(below, own)
                    found.exits.at(space, both).extend(places)

    def _tokens(self, found: Found, words: list[Int32Array]) -> Tokens:
        if not found.tokens and not words:
            return NO_TOKENS
        ranks = self._ranks(found)
        ids = self._vocab.ids_of(ranks)
        if not words and len(ids) < FEW_IDS:
            return Tokens(None, *pack_few(ids.tolist()))
        if not words and len(ids) < DENSE_IDS:
            return Tokens(None, *pack_ids(ids))
        bits = np.zeros(self._vocab.num_words * 32, dtype=np.uint8)
        bits[ids] = 1
        out = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
        for more in words:
            out |= more
        return Tokens(out)

    def _ranks(self, found: Found) -> Int32Array:
        chunks = []
        for space, keep, ranks in found.tokens:
            tokens = space.tokens(ranks)
            if keep is not None:
                tokens = tokens[keep.ranks[tokens]]
            chunks.append(tokens)
        if not chunks:
            return np.zeros(0, dtype=np.int32)
        ranks = np.concatenate(chunks) if len(chunks) > 1 else chunks[0]
        if len(ranks) < DENSE_IDS:
            # One string can be reached from two entries.
            if len(ranks) < FEW_IDS:
                return np.array(list(set(ranks.tolist())), dtype=np.int32)
            ranks = np.sort(ranks)
            ranks = ranks[np.flatnonzero(np.diff(ranks, prepend=-1))]
        return ranks

    def bag_unit(self, pick: Node, entry: Entry) -> BagUnit | None:
        """The members of a bag from an entry; None where they cannot be told apart for too long."""
        key = (pick.uid, entry)
        if key in self._bags:
            return self._bags[key]
        state = self.nodes.state(pick)
        groups: dict[int, Found] = {}
        known: dict[tuple[int, int], tuple[int, Node, Places]] = {}
        text, tests = self._tests[0]
        for space, nodes, keep in entry.segments:
            if space.is_main and nodes == (0,) and text.outside is not None:
                # String text may fit whatever it is, so that only tokens that hold something else need a look.
                reached = self.nodes.head(state)
                if tests.may_hold(state) and tests.loops(state) and not reached.ends:
                    members, rests = reached.tags, text.rests
                else:
                    rests = text.outside
                    members = self.nodes.endless_members(
                        pick, lambda at: tests.may_hold(at) and tests.loops(at)
                    )
                if members:
                    group = groups.setdefault(members, Found())
                    group.words.append(self._slice_words(text, keep))
                    space = self._main.inner(rests)
            if not self._walk_bag(space, keep, [(node, state) for node in nodes], groups, known):
                self._bags[key] = None
                return None
        unit = BagUnit()
        for tags, found in groups.items():
            unit.groups.append((tags, self._tokens(found, found.words)))
        for member, node, places in known.values():
            where = self.entries.of(places)
            if where is not None:
                unit.known.append((member, node, where))
        self._bags[key] = unit
        self.size_bytes += 2000 + sum(tokens.size_bytes for _, tokens in unit.groups)
        return unit

    def _walk_bag(
        self,
        space: WalkSpace,
        keep: Keep | None,
        frontier: list[tuple[int, int]],
        groups: dict[int, Found],
        known: dict[tuple[int, int], tuple[int, Node, Places]],
    ) -> bool:
        trie = space.trie
        children, labels, ranks = trie.children, trie.labels, trie.ranks
        classes, head = self._states.classes, self.nodes.head
        found: dict[int, list[int]] = {}
        loops: dict[int, list[int]] = {}
        wide_entry = space.is_main
        visited = 0
        while frontier:
            out: list[tuple[int, int]] = []
            for node, state in frontier:
                low, high = children[node], children[node + 1]
                if low == high:
                    continue
                row, live = self._states.moves_of(state)
                if not node:
                    pairs = self._bag_root(space, keep, row, found, known)
                elif live is not None and len(live) <= high - low:
                    pairs = [(labels.find(byte, low, high), after) for byte, after in live]
                else:
                    pairs = [(child, row[classes[labels[child]]]) for child in range(low, high)]
                for child, after in pairs:
                    if child < 0 or not after:
                        continue
                    reached = head(after)
                    tags = reached.tags
                    if ranks[child] >= 0:
                        found.setdefault(tags, []).append(ranks[child])
                    if children[child] == children[child + 1]:
                        continue
                    if tags & (tags - 1) and wide_entry:
                        settled = self._settled(labels[child], node, child, after)
                        if settled:
                            loops.setdefault(settled, []).append(child)
                            continue
                    ends = tags if not tags & (tags - 1) else reached.ends
                    while ends:
                        member = ends & -ends
                        ends ^= member
                        key = (member, reached.node.uid)
                        entry = known.get(key)
                        if entry is None:
                            entry = known[key] = (member, reached.node, Places())
                        entry[2].at(space, keep).append(child)
                    if tags & (tags - 1):
                        out.append((child, after))
            frontier = out
            visited += len(out)
            if visited > MAX_BAG_NODES:
                return False
        for tags, some in found.items():
            groups.setdefault(tags, Found()).tokens.append(
                (space, keep, np.array(some, dtype=np.int32))
            )
        # Below these nodes the members stay as many as they are until something else than string text comes.
        text = self._tests[0][0]
        for state, nodes in loops.items():
            below = self._below(nodes, keep)
            group = groups.setdefault(head(state).tags, Found())
            group.words.append(self._slice_words(text, below))
            rests = self._main.inner(text.rests)
            if not self._walk_bag(rests, below, [(0, state)], groups, known):
                return False
        return True

    def _bag_root(
        self,
        space: WalkSpace,
        keep: Keep | None,
        row: list[int],
        found: dict[int, list[int]],
        known: dict[tuple[int, int], tuple[int, Node, Places]],
    ) -> list[tuple[int, int]]:
        """The first step of a bag's walk: whole classes of bytes after which one member is left.

        Returns:
            The (node, state) that are left to look at.
        """
        out: list[tuple[int, int]] = []
        for after, (nodes, inner, ranks) in zip(
            row, space.first_step(self._states.classes), strict=True
        ):
            if not after or not nodes:
                continue
            reached = self.nodes.head(after)
            if reached.tags & (reached.tags - 1):
                out += [(node, after) for node in nodes]
                continue
            if ranks:
                found.setdefault(reached.tags, []).extend(ranks)
            if inner:
                key = (reached.tags, reached.node.uid)
                entry = known.get(key)
                if entry is None:
                    entry = known[key] = (reached.tags, reached.node, Places())
                entry[2].at(space, keep).extend(inner)
        return out

    def _settled(self, byte: int, above: int, node: int, state: int) -> int:
        """A state that string text leads back to itself and whose tokens are those below a node; 0 if there is none.

        The way to the node is whole characters, or whole ones and the first byte of another.
        """
        trie, whole = self._main.trie, self._vocab.whole_text
        if trie.rank_highs[node] - trie.rank_lows[node] < MIN_STRINGS or not whole[above]:
            return 0
        tests = self._tests[0][1]
        target = state if whole[node] else tests.settles(byte, state)
        if not target or not tests.may_hold(target) or not tests.loops(target):
            return 0
        reached = self.nodes.head(target)
        return 0 if reached.ends or reached.tags != self.nodes.head(state).tags else target

    def _below(self, nodes: list[int], keep: Keep | None) -> Keep:
        """The vocabulary's strings below some nodes of its trie, those that also are in `keep`."""
        trie = self._main.trie
        at = np.array(nodes, dtype=np.int32)
        step = np.zeros(len(self._vocab.strings) + 1, dtype=np.int32)
        np.add.at(step, trie.rank_low[at], 1)
        np.add.at(step, trie.rank_high[at], -1)
        below = Keep(np.cumsum(step[:-1]) > 0, self._vocab)
        return below if keep is None else self.entries.both(below, keep)

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.clear()
        self._bags.clear()
        self.entries.clear()
        self.root = self.entries.entry([(self._main, (0,), None)])
        self._states.forget()
        self.nodes.forget()
        self.size_bytes = 0
