"""The key-value cache of toy models: integers in blocks and rings, which refuses every wrong read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41.narrowing import Narrowing

__all__ = ["MODULUS", "ToyCache"]

MODULUS = 2**31 - 1
_EMPTY = -1
_WINDOW_LAYERS = 2


class ToyCache:
    """One integer a token and one an even-odd pair of tokens, in blocks; two a token of a sliding window, by slot.

    A block remembers the token ids that its rows were made of, so a row of another sequence, or one that was never
    written, is refused when it is read. Window rows remember their position. With a window the rows in blocks depend
    on the window rows before them, so what a bounded replay writes differs from what a full run writes.

    Args:
        num_slots: Slots.
        max_tokens: Tokens of one slot.
        max_step_tokens: Tokens that one slot may run in one step; only windows need to know.
        num_blocks: Blocks, or None for one block a slot.
        block_size: Tokens in one block, even; unused without `num_blocks`.
        window: Width of the window in tokens, or 0 without one.
        narrows: Whether tokens before `Segment.full_start` give no output.

    Attributes:
        rows: Value of each token, shape [blocks, block_size], int64, -1 where nothing was written.
        pairs: Value of each pair, shape [blocks, block_size // 2], int64, -1 where nothing was written.
        tables: Blocks of each slot.
        lengths: Tokens held, one a slot.
        draft_lengths: Tokens in the draft's context, one a slot.
        window_starts: Lowest position whose window rows may be read, one a slot.
        ring_size: Rows of a window ring.
        narrowing: What the engine reads off a cache about `narrows` and exact replays.

    Raises:
        ConfigError: The block size is odd.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        max_step_tokens: int = 512,
        *,
        num_blocks: int | None = None,
        block_size: int = 128,
        window: int = 0,
        narrows: bool = False,
    ) -> None:
        if num_blocks is None:
            block_size = max_tokens + max_tokens % 2
        if block_size % 2:
            checks.fail("block_size", block_size, "even", ConfigError)
        count = num_slots if num_blocks is None else num_blocks
        self.num_slots, self.num_blocks = num_slots, count
        self.max_tokens, self.block_size, self.window = max_tokens, block_size, window
        self.is_identity = num_blocks is None
        self.rows = torch.full((count, block_size), _EMPTY, dtype=torch.int64)
        self.pairs = torch.full((count, block_size // 2), _EMPTY, dtype=torch.int64)
        self._row_ids = torch.full((count, block_size), _EMPTY, dtype=torch.int64)
        self._tokens = torch.full((num_slots, max_tokens), _EMPTY, dtype=torch.int64)
        self.ring_size = window + max_step_tokens if window else 0
        self._rings = torch.zeros((num_slots, _WINDOW_LAYERS, self.ring_size), dtype=torch.int64)
        self._ring_positions = torch.full((num_slots, self.ring_size), _EMPTY, dtype=torch.int64)
        self.tables = [[slot] if num_blocks is None else [] for slot in range(num_slots)]
        self.lengths = [0] * num_slots
        self.adopted = [0] * num_slots
        self.draft_lengths = [0] * num_slots
        self.window_starts = [0] * num_slots
        reason = "" if narrows else "a toy that was not made to"
        self.narrowing = Narrowing(0 if narrows else None, reason, _WINDOW_LAYERS)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return 8 * (self.rows.numel() + self.pairs.numel() + self._rings.numel())

    @property
    def block_bytes(self) -> int:
        """Bytes of one saved block."""
        return 8 * (2 * self.block_size + self.block_size // 2)

    @property
    def windows_bytes(self) -> int:
        """Bytes of one saved window."""
        return 8 * _WINDOW_LAYERS * self.window

    @property
    def window_rows(self) -> int:
        """Rows of one saved window."""
        return self.window

    def apply_updates(self, block_updates: Iterable[BlockUpdate]) -> None:
        """Writes block table entries.

        Args:
            block_updates: New entries; one whose `first` is 0 starts a new table.

        Raises:
            InvariantBroken: An update does not fit its table, or names no block.
        """
        for update in block_updates:
            table = self.tables[update.slot]
            if not (update.first == 0 or update.first == len(table)) or any(
                not 0 <= block < self.num_blocks for block in update.blocks
            ):
                raise InvariantBroken(f"{update} does not fit the table {table}.")
            self.tables[update.slot] = [*table[: update.first], *update.blocks]

    def reset(self, slot: int) -> None:
        """Empties a slot; its blocks stay as they are, unless each slot has one of its own.

        Args:
            slot: Its number.
        """
        if self.is_identity:
            self.rows[slot] = self.pairs[slot] = self._row_ids[slot] = _EMPTY
        self._tokens[slot] = self._ring_positions[slot] = _EMPTY
        self.lengths[slot] = self.adopted[slot] = 0
        self.draft_lengths[slot] = self.window_starts[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Takes back the rows past a length.

        Args:
            slot: Number of the slot.
            length: Tokens to keep.

        Raises:
            InvariantBroken: The slot holds fewer.
        """
        held = self.lengths[slot]
        if not 0 <= length <= held:
            raise InvariantBroken(f"slot {slot} holds {held} tokens and cannot keep {length}.")
        if length < held:
            block, at = self._where(slot, torch.arange(length, held))
            self.rows[block, at] = self._row_ids[block, at] = _EMPTY
            self.pairs[block, at // 2] = _EMPTY  # half a pair counts for nothing
            self._tokens[slot, length:held] = _EMPTY
        self.lengths[slot] = length
        self.draft_lengths[slot] = min(self.draft_lengths[slot], length)

    def adopt_prefix(self, slot: int, token_ids: Sequence[int] | Tensor) -> None:
        """Declares a prefix whose rows an empty slot has in its blocks.

        Args:
            slot: The slot.
            token_ids: The prefix.

        Raises:
            InvariantBroken: The slot is not empty.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        if self.lengths[slot]:
            raise InvariantBroken(f"slot {slot} holds {self.lengths[slot]} tokens.")
        self._tokens[slot, : len(ids)] = ids
        self.lengths[slot] = self.adopted[slot] = self.window_starts[slot] = len(ids)

    def write(
        self,
        slot: int,
        start: int,
        token_ids: Tensor,
        *,
        window_start: int = 0,
        pool_start: int = 0,
    ) -> None:
        """Writes the rows of consecutive tokens and the pairs that they complete.

        Args:
            slot: Number of the slot.
            start: First position.
            token_ids: Shape [tokens], int64.
            window_start: Lowest position whose window rows are read.
            pool_start: Lowest position whose rows in blocks are written.

        Raises:
            InvariantBroken: The rows do not start where the slot ends, do not fit, or would overwrite a shared prefix.
        """
        held, adopted, stop = self.lengths[slot], self.adopted[slot], start + len(token_ids)
        is_replay = start < held == adopted and pool_start == adopted and window_start == start
        if start != held and not is_replay:
            raise InvariantBroken(
                f"slot {slot} holds {held} tokens and a segment starts at {start}."
            )
        room = min(self.max_tokens, len(self.tables[slot]) * self.block_size)
        if stop > room:
            raise InvariantBroken(f"slot {slot} has room for {room} tokens, not for {stop}.")
        if start < adopted != pool_start:
            raise InvariantBroken(f"slot {slot} would overwrite its prefix of {adopted} tokens.")
        known = self._tokens[slot, start : min(stop, adopted)]
        if not torch.equal(known, token_ids[: len(known)]):
            raise InvariantBroken(f"slot {slot} replays other tokens than its prefix.")
        self._tokens[slot, start:stop] = token_ids
        self.window_starts[slot] = window_start
        at = torch.arange(start, stop)
        values = (token_ids * 1_103_515_245 + at * 12_345 + 40_503) % MODULUS
        if self.window:
            values = self._write_windows(slot, at, values)
        skip = max(0, pool_start - start)
        if skip < len(at):
            at, values = at[skip:], values[skip:]
            block, row = self._where(slot, at)
            self.rows[block, row] = values
            self._row_ids[block, row] = token_ids[skip:]
            odd = at[at % 2 == 1]
            block, row = self._where(slot, odd)
            self.pairs[block, row // 2] = (
                self.rows[block, row - 1] * self.rows[block, row] % MODULUS
            )
        self.lengths[slot] = stop

    def digests(self, slot: int, start: int, stop: int) -> Tensor:
        """A number for each position that depends on every row and pair up to it, and on its window.

        Args:
            slot: Number of the slot.
            start: First position.
            stop: Position after the last.

        Returns:
            Shape [stop - start], int64, from 0 to 2**31 - 2.

        Raises:
            InvariantBroken: A row that was never written, or one of another sequence, would be read.
        """
        block, row = self._where(slot, torch.arange(stop))
        rows, ids = self.rows[block, row], self._row_ids[block, row]
        pairs = self.pairs[block, row // 2][1::2]
        if bool((rows == _EMPTY).any()) or bool((pairs == _EMPTY).any()):
            raise InvariantBroken(f"slot {slot} has unwritten rows before position {stop}.")
        if not torch.equal(ids, self._tokens[slot, :stop]):
            raise InvariantBroken(
                f"slot {slot} has rows of another sequence before position {stop}."
            )
        at = torch.arange(start, stop).unsqueeze(1)
        total = _weigh(rows, at - torch.arange(stop), 48271)
        total += _weigh(pairs, at - (2 * torch.arange(stop // 2) + 1), 69621)
        if self.window:
            total += self._window_sum(slot, at[:, 0], 1, 16_807)
        return total % MODULUS

    def has_windows(self, slot: int, position: int) -> bool:
        """Whether the window rows that a position reads are still there, and not overwritten by later ones."""
        if not self.window:
            return True
        first = max(self.window_starts[slot], position - self.window + 1)
        wanted = torch.arange(first, position + 1)
        return torch.equal(self._ring_positions[slot, wanted % self.ring_size], wanted)

    def copy_of_slot(self, slot: int, spare: int) -> ToyCache:
        """A cache that holds what a slot holds, to try tokens on.

        Args:
            slot: The slot.
            spare: Tokens that will be added.

        Returns:
            A cache with this one slot.
        """
        length = self.lengths[slot]
        out = ToyCache(1, length + spare, self.ring_size - self.window, window=self.window)
        block, row = self._where(slot, torch.arange(length))
        out.rows[0, :length] = self.rows[block, row]
        out._row_ids[0, :length] = self._row_ids[block, row]
        out.pairs[0, : length // 2] = self.pairs[block, row // 2][1::2]
        out._tokens[0, :length] = self._tokens[slot, :length]
        out._rings[0], out._ring_positions[0] = self._rings[slot], self._ring_positions[slot]
        out.lengths[0], out.window_starts[0] = length, self.window_starts[slot]
        return out

    def save_block(self, block: int) -> Tensor:
        """The bytes of a block, shape [block_bytes], uint8."""
        return _bytes(self.rows[block], self._row_ids[block], self.pairs[block])

    def load_block(self, block: int, data: Tensor) -> None:
        """Fills a block with what `save_block` gave."""
        size = self.block_size
        values = data.clone().view(torch.int64)
        self.rows[block], self._row_ids[block] = values[:size], values[size : 2 * size]
        self.pairs[block] = values[2 * size :]

    def save_windows(self, slot: int, end: int) -> Tensor:
        """The bytes of the window rows before a position of a slot, shape [window_bytes], uint8.

        Raises:
            InvariantBroken: The slot does not hold them any more.
        """
        return _bytes(self._rings[slot][:, self._ring_places(slot, end)].flatten())

    def load_windows(self, slot: int, end: int, data: Tensor) -> None:
        """Fills the window rows before a position of a slot with what `save_windows` gave."""
        positions = torch.arange(max(0, end - self.window), end)
        values = data.clone().view(torch.int64)[: _WINDOW_LAYERS * len(positions)]
        places = positions % self.ring_size
        self._rings[slot][:, places] = values.view(_WINDOW_LAYERS, -1)
        self._ring_positions[slot, places] = positions

    def _where(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.tensor(self.tables[slot], dtype=torch.int64)
        return table[positions // self.block_size], positions % self.block_size

    def _write_windows(self, slot: int, at: Tensor, values: Tensor) -> Tensor:
        """Two layers: the first holds the tokens' values, the second sums of its window; returns the rows."""
        places = at % self.ring_size
        self._ring_positions[slot, places] = at
        self._rings[slot, 0, places] = values
        sums = self._window_sum(slot, at, 0, 630_360_016)
        self._rings[slot, 1, places] = (values + sums) % MODULUS
        return (values + 3 * sums) % MODULUS

    def _window_sum(self, slot: int, at: Tensor, layer: int, factor: int) -> Tensor:
        distance = torch.arange(self.window)
        wanted = at.unsqueeze(1) - distance
        valid = wanted >= self.window_starts[slot]
        places = wanted.clamp(min=0) % self.ring_size
        if bool((valid & (self._ring_positions[slot][places] != wanted)).any()):
            raise InvariantBroken(f"slot {slot} lacks window rows before position {int(at[-1])}.")
        weights = (distance * factor + 7) % MODULUS
        found = self._rings[slot, layer][places]
        return ((found * weights) % MODULUS).masked_fill(~valid, 0).sum(1) % MODULUS

    def _ring_places(self, slot: int, end: int) -> Tensor:
        positions = torch.arange(max(0, end - self.window), end)
        places = positions % self.ring_size
        if not torch.equal(self._ring_positions[slot, places], positions):
            raise InvariantBroken(f"slot {slot} lacks window rows before position {end}.")
        return places

    def __repr__(self) -> str:
        return f"ToyCache({self.num_slots} slots, {self.num_blocks} blocks of {self.block_size})"


def _bytes(*parts: Any) -> Tensor:
    return torch.cat(parts).view(torch.uint8)


def _weigh(values: Tensor, distance: Tensor, factor: int) -> Tensor:
    weights = (distance * factor + 11) % MODULUS
    return ((values * weights) % MODULUS).masked_fill(distance < 0, 0).sum(1) % MODULUS
