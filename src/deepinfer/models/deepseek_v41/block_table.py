"""Where the pool rows of a slot lie: the one place that turns a row of a slot into a row of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import BlockUpdate

__all__ = ["BlockTable", "flat_index"]

Array = TypeVar("Array", np.ndarray, Tensor)


def flat_index(table: Array, slots: Array, rows: Array, block_rows: int) -> Array:
    """Rows of a tensor of blocks for rows of slots; the same code for numpy on the host and torch on a device.

    Args:
        table: Block ids, shape [slots, blocks], int64.
        slots: Slots, int64; broadcasts against `rows`.
        rows: Rows within the slots' pools, int64.
        block_rows: Rows of one block.

    Returns:
        Indices into a tensor of shape [blocks * block_rows, ...], in the shape of `rows`.
    """
    if table.shape[1] == 1:
        return table[slots, 0] * block_rows + rows
    return table[slots, rows // block_rows] * block_rows + rows % block_rows


class BlockTable:
    """The blocks of every slot, on the host and mirrored on the device.

    A block holds `block_size` tokens of every pool. A cache without blocks is the special case of one block a slot,
    whose id is the slot's number.

    Attributes:
        block_size: Tokens in one block.
        num_blocks: Blocks in all.
        host: Block ids, shape [slots, blocks a slot], int64.
        device: The same on the device; the same memory on the CPU.
        counts: Entries of each slot that count.
        is_identity: Whether each slot is one block of its own.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        num_blocks: int | None,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Makes an empty table, or that of a cache without blocks.

        Args:
            num_slots: Slots.
            max_tokens: Tokens that one slot holds at most.
            num_blocks: Blocks, or None for one block a slot.
            block_size: Tokens in one block; with one block a slot, at least `max_tokens`.
            device: Where the mirror lies.
        """
        self.block_size = block_size
        self.is_identity = num_blocks is None
        self.num_blocks = num_slots if num_blocks is None else num_blocks
        width = -(-max_tokens // block_size)
        self.host = np.zeros((num_slots, width), dtype=np.int64)
        self.counts = [0] * num_slots
        if num_blocks is None:
            self.host[:, 0] = np.arange(num_slots)
            self.counts = [1] * num_slots
        self.device = torch.from_numpy(self.host).to(device)

    def tokens(self, slot: int) -> int:
        """Tokens for which a slot has blocks."""
        return self.counts[slot] * self.block_size

    def apply(self, updates: Iterable[BlockUpdate]) -> None:
        """Writes new entries.

        Args:
            updates: The entries, in order; an update whose `first` is 0 starts a new table.

        Raises:
            InvariantBroken: An update leaves a gap, is longer than a table, or names no slot or block.
        """
        changed: set[int] = set()
        for update in updates:
            slot, end = update.slot, update.first + len(update.blocks)
            slots, width = self.host.shape
            if self.is_identity or not 0 <= slot < slots:
                raise InvariantBroken(
                    f"{update} does not fit: the cache has slots 0 to {slots - 1}"
                    f"{' and no blocks' if self.is_identity else ''}."
                )
            held = self.counts[slot] if update.first else 0
            if not 0 <= update.first <= held or end > width:
                raise InvariantBroken(
                    f"{update} does not fit: slot {slot} has {held} of at most {width} blocks."
                )
            if (
                update.blocks
                and not 0 <= min(update.blocks) <= max(update.blocks) < self.num_blocks
            ):
                raise InvariantBroken(
                    f"{update} names a block that is not there; blocks are 0 to {self.num_blocks - 1}."
                )
            self.host[slot, update.first : end] = update.blocks
            self.counts[slot] = end
            changed.add(slot)
        if changed and self.device.device.type != "cpu":
            slots_changed = torch.tensor(sorted(changed), device=self.device.device)
            rows = torch.from_numpy(self.host[sorted(changed)]).to(self.device.device)
            self.device.index_copy_(0, slots_changed, rows)

    def blocks(self, slots: np.ndarray, count: int) -> np.ndarray:
        """The first `count` blocks of some slots, shape [slots, count]; what a slot lacks is any valid block."""
        return self.host[slots, :count]
