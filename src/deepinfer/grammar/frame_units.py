"""What single frames do with the tokens of a vocabulary, from the places where they are entered; remembered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import pack_ids
from deepinfer.grammar.frame_entries import Entry, Keep, WalkSpace
from deepinfer.grammar.frame_loops import StateLoops
from deepinfer.grammar.frame_near import compare
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.frame_store import FrameStore, Shapes, Unit, unit_bytes
from deepinfer.grammar.frame_strings import StringUnits
from deepinfer.grammar.frame_text import TextStates
from deepinfer.grammar.frame_walk import Found, FrameWalk
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.nodes import Node
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameUnits"]

Int32Array = NDArray[np.int32]

MAX_KEPT_BYTES = 48 << 20
"""Memory of the walks of one grammar; past it they are forgotten."""

MANY_EXITS = 100
"""With more places at which a loop may be left, strings that begin with a blank are looked at apart."""

WIDE_TOKENS = 4000
"""A frame that so many tokens may begin in is walked with the next one; see `FrameNodes.unit`."""


class FrameUnits:
    """Walks frames, each once for each entry.

    Args:
        automaton: The automaton.
        vocab: The vocabulary.

    Attributes:
        nodes: The automaton's states taken apart.
        entries: Where frames are entered.
        root: The entry at the beginning of all tokens.
        strings: What finite sets of strings do.
        num_walks: Frames walked so far.
    """

    def __init__(self, automaton: Automaton, vocab: TokenVocab) -> None:
        self._vocab = vocab
        longest = vocab.byte_loops.longest_run
        self.nodes = FrameNodes(automaton, self.is_wide, self.is_shared, longest)
        self._states = StateRows(automaton)
        self._take_store()
        self._loops = StateLoops(self._states, self.nodes, vocab, self._store.weights)
        self._walk = FrameWalk(self._states, self.nodes, self._loops)
        self._text = TextStates(automaton, self._loops.takes_text)
        self._units: dict[tuple[int, Entry], Unit] = {}
        self._own_bytes = self.num_walks = 0

    def _take_store(self) -> None:
        """Takes what the vocabulary's grammars share."""
        store = self._store = FrameStore.of(self._vocab)
        self._main, self._sets = store.main, store.sets
        self.entries, self.root = store.entries, store.root
        self.strings = StringUnits(self._vocab, store)
        self._shapes = Shapes(store)

    @property
    def num_dense_nodes(self) -> int:
        """Nodes visited by walks over whole levels of a trie so far."""
        return self._walk.num_dense_nodes

    @property
    def is_full(self) -> bool:
        """Whether what is remembered takes too much memory."""
        own_bytes = self._own_bytes + self.strings.size_bytes
        return own_bytes > MAX_KEPT_BYTES or self._store.is_full

    def is_shared(self, node: Node) -> bool:
        """Whether a node is an expression that other grammars may hold too."""
        return self._shapes.of(node) != 0

    def is_wide(self, state: int, repeats: bool) -> bool:
        """Whether so many tokens may begin in a frame that it would be left in many places.

        Args:
            state: The frame over an unknown rest.
            repeats: Whether it is a set of bytes or a repeat; others are left in few places.

        Returns:
            Whether it has many live bytes, or some with which many tokens begin.
        """
        shape = self._shapes.of(self.nodes.node(state))
        found = self._store.wide.get((shape, repeats)) if shape > 0 else None
        if found is None:
            live, weights = self._states.moves_of(state)[1], self._store.weights
            found = live is None or (
                repeats and sum([weights[byte] for byte, _ in live]) >= WIDE_TOKENS
            )
            if shape > 0:
                self._store.wide[shape, repeats] = found
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
        shape = self._shapes.of(self.nodes.node(state))
        shared = self._store.units.get((shape, entry)) if shape > 0 else None
        if shared is not None:
            self._units[key] = shared
            return shared
        unit = self._walk_unit(state, entry)
        self._units[key] = unit
        if shape > 0:
            self._store.put(shape, entry, unit)
        else:
            self._own_bytes += unit_bytes(unit)
        return unit

    def _walk_unit(self, state: int, entry: Entry) -> Unit:
        self.num_walks += 1
        found = Found()
        if self.nodes.left(state):
            for space, nodes, keep in entry.segments:
                found.exits.at(space, keep).extend(nodes)
        first = entry.segments[0][0]
        pair = (state, first)
        is_open = entry is first.root and pair not in self._walk.open
        if is_open:
            self._walk.open.add(pair)
        try:
            loops = self._loops.characters(state) is not None or self._loops.bytes_of(state) != 0
            for space, nodes, keep in entry.segments if not self.nodes.is_unknown(state) else ():
                if not nodes[0]:
                    self._from_root(space, state, keep, found)
                    nodes = nodes[1:]
                frontier = [
                    (node, state)
                    for node in nodes
                    if not (loops and self._walk.skip(space, keep, node, state, found))
                ]
                self._walk.walk(space, keep, frontier, found)
            if found.loops:
                self._follow_loops(found)
        finally:
            if is_open:
                self._walk.open.discard(pair)
        return Unit(self._sets.tokens(found, found.words), self.entries.of(found.exits))

    def _from_root(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> None:
        """Walks a frame over all strings of a trie."""
        is_main = space.is_main
        base, members, low, high = state, self._loops.bytes_of(state), 0, 255
        is_text = not members >> ord('"') & 1
        if is_main and members and is_text and self._loops.takes_text(state):
            text = self._vocab.slices[0]
            found.words.append(self._sets.slice_words(text, keep))
            return self._walk.walk(space.inner(text.rests), keep, [(0, state)], found)
        if not members:
            base, low, high = self.nodes.uncounted(state)
            members = self._loops.bytes_of(base) if base and high < 255 else 0
        plain = not members or base == state
        if space.root is not None and plain and self._from_near(space, state, keep, found):
            return
        if is_main and is_text and plain and self._takes_text(space, state, keep, found):
            return
        if members:
            self._from_loop(space, state, keep, found, base, members, low, high)
        elif is_main:
            self._from_start(state, keep, found)
        else:
            self._walk.walk(space, keep, [(0, state)], found)

    def _from_near(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> bool:
        """Takes the tokens of the state that most bytes lead to, if there is one; then walks where the two differ."""
        near = self._loops.near(state)
        root = space.root
        if not near or root is None or (near, space) in self._walk.open:
            return False
        text = self._vocab.slices[0]
        if (
            space.is_main
            and text.outside is not None
            and self._text.holds(state)
            and self._text.holds(near)
        ):
            space = space.inner(text.outside)  # the others are live from both
        split = compare(space.trie, self._states, self.nodes, state, near)
        if split is None:
            return False
        unit = self.unit(near, root)
        words = self._sets.empty.copy()
        unit.tokens.add_to(words)
        gone = self._sets.ranks_below(space, split.gone)
        if len(gone):
            index, values = pack_ids(self._vocab.ids_of(gone))
            words[index] &= ~values
        found.words.append(words if keep is None else words & keep.words)
        if unit.exits is not None:
            for inner, places, own in self.entries.without(unit.exits, gone).segments:
                both = own if keep is None else self.entries.both(keep, own)
                found.exits.at(inner, both).extend(places)
        if split.nodes:
            child = np.array(split.nodes, dtype=np.int32)
            after = np.array(split.states, dtype=np.int32)
            self._walk.arrive(space, keep, child, after, found)
        return True

    def _takes_text(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> bool:
        """Whether any string text is live from a state, such as in front of what must occur; then takes its tokens."""
        text = self._vocab.slices[0]
        if text.outside is None or not (
            self._text.holds(state) or self._loops.contains_text(state)
        ):
            return False
        found.words.append(self._sets.slice_words(text, keep))
        self._walk.walk(space.inner(text.outside), keep, [(0, state)], found)
        return True

    def _from_start(self, state: int, keep: Keep | None, found: Found) -> None:
        """Walks a frame over the vocabulary, strings that begin with a blank apart where many of them are live."""
        after = self._states.moves_of(state)[0][self._states.classes[ord(" ")]]
        led = self._store.led
        if not after or led is None or self._states.moves_of(after)[1] is not None:
            self._walk.walk(self._main, keep, [(0, state)], found)
            return
        self._walk.walk(self._main, keep, [(0, state)], found, frozenset(b" "))
        self._behind_blank(after, keep, found)

    def _behind_blank(self, after: int, keep: Keep | None, found: Found) -> None:
        """Takes the strings that begin with a blank, from the state behind it."""
        led, rank = self._store.led, self._main.trie.ranks[self._store.led_node]
        if rank >= 0:
            found.tokens.append((self._main, keep, np.array([rank], dtype=np.int32)))
        if led is not None:
            self._take(self.unit(after, led), keep, found)

    def _take(self, unit: Unit, keep: Keep | None, found: Found) -> None:
        """Adds what another unit found, as far as it is in a part of the vocabulary."""
        words = self._sets.empty.copy()
        unit.tokens.add_to(words)
        found.words.append(words if keep is None else words & keep.words)
        if unit.exits is not None:
            for space, places, own in unit.exits.segments:
                both = own if keep is None else self.entries.both(keep, own)
                found.exits.at(space, both).extend(places)

    def _from_loop(
        self,
        space: WalkSpace,
        state: int,
        keep: Keep | None,
        found: Found,
        base: int,
        members: int,
        low: int,
        high: int,
    ) -> None:
        """Walks a frame that some bytes lead back to itself, or that counts them: only behind other bytes.

        Args:
            space: The trie.
            state: The state.
            keep: Part of the vocabulary that counts.
            found: Takes what is found.
            base: The state without the count, or the state itself.
            members: The bytes.
            low: Fewest characters before it is left.
            high: Most characters.
        """
        trie, row = space.trie, self._states.moves_of(base)[0]
        loops = self._vocab.byte_loops
        if space.root is not None:
            over = loops.over(members) if space.is_main else loops.over_behind_blank(members)
            if high < 255:
                over = over & loops.short(high + (not space.is_main))
            found.words.append(over if keep is None else over & keep.words)
        else:
            leaf, ranks = trie.leaf_nodes
            inside = ranks[space.paths.leaves(leaf, members, high)]
            if len(inside):
                found.tokens.append((space, keep, inside))
        exits = self._exits(base, members)
        again: list[int] = []
        if base != state:
            body = self.nodes.repeated(state)
            again = [byte for byte in exits if self.nodes.step(body, byte)]
            exits = [byte for byte in exits if byte not in again]
        child, after = [], []
        if exits:
            nodes = self._leaving(space, members, exits, low, high)
            blank = row[self._states.classes[ord(" ")]]
            if (
                space.is_main
                and base == state
                and blank
                and (blank != state or len(nodes) > MANY_EXITS)
                and self._states.moves_of(blank)[1] is None
            ):
                first, last = self._store.led_ranks
                ranks = trie.rank_low[nodes]
                nodes = nodes[(ranks < first) | (ranks >= last)]
                self._behind_blank(blank, keep, found)
            states = np.array(row, dtype=np.int32)[self._states.byte_class[trie.label_bytes[nodes]]]
            child.append(nodes)
            after.append(states)
        if again:
            # Another copy of what is counted begins: how many there were is in the state.
            nodes = self._leaving(space, members, again, 0, high)
            states = np.array([self._behind(space, state, n) for n in nodes.tolist()], np.int32)
            child.append(nodes[states > 0])
            after.append(states[states > 0])
        if child:
            self._walk.arrive(space, keep, np.concatenate(child), np.concatenate(after), found)

    def _leaving(
        self, space: WalkSpace, members: int, exits: list[int], low: int, high: int
    ) -> Int32Array:
        """As `ByteLoops.leaving`, for any trie."""
        if space.by_byte is not None:
            return space.by_byte.leaving(members, exits, low, high)
        wanted = np.zeros(256, dtype=bool)
        wanted[exits] = True
        labels, parent, paths = space.trie.label_bytes, space.trie.parent, space.paths
        nodes = np.flatnonzero(wanted[labels]).astype(np.int32)
        nodes = nodes[nodes > 0]
        above = parent[nodes]
        fits = paths.over(above, members)
        if low > 0 or high < 255:
            fits &= (paths.chars[above] >= low) & (paths.chars[above] <= high)
        return nodes[fits]

    def _behind(self, space: WalkSpace, state: int, node: int) -> int:
        """The state at a node of a trie."""
        trie = space.trie
        way = []
        while node:
            way.append(trie.labels[node])
            node = int(trie.parent[node])
        for byte in reversed(way):
            state = self.nodes.step(state, byte)
            if not state:
                break
        return state

    def _exits(self, state: int, members: int) -> list[int]:
        """The bytes outside of a set that can come."""
        row = self._states.moves_of(state)[0]
        return [
            byte
            for after, bytes_of in zip(row, self._states.members, strict=True)
            if after
            for byte in bytes_of
            if not members >> byte & 1
        ]

    def _follow_loops(self, found: Found) -> None:
        """Takes the subtrees in which states lead back to themselves from those states' own tokens."""
        for space, state, keep, nodes in found.loops.values():
            if space.root is not None:
                below = self._sets.below(space, nodes, keep)
                self._take(self.unit(state, space.root), below, found)

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.clear()
        self._loops.forget()
        self._text.forget()
        self._take_store()
        self._states.forget()
        self.nodes.forget()
        self._own_bytes = 0
