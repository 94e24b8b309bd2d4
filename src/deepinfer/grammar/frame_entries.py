"""Places in tries from which frames are walked: what one frame of a stack leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import pack_ids
from deepinfer.grammar.byte_loops import ByteNodes, TriePaths
from deepinfer.grammar.mask_splits import TrieSplits
from deepinfer.grammar.slices import Residue
from deepinfer.grammar.trie import TokenTrie
from deepinfer.grammar.trie_merge import strings_behind
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["Entry", "EntryStore", "Keep", "Places", "WalkSpace"]

Int32Array = NDArray[np.int32]

MANY_NODES = 4
MANY_STRINGS = 64
MOST_STRINGS = 4000
MANY_RANKS = 1000
MAX_DEPTH = 3
"""An entry of so many nodes, with so many strings behind them, is the root of a trie of its own."""


class WalkSpace:
    """A trie to walk in: that of the vocabulary, or one of what is left of tokens behind a common beginning.

    Args:
        splits: The trie, and the splits of its subtrees.
        residue: Which strings of `parent` each of its strings stands for; None for the vocabulary's own trie.
        parent: The space that the residue belongs to.
        paths: The bytes on its ways where they are known.

    Attributes:
        is_main: Whether it is the vocabulary's own trie.
        depth: Spaces that it lies in.
        root: The entry at its root, for a space so large that states take its strings over sets of bytes from there.
        by_byte: The nodes of such a space by their bytes.
    """

    def __init__(
        self,
        splits: TrieSplits,
        residue: Residue | None = None,
        parent: WalkSpace | None = None,
        paths: TriePaths | None = None,
    ) -> None:
        self.splits = splits
        self.trie: TokenTrie = splits.trie
        self._residue = residue
        self._parent = parent
        self.is_main = parent is None
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.root: Entry | None = None
        self.by_byte: ByteNodes | None = None
        self._inner: dict[int, WalkSpace] = {}
        self._behind: dict[tuple[int, ...], WalkSpace] = {}
        self._paths: TriePaths | None = paths
        self._count = None if residue is None else np.diff(residue.offset)

    def inner(self, residue: Residue) -> WalkSpace:
        """The space of a residue of this one's strings."""
        space = self._inner.get(id(residue))
        if space is None:
            space = self._inner.setdefault(id(residue), WalkSpace(residue.splits, residue, self))
        return space

    def behind(self, nodes: tuple[int, ...]) -> WalkSpace:
        """The space of what follows some nodes of this one."""
        space = self._behind.get(nodes)
        if space is None:
            residue = strings_behind(self.trie, nodes)
            space = self._behind.setdefault(nodes, WalkSpace(residue.splits, residue, self))
        return space

    @property
    def paths(self) -> TriePaths:
        """The bytes on the ways through the trie."""
        if self._paths is None:
            self._paths = TriePaths.of(self.trie)
        return self._paths

    def tokens(self, ranks: Int32Array) -> Int32Array:
        """The strings of the vocabulary that some strings of this trie stand for.

        Args:
            ranks: Ranks in this trie, shape [n], int32.

        Returns:
            Ranks in the vocabulary, shape [m], int32.
        """
        space: WalkSpace | None = self
        while space is not None and space._residue is not None and space._count is not None:
            residue = space._residue
            low, count = residue.offset[ranks], space._count[ranks]
            ends = np.cumsum(count, dtype=np.int32)
            at = np.repeat(low - ends + count, count)
            at += np.arange(len(at), dtype=np.int32)
            ranks = residue.ranks[at]
            space = space._parent
        return ranks


