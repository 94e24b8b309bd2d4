"""Which window rows host memory holds."""

from __future__ import annotations

from deepinfer.cache._lru_slots import LruSlots
from deepinfer.cache.index_entry import IndexEntry
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["WindowSlots"]


class WindowSlots(LruSlots[IndexEntry]):
    """Index of fixed-size places for the window rows before the end of a block, by that block's entry.

    Args:
        num_slots: Places in all, from 0.
        ttl_s: Seconds after its last use from which a place is not found any more, or None for no limit.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, num_slots: int, ttl_s: float | None = None) -> None:
        super().__init__(checks.check_int("num_window_slots", num_slots, 0, 1_000_000, ConfigError))
        self.ttl_s = checks.optional(
            ttl_s,
            lambda value: checks.check_float(
                "window_ttl_s", value, 0.0, 1e9, ConfigError, open_low=True
            ),
        )
        self._used_s: dict[int, float] = {}

    def note_use(self, slot: int, now: float) -> None:
        """Makes a place the most recently used one.

        Args:
            slot: The place.
            now: Time in seconds.
        """
        self.touch(slot)
        self._used_s[slot] = now

    def is_fresh(self, slot: int, now: float) -> bool:
        """Whether a place may still be used.

        Args:
            slot: The place.
            now: Time in seconds.

        Returns:
            Whether its time to live has not passed.
        """
        return self.ttl_s is None or now - self._used_s[slot] <= self.ttl_s
