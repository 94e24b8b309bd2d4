"""Mask rows put together from the walks of single frames, which are shared by all stacks that hold them.

The bytes of a token run through the top frame of the stack, perhaps leave it for the next one, and so on. What a frame
does with the tokens depends on the frame and on the places in the tries where it is entered, and on nothing else. So a
frame's walk is done once for each such pair and remembered: the white space behind every comma, the inside of every
string, and the keys of an object whatever keys came before are walked once in a grammar.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import MaskRow, pack_ids
from deepinfer.grammar.frame_entries import Entry, EntryStore, Keep, Places, WalkSpace
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.frame_walk import Found, FrameWalk
from deepinfer.grammar.mask_slices import SliceTests
from deepinfer.grammar.mask_splits import MIN_STRINGS
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.nodes import BagNode, Node
from deepinfer.grammar.slices import CharacterSet, Slice
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameRows", "TooManyFrames"]

Int32Array = NDArray[np.int32]

MAX_TASKS = 400
"""Frames that one row may run through."""

MAX_BAG_NODES = 6000
"""Nodes at which the members of a bag may still be several; with more the bag is walked as one frame."""

DENSE_IDS = 1500
"""A frame's tokens are kept as a whole mask from so many on."""

MAX_KEPT_BYTES = 48 << 20
"""Memory of the remembered walks; past it they are forgotten."""


class TooManyFrames(Exception):
    """A state runs through so many frames that it is better walked as a whole."""


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
    def size_bytes(self) -> int:
        """Memory."""
        return sum(a.nbytes for a in (self.words, self.index, self.values) if a is not None)


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


Part = tuple[Tokens, ...]


