"""Cache content as bytes, to be kept elsewhere and put back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken, ShapeError
from deepinfer.models.deepseek_v41.block_table import BlockTable
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.narrowing import window_spare
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.row_formats import RowFormats, block_bytes, saved_windows_bytes
from deepinfer.models.deepseek_v41.row_storage import PlainRows

__all__ = ["SavedRows"]


class SavedRows:
    """The part of a `SlotCache` that turns rows into bytes and back.

    Bytes are in the published formats, whatever the cache holds its rows in; where the model does not round, they are
    the rows themselves. What was saved and loaded reads as the same bits.

    Attributes:
        window_layers: Layers, from 0 on, whose windows are saved.
        formats: Formats of the bytes.
    """

    config: DeepseekV41Config
    device: torch.device
    formats: RowFormats
    full_spans: list[tuple[int, int]]
    lengths: list[int]
    ring_size: int
    rows: PlainRows | PackedRows
    table: BlockTable
    window_layers: int
    window_starts: list[int]
    _high_water: list[int]

    @property
    def block_bytes(self) -> int:
        """Bytes that `save_block` gives."""
        return block_bytes(self.config, self.table.block_size, self.formats)

    @property
    def windows_bytes(self) -> int:
        """Bytes that `save_windows` gives."""
        return saved_windows_bytes(self.config, self.window_layers, self.formats)

    def save_block(self, block: int) -> Tensor:
        """The pool rows and index keys of a block: source by source, its pool rows, then its keys.

        Args:
            block: The block.

        Returns:
            Shape [block_bytes], uint8, on the cache's device; a copy.

        Raises:
            InvariantBroken: There is no such block.
        """
        self._check_block(block)
        return self.rows.block_bytes(block)

    def load_block(self, block: int, data: Tensor) -> None:
        """Puts back what `save_block` gave, of this cache or of one of the same model and block size.

        Args:
            block: The block.
            data: Shape [block_bytes], uint8, on any device.

        Raises:
            InvariantBroken: There is no such block.
            ShapeError: The data has another size.
        """
        self._check_block(block)
        self.rows.set_block_bytes(block, self._checked(data, self.block_bytes))

    def save_windows(self, slot: int, end_position: int) -> Tensor:
        """Window rows of the first `window_layers` layers before a position, layer by layer, oldest first.

        These are the window and as many rows as one verify step writes. Positions before 0, and the oldest rows when
        the slot does not have them, are zeros.

        Args:
            slot: The slot.
            end_position: Position behind the last row, at most the tokens that the slot holds.

        Returns:
            Shape [windows_bytes], uint8, on the cache's device; a copy.

        Raises:
            InvariantBroken: A row of the window before `end_position` was not written, or was written over.
        """
        positions = self._saved_positions(end_position)
        oldest = max(self.window_starts[slot], self._high_water[slot] - self.ring_size, 0)
        lowest = max(end_position - self.config.sliding_window + 1, 0)
        if not 0 <= end_position <= self.lengths[slot] or lowest < min(oldest, end_position):
            raise InvariantBroken(
                f"The windows before position {end_position} of slot {slot} cannot be saved: it holds "
                f"{self.lengths[slot]} tokens, and window rows from position {oldest} on."
            )
        index = slot * self.ring_size + np.maximum(positions, 0) % self.ring_size
        data = self.rows.window_bytes(self.window_layers, torch.from_numpy(index).to(self.device))
        missing = int((positions < oldest).sum())
        if missing:
            data[:, :missing] = 0
        return data.flatten()

    def load_windows(self, slot: int, end_position: int, data: Tensor) -> None:
        """Puts back what `save_windows` gave, as the windows of a slot that continues at the same position.

        Args:
            slot: The slot; it holds `end_position` tokens, as after `adopt_prefix`.
            end_position: Position behind the last row.
            data: Shape [windows_bytes], uint8, on any device.

        Raises:
            InvariantBroken: The slot holds another number of tokens.
            ShapeError: The data has another size.
        """
        if self.lengths[slot] != end_position:
            raise InvariantBroken(
                f"Slot {slot} holds {self.lengths[slot]} tokens and cannot get the windows before position "
                f"{end_position}; adopt the prefix first."
            )
        positions = self._saved_positions(end_position)
        data = self._checked(data, self.windows_bytes).view(self.window_layers, len(positions), -1)
        known = int((positions < 0).sum())
        index = slot * self.ring_size + positions[known:] % self.ring_size
        self.rows.set_window_bytes(torch.from_numpy(index).to(self.device), data[:, known:])
        first = max(end_position - self.config.sliding_window + 1, 0)
        self.window_starts[slot] = first
        if self.window_layers == self.config.num_hidden_layers:
            self.full_spans[slot] = (first, end_position)

    def _saved_positions(self, end_position: int) -> np.ndarray:
        count = self.config.sliding_window + window_spare(self.config)
        return np.arange(end_position - count, end_position)

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self.table.num_blocks:
            raise InvariantBroken(
                f"There is no block {block}; the cache has blocks 0 to {self.table.num_blocks - 1}."
            )

    def _checked(self, data: Tensor, size: int) -> Tensor:
        if data.dtype != torch.uint8 or data.shape != (size,):
            raise ShapeError(
                f"data has shape {tuple(data.shape)} and dtype {data.dtype}; it must be [{size}], uint8, as it was "
                "saved.",
                argument="data", expected=(size,), found=tuple(data.shape),
            )  # fmt: skip
        return data.to(self.device)
