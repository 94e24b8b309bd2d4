"""Frames that some bytes lead back to themselves, or that count characters: walked only behind other bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.frame_entries import Keep, WalkSpace
from deepinfer.grammar.frame_walk import Found

if TYPE_CHECKING:
    from deepinfer.grammar.frame_units import FrameUnits

__all__ = ["LoopUnits"]

Int32Array = NDArray[np.int32]

MANY_EXITS = 100
"""With more places at which a loop may be left, strings that begin with a blank are looked at apart."""


MANY_CHARACTERS = 12
"""Counts from which on few strings are longer."""

MANY_LONG = 60
"""With more places at which a count may end within a string, all strings are looked at."""


class LoopUnits:
    """Walks frames that loop.

    Args:
        units: What walks the other frames.
    """

    def __init__(self, units: FrameUnits) -> None:
        self._units = units

    def walk(
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
        """Walks a frame over all strings of a trie.

        Args:
            space: The trie.
            state: The state.
            keep: Part of the vocabulary that counts.
            found: Takes what is found.
            base: The state without the count, or the state itself.
            members: The bytes that lead `base` back to itself.
            low: Fewest characters before it is left.
            high: Most characters.
        """
        exits = self._exits(base, members)
        if (
            base != state
            and not low
            and self._count(space, state, keep, found, base, members, exits, high)
        ):
            return
        if space.by_byte is not None and base == state and not low and high == 255:
            wider, pairs = self._units.loops.most_of(state)
            if pairs:
                self._mostly(space, state, keep, found, wider, pairs)
                return
        units, trie, row = self._units, space.trie, self._units.states.moves_of(base)[0]
        if space.root is not None:
            over = self._over(space, members, high)
            found.words.append(over if keep is None else over & keep.words)
        else:
            leaf, ranks = trie.leaf_nodes
            inside = ranks[space.paths.leaves(leaf, members, high)]
            if len(inside):
                found.tokens.append((space, keep, inside))
        again: list[int] = []
        if base != state:
            body = units.nodes.repeated(state)
            again = [byte for byte in exits if units.nodes.step(body, byte)]
            exits = [byte for byte in exits if byte not in again]
        child, after = [], []
        if exits:
            nodes = self._leaving(space, members, exits, low, high)
            blank = row[units.states.classes[ord(" ")]]
            if (
                space.is_main
                and base == state
                and blank
                and (blank != state or len(nodes) > MANY_EXITS)
                and units.states.moves_of(blank)[1] is None
            ):
                first, last = units.store.led_ranks
                ranks = trie.rank_low[nodes]
                nodes = nodes[(ranks < first) | (ranks >= last)]
                units.take_behind_blank(blank, keep, found)
            child.append(nodes)
            classes = units.states.byte_class[trie.label_bytes[nodes]]
            after.append(np.array(row, dtype=np.int32)[classes])
        if again:
            # Another copy of what is counted begins: how many there were is in the state.
            nodes = self._leaving(space, members, again, 0, high)
            states = self._behind(space, state, nodes)
            child.append(nodes[states > 0])
            after.append(states[states > 0])
        if child:
            units.walk.arrive(space, keep, np.concatenate(child), np.concatenate(after), found)

    def _count(
        self,
        space: WalkSpace,
        state: int,
        keep: Keep | None,
        found: Found,
        base: int,
        members: int,
        exits: list[int],
        high: int,
    ) -> bool:
        """Takes what a frame without a bound does: strings of no more bytes than the bound cannot tell the two apart."""
        units, root, trie = self._units, space.root, space.trie
        if root is None or high < MANY_CHARACTERS or (base, space) in units.walk.open:
            return False
        nodes = self._leaving(space, members, exits, 0, high)
        nodes = nodes[trie.deepest[nodes] > high]
        if len(nodes) > MANY_LONG:
            return False
        most = high + (not space.is_main)
        loops, unit = units.vocab.byte_loops, units.unit(base, root)
        words = units.sets.empty.copy()
        unit.tokens.add_to(words)
        words &= loops.up_to(most)
        words |= self._over(space, members, high)
        found.words.append(words if keep is None else words & keep.words)
        if unit.exits is not None:
            exits_ = units.entries.joined(unit.exits)
            left = units.entries.without(exits_, loops.longer(most))
            units.leave(left, keep, found)
        states = self._behind(space, state, nodes)
        if states.any():
            units.walk.arrive(space, keep, nodes[states > 0], states[states > 0], found)
        return True

    def _mostly(
        self,
        space: WalkSpace,
        state: int,
        keep: Keep | None,
        found: Found,
        members: int,
        pairs: tuple[tuple[int, int, int], ...],
    ) -> None:
        """Walks a frame that some bytes lead back to itself but for a few characters, such as all but white space.

        Args:
            space: The trie.
            state: The state.
            keep: Part of the vocabulary that counts.
            found: Takes what is found.
            members: The bytes.
            pairs: The beginnings of the other characters, as `StateLoops.most_of` gives them.
        """
        units, trie, by_byte = self._units, space.trie, space.by_byte
        if by_byte is None:
            return
        over = self._over(space, members, 255).copy()
        apart = np.zeros(len(trie), dtype=bool)  # at or below one of those characters
        for first, second, _ in pairs:
            over &= ~units.store.holding(first, second)
            apart |= by_byte.pair(first, second)[1]
        found.words.append(over if keep is None else over & keep.words)
        row = np.array(units.states.moves_of(state)[0], dtype=np.int32)
        child, after = [], []
        exits = self._exits(state, members)
        if exits:
            nodes = by_byte.leaving(members, exits)
            nodes = nodes[~apart[trie.parent[nodes]]]
            blank = int(row[units.states.classes[ord(" ")]])
            led = space.is_main and blank and units.states.moves_of(blank)[1] is None
            if led and (blank != state or len(nodes) > MANY_EXITS):
                first, last = units.store.led_ranks
                ranks = trie.rank_low[nodes]
                nodes = nodes[(ranks < first) | (ranks >= last)]
                units.take_behind_blank(blank, keep, found)
            child.append(nodes)
            after.append(row[units.states.byte_class[trie.label_bytes[nodes]]])
        for first, second, target in pairs:
            if target:
                nodes = by_byte.pair(first, second)[0]
                above = trie.parent[trie.parent[nodes]]
                nodes = nodes[~apart[above] & space.paths.over(above, members)]
                child.append(nodes)
                after.append(np.full(len(nodes), target, dtype=np.int32))
        if child:
            units.walk.arrive(space, keep, np.concatenate(child), np.concatenate(after), found)

    def _over(self, space: WalkSpace, members: int, high: int) -> Int32Array:
        """Mask of a space's tokens over a set of bytes, of at most so many characters; shape [words], int32."""
        loops = self._units.vocab.byte_loops
        over = loops.over(members) if space.is_main else loops.over_behind_blank(members)
        return over & loops.short(high + (not space.is_main)) if high < 255 else over

    @staticmethod
    def _leaving(
        space: WalkSpace, members: int, exits: list[int], low: int, high: int
    ) -> Int32Array:
        """As `ByteNodes.leaving`, for any trie."""
        if not exits:
            return np.zeros(0, dtype=np.int32)
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

    def _behind(self, space: WalkSpace, state: int, nodes: Int32Array) -> Int32Array:
        """The states at nodes of a trie, 0 for dead ones; shape [n], int32."""
        trie, step = space.trie, self._units.nodes.step
        out = []
        for node in nodes.tolist():
            way, after = [], state
            while node:
                way.append(trie.labels[node])
                node = int(trie.parent[node])
            while way and after:
                after = step(after, way.pop())
            out.append(after)
        return np.array(out, dtype=np.int32)

    def _exits(self, state: int, members: int) -> list[int]:
        """The bytes outside of a set that can come."""
        states = self._units.states
        return [
            byte
            for after, bytes_of in zip(states.moves_of(state)[0], states.members, strict=True)
            if after
            for byte in bytes_of
            if not members >> byte & 1
        ]
