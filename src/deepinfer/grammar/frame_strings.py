"""What finite sets of strings do with the tokens of a vocabulary, without an automaton; remembered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import run_starts
from deepinfer.grammar.finite import Branch, Keys
from deepinfer.grammar.frame_entries import Entry, Keep, Places
from deepinfer.grammar.frame_store import FrameStore, StringTokens
from deepinfer.grammar.frame_tokens import Tokens
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["Banned", "StringUnits"]

Int32Array = NDArray[np.int32]

KeyTokens = tuple[list[tuple[int, tuple[int, ...]]], list[tuple[int, Entry]]]


class Banned:
    """Tokens that may not come.

    Args:
        ranks: Their ranks, ascending, shape [n], int32.
        is_exact: Whether each goes through the entry in one way only, so that it is banned as a whole.
        vocab: The vocabulary.

    Attributes:
        others: All other tokens.
    """

    def __init__(self, ranks: Int32Array, is_exact: bool, vocab: TokenVocab) -> None:
        self.is_exact = is_exact
        self.others = Keep(vocab, without=ranks)


class StringUnits:
    """Walks strings, each set once for each entry.

    Args:
        vocab: The vocabulary.
        store: What its grammars share.

    Attributes:
        size_bytes: Memory of what is remembered here, estimated.
    """

    def __init__(self, vocab: TokenVocab, store: FrameStore) -> None:
        self._vocab = vocab
        self._store = store
        self._strings: StringTokens = {}
        self._keys: dict[tuple[Keys, Entry], KeyTokens] = {}
        self._banned: dict[tuple[Branch, int, Entry], Banned | None] = {}
        self.size_bytes = 0

    def of(self, strings: Branch, entry: Entry) -> tuple[tuple[int, ...], Entry | None]:
        """What a finite set of strings does.

        Args:
            strings: The strings.
            entry: Where they are entered.

        Returns:
            Ids of the tokens that end in them or at their end, and where they are over.
        """
        key = (strings.name or strings, entry)
        shared = self._store.strings if strings.name else self._strings
        found = shared.get(key)
        if found is not None:
            return found
        ids: list[int] = []
        places = Places()
        for space, nodes, keep in entry.segments:
            ranks: list[int] = []
            over: list[int] = []
            trie = space.trie
            children, labels, trie_ranks = trie.children, trie.labels, trie.ranks
            stack = [(node, strings) for node in nodes]
            if strings.ends:
                over += nodes
            while stack:
                node, branch = stack.pop()
                low, high = children[node], children[node + 1]
                below = branch.below
                if len(below) <= 2 * (high - low):
                    pairs = [(labels.find(byte, low, high), b) for byte, b in below.items()]
                else:
                    pairs = [(c, below[labels[c]]) for c in range(low, high) if labels[c] in below]
                for child, after in pairs:
                    if child < 0:
                        continue
                    if trie_ranks[child] >= 0:
                        ranks.append(trie_ranks[child])
                    if children[child] != children[child + 1]:
                        if after.ends:
                            over.append(child)
                        if after.below:
                            stack.append((child, after))
            if over:
                places.at(space, keep).extend(over)
            ids += self._store.sets.ids(space, keep, ranks)
        found = shared[key] = (tuple(ids), self._store.entries.of(places))
        if strings.name:
            self._store.size_bytes += 400 + 8 * len(ids)
        else:
            self.size_bytes += 200 + 8 * len(ids)
        return found

    def keys(self, keys: Keys, entry: Entry) -> KeyTokens:
        """What strings that are walked together do.

        Args:
            keys: The strings.
            entry: Where they are entered.

        Returns:
            Ids by the members of the bag that they belong to, as bits; and by the number of each string that is over
            somewhere: where that is.
        """
        found = self._keys.get((keys, entry))
        if found is not None:
            return found
        ids: dict[int, list[int]] = {}
        over: dict[int, Places] = {}
        strings, groups = keys.strings, keys.below
        for space, nodes, keep in entry.segments:
            trie = space.trie
            children, labels, trie_ranks = trie.children, trie.labels, trie.ranks
            ranks: dict[int, list[int]] = {}
            stack = [(node, 0, len(strings), 0) for node in nodes]
            while stack:
                node, first, last, depth = stack.pop()
                low, high = children[node], children[node + 1]
                for byte, start, end, members in groups(first, last, depth):
                    child = labels.find(byte, low, high)
                    if child < 0:
                        continue
                    if trie_ranks[child] >= 0:
                        ranks.setdefault(members, []).append(trie_ranks[child])
                    if children[child] == children[child + 1]:
                        continue
                    if len(strings[start]) == depth + 1:
                        over.setdefault(start, Places()).at(space, keep).append(child)
                    stack.append((child, start, end, depth + 1))
            for members, some in ranks.items():
                ids.setdefault(members, []).extend(self._store.sets.ids(space, keep, some))
        ends = [(number, self._store.entries.of(places)) for number, places in over.items()]
        found = self._keys[keys, entry] = (
            [(members, tuple(some)) for members, some in ids.items()],
            [(number, where) for number, where in ends if where is not None],
        )
        self.size_bytes += 500 + 100 * len(ids)
        return found

    def behind_strings(self, strings: Branch, closing: int, entry: Entry) -> Banned | None:
        """The tokens that hold one of some strings from an entry on, and then a byte.

        Args:
            strings: The strings.
            closing: The byte.
            entry: The entry.

        Returns:
            Those tokens; None when there are none.
        """
        key = (strings, closing, entry)
        if key in self._banned:
            return self._banned[key]
        chunks: list[Int32Array] = []
        for space, nodes, _ in entry.segments:
            trie = space.trie
            children, labels = trie.children, trie.labels
            stack = [(node, strings) for node in nodes]
            while stack:
                node, branch = stack.pop()
                low, high = children[node], children[node + 1]
                if branch.ends and (child := labels.find(closing, low, high)) >= 0:
                    ranks = np.arange(trie.rank_lows[child], trie.rank_highs[child], dtype=np.int32)
                    chunks.append(space.tokens(ranks))
                below = branch.below
                if len(below) <= 2 * (high - low):
                    pairs = [(labels.find(byte, low, high), b) for byte, b in below.items()]
                else:
                    pairs = [(c, below[labels[c]]) for c in range(low, high) if labels[c] in below]
                stack += [pair for pair in pairs if pair[0] >= 0]
        found = None
        if chunks:
            ranks = np.sort(np.concatenate(chunks))
            ranks = ranks[run_starts(ranks)]
            found = Banned(ranks, self._num_places(ranks, entry) == len(ranks), self._vocab)
            self.size_bytes += 200_000
        self._banned[key] = found
        return found

    @staticmethod
    def _num_places(ranks: Int32Array, entry: Entry) -> int:
        """Ways in which some strings go through an entry's nodes, all together."""
        count = 0
        for space, nodes, _ in entry.segments:
            trie = space.trie
            for node in nodes:
                low, high = trie.rank_lows[node], trie.rank_highs[node]
                if space.is_main:
                    count += int(np.searchsorted(ranks, high) - np.searchsorted(ranks, low))
                else:
                    below = space.tokens(np.arange(low, high, dtype=np.int32))
                    count += int(np.isin(below, ranks).sum())
        return count

    def without(
        self, tokens: Sequence[Tokens], ids: Sequence[tuple[int, ...]], banned: Banned
    ) -> Tokens:
        """Some tokens without those that are banned."""
        words = self._store.sets.empty.copy()
        for part in tokens:
            part.add_to(words)
        if ids:
            Tokens.of_ids([index for group in ids for index in group]).add_to(words)
        self.size_bytes += words.nbytes
        return Tokens(words & banned.others.words)
