"""Which bytes and characters lead a state back to itself without leaving its frames."""

from __future__ import annotations

from deepinfer.grammar.byte_loops import LEADS
from deepinfer.grammar.frame_nodes import FrameNodes
from deepinfer.grammar.mask_slices import SliceTests
from deepinfer.grammar.mask_states import StateRows
from deepinfer.grammar.slices import BOUNDARY, DEAD, CharacterSet, other_characters
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["StateLoops"]

FEW_BYTES = 6
"""Sets of fewer bytes are walked."""

FEW_APART = 4
"""Second bytes of characters that do not lead back although most with the same first byte do."""

MANY_TOKENS = 4000
"""A state is worth comparing with when ASCII bytes that begin so many tokens lead to it."""


class StateLoops:
    """Looks at the transitions of states over an unknown rest.

    Args:
        states: The automaton's transitions.
        nodes: Its states taken apart.
        vocab: The vocabulary.
        weights: Strings that begin with each byte.
    """

    def __init__(
        self, states: StateRows, nodes: FrameNodes, vocab: TokenVocab, weights: list[int]
    ) -> None:
        self._states = states
        self._nodes = nodes
        self._tests = [
            (part.characters, SliceTests(states, part.characters, cut_off=True))
            for part in vocab.slices
        ]
        others = self._others = other_characters()
        self._other_tests = SliceTests(states, others, cut_off=True)
        self._ascii = [0] * states.num_classes
        self._weights = [0] * states.num_classes
        for byte, index in enumerate(states.classes[:128]):
            self._ascii[index] |= 1 << byte
            self._weights[index] += weights[byte]
        # First bytes of longer characters that neither the automaton nor the encoding tells apart.
        leads: dict[tuple[int, int], tuple[int, int]] = {}
        for byte in LEADS:
            kind = (others.rows[BOUNDARY][byte], states.classes[byte])
            example, bits = leads.get(kind, (byte, 0))
            leads[kind] = (example, bits | 1 << byte)
        self._leads = [(kind[1], *found) for kind, found in leads.items()]
        self._characters: dict[int, CharacterSet | None] = {}
        self._bytes: dict[int, int] = {}
        self._most: dict[int, tuple[int, tuple[tuple[int, int, int], ...]]] = {}

    def characters(self, state: int) -> CharacterSet | None:
        """The largest ready set of characters that leads a state back to itself, or None."""
        if state in self._characters:
            return self._characters[state]
        found = None
        if state in self._states.moves_of(state)[0] and not self._nodes.left(state):
            for characters, tests in self._tests:
                if tests.may_hold(state) and tests.loops(state):
                    found = characters
                    break
        self._characters[state] = found
        return found

    def bytes_of(self, state: int) -> int:
        """The bytes that lead a state back to itself.

        Args:
            state: Frames over an unknown rest.

        Returns:
            ASCII bytes as bits, and those that begin characters all of which lead back; 0 where few tokens are made of
            them.
        """
        members = self._bytes.get(state)
        if members is None:
            members = 0
            row = self._states.moves_of(state)[0]
            if state in row and not self._nodes.left(state):
                for after, bits in zip(row, self._ascii, strict=True):
                    if after == state:
                        members |= bits
                if members.bit_count() < FEW_BYTES:
                    members = 0
                else:
                    for index, byte, bits in self._leads:
                        after = row[index]
                        if after and self._other_tests.settles(byte, after) == state:
                            members |= bits
            self._bytes[state] = members
        return members

    def most_of(self, state: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """As `bytes_of`, with bytes that begin characters most of which lead back.

        Args:
            state: Frames over an unknown rest.

        Returns:
            The bytes; and the beginnings of the characters that do not lead back: (first byte, second byte, state).
        """
        found = self._most.get(state)
        if found is not None:
            return found
        members, others = self.bytes_of(state), self._others
        pairs: list[tuple[int, int, int]] = []
        row, classes = self._states.moves_of(state)[0], self._states.classes
        for byte in LEADS if members else ():
            after = row[classes[byte]]
            if members >> byte & 1 or not after:
                continue
            inner, known = self._states.moves_of(after)[0], {}
            apart: list[tuple[int, int, int]] = []
            kinds = others.rows[others.rows[BOUNDARY][byte]]
            for second in range(0x80, 0xC0):
                kind, behind = kinds[second], inner[classes[second]]
                if kind == DEAD:
                    continue
                if (kind, behind) not in known:
                    known[kind, behind] = bool(behind) and (
                        self._other_tests.settles_inside(kind, behind) == state
                    )
                if not known[kind, behind]:
                    apart.append((byte, second, behind))
            if len(apart) <= FEW_APART:
                members |= 1 << byte
                pairs += apart
        found = self._most[state] = (members, tuple(pairs))
        return found

    def takes_text(self, state: int) -> bool:
        """Whether each character of string text leads a state back to itself."""
        tests = self._tests[0][1]
        return tests.may_hold(state) and tests.loops(state)

    def contains_text(self, state: int) -> bool:
        """Whether any string text is live from a state, as far as a search through its states shows."""
        tests = self._tests[0][1]
        return tests.may_hold(state) and tests.contains(state)

    def mostly(self, state: int) -> int:
        """The other state to which the first bytes of most tokens lead, if they are many; else 0."""
        weights: dict[int, int] = {}
        for after, weight in zip(self._states.moves_of(state)[0], self._weights, strict=True):
            if after:
                weights[after] = weights.get(after, 0) + weight
        most = max(weights, key=weights.__getitem__, default=0)
        return 0 if most in (0, state) or weights[most] < MANY_TOKENS else most

    def near(self, state: int) -> int:
        """As `mostly`, if that state leads back to itself; else 0."""
        most = self.mostly(state)
        return most if most and self.bytes_of(most) else 0

    def is_plain(self, state: int) -> bool:
        """Whether a state that `bytes_of` knows has no characters of which only most lead back to it."""
        row, members = self._states.moves_of(state)[0], self.bytes_of(state)
        return members != 0 and all(
            members >> byte & 1 or not row[index] for index, byte, _ in self._leads
        )

    def forget(self) -> None:
        """Drops what was worked out; it is worked out again."""
        self._characters.clear()
        self._bytes.clear()
        self._most.clear()
