"""Which ready-made slice of the vocabulary a state takes as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.slices import BOUNDARY, DEAD, CharacterSet

__all__ = ["SliceTests"]

Moves = tuple[int, ...]

PROBES = b"zQ5 -/"
MAX_PROBED = 24
"""Bytes that are tried one after the other before all of a set are."""

MAX_CLOSURE = 250
"""States looked at before a state is taken for one that does not contain a slice."""


class SliceTests:
    """Tests of states against one set of characters.

    Args:
        states: The automaton's transitions.
        characters: The set.
        cut_off: Whether states that depend on frames that are cut off count by the moves that are known.
    """

    def __init__(
        self, states: StateRows, characters: CharacterSet, *, cut_off: bool = False
    ) -> None:
        self._states = states
        self._cut_off = cut_off
        self._moves = states.moves_of if cut_off else states.moves
        self.first_classes = states.classes_of(characters.first_bytes)
        self._characters = characters
        self._inside = characters.rows[BOUNDARY]
        self._groups = characters.groups
        self._settled: dict[tuple[int, int], int] = {}
        self._loops: dict[int, bool] = {}
        self._contains: dict[int, bool] = {}

    @cached_property
    def first_bytes(self) -> frozenset[int]:
        """Bytes that begin a character of the set."""
        return frozenset(self._characters.first_bytes)

    @cached_property
    def _edges(self) -> list[list[tuple[int, Callable[[Moves], Moves]]]]:
        """Per state of the set: next states of the set, each with what takes the targets of its bytes from a row."""
        taker = self._states.taker
        return [[(after, taker(group)) for after, group in groups] for groups in self._groups]

    def may_hold(self, state: int) -> bool:
        """Whether every first byte of a character is live, which `loops` and `contains` need."""
        return not self.first_classes & ~self._states.live_classes(state)

    def loops(self, state: int) -> bool:
        """Whether each character of the set leads from a state back to itself.

        Args:
            state: A live state.

        Returns:
            True when it does and no character dies on the way.

        Raises:
            NeedsDepth: The state depends on frames that are cut off.
        """
        known = self._loops.get(state)
        if known is None:
            known = self._loops[state] = self._closure(state, only_itself=True)
        return known

    def contains(self, state: int) -> bool:
        """Whether every sequence of characters of the set is live from a state.

        A state with a long way to its loop is answered with False, which costs time and nothing else.

        Args:
            state: A live state.

        Returns:
            True when they are.

        Raises:
            NeedsDepth: A state on the way depends on frames that are cut off.
        """
        known = self._contains.get(state)
        if known is None:
            known = self._probe(state) and self._closure(state, only_itself=False)
            self._contains[state] = known
        return known

    def _probe(self, state: int) -> bool:
        """Whether a few long sequences of the set are live: a look that is much shorter than the whole."""
        step = self._states.automaton.step
        for byte in PROBES:
            if self._inside[byte] != BOUNDARY:
                continue
            seen: set[int] = set()
            at = state
            while at and at not in seen and len(seen) < MAX_PROBED:
                seen.add(at)
                at = step(at, byte)
            if not at:
                return False
        return True

    def settles(self, byte: int, state: int) -> int:
        """Where every character that begins with a byte leads, when that is one state.

        Args:
            byte: First byte of a character of the set.
            state: The state behind that byte.

        Returns:
            The state behind the character, or 0: characters lead to several states, or one dies.
        """
        return self.settles_inside(self._inside[byte], state)

    def settles_inside(self, inside: int, state: int) -> int:
        """As `settles`, from a state of the set inside of a character."""
        key = (inside, state)
        known = self._settled.get(key)
        if known is None:
            known = self._settled[key] = self._settle(inside, state)
        return known

    def _settle(self, inside: int, state: int) -> int:
        if inside in (DEAD, BOUNDARY):
            return state if inside == BOUNDARY else 0
        target = 0
        seen = {(inside, state)}
        stack = [(inside, state)]
        while stack:
            inner, at = stack.pop()
            row = self._moves(at)[0]
            for after, take in self._edges[inner]:
                for reached in set(take(row)):
                    if not reached or (after == BOUNDARY and target and target != reached):
                        return 0
                    if self._cut_off and self._states.automaton.uncertain(reached):
                        return 0
                    if after == BOUNDARY:
                        target = reached
                    elif (after, reached) not in seen:
                        seen.add((after, reached))
                        stack.append((after, reached))
        return target

    def _closure(self, state: int, *, only_itself: bool) -> bool:
        moves = self._moves
        seen = {(BOUNDARY, state)}
        stack = [(BOUNDARY, state)]
        while stack:
            inner, at = stack.pop()
            row = moves(at)[0]
            for after, take in self._edges[inner]:
                for target in set(take(row)):
                    if not target or (self._cut_off and self._states.automaton.uncertain(target)):
                        return False
                    if after == BOUNDARY and only_itself and target != state:
                        return False
                    if (after, target) not in seen:
                        if len(seen) > MAX_CLOSURE:
                            return False
                        seen.add((after, target))
                        stack.append((after, target))
        return True