class FrameRows:
    """Computes rows from frames.

    Args:
        automaton: The automaton.
        vocab: The vocabulary.
    """

    def __init__(self, automaton: Automaton, vocab: TokenVocab) -> None:
        self._automaton = automaton
        self._vocab = vocab
        self._nodes = FrameNodes(automaton)
        self._states = StateRows(automaton)
        self._tests = [
            (part, SliceTests(self._states, part.characters, cut_off=True)) for part in vocab.slices
        ]
        self._loops: dict[int, CharacterSet | None] = {}
        self._walk = FrameWalk(
            self._states,
            self._nodes,
            self._loop_set,
            vocab.slices[0].characters,
            vocab.whole_text,
        )
        self._main = WalkSpace(vocab.splits)
        self._entries = EntryStore(vocab)
        self._root = self._entries.entry([(self._main, (0,), None)])
        self._units: dict[tuple[int, Entry], Unit] = {}
        self._bags: dict[tuple[int, Entry], BagUnit | None] = {}
        self._bytes = 0
        self._empty = np.zeros(vocab.num_words, dtype=np.int32)

    @property
    def num_full_walks(self) -> int:
        """Walks over most of the vocabulary's trie so far."""
        return self._walk.num_dense_nodes // max(1, len(self._vocab.trie) // 2)

    def parts(self, state: int) -> list[Tokens]:
        """The tokens of a state, in parts that other states share.

        Args:
            state: A live state.

        Returns:
            The parts; their union is the row. Equal lists of the same objects are equal rows.

        Raises:
            TooManyFrames: Better walk the state as a whole.
            GrammarTooLarge: The automaton ran out of its budget.
        """
        if self._bytes > MAX_KEPT_BYTES:
            self.forget()
        with self._automaton._lock, self._automaton._budget:
            return self._parts(self._nodes.node(state))

    def row(self, parts: list[Tokens]) -> MaskRow:
        """The row of some parts."""
        if not any(part.words is not None for part in parts):
            chosen = [part for part in parts if part.index is not None and len(part.index)]
            if not chosen:
                return MaskRow(self._empty)
            if len(chosen) == 1:
                return MaskRow(self._empty, chosen[0].index, chosen[0].values)
        out = self._empty.copy()
        for part in parts:
            part.add_to(out)
        return MaskRow.compact(out, self._empty, self._vocab.full_row)

    def _parts(self, node: Node) -> list[Tokens]:
        agenda: dict[int, tuple[Node, list[Entry]]] = {node.uid: (node, [self._root])}
        out: dict[int, Tokens] = {}
        tasks = 0
        while agenda:
            node, entries = agenda.pop(next(iter(agenda)))
            tasks += 1
            if tasks > MAX_TASKS:
                raise TooManyFrames
            entry = self._entries.merged(entries)
            stacks = self._nodes.stacks(node)
            if not stacks:
                raise TooManyFrames
            for stack in stacks:
                if self._nodes.is_end(stack):
                    continue
                for found in self._advance(stack, entry, out):
                    after, exits = found
                    known = agenda.setdefault(after.uid, (after, []))
                    known[1].append(exits)
        return list(out.values())

    def _advance(
        self, stack: Node, entry: Entry, out: dict[int, Tokens]
    ) -> list[tuple[Node, Entry]]:
        """Runs through one stack's top; returns what stands below and where it is entered."""
        frame, rest = self._nodes.split(stack)
        between = self._nodes.next_member(frame, rest)
        if between is not None:
            ahead = [(between, entry)]
            return [*ahead, (rest, entry)] if frame.nullable else ahead
        bag = self._nodes.open_bag(frame)
        if bag is not None:
            members = self._bag_unit(bag.pick, entry)
            if members is not None:
                return self._advance_bag(bag, members, rest, entry, out)
        state, rest = self._nodes.unit(stack, self._is_wide)
        unit = self._unit(state, entry)
        out[id(unit.tokens)] = unit.tokens
        return [] if unit.exits is None or self._nodes.is_end(rest) else [(rest, unit.exits)]

    def _advance_bag(
        self, bag: BagNode, unit: BagUnit, rest: Node, entry: Entry, out: dict[int, Tokens]
    ) -> list[tuple[Node, Entry]]:
        allowed = self._nodes.allowed(bag)
        for tags, tokens in unit.groups:
            if tags & allowed:
                out[id(tokens)] = tokens
        after: list[tuple[Node, Entry]] = []
        for member, node, places in unit.known:
            if member & allowed:
                follows = self._nodes.behind_member(bag, member, node, rest)
                if follows is not None:
                    after.append((follows, places))
        if bag.nullable and not self._nodes.is_end(rest):
            after.append((rest, entry))
        return after

    def _is_wide(self, state: int) -> bool:
        return self._states.moves_of(state)[1] is None

    def _loop_set(self, state: int) -> CharacterSet | None:
        """The largest set of characters that leads a state back to itself without leaving its frames."""
        if state in self._loops:
            return self._loops[state]
        found = None
        if not self._nodes.left(state):
            for part, tests in self._tests:
                if tests.may_hold(state) and tests.loops(state):
                    found = part.characters
                    break
        self._loops[state] = found
        return found

    # Walks of single frames

    def _unit(self, state: int, entry: Entry) -> Unit:
        key = (state, entry)
        unit = self._units.get(key)
        if unit is not None:
            return unit
        found = Found()
        words: list[Int32Array] = []
        if self._nodes.left(state):
            for space, nodes, keep in entry.segments:
                found.exits.at(space, keep).extend(nodes)
        loops = self._loop_set(state) is not None
        for space, nodes, keep in entry.segments if not self._nodes.is_unknown(state) else ():
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
        unit = Unit(self._tokens(found, words), self._entries.of(found.exits))
        self._units[key] = unit
        self._bytes += unit.tokens.size_bytes + 400
        if unit.exits is not None:
            self._bytes += sum(60 * len(nodes) for _, nodes, _ in unit.exits.segments)
        return unit

    def _from_root(
        self, state: int, keep: Keep | None, found: Found, words: list[Int32Array]
    ) -> None:
        """Walks a frame over the whole vocabulary."""
        characters = self._loop_set(state)
        part = next((p for p, _ in self._tests if p.characters is characters), None)
        if part is None:
            self._walk.walk(self._main, keep, [(0, state)], found)
            return
        words.append(self._slice_words(part, keep))
        rests = self._main.inner(part.rests)
        self._walk.walk(rests, keep, [(0, state)], found)
        if not part.covers_start:
            first = frozenset(part.characters.first_bytes)
            self._walk.walk(self._main, keep, [(0, state)], found, first)

    def _slice_words(self, part: Slice, keep: Keep | None) -> Int32Array:
        words = self._vocab.slice_words(part)
        return words if keep is None else words & keep.words

    def _follow_loops(self, found: Found, words: list[Int32Array]) -> None:
        """Takes the subtrees in which string text leads states back to themselves from those states' own tokens."""
        for state, keep, nodes in found.loops.values():
            below = self._below(nodes, keep)
            base = self._unit(state, self._root)
            whole = self._empty.copy()
            base.tokens.add_to(whole)
            words.append(whole & below.words)
            if base.exits is not None:
                for space, places, own in base.exits.segments:
                    both = self._entries.both(below, own)
                    found.exits.at(space, both).extend(places)

    def _tokens(self, found: Found, words: list[Int32Array]) -> Tokens:
        ids = self._vocab.ids_of(self._ranks(found))
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
            ranks = np.sort(ranks)
            ranks = ranks[np.flatnonzero(np.diff(ranks, prepend=-1))]
        return ranks

    def _bag_unit(self, pick: Node, entry: Entry) -> BagUnit | None:
        """The members of a bag from an entry; None where they cannot be told apart for too long."""
        key = (pick.uid, entry)
        if key in self._bags:
            return self._bags[key]
        state = self._nodes.state(pick)
        groups: dict[int, Found] = {}
        known: dict[tuple[int, int], tuple[int, Node, Places]] = {}
        text, tests = self._tests[0]
        for space, nodes, keep in entry.segments:
            if space.is_main and nodes == (0,) and text.outside is not None:
                # String text may fit whatever it is, so that only tokens that hold something else need a look.
                reached = self._nodes.head(state)
                if tests.may_hold(state) and tests.loops(state) and not reached.ends:
                    members, rests = reached.tags, text.rests
                else:
                    rests = text.outside
                    members = self._nodes.endless_members(
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
            where = self._entries.of(places)
            if where is not None:
                unit.known.append((member, node, where))
        self._bags[key] = unit
        self._bytes += 2000 + sum(tokens.size_bytes for _, tokens in unit.groups)
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
        classes, head = self._states.classes, self._nodes.head
        found: dict[int, list[int]] = {}
        loops: dict[int, list[int]] = {}
        wide_entry = space.is_main
        visited = 0
        while frontier:
            out = []
            for node, state in frontier:
                low, high = children[node], children[node + 1]
                if low == high:
                    continue
                row, live = self._states.moves_of(state)
                if live is not None and len(live) <= high - low:
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
        reached = self._nodes.head(target)
        return 0 if reached.ends or reached.tags != self._nodes.head(state).tags else target

    def _below(self, nodes: list[int], keep: Keep | None) -> Keep:
        """The vocabulary's strings below some nodes of its trie, those that also are in `keep`."""
        trie = self._main.trie
        at = np.array(nodes, dtype=np.int32)
        step = np.zeros(len(self._vocab.strings) + 1, dtype=np.int32)
        np.add.at(step, trie.rank_low[at], 1)
        np.add.at(step, trie.rank_high[at], -1)
        below = Keep(np.cumsum(step[:-1]) > 0, self._vocab)
        return below if keep is None else self._entries.both(below, keep)

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.clear()
        self._bags.clear()
        self._entries.clear()
        self._root = self._entries.entry([(self._main, (0,), None)])
        self._states.forget()
        self._bytes = 0
