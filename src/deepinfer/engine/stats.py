"""What an engine did so far, in numbers."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepinfer.core.events import NullSink, RequestAdded, RequestFinished, StepFinished
from deepinfer.core.plan import LoadSnapshot, RowRole, StepPlan
from deepinfer.core.protocols import StatsSink
from deepinfer.core.types import FinishReason
from deepinfer.engine.outputs import OutputBuilder
from deepinfer.scheduling import Progress

__all__ = ["EngineStats", "StatsRecorder"]

_LOG = logging.getLogger("deepinfer.engine")
_PREFILL = (RowRole.PREFILL, RowRole.LAST_PREFILL, RowRole.REPLAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and how busy the engine is now.

    Attributes:
        requests_running: Requests that hold a slot.
        requests_waiting: Requests that wait for one.
        requests_added: Requests taken.
        requests_finished: Requests ended, by reason: "stop", "length", "abort", "error".
        steps: Steps run.
        failed_steps: Steps that raised.
        prefill_tokens: Prompt tokens run.
        decode_tokens: Other tokens run, drafts included.
        generated_tokens: Tokens that became output.
        draft_tokens_verified: Drafts checked.
        draft_tokens_accepted: Drafts that became output.
        step_seconds: Time in the model and the sampler.
        overhead_seconds: Other time in steps: planning, books, text.
        time_to_first_token_seconds: Mean over finished requests, or None.
        inter_token_seconds: Mean over finished requests, or None.
        queue_seconds: Mean time from arrival to the first step over finished requests, or None.
        kv_used_ratio: Held share of the cache's tokens, from 0 to 1.
        kv_size_bytes: Bytes of the cache, or 0 when unknown.
    """

    requests_running: int
    requests_waiting: int
    requests_added: int
    requests_finished: dict[str, int]
    steps: int
    failed_steps: int
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int
    draft_tokens_verified: int
    draft_tokens_accepted: int
    step_seconds: float
    overhead_seconds: float
    time_to_first_token_seconds: float | None
    inter_token_seconds: float | None
    queue_seconds: float | None
    kv_used_ratio: float
    kv_size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values."""
        return dataclasses.asdict(self)


class _Mean:
    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class StatsRecorder:
    """Counts what happens in one engine and tells a sink about it.

    Args:
        sink: Takes events, or None. A sink that raises is not called again.
    """

    def __init__(self, sink: StatsSink | None = None) -> None:
        self._sink: StatsSink = NullSink() if sink is None else sink
        self._has_sink = sink is not None
        self._finished: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._step_seconds = self._overhead_seconds = 0.0
        self._ttft, self._itl, self._queue = _Mean(), _Mean(), _Mean()

    def added(self, builder: OutputBuilder, now: float) -> None:
        """Counts a request that was taken."""
        self._counts["added"] += 1
        if self._has_sink:
            request = builder.request
            self._tell(
                RequestAdded(time_s=now, rid=request.rid, prompt_tokens=request.num_prompt_tokens)
            )

    def finished(self, builder: OutputBuilder, now: float) -> None:
        """Counts a request that ended."""
        reason = builder.finish_reason or FinishReason.ERROR
        arrival = builder.request.arrival_s
        first, last = builder.first_token_s, builder.last_token_s
        started = builder.first_scheduled_s
        queue = started - arrival if started is not None else None
        ttft = first - arrival if first is not None else None
        itl = None
        if first is not None and last is not None and builder.num_tokens > 1:
            itl = (last - first) / (builder.num_tokens - 1)
        self._finished[str(reason)] += 1
        self._queue.add(queue)
        self._ttft.add(ttft)
        self._itl.add(itl)
        if self._has_sink:
            self._tell(
                RequestFinished(
                    time_s=now,
                    rid=builder.rid,
                    finish_reason=reason,
                    usage=builder.usage,
                    queue_seconds=queue or 0.0,
                    time_to_first_token_seconds=ttft,
                    inter_token_seconds=itl,
                )
            )

    def step(
        self,
        plan: StepPlan,
        progress: Iterable[Progress],
        load: LoadSnapshot | None,
        *,
        now: float,
        step_seconds: float,
        total_seconds: float,
        failed: bool,
    ) -> None:
        """Counts a step that was applied."""
        prefill = sum(row.num_tokens for row in plan.rows if row.role in _PREFILL)
        decode = plan.num_tokens - prefill
        generated = verified = accepted = 0
        for entry in progress:
            generated += len(entry.token_ids)
            verified += entry.result.num_drafts
            accepted += entry.result.num_accepted
        counts = self._counts
        counts["steps"] += 1
        counts["failed"] += failed
        counts["prefill"] += prefill
        counts["decode"] += decode
        counts["generated"] += generated
        counts["verified"] += verified
        counts["accepted"] += accepted
        self._step_seconds += step_seconds
        self._overhead_seconds += max(0.0, total_seconds - step_seconds)
        if self._has_sink and load is not None:
            self._tell(
                StepFinished(
                    time_s=now,
                    step=plan.step,
                    step_seconds=step_seconds,
                    plan_seconds=max(0.0, total_seconds - step_seconds),
                    prefill_tokens=prefill,
                    decode_tokens=decode,
                    generated_tokens=generated,
                    draft_tokens_verified=verified,
                    draft_tokens_accepted=accepted,
                    requests_running=load.num_running,
                    requests_waiting=load.num_waiting,
                    kv_used_ratio=load.used_ratio,
                )
            )

    @property
    def has_sink(self) -> bool:
        """Whether anybody listens."""
        return self._has_sink

    def stats(self, load: LoadSnapshot, kv_size_bytes: int) -> EngineStats:
        """The numbers so far.

        Args:
            load: How busy the scheduler is.
            kv_size_bytes: Bytes of the cache.

        Returns:
            The numbers.
        """
        counts = self._counts
        return EngineStats(
            requests_running=load.num_running,
            requests_waiting=load.num_waiting,
            requests_added=counts["added"],
            requests_finished=dict(self._finished),
            steps=counts["steps"],
            failed_steps=counts["failed"],
            prefill_tokens=counts["prefill"],
            decode_tokens=counts["decode"],
            generated_tokens=counts["generated"],
            draft_tokens_verified=counts["verified"],
            draft_tokens_accepted=counts["accepted"],
            step_seconds=self._step_seconds,
            overhead_seconds=self._overhead_seconds,
            time_to_first_token_seconds=self._ttft.value,
            inter_token_seconds=self._itl.value,
            queue_seconds=self._queue.value,
            kv_used_ratio=load.used_ratio,
            kv_size_bytes=kv_size_bytes,
        )

    def _tell(self, event: RequestAdded | RequestFinished | StepFinished) -> None:
        try:
            self._sink.record(event)
        except Exception:
            self._has_sink = False
            _LOG.exception("the stats sink %r raised and is not called again", self._sink)
