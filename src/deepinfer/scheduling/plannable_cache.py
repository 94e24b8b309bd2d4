"""What the scheduler asks of a cache manager."""

from __future__ import annotations

from typing import Protocol

from deepinfer.core.protocols import Allocation, CacheManager
from deepinfer.core.types import Request

__all__ = ["PlannableCache"]


class PlannableCache(CacheManager, Protocol):
    """A cache manager that can say what it would give out."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it can hold in all."""
        ...

    @property
    def num_held(self) -> int:
        """Requests that hold a slot."""
        ...

    def holding(self, request: Request) -> Allocation | None:
        """What a request holds."""
        ...

    def peek(self, count: int) -> tuple[tuple[int, int], ...]:
        """Slot and generation of up to `count` next allocations; changes nothing."""
        ...

    def reset(self) -> None:
        """Takes every slot back, in whatever state the books are."""
        ...
