"""What `deepinfer.testing.ShadowBooks` is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.core.plan import StepPlan

__all__ = ["BlockContent", "Seat", "ShadowFlight"]


@dataclass(slots=True, eq=False)
class Seat:
    """A request in its slot.

    Attributes:
        rid: Its id.
        slot: Its slot.
        generation: Generation of the slot.
        epoch: Epoch of the request.
        settled: Tokens whose results were applied.
        adopted: Tokens taken over from the cache.
    """

    rid: str
    slot: int
    generation: int
    epoch: int
    settled: int
    adopted: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What tells it from every other seat."""
        return (self.rid, self.slot, self.generation, self.epoch)


@dataclass(slots=True, eq=False)
class ShadowFlight:
    """A launched step without a result.

    Attributes:
        plan: Its plan.
        blocks: Blocks that its rows read or write.
        kept: Keys of seats that were lost since and whose tokens still count.
    """

    plan: StepPlan
    blocks: frozenset[int]
    kept: set[tuple[str, int, int, int]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class BlockContent:
    """What settled steps wrote into a block.

    Attributes:
        prefix: Token ids before the block.
        ids: Token ids in it, -1 where nothing was written.
    """

    prefix: tuple[int, ...]
    ids: list[int]
