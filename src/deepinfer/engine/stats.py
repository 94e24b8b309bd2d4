"""What an engine did so far, in numbers."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.core.events import (
    Event,
    NullSink,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from deepinfer.core.plan import ROLES, LoadSnapshot, PlanRows, RowRole
from deepinfer.core.protocols import StatsSink
from deepinfer.core.types import FinishReason
from deepinfer.engine.draft_stats import BlockCounts, PositionCounts
from deepinfer.engine.latency import Latency, LatencyWindow
from deepinfer.engine.outputs import OutputBuilder
from deepinfer.engine.pipeline import Flight
from deepinfer.engine.trace import Trace
from deepinfer.scheduling import Progress

__all__ = ["EngineStats", "StatsRecorder"]

_LOG = logging.getLogger("deepinfer.engine")
_REPLAY = ROLES.index(RowRole.REPLAY)
_PREFILL = [ROLES.index(RowRole.PREFILL), ROLES.index(RowRole.LAST_PREFILL)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and how busy the engine is now.

    Attributes:
        requests_running: Requests that hold a slot.
        requests_waiting: Requests that wait for one.
        requests_added: Requests taken.
        requests_finished: Requests ended, by reason: "stop", "length", "abort", "error".
        preemptions: How often a running request lost its slot to another.
        steps: Steps run.
        failed_steps: Steps that raised.
        void_rows: Rows that were run for a request that had ended meanwhile; only with `async_depth` 1.
        prefill_tokens: Prompt tokens run; after a preemption, also the output so far that is run again.
        replayed_tokens: Tokens run again to rebuild window rows after a prefix hit.
        decode_tokens: Other tokens run, drafts included.
        generated_tokens: Tokens that became output.
        draft_tokens_verified: Drafts checked, as in the `usage` of outputs.
        draft_tokens_accepted: Drafts that became output.
        drafts_by_position: Drafts proposed, verified and accepted at the first, second, ... place of a block.
        step_seconds: Time in the model and the sampler.
        overhead_seconds: Other time of the host in steps: planning, books, text.
        predicted_seconds: Predicted time of the steps for which the scheduler predicted one.
        predicted_measured_seconds: Time that these steps took.
        graph_steps: Steps that replayed a captured graph.
        time_to_first_token: From arrival to the first token.
        inter_token: Between deltas of one output, over the tokens of the later one.
        queue: From arrival to the launch of the first step.
        end_to_end: From arrival to the end, of requests that ended by themselves.
        step: Duration of a step.
        kv_used_ratio: Share of the cache that cannot be given out now, from 0 to 1.
        kv_size_bytes: Bytes of the cache, or 0 when unknown.
        host_size_bytes: Bytes of host memory for cache content.
        host_copies: Copies made between cache and host memory.
        host_copies_failed: Copies that failed.
        cache: The cache manager's own numbers (`deepinfer.cache.CacheStats`): blocks, quarantine, hits by tier; None
            when it has none.
    """

    requests_running: int = 0
    requests_waiting: int = 0
    requests_added: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0
    void_rows: int = 0
    prefill_tokens: int = 0
    replayed_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens_verified: int = 0
    draft_tokens_accepted: int = 0
    drafts_by_position: tuple[PositionCounts, ...] = ()
    step_seconds: float = 0.0
    overhead_seconds: float = 0.0
    predicted_seconds: float = 0.0
    predicted_measured_seconds: float = 0.0
    graph_steps: int = 0
    time_to_first_token: Latency = field(default_factory=Latency)
    inter_token: Latency = field(default_factory=Latency)
    queue: Latency = field(default_factory=Latency)
    end_to_end: Latency = field(default_factory=Latency)
    step: Latency = field(default_factory=Latency)
    kv_used_ratio: float = 0.0
    kv_size_bytes: int = 0
    host_size_bytes: int = 0
    host_copies: int = 0
    host_copies_failed: int = 0
    cache: Any = None

    @property
    def draft_rows_saved(self) -> int:
        """Drafts that were proposed and not verified, each a row less to run."""
        return sum(counts.proposed - counts.verified for counts in self.drafts_by_position)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values."""
        return dataclasses.asdict(self)


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
        self._seconds: defaultdict[str, float] = defaultdict(float)
        names = ("time_to_first_token", "inter_token", "queue", "end_to_end", "step")
        self._latencies = {name: LatencyWindow() for name in names}
        self._traces: tuple[Trace, ...] = ()
        self._num_delivered = 0  # since the step counted last
        self._drafts_delivered = (0, 0)  # verified and accepted, since then
        self._blocks = BlockCounts()
        self._counted: tuple[tuple[Any, ...], tuple[int, int, int]] = ((), (0, 0, 0))

    def attach(self, trace: Trace) -> None:
        """Lets a trace take part from now on."""
        self.detach(trace)
        self._traces = (*self._traces, trace)

    def detach(self, trace: Trace) -> None:
        """Ends that."""
        self._traces = tuple(other for other in self._traces if other is not trace)

    def added(self, builder: OutputBuilder, now: float) -> None:
        """Counts a request that was taken."""
        self._counts["requests_added"] += 1
        for trace in self._traces:
            trace.added(builder.rid)
        if self._has_sink:
            request = builder.request
            self._tell(
                RequestAdded(time_s=now, rid=request.rid, prompt_tokens=request.num_prompt_tokens)
            )

    def scheduled(self, builder: OutputBuilder, now: float) -> None:
        """Counts the launch of a request's first step."""
        self._latencies["queue"].add(now - builder.request.arrival_s)

    def token(self, builder: OutputBuilder, last_s: float | None, count: int, now: float) -> None:
        """Counts new tokens of an output.

        Args:
            builder: The output.
            last_s: When its last tokens came, or None for the first.
            count: How many came, at least 1.
            now: Time in seconds.
        """
        self._num_delivered += count
        if last_s is None:
            self._latencies["time_to_first_token"].add(now - builder.request.arrival_s)
        else:
            self._latencies["inter_token"].add((now - last_s) / count)

    def drafts(self, num_verified: int, num_accepted: int, num_proposed: int = 0) -> None:
        """Counts drafts of an output.

        Args:
            num_verified: How many were checked.
            num_accepted: How many of them became output.
            num_proposed: Drafts of the block that they are the beginning of, where that is known.
        """
        verified, accepted = self._drafts_delivered
        self._drafts_delivered = (verified + num_verified, accepted + num_accepted)
        self._blocks.add(max(num_proposed, num_verified), num_verified, num_accepted)

    def next_blocks(self, last_s: float, counts: Sequence[int], now: float) -> None:
        """Counts more tokens of several outputs.

        Args:
            last_s: When the last tokens of all of them came.
            counts: How many came, at least 1, one number an output.
            now: Time in seconds.
        """
        self._num_delivered += sum(counts)
        for count, outputs in Counter(counts).items():
            self._latencies["inter_token"].add_same((now - last_s) / count, outputs)

    def all_drafts(
        self, proposed: Sequence[int], verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """`drafts` of several outputs.

        Args:
            proposed: Drafts of each block, or 0 where that is not known.
            verified: How many of each were checked, at least 1.
            accepted: How many of them became output.
        """
        before = self._drafts_delivered
        self._drafts_delivered = (before[0] + sum(verified), before[1] + sum(accepted))
        self._blocks.add_all(map(max, proposed, verified), verified, accepted)

    def next_tokens(self, last_s: float, count: int, now: float) -> None:
        """Counts one more token of each of several outputs.

        Args:
            last_s: When the last tokens of all of them came.
            count: How many outputs.
            now: Time in seconds.
        """
        self._num_delivered += count
        self._latencies["inter_token"].add_same(now - last_s, count)

    def finished(self, builder: OutputBuilder, now: float) -> None:
        """Counts a request that ended."""
        reason = builder.finish_reason or FinishReason.ERROR
        self._finished[str(reason)] += 1
        for trace in self._traces:
            trace.finished(builder.rid, str(reason))
        arrival = builder.request.arrival_s
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._latencies["end_to_end"].add(now - arrival)
        if not self._has_sink:
            return
        first, last = builder.first_token_s, builder.last_token_s
        started = builder.first_scheduled_s
        itl = None
        if first is not None and last is not None and builder.num_tokens > 1:
            itl = (last - first) / (builder.num_tokens - 1)
        self._tell(
            RequestFinished(
                time_s=now,
                rid=builder.rid,
                finish_reason=reason,
                usage=builder.usage,
                queue_seconds=started - arrival if started is not None else 0.0,
                time_to_first_token_seconds=first - arrival if first is not None else None,
                inter_token_seconds=itl,
            )
        )

    def preempted(self, rid: str, lost_tokens: int, now: float) -> None:
        """Counts a request that lost its slot."""
        self._counts["preemptions"] += 1
        for trace in self._traces:
            trace.preempted(rid)
        if self._has_sink:
            self._tell(RequestPreempted(time_s=now, rid=rid, lost_tokens=lost_tokens))

    def step(
        self,
        flight: Flight,
        progress: Sequence[Progress],
        load: LoadSnapshot | None,
        *,
        now: float,
    ) -> None:
        """Counts a step that was applied."""
        plan, result = flight.plan, flight.result
        replayed, prefill, decode = self._tokens_of(plan.rows)
        generated, self._num_delivered = self._num_delivered, 0
        verified, accepted = self._drafts_delivered
        self._drafts_delivered = (0, 0)
        failed = flight.error is not None
        duration = (result.duration_s if result is not None else None) or 0.0
        overhead = max(0.0, flight.wall_s - flight.runner_s)
        counts = self._counts
        counts["steps"] += 1
        counts["failed_steps"] += failed
        counts["void_rows"] += max(0, len(plan.rows) - len(progress))
        counts["prefill_tokens"] += prefill
        counts["replayed_tokens"] += replayed
        counts["decode_tokens"] += decode
        counts["generated_tokens"] += generated
        counts["draft_tokens_verified"] += verified
        counts["draft_tokens_accepted"] += accepted
        self._seconds["step_seconds"] += duration
        self._seconds["overhead_seconds"] += overhead
        if plan.predicted_s is not None and not failed:
            self._seconds["predicted_seconds"] += plan.predicted_s
            self._seconds["predicted_measured_seconds"] += duration
        if not failed:
            self._latencies["step"].add(duration)
        for trace in self._traces:
            trace.step(flight, progress)
        if self._has_sink and load is not None:
            self._tell(
                StepFinished(
                    time_s=now,
                    step=plan.step,
                    step_seconds=duration,
                    plan_seconds=overhead,
                    predicted_seconds=plan.predicted_s,
                    prefill_tokens=prefill,
                    replayed_tokens=replayed,
                    decode_tokens=decode,
                    generated_tokens=generated,
                    draft_tokens_verified=verified,
                    draft_tokens_accepted=accepted,
                    requests_running=load.num_running,
                    requests_waiting=load.num_waiting,
                    kv_used_ratio=load.used_ratio,
                )
            )

    def _tokens_of(self, rows: PlanRows) -> tuple[int, int, int]:
        """Tokens that rows replay, prefill and decode."""
        columns = (rows.roles, rows.num_tokens)
        before, found = self._counted
        if not (before and all(map(operator.is_, columns, before))):  # the same from step to step
            by_role = np.bincount(rows.roles, weights=rows.num_tokens, minlength=len(ROLES))
            replayed, prefill = int(by_role[_REPLAY]), int(by_role[_PREFILL].sum())
            decode = int(by_role.sum()) - prefill - replayed
            found = (replayed, prefill, decode)
            self._counted = (columns, found)
        return found

    @property
    def has_sink(self) -> bool:
        """Whether anybody listens."""
        return self._has_sink

    def stats(self, load: LoadSnapshot, runner: Any = None, cache: Any = None) -> EngineStats:
        """The numbers so far.

        Args:
            load: How busy the scheduler is.
            runner: Its `cache` and `host_tier` are looked at, or None.
            cache: A cache manager with `stats()`, or None.

        Returns:
            The numbers.
        """
        tier = getattr(runner, "host_tier", None)
        found = cache.stats() if hasattr(cache, "stats") else None
        numbers: dict[str, Any] = {**self._counts, **self._seconds}
        latencies: dict[str, Any] = {
            name: window.summary() for name, window in self._latencies.items()
        }
        return EngineStats(
            requests_running=load.num_running,
            requests_waiting=load.num_waiting,
            requests_finished=dict(self._finished),
            kv_used_ratio=load.used_ratio if found is None else found.used_ratio,
            kv_size_bytes=getattr(getattr(runner, "cache", None), "size_bytes", 0),
            host_size_bytes=getattr(tier, "size_bytes", 0),
            graph_steps=getattr(runner, "graph_steps", 0),
            host_copies=getattr(tier, "num_copies", 0),
            host_copies_failed=getattr(tier, "num_failed", 0),
            cache=found,
            drafts_by_position=self._blocks.by_position(),
            **numbers,
            **latencies,
        )

    def _tell(self, event: Event) -> None:
        try:
            self._sink.record(event)
        except Exception:
            self._has_sink = False
            _LOG.exception("the stats sink %r raised and is not called again", self._sink)
