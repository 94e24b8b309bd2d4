"""Times that many requests or steps took, in constant memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Latency", "LatencyWindow"]

_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A summary of times in seconds.

    Attributes:
        count: How many since the start.
        total_s: Their sum.
        p50_s: Median of the latest 4096, or None without any.
        p99_s: 99th percentile of those, or None without any.
    """

    count: int = 0
    total_s: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None

    @property
    def mean_s(self) -> float | None:
        """Mean since the start, or None without any."""
        return self.total_s / self.count if self.count else None


class LatencyWindow:
    """Adds times up, and keeps the latest of them for percentiles.

    Args:
        size: How many are kept.

    Examples:
        >>> window = LatencyWindow(size=3)
        >>> for seconds in (9.0, 1.0, 2.0, 3.0):
        ...     window.add(seconds)
        >>> window.summary()
        Latency(count=4, total_s=15.0, p50_s=2.0, p99_s=3.0)
    """

    __slots__ = ("_count", "_latest", "_total")

    def __init__(self, size: int = _WINDOW) -> None:
        self._latest: deque[float] = deque(maxlen=size)
        self._total, self._count = 0.0, 0

    def add(self, seconds: float | None) -> None:
        """Takes a time.

        Args:
            seconds: The time; None counts for nothing.
        """
        if seconds is not None:
            self._latest.append(seconds)
            self._total += seconds
            self._count += 1

    def add_same(self, seconds: float, count: int) -> None:
        """Takes the same time several times.

        Args:
            seconds: The time.
            count: How often.
        """
        self._latest.extend([seconds] * min(count, self._latest.maxlen or count))
        self._total += seconds * count
        self._count += count

    def summary(self) -> Latency:
        """The summary; percentiles are values that occurred, the lower one of two neighbours."""
        if not self._latest:
            return Latency(count=self._count, total_s=self._total)
        ordered = sorted(self._latest)
        last = len(ordered) - 1
        return Latency(
            count=self._count,
            total_s=self._total,
            p50_s=ordered[last // 2],
            p99_s=ordered[(last * 99 + 99) // 100],
        )
