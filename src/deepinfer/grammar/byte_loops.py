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

from deepinfer.grammar.slices import BOUNDARY, DEAD, any_text

if TYPE_CHECKING:
    from deepinfer.grammar.trie import TokenTrie
    from deepinfer.grammar.vocab import TokenVocab

__all__ = ["ByteLoops", "MULTI", "TriePaths"]

Int32Array = NDArray[np.int32]

MULTI = 1 << 128
"""In a set of bytes: every character of more than one byte."""

_NOT_ASCII, _BROKEN = 1, 2
_HALF = (1 << 64) - 1
_BLOCKS = (
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
        kind: Bit 0: another byte occurs. Bit 1: the way is not whole, well-formed characters. Shape [nodes], uint8.
        chars: Characters, one that is cut short included; at most 255. Shape [nodes], uint8.
        ill_formed: Whether it never becomes well-formed, shape [nodes], bool.
    """

    low: NDArray[np.uint64]
    high: NDArray[np.uint64]
    kind: NDArray[np.uint8]
    chars: NDArray[np.uint8]
    ill_formed: NDArray[np.bool_]

    @classmethod
    def of(cls, trie: TokenTrie) -> TriePaths:
        """Goes through a trie level by level."""
        size = len(trie)
        low, high = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        kind, chars = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        state = np.full(size, BOUNDARY, np.uint8)
        one = np.uint64(1)
        table = any_text().table.ravel()
        bits_low, bits_high = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
        for byte in range(64):
            bits_low[byte] = bits_high[byte + 64] = one << np.uint64(byte)
        for level in range(1, trie.num_levels + 1):
            first, last = trie.level_bounds(level)
            labels, above = trie.label_bytes[first:last], trie.parent[first:last]
            low[first:last] = low[above] | bits_low[labels]
            high[first:last] = high[above] | bits_high[labels]
            before = state[above]
            now = table[before.astype(np.int32) * 256 + labels]
            state[first:last] = now
            kind[first:last] = (
                (kind[above] & _NOT_ASCII)
                | (labels >= 128) * np.uint8(_NOT_ASCII)
                | (now != BOUNDARY) * np.uint8(_BROKEN)
            )
            more = ((before == BOUNDARY) & (now != DEAD)).astype(np.uint8)
            chars[first:last] = np.minimum(chars[above], 254) + more
        return cls(low, high, kind, chars, state == DEAD)

    def over(self, nodes: Int32Array, members: int) -> NDArray[np.bool_]:
        """Whether the way to each of some nodes is whole characters over a set of bytes, shape [n], bool."""
        fits = (self.low[nodes] & ~np.uint64(members & _HALF)) == 0
        fits &= (self.high[nodes] & ~np.uint64(members >> 64 & _HALF)) == 0
        most = _NOT_ASCII if members & MULTI else 0
        fits &= self.kind[nodes] <= most
        return fits

    def is_over(self, node: int, members: int) -> bool:
        """The same for one node."""
        kind = int(self.kind[node])
        if kind and (kind != _NOT_ASCII or not members & MULTI):
            return False
        return not (int(self.low[node]) | int(self.high[node]) << 64) & ~members


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
        node = at_rank[np.where(self._is_text, rank_of_id, 0)] if len(at_rank) else rank_of_id * 0
        self._holds = [
            self._pack(half[node] >> np.uint64(bit) & np.uint64(1) != 0)
            for half in (self.paths.low, self.paths.high)
            for bit in range(64)
        ]
        self._not_ascii = self._pack(self.paths.kind[node] & _NOT_ASCII != 0)
        self._ill_formed = self._pack(self.paths.ill_formed[node])
        self._chars = self.paths.chars[node]
        self._blocks = [(block, self._union(block)) for block in _BLOCKS]
        self._over: dict[int, tuple[Int32Array, int]] = {}
        self._short: dict[int, Int32Array] = {}
        # For each byte: nodes at which it occurs for the first time on the way.
        self._first: list[Int32Array] = []
        above = trie.parent
        order = np.argsort(trie.label_bytes[1:], kind="stable").astype(np.int32) + 1
        bounds = np.searchsorted(trie.label_bytes[1:][order - 1], np.arange(257))
        for byte in range(256):
            here = order[bounds[byte] : bounds[byte + 1]]
            if byte < 128:
                half = self.paths.low if byte < 64 else self.paths.high
                again = half[above[here]] >> np.uint64(byte & 63) & np.uint64(1) != 0
            else:
                again = self.paths.kind[above[here]] & _NOT_ASCII != 0
            self._first.append(np.sort(here[~again]))

    def _pack(self, flags: NDArray[np.bool_]) -> Int32Array:
        words: Int32Array = np.packbits(flags & self._is_text, bitorder="little").view("<i4")
        return words.astype(np.int32, copy=False)

    def _union(self, members: int) -> Int32Array:
        words = np.zeros(self._vocab.num_words, dtype=np.int32)
        for byte in range(128):
            if members >> byte & 1:
                words |= self._holds[byte]
        return words

    def over(self, members: int) -> tuple[Int32Array, int]:
        """The tokens over a set of bytes, the last character of which may be cut short.

        Args:
            members: ASCII bytes as bits, and `MULTI`.

        Returns:
            Mask, shape [words], int32, read-only; and how many there are.
        """
        found = self._over.get(members)
        if found is None:
            out = self._ill_formed.copy() if members & MULTI else self._not_ascii.copy()
            left = ~members & (MULTI - 1)
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
            count = int(np.unpackbits(out.view(np.uint8)).sum())
            found = self._over[members] = (out, count)
        return found

    def short(self, most: int) -> Int32Array:
        """Mask of the tokens of at most so many characters, shape [words], int32; read-only."""
        words = self._short.get(most)
        if words is None:
            words = self._short[most] = self._pack(self._chars <= most)
            words.flags.writeable = False
        return words

    def leaving(self, members: int, byte: int, low: int = 0, high: int = 255) -> Int32Array:
        """Where tokens hold a byte outside of a set for the first time, behind whole characters of the set.

        Args:
            members: The set.
            byte: The byte, not in it.
            low: Fewest characters in front of it.
            high: Most characters in front of it.

        Returns:
            Nodes of the vocabulary's trie, shape [n], int32, ascending.
        """
        nodes = self._first[byte]
        above = self._vocab.trie.parent[nodes]
        fits = self.paths.over(above, members)
        if low > 0 or high < 255:
            chars = self.paths.chars[above]
            fits &= (chars >= low) & (chars <= high)
        return nodes[fits]
