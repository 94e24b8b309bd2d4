"""What single frames do with the tokens of a vocabulary, from the places where they are entered; remembered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import pack_ids
from deepinfer.grammar.first_bytes import first_bytes
from deepinfer.grammar.frame_entries import Entry, Keep, WalkSpace
from deepinfer.grammar.frame_kinds import KindWalk
from deepinfer.grammar.frame_leave import LoopUnits
from deepinfer.grammar.frame_loops import StateLoops
from deepinfer.grammar.frame_near import compare
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.frame_store import FrameStore, Shapes, Unit, unit_bytes
from deepinfer.grammar.frame_strings import StringUnits
from deepinfer.grammar.frame_text import TextStates
from deepinfer.grammar.frame_walk import Found, FrameWalk
from deepinfer.grammar.mask_states import FEW_LIVE, StateRows
from deepinfer.grammar.nodes import CONS, Node
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameUnits"]

Int32Array = NDArray[np.int32]

MAX_KEPT_BYTES = 48 << 20
"""Memory of the walks of one grammar; past it they are forgotten."""

MAX_NESTING = 24
"""How deep to look into an expression for its first bytes."""

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
        self.vocab = vocab
        longest = vocab.byte_loops.longest_run
        self.nodes = FrameNodes(automaton, self.is_wide, self.is_shared, longest)
        self.states = StateRows(automaton)
        self._take_store()
        self.loops = StateLoops(self.states, self.nodes, vocab, self.store.weights)
        self.walk = FrameWalk(self.states, self.nodes, self.loops)
        self._text = TextStates(automaton, self.loops.takes_text)
        self._counts = LoopUnits(self)
        self._kinds = KindWalk(self)
        self._units: dict[tuple[int, Entry], Unit] = {}
        self._own_bytes = self.num_walks = 0

    def _take_store(self) -> None:
        """Takes what the vocabulary's grammars share."""
        store = self.store = FrameStore.of(self.vocab)
        self._main, self.sets = store.main, store.sets
        self.entries, self.root = store.entries, store.root
        self.strings = StringUnits(self.vocab, store)
        self._shapes = Shapes(store)

    @property
    def num_dense_nodes(self) -> int:
        """Nodes visited by walks over whole levels of a trie so far."""
        return self.walk.num_dense_nodes

    @property
    def is_full(self) -> bool:
        """Whether what is remembered takes too much memory."""
        own_bytes = self._own_bytes + self.strings.size_bytes
        return own_bytes > MAX_KEPT_BYTES or self.store.is_full

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
        node = self.nodes.node(state)
        shape = self._shapes.of(node)
        found = self.store.wide.get((shape, repeats)) if shape > 0 else None
        if found is None:
            # As its expression says: most frames that are wide are never walked alone.
            frame = node.a if node.kind == CONS else node
            live, weights = first_bytes(frame, MAX_NESTING), self.store.weights
            found = live.bit_count() > FEW_LIVE or (
                repeats
                and sum([weight for byte, weight in enumerate(weights) if live >> byte & 1])
                >= WIDE_TOKENS
            )
            if shape > 0:
                self.store.wide[shape, repeats] = found
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
        shared = self.store.units.get((shape, entry)) if shape > 0 else None
        if shared is not None:
            self._units[key] = shared
            return shared
        base, low, high = self.nodes.uncounted(state)
        if base and not low and high >= self.entries.reach(entry):  # no string is so long
            unit = self._units[key] = self.unit(base, entry)
            return unit
        unit = self._walk_unit(state, entry)
        self._units[key] = unit
        if shape > 0:
            self.store.put(shape, entry, unit)
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
        is_open = entry is first.root and pair not in self.walk.open
        if is_open:
            self.walk.open.add(pair)
        try:
            loops = self.loops.characters(state) is not None or self.loops.bytes_of(state) != 0
            for space, nodes, keep in entry.segments if not self.nodes.is_unknown(state) else ():
                if not nodes[0]:
                    self._from_root(space, state, keep, found)
                    nodes = nodes[1:]
                elif space.is_main and self.store.led_node in nodes and self._is_many(state):
                    nodes = tuple([node for node in nodes if node != self.store.led_node])
                    self.take(self.unit(state, self.store.led), keep, found)  # type: ignore[arg-type]
                frontier = [
                    (node, state)
                    for node in nodes
                    if not (loops and self.walk.skip(space, keep, node, state, found))
                ]
                self.walk.walk(space, keep, frontier, found)
            if found.loops:
                self._follow_loops(found)
        finally:
            if is_open:
                self.walk.open.discard(pair)
        return Unit(self.sets.tokens(found, found.words), self.entries.of(found.exits))

    def _is_many(self, state: int) -> bool:
        """Whether many bytes are live in a state, so that its strings behind a blank are better looked at apart."""
        return self.store.led is not None and self.states.moves_of(state)[1] is None

    def _from_root(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> None:
        """Walks a frame over all strings of a trie."""
        is_main = space.is_main
        base, members, low, high = state, self.loops.bytes_of(state), 0, 255
        is_text = not members >> ord('"') & 1
        if is_main and members and is_text and self.loops.takes_text(state):
            text = self.vocab.slices[0]
            found.words.append(self.sets.slice_words(text, keep))
            return self.walk.walk(space.inner(text.rests), keep, [(0, state)], found)
        if not members:
            base, low, high = self.nodes.uncounted(state)
            members = self.loops.bytes_of(base) if base and high < 255 else 0
        plain = not members or base == state
        if plain and self._by_kinds(space, state, keep, found):
            return
        if space.root is not None and plain and self._from_near(space, state, keep, found):
            return
        if is_main and is_text and plain and self._takes_text(space, state, keep, found):
            return
        if members:
            self._counts.walk(space, state, keep, found, base, members, low, high)
        elif is_main:
            self._from_start(state, keep, found)
        else:
            self.walk.walk(space, keep, [(0, state)], found)

    def _by_kinds(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> bool:
        """Walks a frame by kinds of characters where that is less work than the other ways, and possible."""
        if space.root is None or self.states.moves_of(state)[1] is not None:
            return False
        if not self._kinds.fits(state, first=True) or self.loops.is_plain(state):
            return False
        most = self.loops.mostly(state)
        if most and self._is_known(most):
            return False
        return self._kinds.walk(state, keep, found, behind_blank=not space.is_main)

    def _is_known(self, state: int) -> bool:
        """Whether a state's own tokens were found before."""
        if (state, self.root) in self._units:
            return True
        shape = self._shapes.of(self.nodes.node(state))
        return shape > 0 and (shape, self.root) in self.store.units

    def _from_near(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> bool:
        """Takes the tokens of the state that most bytes lead to, if there is one; then walks where the two differ."""
        near = self.loops.near(state)
        root = space.root
        if not near or root is None or (near, space) in self.walk.open:
            return False
        text = self.vocab.slices[0]
        if (
            space.is_main
            and text.outside is not None
            and self._text.holds(state)
            and self._text.holds(near)
        ):
            space = space.inner(text.outside)  # the others are live from both
        split = compare(space.trie, self.states, self.nodes, self.loops, state, near)
        if split is None:
            return False
        unit = self.unit(near, root)
        words = self.sets.empty.copy()
        unit.tokens.add_to(words)
        gone = self.sets.ranks_below(space, split.gone)
        if len(gone):
            index, values = pack_ids(self.vocab.ids_of(gone))
            words[index] &= ~values
        found.words.append(words if keep is None else words & keep.words)
        if unit.exits is not None:
            exits = self.entries.without(self.entries.joined(unit.exits), gone)
            self.leave(exits, keep, found)
        if split.nodes:
            child = np.array(split.nodes, dtype=np.int32)
            after = np.array(split.states, dtype=np.int32)
            self.walk.arrive(space, keep, child, after, found)
        return True

    def _takes_text(self, space: WalkSpace, state: int, keep: Keep | None, found: Found) -> bool:
        """Whether any string text is live from a state, such as in front of what must occur; then takes its tokens."""
        text = self.vocab.slices[0]
        if text.outside is None or not (self._text.holds(state) or self.loops.contains_text(state)):
            return False
        found.words.append(self.sets.slice_words(text, keep))
        self.walk.walk(space.inner(text.outside), keep, [(0, state)], found)
        return True

    def _from_start(self, state: int, keep: Keep | None, found: Found) -> None:
        """Walks a frame over the vocabulary, strings that begin with a blank apart where many of them are live."""
        after = self.states.moves_of(state)[0][self.states.classes[ord(" ")]]
        led = self.store.led
        if not after or led is None or self.states.moves_of(after)[1] is not None:
            self.walk.walk(self._main, keep, [(0, state)], found)
            return
        self.walk.walk(self._main, keep, [(0, state)], found, frozenset(b" "))
        self.take_behind_blank(after, keep, found)

    def take_behind_blank(self, after: int, keep: Keep | None, found: Found) -> None:
        """Takes the strings that begin with a blank, from the state behind it."""
        led, rank = self.store.led, self._main.trie.ranks[self.store.led_node]
        if rank >= 0:
            found.tokens.append((self._main, keep, np.array([rank], dtype=np.int32)))
        if led is not None:
            self.take(self.unit(after, led), keep, found)

    def take(self, unit: Unit, keep: Keep | None, found: Found) -> None:
        """Adds what another unit found, as far as it is in a part of the vocabulary."""
        words = self.sets.empty.copy()
        unit.tokens.add_to(words)
        found.words.append(words if keep is None else words & keep.words)
        if unit.exits is not None:
            self.leave(unit.exits, keep, found)

    def leave(self, exits: Entry, keep: Keep | None, found: Found) -> None:
        """Adds the exits of another unit, as far as they are in a part of the vocabulary."""
        for space, places, own in self.entries.joined(exits).segments:
            both = own if keep is None else self.entries.both(keep, own)
            found.exits.at(space, both).extend(places)

    def _follow_loops(self, found: Found) -> None:
        """Takes the subtrees in which states lead back to themselves from those states' own tokens."""
        for space, state, keep, nodes in found.loops.values():
            if space.root is not None:
                below = self.sets.below(space, nodes, keep)
                self.take(self.unit(state, space.root), below, found)

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.clear()
        self.loops.forget()
        self._text.forget()
        self._take_store()
        self.states.forget()
        self.nodes.forget()
        self._own_bytes = 0
