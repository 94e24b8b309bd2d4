"""Which bytes the ways through a vocabulary's trie hold: tokens over any set of bytes, without a walk.

A state that some bytes lead back to itself takes every token over these bytes. Whatever the set is, the mask of these
tokens is what is left of the vocabulary without the tokens that hold another byte; and the other tokens leave the state
at the first byte outside of the set, at nodes that are known for each byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.bitmask import pack_ids
from deepinfer.grammar.slices import BOUNDARY, DEAD, any_text

if TYPE_CHECKING:
    from deepinfer.grammar.trie import TokenTrie
    from deepinfer.grammar.vocab import TokenVocab

__all__ = ["ByteLoops", "ByteNodes", "LEADS", "TriePaths"]

Int32Array = NDArray[np.int32]

LEADS = range(0xC2, 0xF5)
"""Bytes that begin a character of more than one byte. In a set of bytes, one stands for all characters it begins."""

MANY_IDS = 1000
"""Ids that are not packed one by one."""

_FIRST_LEAD = LEADS[0]
_ALL_LEADS = sum(1 << byte for byte in LEADS)
_HALF = (1 << 64) - 1
_BLOCKS = (
    _ALL_LEADS,
    _ALL_LEADS & ~(1 << 0xE2),
    sum(1 << byte for byte in [*range(32), 127]),
    sum(1 << byte for byte in b"!#$%&'()*+,-./:;<=>?@[]^_`{|}~"),
    sum(1 << byte for byte in b"0123456789"),
    sum(1 << byte for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    sum(1 << byte for byte in b"GHIJKLMNOPQRSTUVWXYZ"),
    sum(1 << byte for byte in b"abcdefghijklmnopqrstuvwxyz"),
    sum(1 << byte for byte in b"ghijklmnopqrstuvwxyz"),
)
"""Bytes that many sets leave out together."""


@dataclass(frozen=True, eq=False)
class TriePaths:
    """The bytes on the way to each node of a trie.

    Attributes:
        low: ASCII bytes below 64, as bits; shape [nodes], uint64.
        high: Those from 64 to 127.
        lead: Bytes of `LEADS`, the first as bit 0.
        broken: Whether the way is not whole, well-formed characters, shape [nodes], bool.
        chars: Characters, one that is cut short included; at most 255. Shape [nodes], uint8.
        ill_formed: Whether it never becomes well-formed, shape [nodes], bool.
    """

    low: NDArray[np.uint64]
    high: NDArray[np.uint64]
    lead: NDArray[np.uint64]
    broken: NDArray[np.bool_]
    chars: NDArray[np.uint8]
    ill_formed: NDArray[np.bool_]

    @classmethod
    def of(cls, trie: TokenTrie) -> TriePaths:
        """Goes through a trie level by level."""
        size = len(trie)
        parts = [np.zeros(size, np.uint64) for _ in range(3)]
        chars = np.zeros(size, np.uint8)
        state = np.full(size, BOUNDARY, np.uint8)
        table = any_text().table.ravel()
        bits = np.zeros((3, 256), np.uint64)
        for place, first, count in ((0, 0, 64), (1, 64, 64), (2, _FIRST_LEAD, len(LEADS))):
            bits[place, first : first + count] = np.uint64(1) << np.arange(count, dtype=np.uint64)
        for level in range(1, trie.num_levels + 1):
            low, high = trie.level_bounds(level)
            labels, above = trie.label_bytes[low:high], trie.parent[low:high]
            for part, own in zip(parts, bits, strict=True):
                part[low:high] = part[above] | own[labels]
            before = state[above]
            now = table[before.astype(np.int32) * 256 + labels]
            state[low:high] = now
            more = ((before == BOUNDARY) & (now != DEAD)).astype(np.uint8)
            chars[low:high] = np.minimum(chars[above], 254) + more
        return cls(parts[0], parts[1], parts[2], state != BOUNDARY, chars, state == DEAD)

    @property
    def parts(self) -> tuple[tuple[NDArray[np.uint64], int, int], ...]:
        """The bits of ways, the byte of the first of them, and how many there are."""
        return (self.low, 0, 64), (self.high, 64, 64), (self.lead, _FIRST_LEAD, len(LEADS))

    def over(self, nodes: Int32Array, members: int) -> NDArray[np.bool_]:
        """Whether the way to each of some nodes is whole characters over a set of bytes, shape [n], bool."""
        fits = ~self.broken[nodes]
        for part, first, _ in self.parts:
            fits &= (part[nodes] & ~np.uint64(members >> first & _HALF)) == 0
        return fits

    def leaves(self, nodes: Int32Array, members: int, most: int = 255) -> NDArray[np.bool_]:
        """Whether the way to each of some nodes is characters over a set, at most so many, the last perhaps cut short.

        Args:
            nodes: The nodes, shape [n], int32.
            members: The set.
            most: Characters.

        Returns:
            Shape [n], bool.
        """
        fits = ~self.ill_formed[nodes]
        for part, first, _ in self.parts:
            fits &= (part[nodes] & ~np.uint64(members >> first & _HALF)) == 0
        if most < 255:
            fits &= self.chars[nodes] <= most
        return fits

    def is_over(self, node: int, members: int) -> bool:
        """The same for one node."""
        if self.broken[node]:
            return False
        found = int(self.low[node]) | int(self.high[node]) << 64
        return not (found | int(self.lead[node]) << _FIRST_LEAD) & ~members


class ByteNodes:
    """The nodes of a trie by their bytes.

    Args:
        trie: The trie.
        paths: The bytes on its ways.
    """

    def __init__(self, trie: TokenTrie, paths: TriePaths) -> None:
        self._trie = trie
        self._paths = paths
        # For each byte: nodes at which it occurs for the first time on the way.
        self._first: list[Int32Array] = []
        self._pairs: dict[tuple[int, int], tuple[Int32Array, NDArray[np.bool_]]] = {}
        above = trie.parent
        order = np.argsort(trie.label_bytes[1:], kind="stable").astype(np.int32) + 1
        bounds = np.searchsorted(trie.label_bytes[1:][order - 1], np.arange(257))
        for byte in range(256):
            here = order[bounds[byte] : bounds[byte + 1]]
            for part, first, count in paths.parts:
                if first <= byte < first + count:
                    again = part[above[here]] >> np.uint64(byte - first) & np.uint64(1) != 0
                    here = here[~again]
            self._first.append(here)

    def leaving(self, members: int, exits: list[int], low: int = 0, high: int = 255) -> Int32Array:
        """Where strings hold a byte outside of a set for the first time, behind whole characters of the set.

        Args:
            members: The set.
            exits: The bytes, none in it.
            low: Fewest characters in front of it.
            high: Most characters in front of it.

        Returns:
            Nodes of the trie, shape [n], int32.
        """
        nodes = np.concatenate([self._first[byte] for byte in exits])
        above = self._trie.parent[nodes]
        fits = self._paths.over(above, members)
        if low > 0 or high < 255:
            chars = self._paths.chars[above]
            fits &= (chars >= low) & (chars <= high)
        return nodes[fits]

    def pair(self, first: int, second: int) -> tuple[Int32Array, NDArray[np.bool_]]:
        """Where two bytes follow each other.

        Args:
            first: A byte that begins a character.
            second: Its second byte.

        Returns:
            Nodes of the second byte, ascending, shape [n], int32; and whether each node is one of them or below one,
            shape [nodes], bool.
        """
        found = self._pairs.get((first, second))
        if found is None:
            trie = self._trie
            nodes = np.flatnonzero(trie.label_bytes == second).astype(np.int32)
            nodes = nodes[trie.label_bytes[trie.parent[nodes]] == first]
            below = np.zeros(len(trie), dtype=bool)
            below[nodes] = True
            for level in range(2, trie.num_levels + 1):
                low, high = trie.level_bounds(level)
                below[low:high] |= below[trie.parent[low:high]]
            found = self._pairs[first, second] = nodes, below
        return found


class ByteLoops:
    """Tokens of a vocabulary by the bytes that they hold.

    Args:
        vocab: The vocabulary.
    """

    def __init__(self, vocab: TokenVocab) -> None:
        self._vocab = vocab
        trie = vocab.trie
        self.paths = TriePaths.of(trie)
        nodes, ranks = trie.leaf_nodes
        at_rank = np.zeros(len(vocab.strings), dtype=np.int32)
        at_rank[ranks] = nodes
        width = vocab.num_words * 32
        rank_of_id = np.full(width, -1, dtype=np.int32)
        count = np.diff(vocab.rank_offset)
        rank_of_id[vocab.rank_ids] = np.repeat(np.arange(len(count), dtype=np.int32), count)
        self._is_text = rank_of_id >= 0
        self.rank_of_id = rank_of_id
        node = at_rank[np.where(self._is_text, rank_of_id, 0)] if len(at_rank) else rank_of_id * 0
        self._holds = {
            first + bit: self._pack(part[node] >> np.uint64(bit) & np.uint64(1) != 0)
            for part, first, count in self.paths.parts
            for bit in range(count)
        }
        self._ill_formed = self._pack(self.paths.ill_formed[node])
        chars = self.paths.chars[node][vocab.rank_ids]
        order = np.argsort(chars, kind="stable")
        self._by_chars, self._sorted_chars = vocab.rank_ids[order], chars[order]
        self._blocks = [(block, self._union(block)) for block in _BLOCKS]
        self._over: dict[int, Int32Array] = {}
        self._short: dict[int, Int32Array] = {}
        self._holding: dict[tuple[int, int], Int32Array] = {}
        self._node = node
        self._runs: dict[int, int] = {}
        lengths = np.fromiter(map(len, vocab.strings), np.int32, len(vocab.strings))
        self._by_length = np.argsort(lengths, kind="stable").astype(np.int32)
        self._sorted_lengths = lengths[self._by_length]
        self._longer: dict[int, Int32Array] = {}
        self._up_to: dict[int, Int32Array] = {}
        blank = ord(" ")
        led = [i for i, text in enumerate(vocab.strings) if text[0] == blank and len(text) > 1]
        twice = [i for i in led if vocab.strings[i].find(b" ", 1) > 0]
        self._led, self._led_twice = self._of_ranks(led), self._of_ranks(twice)

    def _of_ranks(self, ranks: list[int]) -> Int32Array:
        bits = np.zeros(self._vocab.num_words * 32, dtype=bool)
        bits[self._vocab.ids_of(np.array(ranks, dtype=np.int32))] = True
        return self._pack(bits)

    def _pack(self, flags: NDArray[np.bool_]) -> Int32Array:
        words: Int32Array = np.packbits(flags & self._is_text, bitorder="little").view("<i4")
        return words.astype(np.int32, copy=False)

    def _union(self, members: int) -> Int32Array:
        words = np.zeros(self._vocab.num_words, dtype=np.int32)
        for byte, holds in self._holds.items():
            if members >> byte & 1:
                words |= holds
        return words

    def over(self, members: int) -> Int32Array:
        """The tokens over a set of bytes, the last character of which may be cut short.

        Args:
            members: ASCII bytes and bytes of `LEADS`, as bits.

        Returns:
            Mask, shape [words], int32; read-only.
        """
        found = self._over.get(members)
        if found is None:
            out = self._ill_formed.copy()
            left = ~members & (_ALL_LEADS | (1 << 128) - 1)
            for block, words in self._blocks:
                if not block & ~left:
                    out |= words
                    left &= ~block
            while left:
                byte = (left & -left).bit_length() - 1
                left &= left - 1
                out |= self._holds[byte]
            out = self._vocab.full_row & ~out
            out.flags.writeable = False
            found = self._over[members] = out
        return found

    def holding(self, first: int, second: int, below: NDArray[np.bool_]) -> Int32Array:
        """The tokens in which two bytes follow each other.

        Args:
            first: The first byte.
            second: The second byte.
            below: Whether each node of the vocabulary's trie is behind them, shape [nodes], bool.

        Returns:
            Mask, shape [words], int32; read-only.
        """
        words = self._holding.get((first, second))
        if words is None:
            words = self._holding[first, second] = self._pack(below[self._node])
            words.flags.writeable = False
        return words

    def over_behind_blank(self, members: int) -> Int32Array:
        """The tokens that begin with a blank and go on over a set of bytes.

        Args:
            members: As in `over`.

        Returns:
            Mask, shape [words], int32.
        """
        blank = 1 << ord(" ")
        out: Int32Array = self.over(members | blank) & self._led
        return out if members & blank else out & ~self._led_twice

    def short(self, most: int) -> Int32Array:
        """Mask of the tokens of at most so many characters, shape [words], int32; read-only."""
        words = self._short.get(most)
        if words is None:
            at = np.searchsorted(self._sorted_chars, most, side="right")
            words = self._short[most] = self._without(self._by_chars[at:])
        return words

    def longer(self, most: int) -> Int32Array:
        """Ranks of the strings of more than so many bytes, ascending, shape [n], int32."""
        found = self._longer.get(most)
        if found is None:
            at = np.searchsorted(self._sorted_lengths, most, side="right")
            found = self._longer[most] = np.sort(self._by_length[at:])
        return found

    def up_to(self, most: int) -> Int32Array:
        """Mask of the tokens of at most so many bytes, shape [words], int32; read-only."""
        words = self._up_to.get(most)
        if words is None:
            words = self._up_to[most] = self._without(self._vocab.ids_of(self.longer(most)))
        return words

    def _without(self, ids: Int32Array) -> Int32Array:
        """Mask of all tokens but some; read-only."""
        if len(ids) < MANY_IDS:
            words = self._vocab.full_row.copy()
            index, values = pack_ids(ids)
            words[index] &= ~values
        else:
            left = self._is_text.copy()
            left[ids] = False
            words = self._pack(left)
        words.flags.writeable = False
        return words

    def longest_run(self, members: int, enough: int = 1 << 30) -> int:
        """Most bytes of a set that a token holds in a row.

        Args:
            members: Any bytes, as bits.
            enough: A number that the answer need not exceed: any one from it on says that there are so many.

        Returns:
            How many; 0 when no token holds one.
        """
        found = self._runs.get(members)
        if found is None:
            for known, most in list(self._runs.items()):
                if most >= enough and not known & ~members:
                    return most
            trie = self._vocab.trie
            inside = np.array([members >> byte & 1 for byte in range(256)], dtype=np.int32)
            before, found = np.zeros(1, dtype=np.int32), 0
            for level in range(1, trie.num_levels + 1):
                first, last = trie.level_bounds(level)
                run = before[trie.parent_in_level(level)] + 1
                run *= inside[trie.label_bytes[first:last]]
                before, found = run, max(found, int(run.max()))
            self._runs[members] = found
        return found
