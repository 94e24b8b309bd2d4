"""State slots with generations and a quarantine."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken

__all__ = ["SlotPool"]


class SlotPool:
    """Numbers from 0 that are given out and come back once nothing can touch them any more.

    The lowest free slot goes first. A slot given back while a step may still read it waits until that step was
    collected. Each time a slot is given out its generation rises, which tells a late result of its former holder
    from a current one.

    Args:
        num_slots: Number of slots, from 1.

    Raises:
        ConfigError: The number is out of range.

    Examples:
        >>> slots = SlotPool(2)
        >>> slots.take(), slots.take(), slots.num_free
        ((0, 0), (1, 0), 0)
        >>> slots.give_back(0, after_step=5)
        >>> slots.num_quarantined, slots.step_done(5), slots.peek(2)
        (1, 1, ((0, 1),))
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = checks.check_int("num_slots", num_slots, 1, 1_000_000, ConfigError)
        self._free = list(range(self.num_slots))  # a heap
        self._generation = [0] * self.num_slots
        self._quarantine: dict[int, list[int]] = {}
        self._last_done = -1

    @property
    def num_free(self) -> int:
        """Slots that may be given out now."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Slots given back whose last step was not collected yet."""
        return sum(map(len, self._quarantine.values()))

    def peek(self, count: int) -> tuple[tuple[int, int], ...]:
        """What `take` will return next; changes nothing.

        Args:
            count: How many, from 0.

        Returns:
            Up to `count` pairs of slot and generation, in the order in which they will be given out.
        """
        if count == 1 and self._free:
            return ((self._free[0], self._generation[self._free[0]]),)
        return tuple((slot, self._generation[slot]) for slot in heapq.nsmallest(count, self._free))

    def take(self) -> tuple[int, int]:
        """Gives out the lowest free slot.

        Returns:
            The slot and its generation: how often it was given out before.

        Raises:
            InvariantBroken: None is free.
        """
        if not self._free:
            raise InvariantBroken(f"all {self.num_slots} slots are taken; ask num_free first.")
        slot = heapq.heappop(self._free)
        generation = self._generation[slot]
        self._generation[slot] += 1
        return slot, generation

    def give_back(self, slot: int, after_step: int) -> None:
        """Takes a slot back once step `after_step` was collected, at once if it was already.

        Args:
            slot: The slot.
            after_step: The last step that may touch it.
        """
        if after_step <= self._last_done:
            heapq.heappush(self._free, slot)
        else:
            self._quarantine.setdefault(after_step, []).append(slot)

    def step_done(self, step: int) -> int:
        """Notes that a step, and so every earlier one, was collected.

        Args:
            step: Its id.

        Returns:
            How many slots left quarantine.
        """
        self._last_done = max(self._last_done, step)
        count = 0
        for due in [key for key in self._quarantine if key <= step]:
            for slot in self._quarantine.pop(due):
                heapq.heappush(self._free, slot)
                count += 1
        return count

    def reset(self) -> None:
        """Takes every slot back, in whatever state the books are; what was given out before is void."""
        self._generation = [generation + 1 for generation in self._generation]
        self._free = list(range(self.num_slots))
        self._quarantine.clear()

    def check(self, held: Iterable[tuple[str, int, int]]) -> None:
        """Walks the books.

        Args:
            held: Request id, slot and generation of everything given out.

        Raises:
            InvariantBroken: A slot is lost or owned twice, or a generation is wrong.
        """
        owners = [("the free list", slot) for slot in self._free]
        for rid, slot, generation in held:
            owners.append((f"request {rid!r}", slot))
            if not 0 <= slot < self.num_slots or self._generation[slot] != generation + 1:
                raise InvariantBroken(
                    f"request {rid!r} holds generation {generation} of slot {slot}, which is not the "
                    f"one given out last."
                )
        for step, slots in self._quarantine.items():
            owners += [(f"the quarantine of step {step}", slot) for slot in slots]
        seen: dict[int, str] = {}
        for owner, slot in owners:
            if slot in seen:
                raise InvariantBroken(f"slot {slot} belongs to {seen[slot]} and to {owner}.")
            seen[slot] = owner
        if seen.keys() != set(range(self.num_slots)):
            lost = sorted(set(range(self.num_slots)) ^ seen.keys())
            raise InvariantBroken(f"slots {lost} are lost or unknown; there are {self.num_slots}.")
        if any(step <= self._last_done for step in self._quarantine):
            raise InvariantBroken(
                f"slots wait for steps {sorted(self._quarantine)}, and step {self._last_done} is done."
            )

    def __repr__(self) -> str:
        return f"SlotPool({self.num_slots} slots, {len(self._free)} free)"
