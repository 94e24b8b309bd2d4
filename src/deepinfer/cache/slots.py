"""A cache manager with one contiguous slot a request: slots with generations, and a quarantine."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.protocols import Allocation, Hit
from deepinfer.core.types import Request

__all__ = ["CacheStats", "SlotCacheManager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """How full the cache is.

    Attributes:
        num_slots: Slots in all.
        free_slots: Slots that may be given out now.
        held_slots: Slots that requests hold.
        quarantined_slots: Slots given back whose last step was not collected yet.
        slot_tokens: Tokens that one slot holds.
        settled_tokens: Final tokens in held slots.
        allocated_total: Slots given out since the start.
        refused_total: Requests for room that found none since the start.
    """

    num_slots: int
    free_slots: int
    held_slots: int
    quarantined_slots: int
    slot_tokens: int
    settled_tokens: int
    allocated_total: int
    refused_total: int

    @property
    def used_ratio(self) -> float:
        """Share of the cache's tokens that are settled, from 0 to 1."""
        return self.settled_tokens / (self.num_slots * self.slot_tokens)


@dataclass(slots=True)
class _Holding:
    allocation: Allocation
    settled: int = 0


class SlotCacheManager:
    """Gives each request one slot that holds up to `slot_tokens` tokens.

    Nothing is shared between requests, so `lookup` never finds anything. The free slot with the lowest number
    is given out first. A slot that is given back while a step may still read it waits in quarantine until
    that step was collected. Each time a slot is given out its generation rises, which tells a late result of
    its former holder from a current one.

    Args:
        num_slots: Number of slots, from 1.
        slot_tokens: Tokens in one slot, from 1.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> from deepinfer.core import Request
        >>> cache = SlotCacheManager(num_slots=2, slot_tokens=64)
        >>> request = Request(rid="a", prompt_token_ids=(5, 6))
        >>> cache.allocate(request, None, upto=3).slot
        0
        >>> cache.release(request, after_step=7)
        >>> cache.stats().quarantined_slots, cache.step_done(7), cache.stats().free_slots
        (1, 1, 2)
    """

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        self.num_slots = checks.check_int("num_slots", num_slots, 1, 1_000_000, ConfigError)
        self.slot_tokens = checks.check_int("slot_tokens", slot_tokens, 1, 2**31 - 1, ConfigError)
        self._free = list(range(self.num_slots))  # a heap
        self._generation = [0] * self.num_slots
        self._held: dict[str, _Holding] = {}
        self._quarantine: dict[int, list[int]] = {}
        self._last_done = -1
        self._allocated_total = 0
        self._refused_total = 0

    @property
    def num_free(self) -> int:
        """Slots that may be given out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Requests that hold a slot."""
        return len(self._held)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into all slots."""
        return self.num_slots * self.slot_tokens

    def peek(self, count: int) -> tuple[tuple[int, int], ...]:
        """What the next allocations of new requests will return; changes nothing.

        Args:
            count: How many, from 0.

        Returns:
            Up to `count` pairs of slot and slot generation, in the order in which they will be given out.
        """
        return tuple((slot, self._generation[slot]) for slot in heapq.nsmallest(count, self._free))

    def holding(self, request: Request) -> Allocation | None:
        """What a request holds.

        Args:
            request: The request.

        Returns:
            Its slot, or None.
        """
        holding = self._held.get(request.rid)
        return None if holding is None else holding.allocation

    def lookup(self, request: Request, limit: int) -> Hit:
        """Finds nothing: slots are private.

        Args:
            request: The request.
            limit: Most prompt tokens to find.

        Returns:
            An empty hit.
        """
        return Hit()

    def allocate(
        self, request: Request, hit: Hit | None, upto: int, reserve: int = 0
    ) -> Allocation | None:
        """Gives a request a slot; asking again for the same one returns the slot that it has.

        Args:
            request: The request.
            hit: Ignored.
            upto: Tokens to make room for, at most `slot_tokens`.
            reserve: Tokens of room to leave free for others, rounded up to whole slots.

        Returns:
            The slot, or None, with nothing changed, when none is free or `upto` exceeds a slot.
        """
        if upto > self.slot_tokens:
            self._refused_total += 1
            return None
        holding = self._held.get(request.rid)
        if holding is not None:
            return holding.allocation
        if len(self._free) <= -(-reserve // self.slot_tokens):
            self._refused_total += 1
            return None
        slot = heapq.heappop(self._free)
        allocation = Allocation(
            slot=slot, slot_generation=self._generation[slot], num_tokens=self.slot_tokens
        )
        self._generation[slot] += 1
        self._held[request.rid] = _Holding(allocation)
        self._allocated_total += 1
        return allocation

    def settle(self, request: Request, settled: int, step: int) -> None:
        """Notes that the first `settled` tokens of a request are final.

        Args:
            request: The request; one that holds nothing is ignored.
            settled: Tokens that are final.
            step: The step that made them so.
        """
        holding = self._held.get(request.rid)
        if holding is not None:
            holding.settled = settled

    def release(self, request: Request, after_step: int) -> None:
        """Takes a slot back once step `after_step` was collected, at once if it was already.

        Args:
            request: The request; one that holds nothing is ignored.
            after_step: The last step that may touch the slot.
        """
        holding = self._held.pop(request.rid, None)
        if holding is None:
            return
        if after_step <= self._last_done:
            heapq.heappush(self._free, holding.allocation.slot)
        else:
            self._quarantine.setdefault(after_step, []).append(holding.allocation.slot)

    def step_done(self, step: int) -> int:
        """Notes that a step, and so every earlier one, was collected.

        Args:
            step: Its id.

        Returns:
            How many slots left quarantine.
        """
        self._last_done = max(self._last_done, step)
        due = [key for key in self._quarantine if key <= step]
        count = 0
        for key in due:
            for slot in self._quarantine.pop(key):
                heapq.heappush(self._free, slot)
                count += 1
        return count

    def reset(self) -> None:
        """Takes every slot back, in whatever state the books are; what was given out before is void."""
        self._generation = [generation + 1 for generation in self._generation]
        self._free = list(range(self.num_slots))
        self._held.clear()
        self._quarantine.clear()

    def stats(self) -> CacheStats:
        """How full the cache is."""
        return CacheStats(
            num_slots=self.num_slots,
            free_slots=len(self._free),
            held_slots=len(self._held),
            quarantined_slots=sum(map(len, self._quarantine.values())),
            slot_tokens=self.slot_tokens,
            settled_tokens=sum(holding.settled for holding in self._held.values()),
            allocated_total=self._allocated_total,
            refused_total=self._refused_total,
        )

    def check(self) -> None:
        """Walks the books.

        Raises:
            InvariantBroken: A slot is lost, owned twice, or holds more than fits.
        """
        owners = [("the free list", slot) for slot in self._free]
        owners += [(f"request {rid!r}", h.allocation.slot) for rid, h in self._held.items()]
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
        for rid, holding in self._held.items():
            if not 0 <= holding.settled <= self.slot_tokens:
                raise InvariantBroken(
                    f"request {rid!r} has {holding.settled} settled tokens in a slot of "
                    f"{self.slot_tokens}."
                )
            slot, generation = holding.allocation.slot, holding.allocation.slot_generation
            if self._generation[slot] != generation + 1:
                raise InvariantBroken(
                    f"request {rid!r} holds generation {generation} of slot {slot}, which was given "
                    f"out {self._generation[slot]} times."
                )
        if any(step <= self._last_done for step in self._quarantine):
            raise InvariantBroken(
                f"slots wait for steps {sorted(self._quarantine)}, and step {self._last_done} is done."
            )

    def __repr__(self) -> str:
        return (
            f"SlotCacheManager({self.num_slots} slots of {self.slot_tokens} tokens, "
            f"{len(self._free)} free)"
        )
