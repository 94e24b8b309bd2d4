"""A cache manager with one contiguous slot a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.cache.slot_pool import SlotPool
from deepinfer.cache.stats import CacheStats
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.plan import BlockUpdate, CacheCopy
from deepinfer.core.protocols import Allocation, Hit
from deepinfer.core.types import Request

__all__ = ["SlotCacheManager"]


@dataclass(slots=True)
class _Holding:
    allocation: Allocation
    settled: int = 0


class SlotCacheManager:
    """Gives each request one slot that holds up to `slot_tokens` tokens.

    To a scheduler a slot is a single block of `slot_tokens` tokens, so `block_size` is `slot_tokens` and `num_blocks`
    is `num_slots`. Nothing is shared between requests: `lookup` never finds anything, and there are no block tables
    and no copies. The free slot with the lowest number is given out first. A slot that is given back while a step
    may still read it waits in quarantine until that step was collected.

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
        self._slots = SlotPool(num_slots)
        self.num_slots = self._slots.num_slots
        self.slot_tokens = checks.check_int("slot_tokens", slot_tokens, 1, 2**31 - 1, ConfigError)
        self.block_size = self.slot_tokens
        self.num_blocks = self.num_slots
        self._held: dict[str, _Holding] = {}
        self._allocated_total = 0
        self._refused_total = 0

    @property
    def num_held(self) -> int:
        """Requests that hold a slot."""
        return len(self._held)

    @property
    def num_free_blocks(self) -> int:
        """Slots that may be given out now."""
        return self._slots.num_free

    @property
    def num_quarantined_blocks(self) -> int:
        """Slots given back that a step in flight may still touch."""
        return self._slots.num_quarantined

    @property
    def capacity_tokens(self) -> int:
        """Most tokens that one request can hold."""
        return self.slot_tokens

    def peek(self, count: int) -> tuple[tuple[int, int], ...]:
        """What the next allocations of new requests will return; changes nothing.

        Args:
            count: How many, from 0.

        Returns:
            Up to `count` pairs of slot and slot generation, in the order in which they will be given out.
        """
        return self._slots.peek(count)

    def holding(self, request: Request) -> Allocation | None:
        """What a request holds.

        Args:
            request: The request.

        Returns:
            Its slot, or None.
        """
        holding = self._held.get(request.rid)
        return None if holding is None else holding.allocation

    def lookup(self, request: Request, token_ids: Sequence[int], limit: int) -> Hit:
        """Finds nothing: slots are private.

        Args:
            request: The request.
            token_ids: Its tokens.
            limit: Most tokens to find.

        Returns:
            An empty hit.
        """
        return Hit()

    def blocks_for(self, request: Request, hit: Hit | None, upto: int) -> int:
        """Slots that the request would take.

        Args:
            request: The request.
            hit: Ignored.
            upto: Tokens to make room for.

        Returns:
            0 when it has a slot, else 1.
        """
        return 0 if request.rid in self._held else 1

    def freed_by(self, request: Request) -> int:
        """Slots that come back when a request is released; changes nothing.

        Args:
            request: The request.

        Returns:
            1 when it holds one, else 0.
        """
        return int(request.rid in self._held)

    def allocate(
        self, request: Request, hit: Hit | None, upto: int, reserve: int = 0
    ) -> Allocation | None:
        """Gives a request a slot; asking again for the same one returns the slot that it has.

        Args:
            request: The request.
            hit: Ignored.
            upto: Tokens to make room for, at most `slot_tokens`.
            reserve: Slots to leave free for others.

        Returns:
            The slot, or None, with nothing changed, when none is free or `upto` exceeds a slot.
        """
        if upto > self.slot_tokens:
            self._refused_total += 1
            return None
        holding = self._held.get(request.rid)
        if holding is not None:
            return holding.allocation
        if self._slots.num_free <= reserve:
            self._refused_total += 1
            return None
        slot, generation = self._slots.take()
        allocation = Allocation(slot=slot, slot_generation=generation, num_tokens=self.slot_tokens)
        self._held[request.rid] = _Holding(allocation)
        self._allocated_total += 1
        return allocation

    def take_updates(self) -> tuple[tuple[BlockUpdate, ...], tuple[CacheCopy, ...]]:
        """Nothing: a slot is its own table.

        Returns:
            No updates and no copies.
        """
        return (), ()

    def settle(self, request: Request, token_ids: Sequence[int], settled: int, step: int) -> None:
        """Notes that the first `settled` tokens of a request are final.

        Args:
            request: The request; one that holds nothing is ignored.
            token_ids: Its tokens.
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
        if holding is not None:
            self._slots.give_back(holding.allocation.slot, after_step)

    def load_failed(self, request: Request) -> None:
        """Does nothing: there is no host memory to load from.

        Args:
            request: The request.
        """

    def step_done(self, step: int) -> int:
        """Notes that a step, and so every earlier one, was collected.

        Args:
            step: Its id.

        Returns:
            How many slots left quarantine.
        """
        return self._slots.step_done(step)

    def reset(self) -> None:
        """Takes every slot back, in whatever state the books are; what was given out before is void."""
        self._slots.reset()
        self._held.clear()

    def stats(self) -> CacheStats:
        """How full the cache is."""
        return CacheStats(
            num_slots=self.num_slots,
            free_slots=self._slots.num_free,
            held_slots=len(self._held),
            quarantined_slots=self._slots.num_quarantined,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=self._slots.num_free,
            held_blocks=len(self._held),
            quarantined_blocks=self._slots.num_quarantined,
            settled_tokens=sum(holding.settled for holding in self._held.values()),
            allocated_total=self._allocated_total,
            refused_total=self._refused_total,
        )

    def check(self) -> None:
        """Walks the books.

        Raises:
            InvariantBroken: A slot is lost, owned twice, or holds more than fits.
        """
        self._slots.check(
            (rid, holding.allocation.slot, holding.allocation.slot_generation)
            for rid, holding in self._held.items()
        )
        for rid, holding in self._held.items():
            if not 0 <= holding.settled <= self.slot_tokens:
                raise InvariantBroken(
                    f"request {rid!r} has {holding.settled} settled tokens in a slot of "
                    f"{self.slot_tokens}."
                )

    def __repr__(self) -> str:
        return (
            f"SlotCacheManager({self.num_slots} slots of {self.slot_tokens} tokens, "
            f"{self._slots.num_free} free)"
        )
