"""An automaton's transitions in the forms that walks over a trie read fast."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteAutomaton", "NeedsDepth", "StateRows"]

FEW_LIVE = 24
"""With at most this many live bytes a state is walked byte by byte, otherwise child by child."""


class ByteAutomaton(Protocol):
    """What masks need of an automaton; state 0 is dead."""

    start: int
    byte_class: NDArray[np.uint8]
    num_classes: int
    table: NDArray[np.int32]

    def expand(self, state: int) -> None:
        """Computes the whole row of a state in `table`."""
        ...

    def step(self, state: int, byte: int) -> int:
        """The state behind a byte."""
        ...

    def run(self, state: int, data: bytes) -> int:
        """The state behind some bytes."""
        ...

    def accepting(self, state: int) -> bool:
        """Whether an output may end here."""
        ...

    def depth(self, state: int) -> int:
        """Frames on the stack."""
        ...

    def truncate(self, state: int, depth: int) -> int:
        """The state with only its top frames known."""
        ...

    def uncertain(self, state: int) -> bool:
        """Whether a state depends on frames that a truncation cut off."""
        ...


class NeedsDepth(Exception):
    """A walk met a state that depends on frames that a truncation cut off."""


Moves = tuple[tuple[int, ...], tuple[tuple[int, int], ...] | None]
"""Next state by class, and (byte, next state) of the live bytes where there are few."""


class StateRows:
    """The rows of an automaton's table as Python lists, computed when asked for.

    Args:
        automaton: The automaton.
    """

    def __init__(self, automaton: ByteAutomaton) -> None:
        self.automaton = automaton
        self.byte_class = np.ascontiguousarray(automaton.byte_class, dtype=np.uint8)
        self.classes = self.byte_class.tobytes()
        self.num_classes = int(automaton.num_classes)
        self.members: list[list[int]] = [[] for _ in range(self.num_classes)]
        for byte, index in enumerate(self.classes):
            self.members[index].append(byte)
        self._takers: dict[bytes, Callable[[tuple[int, ...]], tuple[int, ...]]] = {}
        self._moves: dict[int, Moves] = {}
        self._certain_moves: dict[int, Moves] = {}
        self._live: dict[int, int] = {}
        self._certain = np.zeros(256, dtype=np.uint8)  # 0 not asked yet, 1 certain, 2 uncertain

    def moves(self, state: int) -> Moves:
        """The transitions of a state.

        Args:
            state: A live state.

        Returns:
            Next state by class, shape [classes]; and the live bytes with their next states, or None where they are
            many.

        Raises:
            NeedsDepth: They depend on frames that are cut off.
        """
        found = self._certain_moves.get(state)
        if found is None:
            if self.automaton.uncertain(state):
                raise NeedsDepth
            found = self._certain_moves[state] = self.moves_of(state)
        return found

    def moves_of(self, state: int) -> Moves:
        """As `moves`, without those that depend on frames that are cut off."""
        found = self._moves.get(state)
        if found is not None:
            return found
        automaton = self.automaton
        # Tuples of numbers, which the garbage collector need not look into.
        row: tuple[int, ...] = tuple(automaton.table[state].tolist())
        if -1 in row:
            automaton.expand(state)
            row = tuple(automaton.table[state].tolist())
        live: list[tuple[int, int]] = []
        few = True
        for index, after in enumerate(row):
            if after:
                bytes_of = self.members[index]
                few = len(live) + len(bytes_of) <= FEW_LIVE
                if not few:
                    break
                live += [(byte, after) for byte in bytes_of]
        self._moves[state] = found = (row, tuple(live) if few else None)
        return found

    def has_moves(self, state: int) -> bool:
        """Whether `moves_of` computes nothing."""
        return state in self._moves

    def live_classes(self, state: int) -> int:
        """The classes with a live next state, as bits of an int."""
        bits = self._live.get(state)
        if bits is None:
            bits = 0
            for index, after in enumerate(self.moves_of(state)[0]):
                if after:
                    bits |= 1 << index
            self._live[state] = bits
        return bits

    def taker(self, members: bytes) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """What takes the next states of some bytes, those of one class once, from a state's transitions."""
        found = self._takers.get(members)
        if found is None:
            classes = set(members.translate(self.classes))
            index = classes.pop()
            found = itemgetter(index, *classes) if classes else itemgetter(slice(index, index + 1))
            self._takers[members] = found
        return found

    def classes_of(self, members: bytes) -> int:
        """The classes of some bytes, as bits of an int."""
        bits = 0
        for index in set(members.translate(self.classes)):
            bits |= 1 << index
        return bits

    def require_certain(self, states: NDArray[np.int32]) -> None:
        """Checks that no state depends on frames that are cut off.

        Args:
            states: Shape [n], int32.

        Raises:
            NeedsDepth: One does.
        """
        top = int(states.max(initial=0))
        if top >= len(self._certain):
            self._certain = np.concatenate(
                [self._certain, np.zeros(max(top + 1, len(self._certain)), dtype=np.uint8)]
            )
        flags = self._certain.take(states)
        if flags.size and flags.min() == 0:
            wanted = np.zeros(len(self._certain), dtype=bool)
            wanted[states[flags == 0]] = True
            for state in np.flatnonzero(wanted).tolist():
                uncertain = state != 0 and self.automaton.uncertain(state)
                self._certain[state] = 2 if uncertain else 1
            flags = self._certain.take(states)
        if flags.size and flags.max() == 2:
            raise NeedsDepth

    def step_all(self, states: NDArray[np.int32], classes: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Steps many states at once.

        Args:
            states: Shape [n], int32; the dead state stays dead.
            classes: Class of the byte for each, shape [n], uint8.

        Returns:
            Next states, shape [n], int32.
        """
        # Places in the table fit 32 bits long before its memory would be too large.
        key = states * np.int32(self.num_classes)
        key += classes
        out: NDArray[np.int32] = self.automaton.table.reshape(-1).take(key)
        while out.size and out.min() < 0:
            wanted = np.zeros(len(self.automaton.table), dtype=bool)
            wanted[states[out < 0]] = True
            for state in np.flatnonzero(wanted).tolist():
                self.automaton.expand(state)
            out = self.automaton.table.reshape(-1).take(key)
        return out

    def forget(self) -> None:
        """Drops what was computed; it is computed again when needed."""
        for kept in (self._moves, self._certain_moves, self._live):
            kept.clear()

    def __len__(self) -> int:
        return len(self._moves)
