"""Which blocks host memory holds."""

from __future__ import annotations

from deepinfer.cache._lru_slots import LruSlots
from deepinfer.cache.index_entry import IndexEntry
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["HostTier"]


class HostTier(LruSlots[IndexEntry]):
    """Index of host blocks: entries by host block, least recently used first.

    A host block that a request is about to read is pinned until its copy is in a plan. Copies are carried out in the
    order of the plans, so a later copy may then write over it.

    Args:
        num_blocks: Host blocks in all, from 0.

    Raises:
        ConfigError: The number is out of range.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(checks.check_int("num_host_blocks", num_blocks, 0, 2**31 - 1, ConfigError))
