"""A sink of events that cannot break what it listens to."""

from __future__ import annotations

import logging

from deepinfer.core.events import Event
from deepinfer.core.protocols import StatsSink

__all__ = ["GuardedSink"]

_LOG = logging.getLogger("deepinfer.engine")


class GuardedSink:
    """Hands events on until the sink raises; then it is not called again.

    Args:
        sink: Takes the events.

    Examples:
        >>> from deepinfer.core.events import MemorySink, RequestAdded
        >>> sink = MemorySink()
        >>> GuardedSink(sink).record(RequestAdded(time_s=0.0, rid="a", prompt_tokens=1))
        >>> len(sink)
        1
    """

    def __init__(self, sink: StatsSink) -> None:
        self._sink: StatsSink | None = sink

    def record(self, event: Event) -> None:
        """Hands an event on.

        Args:
            event: The event.
        """
        sink = self._sink
        if sink is None:
            return
        try:
            sink.record(event)
        except Exception:
            self._sink = None
            _LOG.exception(
                "the sink %r raised at an event of the cache and gets no more of them", sink
            )
