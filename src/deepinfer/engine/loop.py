"""The step loop: plans to the runner, results to the scheduler, tokens to their outputs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence

from deepinfer.core.clock import Clock
from deepinfer.core.errors import (
    DeepInferError,
    EngineDead,
    InvalidRequest,
    RequestError,
    Unschedulable,
)
from deepinfer.core.protocols import Tokenizer
from deepinfer.core.types import FinishReason, Request
from deepinfer.engine.constraints import GrammarMasks
from deepinfer.engine.delivery import Delivery
from deepinfer.engine.faults import InterruptGuard
from deepinfer.engine.loop_controls import LoopControls
from deepinfer.engine.outputs import OutputBuilder, Sink
from deepinfer.engine.parts import EngineRunner, EngineScheduler
from deepinfer.engine.pipeline import Flight, StepPipeline
from deepinfer.engine.stats import StatsRecorder
from deepinfer.scheduling import Progress

__all__ = ["EngineLoop"]

_LOG = logging.getLogger("deepinfer.engine")


class EngineLoop(LoopControls, Delivery):
    """Every unfinished request of one engine, and the steps that move them on.

    A request ends in exactly one delta with a finish reason, whatever happens to it. A failing forward pass
    ends the requests of its step; broken books end the loop.

    Args:
        scheduler: Plans.
        runner: Runs plans.
        masks: Grammar states.
        recorder: Counts.
        clock: Time of events.
        tokenizer: Makes text, or None.
        async_depth: Steps planned ahead of the results, 0 or 1.

    Attributes:
        is_paused: Whether no steps are run.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        runner: EngineRunner,
        masks: GrammarMasks,
        recorder: StatsRecorder,
        clock: Clock,
        tokenizer: Tokenizer | None,
        async_depth: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.recorder = recorder
        self.clock = clock
        self._masks = masks
        self._tokenizer = tokenizer
        self._live: dict[str, OutputBuilder] = {}
        self._requests: dict[str, Request] = {}
        self._samples: dict[str, list[str]] = {}
        self._orphans: deque[str] = deque()
        self._cause: BaseException | None = None
        self._is_stepping = False
        self.is_paused = False
        self._guard = InterruptGuard()
        self._unscheduled: set[str] = set()
        self._pipeline = StepPipeline(
            scheduler, runner, masks, clock, async_depth, on_applied=self._applied
        )

    @property
    def num_live(self) -> int:
        """Unfinished samples."""
        return len(self._live)

    def has(self, rid: str) -> bool:
        """Whether a request is unfinished.

        Args:
            rid: Id that the caller knows.

        Returns:
            True while any of its samples runs.
        """
        return rid in self._samples

    def submit(self, rid: str, requests: Sequence[Request], sink: Sink) -> list[OutputBuilder]:
        """Takes the samples of one prompt, all or none.

        Args:
            rid: Id that the caller knows.
            requests: One a sample.
            sink: Takes the deltas.

        Returns:
            One builder a sample.

        Raises:
            InvalidRequest: The id is taken.
            RequestTooLong: The prompt does not fit.
            Unschedulable: The request could never run.
            EngineDead: The loop ended.
        """
        self.raise_if_dead()
        self.reap()
        names = [request.rid for request in requests if request.rid in self._live]
        if rid in self._samples or names:
            raise InvalidRequest(
                f"a request with id {(names or [rid])[0]!r} is not finished yet, so {rid!r} cannot be taken; give "
                "every request its own id.",
                rid=rid,
                field="rid",
                value=rid,
                limit="an id that no unfinished request or sample has",
            )
        with self._guard:
            builders = [OutputBuilder(r, rid, self._tokenizer, sink) for r in requests]
            added: list[str] = []
            try:
                for builder in builders:
                    self._masks.add(builder.request)
                    self.scheduler.add(builder.request)
                    added.append(builder.rid)
            except BaseException:
                for request in requests:
                    self._masks.remove(request.rid)
                for sample in added:
                    self.scheduler.abort(sample)
                raise
            now = self.clock.now()
            self._samples[rid] = added
            for builder in builders:
                self._live[builder.rid] = builder
                self._requests[builder.rid] = builder.request
                self._unscheduled.add(builder.rid)
                self.recorder.added(builder, now)
        return builders

    def abort(self, rid: str) -> list[OutputBuilder]:
        """Ends every sample of a request.

        Args:
            rid: Id that the caller knows.

        Returns:
            The samples that were unfinished; none for an unknown or finished id.
        """
        self._heal()
        with self._guard:
            builders = [self._live[sample] for sample in self._samples.get(rid, ())]
            for builder in builders:
                self._end(builder, FinishReason.ABORT)
            self._drain_if_idle()
        return builders

    def run_step(self) -> bool:
        """Plans, runs and applies one step.

        Returns:
            False when there was nothing to run.

        Raises:
            EngineDead: The loop ended, now or before.
            RequestError: A step is running, and something in it calls this.
        """
        self.raise_if_dead()
        if self._is_stepping:
            raise RequestError(
                "the engine was asked for a step from inside a step: a sink or a part called step, generate or "
                "a stream of the same engine. Add the request there with add_request; later steps run it."
            )
        self._is_stepping = True
        try:
            with self._guard:
                return self._run_step()
        finally:
            self._is_stepping = False

    def _run_step(self) -> bool:
        self.reap()
        if self.is_paused:
            return False
        try:
            if not self._pipeline.advance(self._requests):
                self._fail_stalled()
                return False
        except Exception as error:
            self.die(error)
            self.raise_if_dead()
        except BaseException:
            with contextlib.suppress(Exception):  # what is left of broken books is healed later
                self._interrupted()
            raise
        finally:
            self._is_stepping = False
        self._drain_if_idle()
        return True

    def _drain_if_idle(self) -> None:
        """Steps in flight that run nothing but what has ended hold slots and blocks."""
        if not self._live:
            self._drain()

    def _drain(self) -> None:
        if self._is_stepping or not self._pipeline.flights:
            return
        self._is_stepping = True
        try:
            self._pipeline.drain()
        except Exception as error:
            self.die(error)
        except BaseException:
            with contextlib.suppress(Exception):
                self._interrupted()
            raise
        finally:
            self._is_stepping = False

    def _applied(self, flight: Flight, progress: Sequence[Progress], began: float) -> None:
        now = self.clock.now()
        if self._unscheduled:
            for rid in self._unscheduled & flight.requests.keys():
                self._unscheduled.discard(rid)
                self._live[rid].first_scheduled_s = flight.launched_s
                self.recorder.scheduled(self._live[rid], flight.launched_s)
        for rid, lost in flight.preempted:
            self.recorder.preempted(rid, lost, flight.launched_s)
        self._deliver_all(progress, now)
        load = self.scheduler.snapshot() if self.recorder.has_sink else None
        flight.spans["apply"] = (began, time.perf_counter())
        self.recorder.step(flight, progress, load, now=now)

    def die(self, cause: BaseException) -> None:
        """Ends the loop and every request in it.

        Args:
            cause: Why.
        """
        if self._cause is not None:
            return
        self._cause = cause
        self._pipeline.clear()
        for builder in list(self._live.values()):
            if self._live.get(builder.rid) is not builder:  # the sink of another sample raised
                continue
            error = EngineDead(
                f"the engine stopped while {builder.parent_rid!r} was running: {cause}"
            )
            error.__cause__ = cause
            self._forget(builder)
            self._emit_end(builder, FinishReason.ERROR, error)

    def shut_down(self) -> None:
        """Aborts every request; nothing is taken any more."""
        for rid in list(self._samples):
            self.abort(rid)
        self._pipeline.clear()
        self._cause = self._cause or EngineDead("close() was called")

    def raise_if_dead(self) -> None:
        """Raises `EngineDead` once the loop ended."""
        if self._cause is not None:
            raise EngineDead(
                f"the engine has stopped and takes no more work: {self._cause}. Make a new one."
            ) from self._cause

    def _end(
        self, builder: OutputBuilder, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        if self._live.get(builder.rid) is not builder:  # another sample's sink raised meanwhile
            return
        self.scheduler.abort(builder.rid)
        self._forget(builder)
        self._emit_end(builder, reason, error)

    def _emit_end(
        self, builder: OutputBuilder, reason: FinishReason, error: BaseException | None
    ) -> None:
        now = self.clock.now()
        delta = builder.end(reason, now, error)
        self.recorder.finished(builder, now)
        self._emit(builder, delta)

    def _forget(self, builder: OutputBuilder) -> None:
        del self._live[builder.rid]
        del self._requests[builder.rid]
        self._masks.remove(builder.rid)
        self._unscheduled.discard(builder.rid)
        forget = getattr(self.runner, "forget", None)
        if forget is not None:
            forget(builder.rid)
        samples = self._samples[builder.parent_rid]
        samples.remove(builder.rid)
        if not samples:
            del self._samples[builder.parent_rid]

    def _emit(self, builder: OutputBuilder, delta: object) -> None:
        try:
            builder.sink(delta)  # type: ignore[arg-type]
        except Exception:
            _LOG.exception("the sink of request %r raised; it is aborted", builder.parent_rid)
            builder.sink = _drop
            self.abort(builder.parent_rid)

    def _fail_stalled(self) -> None:
        """A scheduler that plans nothing would let its requests wait for ever."""
        for builder in list(self._live.values()):
            error = Unschedulable(
                f"the scheduler plans nothing, and {builder.parent_rid!r} is not finished; this is a "
                "fault of the scheduler.",
                rid=builder.parent_rid,
            )
            self._end(builder, FinishReason.ERROR, error)

    def _heal(self) -> None:
        """Ends every request and starts with empty books, if an interrupt left them broken."""
        if not self._guard.is_suspect:
            return
        try:
            self._check()
        except Exception as broken:
            builders = list(self._live.values())
            for book in (self._live, self._requests, self._samples):
                book.clear()
            self._masks.clear()
            self._unscheduled.clear()
            self._pipeline.clear()
            reset = getattr(self.scheduler, "reset", None)
            if reset is None:
                self.die(broken)
            else:
                reset()
            for builder in builders:
                error = DeepInferError(
                    "an interrupt came while the books of the engine were written"
                )
                error.__cause__ = broken
                self._emit_end(builder, FinishReason.ERROR, error)
        self._guard.is_suspect = False

    def _interrupted(self) -> None:
        """Ctrl-C in a step: its requests are run again, or end if their books were being written."""
        applying = self._pipeline.cancel()
        if applying is None:
            return
        error = DeepInferError("the step was interrupted while its result was being applied")
        for rid in applying.requests:
            builder = self._live.get(rid)
            if builder is not None:
                self._end(builder, FinishReason.ERROR, error)


def _drop(delta: object) -> None:
    """Takes a delta that nobody wants."""
