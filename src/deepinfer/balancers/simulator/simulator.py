"""A fleet as discrete events: prompts, transfers, decoding, failures."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

from deepinfer.balancers.base import Router, RouteRequest, WorkerSnapshot, WorkerState
from deepinfer.balancers.fleet import Fleet
from deepinfer.balancers.prefill.prefix_index import CacheUpdate, PrefixIndex
from deepinfer.balancers.prefill.tiers import DEFAULT_BOUNDS, TierRouter
from deepinfer.balancers.simulator.block_cache import LruBlocks
from deepinfer.balancers.simulator.books import Books
from deepinfer.balancers.simulator.config import (
    CacheKind,
    DecodeConfig,
    FleetChange,
    FleetChangeKind,
    PrefillConfig,
    TransferConfig,
)
from deepinfer.balancers.simulator.decode_pool import DecodePool
from deepinfer.balancers.simulator.prefill_engine import PrefillEngine, PrefillJob
from deepinfer.balancers.simulator.report import FleetReport
from deepinfer.balancers.traffic.records import TraceRecord
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken

__all__ = ["FleetSimulator"]

_Action = Callable[[], None]


class FleetSimulator:
    """Runs a trace through a fleet and its routers, without a model and without a clock.

    The router sees what a real one sees: reports of the engines at the ends of their steps, its own dispatches since,
    and cache events, late by `event_delay_s`. Everything else is arithmetic, so equal arguments give equal reports.

    Args:
        prefill: The engines that run prompts.
        router: Chooses among them; columns of its fleet are the engines.
        index: The prefix index that the router reads, fed by the engines here; None feeds nobody.
        decode: The engines that decode; None ends each request with its first token.
        decode_router: Chooses among all ranks of them: row = engine * num_ranks + rank. Needed with `decode`.
        transfer: How cache entries travel between the two.
        changes: What happens to engines.
        event_delay_s: How late cache events and reports reach the router.
        round_s: Seconds of a round of a `TierRouter`.
        tier_bounds: Tiers of the report; those of a `TierRouter` win.

    Raises:
        ConfigError: A number is out of range, something is no router, or a decode router is missing.

    Examples:
        >>> from deepinfer.balancers.prefill import LeastWork
        >>> from deepinfer.balancers.traffic import generate_chat_trace
        >>> simulator = FleetSimulator(PrefillConfig(num_engines=2), LeastWork())
        >>> report = simulator.run(generate_chat_trace(50, seed=1))
        >>> report.num_unserved, report.ttft_s.shape
        (0, (50,))
    """

    def __init__(
        self,
        prefill: PrefillConfig,
        router: Router,
        *,
        index: PrefixIndex | None = None,
        decode: DecodeConfig | None = None,
        decode_router: Router | None = None,
        transfer: TransferConfig | None = None,
        changes: Iterable[FleetChange] = (),
        event_delay_s: float = 0.0,
        round_s: float = 30.0,
        tier_bounds: Sequence[int] = DEFAULT_BOUNDS,
    ) -> None:
        if decode is not None and decode_router is None:
            raise ConfigError(
                "a decode pool needs decode_router, the router over its ranks.",
                field="decode_router",
            )
        for name, value in (("router", router), ("decode_router", decode_router)):
            if not isinstance(value, Router) and (name == "router" or value is not None):
                checks.fail(name, value, "a router, with a method decide", ConfigError)
        self.prefill = prefill
        self.router = router
        self.index = index
        self.decode = decode
        self.decode_router = decode_router
        self.transfer = transfer or TransferConfig()
        self.changes = tuple(changes)
        self.event_delay_s = checks.check_float(
            "event_delay_s", event_delay_s, 0.0, 1e6, ConfigError
        )
        self.round_s = checks.check_float("round_s", round_s, 0.0, 1e9, ConfigError, open_low=True)
        self.tier_bounds = router.bounds if isinstance(router, TierRouter) else tuple(tier_bounds)
        for change in self.changes:
            limit = (
                (decode.num_engines if decode else 0) if change.is_decode else prefill.num_engines
            )
            if not change.engine < limit:
                pool = "the decode pool" if change.is_decode else "the prefill pool"
                has = f"has engines 0 to {limit - 1}" if limit else "does not exist"
                raise ConfigError(
                    f"a change is of engine {change.engine}, and {pool} {has}.",
                    field="changes",
                    value=change.engine,
                )

    def run(
        self, records: Sequence[TraceRecord], *, max_time_s: float | None = None
    ) -> FleetReport:
        """Runs a trace to its end.

        Args:
            records: The trace.
            max_time_s: Stop at this time, with requests unserved; None goes on until nothing happens any more.

        Returns:
            The report. Requests whose cache entries no decode rank can ever hold stay unfinished.

        Raises:
            ConfigError: The blocks of a record are not those of the engines, or `max_time_s` is no number.
            InvariantBroken: A router chose a worker that is not ready.
        """
        if max_time_s is not None:
            checks.check_float("max_time_s", max_time_s, 0.0, 1e15, ConfigError)
        size = self.prefill.block_tokens
        for number, record in enumerate(records):
            if record.block_ids and record.block_tokens != size:
                raise ConfigError(
                    f"record {number} has ids of {record.block_tokens}-token blocks, and the engines have blocks of "
                    f"{size} tokens; use PrefillConfig(block_tokens={record.block_tokens}) and the same in the router.",
                    field="block_tokens",
                    value=size,
                    limit=str(record.block_tokens),
                )
        return _Run(self, records).run(max_time_s)


class _Run:
    def __init__(self, simulator: FleetSimulator, records: Sequence[TraceRecord]) -> None:
        self.simulator = simulator
        self.records = records
        config = simulator.prefill
        store = LruBlocks(config.cache_blocks)
        self.engines = [
            PrefillEngine(
                f"prefill{i}",
                config,
                store if config.cache is CacheKind.STORE else LruBlocks(config.cache_blocks),
            )
            for i in range(config.num_engines)
        ]
        self.states = [WorkerState.READY] * config.num_engines
        self.epochs = [0] * config.num_engines
        self.lives = [0] * config.num_engines  # of their caches
        self.sequences = [0] * config.num_engines
        self.fleet = Fleet(WorkerSnapshot(name=engine.name) for engine in self.engines)
        self.books = Books(records, config.block_tokens)
        self.pending: deque[int] = deque()
        self.events: list[tuple[float, int, _Action]] = []
        self.count = 0
        self.now = 0.0
        self.rank_sum = self.step_sum = 0.0
        self.tier_s = np.zeros(len(simulator.tier_bounds) + 1)
        self.pool = None
        if simulator.decode is not None and simulator.decode_router is not None:
            self.pool = DecodePool(
                simulator.decode, simulator.decode_router, self.at, self.books, self.lost_decode
            )

    def at(self, time_s: float, action: _Action) -> None:
        """Puts an event into the queue; events of one time happen in the order in which they were put."""
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, action))

    def run(self, max_time_s: float | None) -> FleetReport:
        for number, record in enumerate(self.records):
            self.at(record.arrival_s, lambda number=number: self.route(number))  # type: ignore[misc]
        for change in self.simulator.changes:
            self.at(change.time_s, lambda change=change: self.change(change))  # type: ignore[misc]
        if isinstance(self.simulator.router, TierRouter) and self.records:
            self.at(self.simulator.round_s, self.round)
        while self.events and (max_time_s is None or self.events[0][0] <= max_time_s):
            time_s, _, action = heapq.heappop(self.events)
            self.now = time_s
            if self.pool is not None:
                self.pool.now_s = time_s
            action()
        return self.report()

    def route(self, number: int) -> None:
        record, config = self.records[number], self.simulator.prefill
        tokens = record.input_tokens + self.books.made[number]
        keys = record.block_ids[: record.input_tokens // config.block_tokens]
        request = RouteRequest(
            rid=str(number),
            prompt_tokens=tokens,
            output_tokens=float(record.output_tokens),
            block_keys=keys,
            session=None if record.session is None else str(record.session),
        )
        self.books.end_s = self.now
        decision = self.simulator.router.decide(request, self.fleet)
        self.books.num_decisions += 1
        target = decision.target
        if target is None:
            self.pending.append(number)
            return
        if not 0 <= target < len(self.engines) or not self.fleet.ready[target]:
            raise InvariantBroken(
                f"the router chose engine {target}, which is not ready; see Router for what it must keep."
            )
        job = PrefillJob(number, tokens, keys)
        engine = self.engines[target]
        hit = 0.0
        if self.simulator.index is not None and keys:
            hit = (
                float(self.simulator.index.match_rows(keys, self.fleet)[target])
                * config.block_tokens
            )
            hit = min(hit, tokens - 1.0)
        own = float(config.cost.seconds(hit, tokens - hit)) / config.num_ranks
        self.tier_s[int(np.searchsorted(self.simulator.tier_bounds, tokens, side="right"))] += own
        self.fleet.sent(
            target,
            now_s=self.now,
            waiting_tokens=int(tokens - hit),
            waiting_s=own,
            kv_tokens=tokens,
        )
        # When nobody has told the router yet, a refused request does.
        if self.states[target] is not WorkerState.READY:
            self.fleet.update(self.snapshot(target))
            self.lose([number])
            return
        self.books.engine[number] = target
        engine.add(job)
        self.begin(target)

    def begin(self, target: int) -> None:
        step = self.engines[target].begin(self.now)
        if step is None:
            return
        config = self.simulator.prefill
        self.step_sum += step.duration_s
        self.rank_sum += config.cost.step_s + float(step.rank_s.mean())
        epoch = self.epochs[target]
        self.at(self.now + step.duration_s, lambda: self.end(target, epoch))

    def end(self, target: int, epoch: int) -> None:
        if epoch != self.epochs[target]:
            return  # it died meanwhile
        self.books.end_s = self.now
        engine = self.engines[target]
        finished, stored, removed = engine.end()
        self.begin(target)
        self.tell(target, stored, removed)
        for job in finished:
            self.books.first_token(job, self.now)
            record = self.records[job.index]
            left = record.output_tokens - 1 - self.books.made[job.index]
            if self.pool is None or left < 1:
                self.books.finish(job.index, self.now)
                continue
            delay = self.simulator.transfer.seconds(job.tokens)
            index, tokens = job.index, job.tokens + 1
            self.at(
                self.now + delay,
                lambda index=index, tokens=tokens, left=left: self.pool.arrive(index, tokens, left),  # type: ignore[misc]
            )
        self.retry()

    def tell(
        self, target: int, stored: Sequence[Hashable] = (), removed: Sequence[Hashable] = ()
    ) -> None:
        """Reports the engine's load, and what its cache gained and lost, after the delay."""
        snapshot = self.snapshot(target)
        updates = []
        if self.simulator.index is not None and (stored or removed):
            updates.append(self.message(target, stored, removed))
            if removed and self.simulator.prefill.cache is CacheKind.STORE:
                # What one engine drives out of the store, another may have brought in.
                others = [other for other in range(len(self.engines)) if other != target]
                updates += [self.message(other, (), removed) for other in others]
        if self.simulator.event_delay_s:
            later = self.now + self.simulator.event_delay_s
            self.at(later, lambda: self.heard(snapshot, updates))
        else:
            self.heard(snapshot, updates)

    def message(
        self, target: int, stored: Sequence[Hashable], removed: Sequence[Hashable]
    ) -> CacheUpdate:
        self.sequences[target] += 1
        return CacheUpdate(
            worker=self.engines[target].name,
            epoch=self.lives[target],
            sequence=self.sequences[target] - 1,
            stored=tuple(stored),
            removed=tuple(removed),
        )

    def snapshot(self, target: int) -> WorkerSnapshot:
        engine = self.engines[target]
        running = min(engine.num_jobs, self.simulator.prefill.num_ranks)
        return WorkerSnapshot(
            name=engine.name,
            state=self.states[target],
            time_s=self.now,
            num_running=running,
            num_waiting=engine.num_jobs - running,
            waiting_tokens=engine.waiting_tokens,
            waiting_s=engine.waiting_s(self.now),
        )

    def heard(self, snapshot: WorkerSnapshot, updates: Sequence[CacheUpdate]) -> None:
        self.fleet.update(snapshot)
        if self.simulator.index is not None:
            for update in updates:
                self.simulator.index.apply(update)
        self.retry()

    def retry(self) -> None:
        """Routes again what nobody could take."""
        if self.pending and self.fleet.ready.any():
            waiting, self.pending = self.pending, deque()
            for number in waiting:
                self.route(number)

    def round(self) -> None:
        router = self.simulator.router
        if isinstance(router, TierRouter):
            router.reassign(self.tier_s.tolist())
            self.tier_s[:] = 0.0
            if self.events:
                self.at(self.now + self.simulator.round_s, self.round)

    def change(self, change: FleetChange) -> None:
        if change.is_decode:
            if self.pool is not None:
                self.pool.change(change.engine, change.kind)
            return
        target = change.engine
        if change.kind is FleetChangeKind.FAIL and self.states[target] is not WorkerState.DEAD:
            self.states[target] = WorkerState.DEAD
            jobs = self.engines[target].fail(self.now)
            self.epochs[target] += 1
            if self.simulator.prefill.cache is not CacheKind.STORE:  # a store outlives its engines
                if self.simulator.index is not None:
                    self.simulator.index.drop(self.engines[target].name)
                self.lives[target] += 1
                self.sequences[target] = 0
            self.tell(target)
            self.lose([job.index for job in jobs])
        elif change.kind is FleetChangeKind.DRAIN and self.states[target] is WorkerState.READY:
            self.states[target] = WorkerState.DRAINING
            self.tell(target)
        elif change.kind is FleetChangeKind.JOIN:
            self.states[target] = WorkerState.READY
            self.tell(target)

    def lose(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.books.retries[number] += 1
            self.at(self.now, lambda number=number: self.route(number))  # type: ignore[misc]

    def lost_decode(self, number: int, made: int) -> None:
        """A decode engine died with a request: its prompt and what it made are run again."""
        self.books.made[number] += made
        self.lose([number])

    def report(self) -> FleetReport:
        pool = self.pool
        return self.books.report(
            has_decode=pool is not None,
            prefill_busy_s=np.array([engine.busy_s for engine in self.engines]),
            prefill_efficiency=self.rank_sum / self.step_sum if self.step_sum else 1.0,
            decode_efficiency=pool.efficiency if pool else float("nan"),
            decode_busy_s=pool.busy_s if pool else np.zeros(0),
            decode_max_requests=pool.max_requests if pool else float("nan"),
            decode_max_kv=pool.max_kv if pool else float("nan"),
            end_s=self.books.end_s,
            tier_bounds=self.simulator.tier_bounds,
        )