class Keep:
    """A part of the vocabulary that a walk is restricted to.

    Args:
        vocab: The vocabulary.
        ranks: Whether each string is in it, shape [ranks], bool; or None with one of the others.
        without: Ranks of all strings that are not in it, distinct, shape [n], int32.
        within: Ranks of all strings that are in it, distinct, shape [n], int32.
    """

    def __init__(
        self,
        vocab: TokenVocab,
        ranks: NDArray[np.bool_] | None = None,
        without: Int32Array | None = None,
        within: Int32Array | None = None,
    ) -> None:
        self._vocab = vocab
        self._within = within
        self._ranks = ranks
        self._without = without
        self._words: Int32Array | None = None

    @property
    def ranks(self) -> NDArray[np.bool_]:
        """Whether each string is in it, shape [ranks], bool."""
        if self._ranks is None:
            is_in = self._within is not None
            self._ranks = np.full(len(self._vocab.strings), not is_in)
            self._ranks[self._within if is_in else self._without] = is_in
        return self._ranks

    @property
    def words(self) -> Int32Array:
        """The same as a mask, shape [words], int32."""
        if self._words is None:
            vocab = self._vocab
            if self._without is not None:
                self._words = vocab.full_row.copy()
                index, values = pack_ids(vocab.ids_of(self._without))
                self._words[index] &= ~values
            elif self._within is not None and len(self._within) < MANY_RANKS:
                self._words = np.zeros(vocab.num_words, dtype=np.int32)
                index, values = pack_ids(vocab.ids_of(self._within))
                self._words[index] = values
            else:
                bits = np.zeros(vocab.num_words * 32, dtype=np.uint8)
                ranks = self._within
                if ranks is None:
                    ranks = np.flatnonzero(self.ranks).astype(np.int32)
                bits[vocab.ids_of(ranks)] = 1
                self._words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        return self._words


Segment = tuple[WalkSpace, tuple[int, ...], Keep | None]


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """Nodes of tries, from which a frame is walked. Equal ones of a store are one object.

    Attributes:
        segments: (space, nodes, part of the vocabulary that counts or None for all), at most one for each space and part.
        num_nodes: Nodes of all segments.
    """

    segments: tuple[Segment, ...]
    num_nodes: int


@dataclass(slots=True)
class Places:
    """Nodes being collected for an `Entry`."""

    nodes: dict[tuple[int, int], tuple[WalkSpace, list[int], Keep | None]] = field(
        default_factory=dict
    )

    def at(self, space: WalkSpace, keep: Keep | None) -> list[int]:
        """The list to which nodes of a space are added."""
        key = (id(space), id(keep))
        found = self.nodes.get(key)
        if found is None:
            found = self.nodes[key] = (space, [], keep)
        return found[1]


