"""One background thread that runs an engine for asyncio callers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from deepinfer.core.errors import EngineDead
from deepinfer.core.types import OutputDelta
from deepinfer.engine.engine import Engine

__all__ = ["AsyncSink", "EngineWorker"]

_LOG = logging.getLogger("deepinfer.engine")

T = TypeVar("T")


class AsyncSink:
    """Carries deltas of one request from the engine's thread into an event loop.

    Args:
        worker: The thread.
        rid: Id of the request.

    Attributes:
        queue: The deltas; None stands for the end when several tasks share a stream.
    """

    def __init__(self, worker: EngineWorker, rid: str) -> None:
        self.rid = rid
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[OutputDelta | None] = asyncio.Queue()
        self._worker = worker

    def push(self, delta: OutputDelta) -> None:
        """Takes a delta, on the engine's thread.

        Args:
            delta: The delta.
        """
        self._worker.post(self, delta)


class EngineWorker:
    """Runs steps while there are unfinished requests, and calls in between.

    The thread starts with the first call and ends after `idle_s` without work, so a forgotten engine keeps no
    thread. Whatever ends it, every call and every request gets an answer.

    Args:
        engine: The engine; nobody else may run it.
        idle_s: Seconds without work after which the thread ends.
    """

    def __init__(self, engine: Engine, idle_s: float = 2.0) -> None:
        self._engine = engine
        self._idle_s = idle_s
        self._wake = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._outbox: list[tuple[AsyncSink, OutputDelta]] = []
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on the engine's thread, between steps.

        Args:
            function: The function.

        Returns:
            Its result to be.

        Raises:
            EngineDead: The engine is closed.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._is_closing:
                raise EngineDead("the engine is closed and takes no more work; make a new one.")
            self._calls.append((function, future))
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(
                    target=self._run, name="deepinfer-engine", daemon=True
                )
                self._thread.start()
            self._wake.notify()
        return future

    def post(self, sink: AsyncSink, delta: OutputDelta) -> None:
        """Keeps a delta until the end of the step.

        Args:
            sink: Where it goes.
            delta: The delta.
        """
        self._outbox.append((sink, delta))

    def close(self) -> None:
        """Ends requests, thread and engine; returns when all is done. Calling it twice is harmless."""
        with self._wake:
            self._is_closing = True
            thread = self._thread
            self._wake.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._engine.close()
        self._flush()

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._wait_for_work():
                self._run_calls()
                if self._engine.has_unfinished:
                    self._step()
                self._flush()
        except BaseException as error:  # the thread must not die silently: callers wait for it
            _LOG.exception("the engine's thread ended")
            cause = error
        if cause is not None or self._is_closing:
            self._end(cause)

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False when the thread should end."""
        with self._wake:
            if not (self._calls or self._is_closing or self._engine.has_unfinished):
                self._wake.wait(self._idle_s)
                if not (self._calls or self._is_closing or self._engine.has_unfinished):
                    self._thread = None
                    return False
            return not self._is_closing

    def _run_calls(self) -> None:
        while True:
            with self._wake:
                if not self._calls:
                    return
                function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _step(self) -> None:
        try:
            self._engine._advance()
        except EngineDead:
            _LOG.warning("the engine stopped; its requests have ended with the cause")

    def _flush(self) -> None:
        """Hands over what a step brought: one wake-up a loop."""
        outbox, self._outbox = self._outbox, []
        loops: dict[asyncio.AbstractEventLoop, list[tuple[AsyncSink, OutputDelta]]] = {}
        for sink, delta in outbox:
            loops.setdefault(sink.loop, []).append((sink, delta))
        for loop, items in loops.items():
            try:
                loop.call_soon_threadsafe(_hand_over, items)
            except RuntimeError:  # the loop is closed: nobody waits any more
                for sink, _ in items:
                    self._engine._loop.abort_later(sink.rid)

    def _end(self, cause: BaseException | None) -> None:
        with self._wake:
            self._is_closing = True
            calls, self._calls = list(self._calls), deque()
            self._thread = None
        dead = EngineDead("the engine stopped before this call; make a new one.")
        dead.__cause__ = cause
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(dead)
        if cause is not None:
            self._engine._loop.die(cause)
        else:
            self._engine.close()
        self._flush()


def _hand_over(items: list[tuple[AsyncSink, OutputDelta]]) -> None:
    for sink, delta in items:
        sink.queue.put_nowait(delta)
