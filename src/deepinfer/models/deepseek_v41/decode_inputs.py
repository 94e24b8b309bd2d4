"""What a decode or verify step of fixed shape is told, as tensors that keep their addresses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.models.deepseek_v41.batch import Segment
from deepinfer.models.deepseek_v41.cache import SlotCache

__all__ = ["DecodeInputs", "cannot_decode", "row_values"]

Ints = NDArray[np.int64]

FIRST, SLOT, COUNT, WINDOW_FLOOR, FULL_FLOOR, FROM_FUTURE = range(6)
NUM_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Rows of one step: each of `num_rows` requests runs up to `tokens_per_row` consecutive tokens.

    A row that is not used has a count of 0, and tokens from a row's count on are padding: both are computed with, and
    written nowhere.

    Attributes:
        ids: Token ids, shape [rows, tokens per row], int64.
        values: First position, slot, tokens, lowest position whose window row may be read (in the layers below the
            narrowing and in those from it on), and whether the first id is the one sampled last for the slot; shape
            [rows, 6], int64.
    """

    ids: Tensor
    values: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, tokens_per_row: int, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> DecodeInputs:  # fmt: skip
        """Inputs in which no row is used.

        Args:
            num_rows: Rows.
            tokens_per_row: Tokens of a row.
            device: Where they lie.
            pinned: Whether host memory is page-locked, so that copies to a GPU do not wait.
        """
        options = {"dtype": torch.int64, "device": device, "pin_memory": pinned}
        return cls(
            torch.zeros(num_rows, tokens_per_row, **options),
            torch.zeros(num_rows, NUM_COLUMNS, **options),
        )

    @property
    def num_rows(self) -> int:
        """Rows, unused ones included."""
        return self.ids.shape[0]

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a row, padding included."""
        return self.ids.shape[1]

    def fill(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[int]]) -> None:
        """Writes rows and empties the rest; on the host.

        Args:
            ids: Known ids of each row, at most `tokens_per_row`.
            values: Columns of each row, see `row_values`.

        Raises:
            InvariantBroken: There are more rows or ids than fit.
        """
        if len(ids) > self.num_rows or max(map(len, ids), default=0) > self.tokens_per_row:
            raise InvariantBroken(
                f"{len(ids)} rows of up to {max(map(len, ids), default=0)} tokens do not fit inputs of "
                f"{self.num_rows} rows of {self.tokens_per_row}."
            )
        self.values.zero_()
        if not ids:
            return
        width = self.tokens_per_row
        padded = [[*row, *(0,) * (width - len(row))] for row in ids]
        self.ids[: len(ids)] = torch.tensor(padded, dtype=torch.int64)
        self.values[: len(ids)] = torch.tensor(values, dtype=torch.int64)

    def fill_tokens(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[int]]) -> None:
        """Writes requests of several tokens, each token as a row of its own, and empties the rest; on the host.

        Args:
            ids: Ids of each request's tokens.
            values: Columns of each request, see `row_values`.

        Raises:
            InvariantBroken: There are more tokens than rows.
        """
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        total = int(counts.sum())
        if total > self.num_rows or self.tokens_per_row > 1:
            raise InvariantBroken(
                f"{total} tokens do not fit inputs of {self.num_rows} rows of {self.tokens_per_row}."
            )
        rows = np.repeat(np.array(values, np.int64).reshape(len(ids), NUM_COLUMNS), counts, 0)
        step = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        rows[:, FIRST] += step
        rows[:, COUNT] = 1
        rows[step > 0, FROM_FUTURE] = 0
        self.ids.numpy()[:total, 0] = np.fromiter(
            itertools.chain.from_iterable(ids), np.int64, total
        )
        self.values.numpy()[:total] = rows
        self.values[total:].zero_()

    def fill_decode(
        self, ids: Ints, is_future: NDArray[np.bool_] | None, columns: Sequence[Ints]
    ) -> None:
        """Writes rows of one token each and empties the rest; on the host.

        Args:
            ids: Known ids, shape [rows], int64.
            is_future: Whether the id is the one sampled last for the slot, shape [rows], bool; None for nowhere.
            columns: First position, slot, and the two lowest positions of `values`, shape [rows] each, int64.

        Raises:
            InvariantBroken: There are more rows than fit.
        """
        count = len(ids)
        if count > self.num_rows:
            raise InvariantBroken(f"{count} rows do not fit inputs of {self.num_rows} rows.")
        tokens, values = self.ids.numpy(), self.values.numpy()
        if tokens.shape[1] > 1:
            tokens[:count] = 0
        tokens[:count, 0] = ids
        values[count:] = 0
        for place, column in zip((FIRST, SLOT, WINDOW_FLOOR, FULL_FLOOR), columns, strict=True):
            values[:count, place] = column
        values[:count, COUNT] = 1
        values[:count, FROM_FUTURE] = 0 if is_future is None else is_future

    def copy_(self, other: DecodeInputs) -> None:
        """Takes over the content of inputs of the same shape, without waiting for the device."""
        self.ids.copy_(other.ids, non_blocking=True)
        self.values.copy_(other.values, non_blocking=True)


def row_values(segment: Segment, full_floor: int, *, from_future: bool = False) -> tuple[int, ...]:
    """The columns of one row.

    Args:
        segment: Its tokens.
        full_floor: From `SlotCache.full_floors`.
        from_future: Whether the first id is the one sampled last for the slot.
    """
    return (
        segment.start,
        segment.slot,
        segment.num_tokens,
        segment.window_start,
        full_floor,
        int(from_future),
    )


def cannot_decode(segments: Sequence[Segment], cache: SlotCache) -> str:
    """Why segments cannot run in a step of fixed shape, or "".

    Such a step drops no rows, writes every pool row that it completes, and holds each slot once.
    """
    if len({s.slot for s in segments}) < len(segments):
        return "a slot has two segments"
    for s in segments:
        if s.start < s.full_start or s.start < s.pool_start:
            return f"the segment at position {s.start} of slot {s.slot} replays or drops rows"
        if s.num_tokens > cache.max_rollback + 1:
            return f"a segment of {s.num_tokens} tokens is longer than what can be taken back"
    return ""