class EntryStore:
    """Keeps each entry once.

    Args:
        vocab: The vocabulary.

    Attributes:
        num_merged: Entries whose strings were merged into one trie so far.
    """

    def __init__(self, vocab: TokenVocab) -> None:
        self._vocab = vocab
        self._entries: dict[tuple[tuple[int, tuple[int, ...], int], ...], Entry] = {}
        self._merged: dict[tuple[Entry, ...], Entry] = {}
        self._joined: dict[Entry, Entry] = {}
        self._reach: dict[Entry, int] = {}
        self._held: dict[Entry, list[Int32Array]] = {}
        self._both: dict[tuple[int, int], tuple[Keep, Keep, Keep]] = {}
        self.num_merged = 0

    def entry(self, segments: list[Segment]) -> Entry:
        """The entry of some segments."""
        key = tuple([(id(space), nodes, id(keep)) for space, nodes, keep in segments])
        found = self._entries.get(key)
        if found is None:
            count = sum([len(nodes) for _, nodes, _ in segments])
            found = self._entries.setdefault(key, Entry(tuple(segments), count))
        return found

    def of(self, places: Places) -> Entry | None:
        """The entry of collected nodes; None when there are none."""
        segments: list[Segment] = []
        for space, some, keep in places.nodes.values():
            if some:
                segments.append((space, tuple(sorted(set(some))), keep))
        return self.entry(segments) if segments else None

    def known(self, entry: Entry) -> Entry | None:
        """What `joined` gives, or None when that is yet to be worked out and takes a while."""
        found = self._joined.get(entry)
        if found is None and all(len(nodes) < MANY_NODES for _, nodes, _ in entry.segments):
            found = self._joined[entry] = entry
        return found

    def joined(self, entry: Entry) -> Entry:
        """An entry with the strings behind its nodes merged, where they are many: the same strings, walked faster."""
        found = self.known(entry)
        if found is not None:
            return found
        segments: list[Segment] = []
        for space, nodes, keep in entry.segments:
            if len(nodes) >= MANY_NODES and space.depth < MAX_DEPTH:
                if not nodes[0]:  # everything
                    segments.append((space, nodes[:1], keep))
                    nodes = nodes[1:]
                lows, highs = space.trie.rank_lows, space.trie.rank_highs
                count = sum([highs[node] - lows[node] for node in nodes])
                if MANY_STRINGS <= count <= MOST_STRINGS:
                    space, nodes = space.behind(nodes), (0,)
                    self.num_merged += 1
            if nodes:
                segments.append((space, nodes, keep))
        found = self._joined[entry] = self.entry(segments)
        self._joined[found] = found
        return found

    def reach(self, entry: Entry) -> int:
        """Bytes of the longest string behind an entry's nodes, or more."""
        found = self._reach.get(entry)
        if found is None:
            found = 0
            for space, nodes, _ in entry.segments:
                trie = space.trie
                longest = max([int(trie.deepest[node]) - trie.level_of(node) for node in nodes])
                found = max(found, longest)
            self._reach[entry] = found
        return found

    def labels(self, entry: Entry) -> int:
        """The bytes behind an entry's nodes, as bits."""
        found = 0
        for space, nodes, _ in entry.segments:
            labels, children = space.trie.labels, space.trie.children
            for byte in set(b"".join([labels[children[n] : children[n + 1]] for n in nodes])):
                found |= 1 << byte
        return found

    def merged(self, entries: list[Entry]) -> Entry:
        """The entry of the nodes of several."""
        if len(entries) == 1:
            return entries[0]
        key = tuple(entries)
        found = self._merged.get(key)
        if found is None:
            places = Places()
            for entry in entries:
                for space, nodes, keep in entry.segments:
                    places.at(space, keep).extend(nodes)
            found = self._merged.setdefault(key, self.of(places) or entries[0])
        return found

    def restricted(self, entry: Entry, keep: Keep) -> Entry:
        """An entry of which only a part of the vocabulary counts."""
        return self.entry(
            [(space, nodes, self.both(keep, own)) for space, nodes, own in entry.segments]
        )

    def without(self, entry: Entry, ranks: Int32Array) -> Entry:
        """An entry of which some strings do not count.

        Args:
            entry: The entry.
            ranks: The strings, ascending, shape [n], int32.

        Returns:
            The entry itself where it is not about these strings.
        """
        if not len(ranks):
            return entry
        held = self._held.get(entry)
        if held is None:
            held = self._held[entry] = [
                np.sort(space.tokens(_ranks_below(space, nodes)))
                for space, nodes, _ in entry.segments
            ]
        segments: list[Segment] = []
        keep: Keep | None = None
        for (space, nodes, own), tokens in zip(entry.segments, held, strict=True):
            at = np.searchsorted(tokens, ranks)
            if len(tokens) and (tokens[np.minimum(at, len(tokens) - 1)] == ranks).any():
                if keep is None:
                    keep = Keep(self._vocab, without=ranks)
                own = self.both(keep, own)
            segments.append((space, nodes, own))
        return entry if keep is None else self.entry(segments)

    def both(self, one: Keep, other: Keep | None) -> Keep:
        """What is in two parts of the vocabulary."""
        if other is None or other is one:
            return one
        key = (id(one), id(other))
        found = self._both.get(key)
        if found is None:  # the two are kept with the result, so that their ids stay theirs
            result = Keep(self._vocab, one.ranks & other.ranks)
            found = self._both.setdefault(key, (one, other, result))
        return found[2]


def _ranks_below(space: WalkSpace, nodes: tuple[int, ...]) -> Int32Array:
    """Ranks of the strings below some nodes in their own trie, perhaps repeated; shape [n], int32."""
    lows, highs = space.trie.rank_lows, space.trie.rank_highs
    return np.concatenate([np.arange(lows[n], highs[n], dtype=np.int32) for n in nodes])
