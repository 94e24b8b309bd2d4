"""Deltas of one request as an iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepinfer.core.types import OutputDelta

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.engine.outputs import Sink

__all__ = ["TokenStream"]


class TokenStream(Iterator[OutputDelta]):
    """Deltas of one request; each `next` runs the engine as far as needed.

    Closing the stream, leaving its `with` block, or dropping it before its end aborts the request.

    Args:
        engine: The engine that runs the request.
        rid: Id of the request.
        num_samples: Samples of the request.
    """

    def __init__(self, engine: Engine, rid: str, num_samples: int) -> None:
        self._open = num_samples
        self.rid = rid
        self._deltas: deque[OutputDelta] = deque()
        self._engine: Engine | None = engine

    @property
    def sink(self) -> Sink:
        """Takes deltas; it does not hold the stream, which can therefore be dropped."""
        return self._deltas.append

    def __next__(self) -> OutputDelta:
        while True:
            try:  # another thread may take what was just seen, so looking first would not do
                delta = self._deltas.popleft()
                break
            except IndexError:
                engine = self._engine
            if engine is None or self._open <= 0:
                raise StopIteration
            if not engine._advance() and not self._deltas:  # an interrupt took the end
                engine._loop.raise_if_paused()
                self._open = 0
        if delta.finished:
            self._open -= 1
            if delta.error is not None:
                self.close()
                raise delta.error
        return delta

    def disown(self) -> None:
        """Forgets the engine, which never took the request."""
        self._engine = None

    def close(self) -> None:
        """Aborts the request unless it is finished; calling it twice is harmless."""
        engine, self._engine = self._engine, None
        if engine is not None and self._open > 0:
            engine.abort(self.rid)
        self._open = 0
        self._deltas.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Collection can strike in the middle of a step, so the engine is only told, not entered.
        engine = getattr(self, "_engine", None)
        if engine is not None and getattr(self, "_open", 0) > 0:
            engine._loop.abort_later(self.rid)
