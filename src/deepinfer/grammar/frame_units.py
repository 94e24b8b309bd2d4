"""What single frames do with the tokens of a vocabulary, from the places where they are entered; remembered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.frame_bags import BagUnits
from deepinfer.grammar.frame_entries import Entry, EntryStore, Keep, WalkSpace
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.frame_tokens import Tokens, TokenSets
from deepinfer.grammar.frame_walk import Found, FrameWalk
from deepinfer.grammar.mask_slices import SliceTests
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.slices import CharacterSet
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["FrameUnits", "Unit"]

Int32Array = NDArray[np.int32]


WIDE_TOKENS = 2000
"""A frame that so many tokens may begin in is walked with the next one; see `FrameNodes.unit`."""


@dataclass(eq=False, slots=True)
class Unit:
    """What one frame does with the tokens from one entry.

    Attributes:
        tokens: Those that end inside of it, or at its end.
        exits: Where it may be left, or None.
    """

    tokens: Tokens
    exits: Entry | None


class FrameUnits:
    """Walks frames, each once for each entry.

    Args:
        automaton: The automaton.
        vocab: The vocabulary.

    Attributes:
        nodes: The automaton's states taken apart.
        entries: Where frames are entered.
        root: The entry at the beginning of all tokens.
        bags: The members of bags.
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
        self._sets = TokenSets(vocab, self.entries)
        self.bags = BagUnits(
            vocab, self._states, self.nodes, self.entries, self._sets, self._main, self._tests[0]
        )
        self._own_bytes = 0
        trie = vocab.trie
        self._weights = [0] * 256  # tokens that begin with each byte
        for node in range(trie.children[0], trie.children[1]):
            if trie.labels[node] not in b" \t\n\r":
                self._weights[trie.labels[node]] = trie.rank_highs[node] - trie.rank_lows[node]

    @property
    def num_dense_nodes(self) -> int:
        """Nodes visited by walks over whole levels of the vocabulary's trie so far."""
        return self._walk.num_dense_nodes

    @property
    def size_bytes(self) -> int:
        """Memory of what is remembered, estimated."""
        return self._own_bytes + self.bags.size_bytes

    def is_wide(self, state: int, repeats: bool) -> bool:
        """Whether so many tokens may begin in a frame that it would be left in many places.

        Args:
            state: The frame over an unknown rest.
            repeats: Whether it is a set of bytes or a repeat; others are left in few places.

        Returns:
            True for one with many live bytes, or with some with which many tokens begin.
        """
        live = self._states.moves_of(state)[1]
        if live is None:
            return True
        weights = self._weights
        return repeats and sum([weights[byte] for byte, _ in live]) >= WIDE_TOKENS

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
        unit = Unit(self._sets.tokens(found, words), self.entries.of(found.exits))
        self._units[key] = unit
        self._own_bytes += unit.tokens.size_bytes + 400
        if unit.exits is not None:
            self._own_bytes += sum(60 * len(nodes) for _, nodes, _ in unit.exits.segments)
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
        words.append(self._sets.slice_words(part, keep))
        rests = self._main.inner(part.rests)
        self._walk.walk(rests, keep, [(0, state)], found)
        if not part.covers_start:
            first = frozenset(part.characters.first_bytes)
            self._walk.walk(self._main, keep, [(0, state)], found, first)

    def _most_text(self, state: int) -> int:
        """Characters of string text that fit from a state which counts them and takes any; 0 for other states."""
        loop, most = self.nodes.uncounted(state)
        return most if loop and self._loop_set(loop) is self._tests[0][0].characters else 0

    def _follow_loops(self, found: Found, words: list[Int32Array]) -> None:
        """Takes the subtrees in which string text leads states back to themselves from those states' own tokens."""
        for state, keep, nodes in found.loops.values():
            below = self._sets.below(nodes, keep)
            base = self.unit(state, self.root)
            whole = self._sets.empty.copy()
            base.tokens.add_to(whole)
            words.append(whole & below.words)
            if base.exits is not None:
                for space, places, own in base.exits.segments:
                    both = self.entries.both(below, own)
                    found.exits.at(space, both).extend(places)

    def forget(self) -> None:
        """Drops everything remembered; it is computed again when needed."""
        self._units.clear()
        self.bags.forget()
        self.entries.clear()
        self.root = self.entries.entry([(self._main, (0,), None)])
        self._states.forget()
        self.nodes.forget()
        self._own_bytes = 0
