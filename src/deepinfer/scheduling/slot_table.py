"""What the scheduler knows of running requests, one array a fact and one place a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.protocols import Allocation, Hit
from deepinfer.scheduling.ledger import Sequence

__all__ = ["SlotTable"]

Ints = NDArray[np.int64]


class SlotTable:
    """State of every slot, so that a step over many decoding requests is a few array operations.

    Generated tokens go to a small ring a slot, and from there to the request's own ids when the ring is full or somebody
    asks for them.

    Args:
        num_slots: Slots of the cache.
        most_tokens: Most tokens that one step adds to one request.
        eos_token_ids: Token ids that end a sequence unless its request ignores them.

    Attributes:
        settled: Tokens with final cache entries.
        known: Tokens of prompt and output known to the host.
        limit: Most tokens of prompt and output.
        prompt: Tokens of the prompt.
        last_token: The token known last.
        generation: Generation of the slot.
        epoch: Epoch of its request.
        room: Tokens for which the cache gave room.
        last_step: The step launched last that has a row of this slot, or -1.
        window_start: As in `PlanRow`.
        pool_start: As in `PlanRow`.
        full_start: As in `PlanRow`.
        is_held: Whether a request runs in the slot.
        uses_eos: Whether the shared end-of-sequence tokens end it.
        has_own_stops: Whether its request has stop tokens of its own.
        may_draft: Whether it is planned with drafts.
        is_host_bound: Whether sampling waits for what the host makes of the token before.
        confidences: Confidences of the drafts proposed last, by slot.
        sequences: The request of each slot, or None.
    """

    def __init__(self, num_slots: int, most_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        def ints() -> Ints:
            return np.zeros(num_slots, np.int64)

        def flags() -> NDArray[np.bool_]:
            return np.zeros(num_slots, np.bool_)

        self.settled, self.known, self.limit, self.prompt = ints(), ints(), ints(), ints()
        self.last_token, self.generation, self.epoch, self.room = ints(), ints(), ints(), ints()
        self.last_step = np.full(num_slots, -1, np.int64)
        self.window_start, self.pool_start, self.full_start = ints(), ints(), ints()
        self.is_held, self.uses_eos, self.has_own_stops = flags(), flags(), flags()
        self.may_draft, self.is_host_bound = flags(), flags()
        self.confidences: dict[int, tuple[float, ...]] = {}
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._eos = tuple(sorted(set(eos_token_ids)))
        size = 64
        while size < 4 * most_tokens:
            size *= 2
        self._mask = size - 1
        self._most_tokens = most_tokens
        self._full = size - most_tokens
        self._most_recent = 0  # no ring holds more than that
        self._recent = np.zeros((num_slots, size), np.int32)
        self._stored = ints()  # ids of each slot that its request has in its own buffer

    def take(
        self,
        sequence: Sequence,
        allocation: Allocation,
        hit: Hit | None,
        *,
        window: int,
        full_start: int,
        may_draft: bool,
        is_host_bound: bool,
        ignores_eos: bool,
    ) -> None:
        """Gives a slot to a request that waited.

        Args:
            sequence: The request.
            allocation: What the cache gave it.
            hit: The prefix that it takes over, or None.
            window: Rows that a restored window holds.
            full_start: As in `PlanRow`.
            may_draft: Whether it is planned with drafts.
            is_host_bound: Whether sampling waits for the host.
            ignores_eos: Whether the shared end-of-sequence tokens do not end it.
        """
        slot = allocation.slot
        ids = sequence.token_ids
        self.settled[slot] = self.window_start[slot] = hit.replay_start if hit else 0
        if hit is not None and hit.window_slot is not None:
            self.window_start[slot] = max(0, hit.num_tokens - window)
        self.pool_start[slot] = hit.num_tokens if hit else 0
        self.full_start[slot] = full_start
        self.known[slot] = self._stored[slot] = len(ids)
        self.last_token[slot] = ids[-1]
        self.limit[slot] = sequence.limit
        self.prompt[slot] = sequence.request.num_prompt_tokens
        self.generation[slot] = allocation.slot_generation
        self.epoch[slot] = sequence.epoch
        self.room[slot] = allocation.num_tokens
        self.last_step[slot] = -1
        self.is_held[slot] = True
        self.uses_eos[slot] = bool(self._eos) and not ignores_eos
        self.has_own_stops[slot] = sequence.has_own_stops
        self.may_draft[slot] = may_draft
        self.is_host_bound[slot] = is_host_bound
        self.sequences[slot] = sequence
        sequence.table = self
        sequence.slot = slot
        sequence.slot_generation = allocation.slot_generation

    def free(self, slot: int) -> None:
        """Ends the hold of a slot's request, which keeps its ids."""
        sequence = self.sequences[slot]
        self.flush(slot)
        self.is_held[slot] = False
        self.sequences[slot] = None
        self.confidences.pop(slot, None)
        if sequence is not None:
            sequence.slot = None

    def clear(self) -> None:
        """Forgets every request."""
        for sequence in self.sequences:
            if sequence is not None:
                sequence.slot = None
        self.is_held[:] = False
        self.sequences = [None] * len(self.sequences)
        self.confidences.clear()

    def add_one_each(self, slots: Ints, known: Ints, tokens: Ints) -> Ints:
        """Notes one new token for each of some slots.

        Args:
            slots: The slots, each once.
            known: Tokens known before, one number a slot.
            tokens: Their tokens.

        Returns:
            Tokens known now, one number a slot.
        """
        self._recent[slots, known & self._mask] = tokens
        self.last_token[slots] = tokens
        self.known[slots] = known = known + 1
        self._make_room(1)
        return known

    def add(self, slots: Ints, counts: Ints, tokens: Ints) -> Ints:
        """Notes new tokens of some slots.

        Args:
            slots: The slots, each once.
            counts: New tokens of each.
            tokens: The tokens of all of them behind one another.

        Returns:
            Tokens known before, one number a slot.
        """
        known = self.known[slots]
        row = np.repeat(np.arange(len(slots)), counts)
        starts = np.cumsum(counts) - counts
        at = known[row] + np.arange(len(tokens)) - starts[row]
        self._recent[slots[row], at & self._mask] = tokens
        has = counts > 0
        self.last_token[slots[has]] = tokens[(starts + counts - 1)[has]]
        self.known[slots] = known + counts
        self._make_room(self._most_tokens)
        return known

    def drop_last(self, slot: int, known: int) -> None:
        """Takes the newest tokens of a slot back, those after the one that ended its request.

        Args:
            slot: The slot.
            known: Tokens that stay.
        """
        self.known[slot] = known
        sequence = self.sequences[slot]
        if sequence is not None and self._stored[slot] > known:
            sequence.truncate(known)
            self._stored[slot] = known

    def ends_sequence(self, tokens: Ints) -> NDArray[np.bool_] | None:
        """Which tokens are among the shared end-of-sequence tokens, shape [tokens], bool; None for none."""
        if not self._eos:
            return None
        found: NDArray[np.bool_] = tokens == self._eos[0]
        for token in self._eos[1:]:
            found |= tokens == token
        return found if np.count_nonzero(found) else None

    def flush(self, slot: int) -> None:
        """Moves the newest tokens of a slot to its request's own ids."""
        stored, known = int(self._stored[slot]), int(self.known[slot])
        sequence = self.sequences[slot]
        if sequence is None or known <= stored:
            return
        at, end = stored & self._mask, known & self._mask
        ring = self._recent[slot]
        if at < end:
            sequence.store(ring[at:end])
        else:
            sequence.store(ring[at:])
            sequence.store(ring[:end])
        self._stored[slot] = known

    def _make_room(self, num_added: int) -> None:
        """Empties rings before the next step could overflow one; looks at them once in many steps only."""
        self._most_recent += num_added
        if self._most_recent > self._full:
            waiting = np.where(self.is_held, self.known - self._stored, 0)
            for slot in np.flatnonzero(waiting > self._full // 2).tolist():
                self.flush(slot)
            self._most_recent = self._full // 2

    def check(self, slot: int, fail: Callable[[str], Any]) -> None:
        """Looks for a slot whose numbers cannot be.

        Args:
            slot: A slot that is held.
            fail: Called with what is wrong.
        """
        known, settled = int(self.known[slot]), int(self.settled[slot])
        if not 0 <= settled <= known <= self.limit[slot]:
            fail(f"{settled} tokens are settled of {known} known, and {self.limit[slot]} may be")
        if not 0 <= known - self._stored[slot] <= self._mask + 1:
            fail(f"{known} tokens are known and {self._stored[slot]} stored")
        if settled > self.room[slot]:
            fail(f"{settled} tokens are settled in room for {self.room[slot]}")
        if not self.window_start[slot] <= settled:
            fail(
                f"{settled} tokens are settled, and the window begins at {self.window_start[slot]}"
            )
