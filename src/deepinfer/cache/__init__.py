"""Who holds which room of the key-value cache.

`SlotCacheManager` gives each request one contiguous slot. It keeps books only: the tensors belong to the
runner, so this package needs the standard library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.cache.slots import CacheStats as CacheStats
    from deepinfer.cache.slots import SlotCacheManager as SlotCacheManager

_EXPORTS = {
    "CacheStats": "deepinfer.cache.slots",
    "SlotCacheManager": "deepinfer.cache.slots",
}

__all__ = ["CacheStats", "SlotCacheManager"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
