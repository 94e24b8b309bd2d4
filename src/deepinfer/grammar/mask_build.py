"""Mask rows of automaton states, each by the cheapest of several ways that give the same row."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import MaskRow, pack_few, pack_ids
from deepinfer.grammar.mask_difference import Difference, difference
from deepinfer.grammar.mask_slices import SliceTests
from deepinfer.grammar.mask_states import ByteAutomaton, StateRows
from deepinfer.grammar.mask_walk import LoopSet, ResidueWalk, TrieWalk
from deepinfer.grammar.slices import CharacterSet, Slice
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["MaskBuilder"]

Int32Array = NDArray[np.int32]

FEW_IDS = 64
MANY_TOKENS = 2000
"""A neighbour state is worth comparing with when the first bytes that lead to it begin so many tokens."""


class MaskBuilder:
    """Computes which tokens are live from a state.

    A token is allowed when its bytes lead from the state to a live one. The ways to find these tokens, in the order in
    which they are tried:

    1. *slice*: a state that every character of a set leads back to itself takes all tokens over that set from a mask
       made in advance; of the other tokens only what is left behind such characters is walked.
    2. *difference*: a state from which most first bytes lead to one of the former, like the beginning of a key that must
       not be one of a few, has that state's row except where the two differ, and only there is walked.
    3. *contained*: a state from which every sequence over the set is live, though it does not come back, takes the mask
       and walks the tokens that hold something else.
    4. *walk*: the whole trie, cut where the automaton dies.

    Args:
        automaton: The automaton.
        vocab: The vocabulary.
        text_ids: Control tokens whose names count as text.
    """

    def __init__(
        self, automaton: ByteAutomaton, vocab: TokenVocab, text_ids: Iterable[int] = ()
    ) -> None:
        self.states = StateRows(automaton)
        self._vocab = vocab
        self._empty = np.zeros(vocab.num_words, dtype=np.int32)
        self._walk = TrieWalk(vocab.splits, self.states, self._loop_set)
        self._slices = [_BoundSlice(part, self.states, self._loop_set) for part in vocab.slices]
        self._loops: dict[int, CharacterSet | None] = {}
        self._text = [(index, vocab.token_bytes(index)) for index in text_ids]
        # Tokens that begin with a byte of each class.
        trie = vocab.trie
        roots = (
            slice(int(trie.level_start[1]), int(trie.level_start[2]))
            if len(trie) > 1
            else slice(1, 1)
        )
        begins = (trie.rank_high - trie.rank_low)[roots]
        self._weights: list[int] = np.bincount(
            automaton.byte_class[trie.label_bytes[roots]], begins, minlength=self.states.num_classes
        ).tolist()
        self.routes: dict[str, int] = {"slice": 0, "difference": 0, "contained": 0, "walk": 0}

    def build(self, state: int, row_of: Callable[[int], MaskRow], *, check: bool) -> MaskRow:
        """Computes a state's row.

        Args:
            state: The state, live.
            row_of: Gives the row of another state, from a cache or by `build`.
            check: Whether the state is a truncated one.

        Returns:
            The row, without the ids that end an output.

        Raises:
            NeedsDepth: The row depends on frames that are cut off.
        """
        return self.with_text(self._build(state, row_of, check), state)

    def with_text(self, row: MaskRow, state: int) -> MaskRow:
        """A row and the control tokens whose names fit as text.

        Args:
            row: The row of the other tokens.
            state: Its state.

        Returns:
            The row.

        Raises:
            NeedsDepth: It depends on frames that are cut off.
        """
        extra = [index for index, text in self._text if self._survives(state, text)]
        if not extra:
            return row
        words = row.words()
        index, values = pack_few(extra)
        words[index] |= values
        return MaskRow.compact(words, self._empty, self._vocab.full_row)

    @property
    def num_full_walks(self) -> int:
        """Walks over most of the vocabulary's trie so far."""
        return self._walk.num_dense_nodes // max(1, len(self._vocab.trie) // 2)

    def _build(self, state: int, row_of: Callable[[int], MaskRow], check: bool) -> MaskRow:
        live = self.states.moves(state)[1]
        if live is not None and not any(byte in b"0123456789 \t" for byte, _ in live):
            return self._walked(state, check)
        tests = [part for part in self._slices if part.tests.may_hold(state)]
        for part in tests:
            if part.tests.loops(state):
                self.routes["slice"] += 1
                return self._from_slice(state, part, check)
        near = self._neighbour(state)
        if near:
            found = difference(self._vocab.trie, self.states, state, near)
            if found is not None:
                self.routes["difference"] += 1
                return self._from_difference(row_of(near), found)
        for part in tests:
            if part.outside is not None and part.tests.contains(state):
                self.routes["contained"] += 1
                ranks = part.outside.from_root(state, check)
                return self._over(part.row_words(self._vocab), self._vocab.ids_of(ranks))
        return self._walked(state, check)

    def _walked(self, state: int, check: bool) -> MaskRow:
        self.routes["walk"] += 1
        return self._of_ids(self._vocab.ids_of(self._walk.from_root(state, check=check)))

    def _from_slice(self, state: int, part: _BoundSlice, check: bool) -> MaskRow:
        ranks = part.rests.from_root(state, check)
        if not part.covers_start:
            others = self._walk.from_root(state, without=part.tests.first_bytes, check=check)
            ranks = np.concatenate([ranks, others])
        return self._over(part.row_words(self._vocab), self._vocab.ids_of(ranks))

    def _loop_set(self, state: int) -> CharacterSet | None:
        """The largest set of characters that leads a state back to itself."""
        if state in self._loops:
            return self._loops[state]
        found = None
        # A walk over a truncated state's tokens may end in an uncertain one, which has no transitions to look at.
        if not self.states.automaton.uncertain(state):
            for part in self._slices:
                if part.tests.may_hold(state) and part.tests.loops(state):
                    found = part.characters
                    break
            self._loops[state] = found
        return found

    def _neighbour(self, state: int) -> int:
        """The looping state to which the first bytes of most tokens lead, or 0."""
        weights: dict[int, int] = {}
        for after, weight in zip(self.states.moves(state)[0], self._weights, strict=True):
            if after:
                weights[after] = weights.get(after, 0) + weight
        near = max(weights, key=weights.__getitem__, default=0)
        if (
            near in (0, state)
            or weights[near] < MANY_TOKENS
            or self.states.automaton.uncertain(near)
        ):
            return 0
        return near if self._loop_set(near) is not None else 0

    def _from_difference(self, base: MaskRow, found: Difference) -> MaskRow:
        words = base.words()
        if found.cleared:
            ranks = np.concatenate(
                [np.arange(low, high, dtype=np.int32) for low, high in found.cleared]
            )
            index, values = pack_ids(self._vocab.ids_of(ranks))
            words[index] &= ~values
        if found.added:
            index, values = pack_ids(self._vocab.ids_of(np.array(found.added, dtype=np.int32)))
            words[index] |= values
        return MaskRow.compact(words, self._empty, self._vocab.full_row)

    def _over(self, words: Int32Array, ids: Int32Array) -> MaskRow:
        """A row of a ready mask and some more ids."""
        out = words.copy()
        if len(ids):
            index, values = pack_ids(ids)
            out[index] |= values
        return MaskRow.compact(out, self._empty, self._vocab.full_row)

    def _of_ids(self, ids: Int32Array) -> MaskRow:
        if len(ids) <= FEW_IDS:
            return MaskRow(self._empty, *pack_few(ids.tolist()))
        if len(ids) < self._vocab.num_words:
            return MaskRow(self._empty, *pack_ids(ids))
        bits = np.zeros(self._vocab.num_words * 32, dtype=np.uint8)
        bits[ids] = 1
        words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
        return MaskRow.compact(words, self._empty, self._vocab.full_row)

    def _survives(self, state: int, text: bytes) -> bool:
        for byte in text:
            state = self.states.moves(state)[0][self.states.classes[byte]]
            if not state:
                return False
        return bool(text)


class _BoundSlice:
    """A slice of the vocabulary with the walks of one automaton."""

    def __init__(self, part: Slice, states: StateRows, loop_set: LoopSet) -> None:
        self._part = part
        self.tests = SliceTests(states, part.characters)
        self.characters = part.characters
        self.covers_start = part.covers_start
        self.rests = ResidueWalk(part.rests, states, loop_set)
        self.outside = None if part.outside is None else ResidueWalk(part.outside, states, loop_set)

    def row_words(self, vocab: TokenVocab) -> Int32Array:
        """Mask of the tokens inside, shape [words], int32; read-only."""
        return vocab.slice_words(self._part)
