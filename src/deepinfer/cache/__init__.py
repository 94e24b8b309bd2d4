"""Who holds which room of the key-value cache, and which prefixes can be found in it.

`BlockCacheManager` hands out blocks and shares those of equal prefixes; `SlotCacheManager` gives each request one
contiguous slot. They keep books only: the tensors belong to the runner, so this package needs the standard library
alone. Their parts work on their own: `BlockPool` (who holds which block), `BlockHasher` (names of blocks),
`PrefixIndex` (which block continues which prefix), `HostTier` and `WindowSlots` (what host memory holds),
`ReplayPolicy` (what has to be run again after a hit), and `CacheLayout` (bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.cache.block_keys import BlockHasher as BlockHasher
    from deepinfer.cache.block_keys import CacheIdentity as CacheIdentity
    from deepinfer.cache.block_keys import MediaSpan as MediaSpan
    from deepinfer.cache.block_keys import block_key as block_key
    from deepinfer.cache.block_pool import BlockPool as BlockPool
    from deepinfer.cache.events import BlockRemoved as BlockRemoved
    from deepinfer.cache.events import BlockStored as BlockStored
    from deepinfer.cache.events import CacheCleared as CacheCleared
    from deepinfer.cache.host_tier import HostTier as HostTier
    from deepinfer.cache.layout import CacheGroupSpec as CacheGroupSpec
    from deepinfer.cache.layout import CacheLayout as CacheLayout
    from deepinfer.cache.manager import BlockCacheManager as BlockCacheManager
    from deepinfer.cache.prefix_index import PrefixIndex as PrefixIndex
    from deepinfer.cache.replay import ReplayPolicy as ReplayPolicy
    from deepinfer.cache.slot_pool import SlotPool as SlotPool
    from deepinfer.cache.slots import SlotCacheManager as SlotCacheManager
    from deepinfer.cache.stats import CacheStats as CacheStats
    from deepinfer.cache.window_slots import WindowSlots as WindowSlots

_EXPORTS = {
    "BlockCacheManager": "deepinfer.cache.manager",
    "BlockHasher": "deepinfer.cache.block_keys",
    "BlockPool": "deepinfer.cache.block_pool",
    "BlockRemoved": "deepinfer.cache.events",
    "BlockStored": "deepinfer.cache.events",
    "CacheCleared": "deepinfer.cache.events",
    "CacheGroupSpec": "deepinfer.cache.layout",
    "CacheIdentity": "deepinfer.cache.block_keys",
    "CacheLayout": "deepinfer.cache.layout",
    "CacheStats": "deepinfer.cache.stats",
    "HostTier": "deepinfer.cache.host_tier",
    "MediaSpan": "deepinfer.cache.block_keys",
    "PrefixIndex": "deepinfer.cache.prefix_index",
    "ReplayPolicy": "deepinfer.cache.replay",
    "SlotCacheManager": "deepinfer.cache.slots",
    "SlotPool": "deepinfer.cache.slot_pool",
    "WindowSlots": "deepinfer.cache.window_slots",
    "block_key": "deepinfer.cache.block_keys",
}

__all__ = [
    "BlockCacheManager",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheGroupSpec",
    "CacheIdentity",
    "CacheLayout",
    "CacheStats",
    "HostTier",
    "MediaSpan",
    "PrefixIndex",
    "ReplayPolicy",
    "SlotCacheManager",
    "SlotPool",
    "WindowSlots",
    "block_key",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
