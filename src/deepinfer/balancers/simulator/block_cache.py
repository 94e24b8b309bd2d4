"""The prefix cache of a simulated engine: which blocks it holds, and which it gives up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["LruBlocks"]


class LruBlocks:
    """Blocks by key, the least recently used given up first, tails of a prefix before heads.

    Args:
        capacity: Most blocks.

    Raises:
        ConfigError: The capacity is negative.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = checks.check_int("capacity", capacity, 0, 2**40, ConfigError)
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def hit(self, keys: Sequence[Hashable]) -> int:
        """Leading blocks that are held; nothing is touched.

        Args:
            keys: Keys of a prompt, in order.

        Returns:
            Their number.
        """
        blocks = self._blocks
        for at, key in enumerate(keys):
            if key not in blocks:
                return at
        return len(keys)

    def use(self, keys: Sequence[Hashable]) -> tuple[list[Hashable], list[Hashable]]:
        """Stores and touches the blocks of a prefix, heads last, so that tails are given up first.

        Args:
            keys: Keys of the prefix from its first block on.

        Returns:
            The blocks that are new, parents first, and those that were given up for them. With more keys than room
            the tail is not stored.
        """
        blocks = self._blocks
        keys = keys[: self.capacity]
        new = [key for key in keys if key not in blocks]
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        removed = []
        while len(blocks) > self.capacity:
            removed.append(blocks.popitem(last=False)[0])
        return new, removed

    def clear(self) -> None:
        """Forgets everything."""
        self._blocks.clear()
