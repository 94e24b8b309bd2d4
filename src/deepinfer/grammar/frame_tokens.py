"""Sets of tokens that the walks of frames find, in the form in which they are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import pack_few, pack_ids, run_starts
from deepinfer.grammar.frame_entries import EntryStore, Keep, WalkSpace
from deepinfer.grammar.frame_walk import Found
from deepinfer.grammar.slices import Slice
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["TokenSets", "Tokens"]

Int32Array = NDArray[np.int32]

FEW_IDS = 48
"""Ids that are packed one by one, which is faster for so few."""

DENSE_IDS = 1500
"""A frame's tokens are kept as a whole mask from so many on."""


@dataclass(eq=False, slots=True)
class Tokens:
    """Some ids as a mask, or as the words that hold them."""

    words: Int32Array | None = None
    index: NDArray[np.intp] | None = None
    values: Int32Array | None = None

    @classmethod
    def of_ids(cls, ids: Collection[int]) -> Tokens:
        """The tokens with some ids, which may repeat."""
        if len(ids) < FEW_IDS:
            return cls(None, *pack_few(ids))
        return cls(None, *pack_ids(np.fromiter(set(ids), dtype=np.int32)))

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


class TokenSets:
    """Makes sets of tokens of one vocabulary.

    Args:
        vocab: The vocabulary.
        entries: Keeps the parts of the vocabulary that are combined.
    """

    def __init__(self, vocab: TokenVocab, entries: EntryStore) -> None:
        self._vocab = vocab
        self._entries = entries
        self.empty = np.zeros(vocab.num_words, dtype=np.int32)

    def slice_words(self, part: Slice, keep: Keep | None) -> Int32Array:
        """Mask of the tokens of a slice that are in `keep`, shape [words], int32; not to be written."""
        words = self._vocab.slice_words(part)
        return words if keep is None else words & keep.words

    def tokens(self, found: Found, words: list[Int32Array]) -> Tokens:
        """The tokens that a walk found.

        Args:
            found: What it collected.
            words: Ready masks of more of them, each shape [words], int32.

        Returns:
            The set.
        """
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

    def ids(self, space: WalkSpace, keep: Keep | None, ranks: list[int]) -> list[int]:
        """The ids of a few strings of a space, those that are in `keep`."""
        if not ranks:
            return []
        if space.is_main and keep is None and not self._vocab.has_twins:
            ids_by_rank = self._vocab.ids_by_rank
            return [ids_by_rank[rank] for rank in ranks]
        tokens = space.tokens(np.array(ranks, dtype=np.int32))
        if keep is not None:
            tokens = tokens[keep.ranks[tokens]]
        out: list[int] = self._vocab.ids_of(tokens).tolist()
        return out

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
            ranks = ranks[run_starts(ranks)]
        return ranks

    @staticmethod
    def ranks_below(space: WalkSpace, nodes: list[int]) -> Int32Array:
        """The vocabulary's strings at and below some nodes of a trie, none below another.

        Args:
            space: The trie.
            nodes: The nodes.

        Returns:
            Ranks in the vocabulary, ascending, shape [n], int32.
        """
        if not nodes:
            return np.zeros(0, dtype=np.int32)
        trie = space.trie
        bounds = sorted([(trie.rank_lows[node], trie.rank_highs[node]) for node in nodes])
        ranks = np.concatenate([np.arange(low, high, dtype=np.int32) for low, high in bounds])
        return ranks if space.is_main else np.sort(space.tokens(ranks))

    def below(self, space: WalkSpace, nodes: list[int], keep: Keep | None) -> Keep:
        """The vocabulary's strings below some nodes of a trie, those that also are in `keep`."""
        trie, at = space.trie, np.array(nodes, dtype=np.int32)
        low, high = trie.rank_low[at], trie.rank_high[at]
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
        ends = np.maximum.accumulate(high)
        low[1:] = np.maximum(low[1:], ends[:-1])  # nodes below others add nothing
        count = np.maximum(high - low, 0)
        ranks = np.repeat(low - np.cumsum(count, dtype=np.int32) + count, count)
        ranks += np.arange(len(ranks), dtype=np.int32)
        if space.is_main:
            below = Keep(self._vocab, within=ranks)
        else:
            flags = np.zeros(len(self._vocab.strings), dtype=bool)
            flags[space.tokens(ranks)] = True
            below = Keep(self._vocab, flags)
        return below if keep is None else self._entries.both(below, keep)
