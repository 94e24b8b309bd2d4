"""What a cache tells routers and mirrors: which blocks can be found, and which no longer.

The names follow the cache events of other engines. They are recorded only when a sink was given.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core.events import Event

__all__ = ["BlockRemoved", "BlockStored", "CacheCleared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored(Event):
    """A block can be found from now on.

    Attributes:
        key: Its key.
        parent: Key of the block before it, or the root key.
        token_ids: Its token ids as little-endian int32 bytes.
        tier: Where it is: "device" or "host".
    """

    key: bytes
    parent: bytes
    token_ids: bytes
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved(Event):
    """A block cannot be found in a tier any more.

    Attributes:
        key: Its key.
        tier: Where it was: "device" or "host".
    """

    key: bytes
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared(Event):
    """Nothing that was stored before can be found any more, in any tier."""
