"""Mask rows by state, bounded by bytes, least recently used first out."""

from __future__ import annotations

import threading
from collections import OrderedDict

from deepinfer.core.errors import ConfigError
from deepinfer.grammar.bitmask import MaskRow

__all__ = ["RowCache"]


class RowCache:
    """A map from states to mask rows that forgets the least recently used ones.

    Reads take no lock: every operation on the map is atomic in CPython, and a row is immutable, so a reader gets a whole
    row or none. Writes are serialised.

    Args:
        max_bytes: Bytes that the rows may take together. The newest row is always kept.

    Raises:
        ConfigError: `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(
                f"max_bytes is {max_bytes}; give a number of bytes from 0 up",
                field="max_bytes",
                value=max_bytes,
                limit="at least 0",
            )
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evictions = 0
        self._rows: OrderedDict[int, MaskRow] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: int) -> MaskRow | None:
        """The row of a state, which becomes the most recently used one.

        Args:
            key: The state.

        Returns:
            The row, or None.
        """
        row = self._rows.get(key)
        if row is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        try:
            self._rows.move_to_end(key)
        except KeyError:
            return row  # another thread dropped it since; the row itself stays good
        return row

    def put(self, key: int, row: MaskRow) -> None:
        """Keeps a row, and drops others until the limit holds.

        Args:
            key: The state.
            row: Its row.
        """
        with self._lock:
            old = self._rows.pop(key, None)
            if old is not None:
                self.size_bytes -= old.size_bytes
            self._rows[key] = row
            self.size_bytes += row.size_bytes
            while self.size_bytes > self.max_bytes and len(self._rows) > 1:
                _, dropped = self._rows.popitem(last=False)
                self.size_bytes -= dropped.size_bytes
                self.num_evictions += 1

    def clear(self) -> None:
        """Drops every row; the counts stay."""
        with self._lock:
            self._rows.clear()
            self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __repr__(self) -> str:
        return f"RowCache({len(self)} rows, {self.size_bytes} of {self.max_bytes} bytes)"
