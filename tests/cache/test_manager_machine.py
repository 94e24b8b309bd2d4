"""Any order of calls: the books add up after each, and every row that is read is the right one."""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer.cache import BlockCacheManager, CacheCleared, ReplayPolicy
from deepinfer.cache.block_keys import sha256
from deepinfer.core import FakeClock, MemorySink, Request
from deepinfer.core.plan import CopyKind

spec = importlib.util.spec_from_file_location("device", Path(__file__).with_name("device.py"))
assert spec is not None
assert spec.loader is not None
device_module: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(device_module)
Device, signatures, GARBAGE = (
    device_module.Device,
    device_module.signatures,
    device_module.GARBAGE,
)

BLOCK = 4
MAX_TOKENS = 28
CHUNK = 9
DRAFTS = 2
INEXACT = 10**30
SEEDS = st.integers(0, 2**32)


def next_token(ids: list[int]) -> int:
    return (sum(ids) * 7 + len(ids)) % 3


@dataclass
class Running:
    request: Request
    ids: list[int]  # known
    slot: int = -1
    scheduled: int = 0
    settled: int = 0
    epoch: int = 0
    flights: int = 0
    last_step: int = -1
    failed: bool = False


@dataclass
class Step:
    number: int
    rows: list[tuple[Running, int, int, int]] = field(default_factory=list)  # run, epoch, end, slot
    failed: set[str] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    """Drives a manager as a scheduler at depth 0 or 1 does, on top of a device that checks what is read."""

    make_manager: Any = BlockCacheManager

    @initialize(
        num_slots=st.integers(1, 3),
        num_blocks=st.integers(3, 12),
        host=st.sampled_from([0, 2, 5]),
        window_slots=st.sampled_from([0, 1, 3]),
        window=st.sampled_from([0, 3]),
        mode=st.sampled_from(["bounded", "exact", "off"]),
        spare=st.integers(0, 3),
        colliding=st.sampled_from([0, 0, 1, 2]),
        ttl=st.sampled_from([None, 5.0]),
    )
    def start(
        self,
        num_slots: int,
        num_blocks: int,
        host: int,
        window_slots: int,
        window: int,
        mode: str,
        spare: int,
        colliding: int,
        ttl: float | None,
    ) -> None:
        self.policy = ReplayPolicy(mode=mode, window=window, layers=1, narrowed=False)
        rows = window + 1 if window else 0
        ring = max(rows + CHUNK, rows + spare + 2 * (1 + DRAFTS), 1)
        self.device = Device(num_slots, num_blocks, BLOCK, ring, rows)
        self.clock = FakeClock()
        self.sink = MemorySink()
        self.cache = self.make_manager(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_tokens=MAX_TOKENS + DRAFTS + 2,
            replay=self.policy,
            num_host_blocks=host,
            num_window_slots=window_slots if window else 0,
            window_rows=rows,
            ring_spare=spare,
            window_ttl_s=ttl,
            clock=self.clock,
            sink=self.sink,
            hash_fn=(lambda data: sha256(data)[:1])
            if colliding == 1
            else ((lambda data: b"k") if colliding == 2 else sha256),
        )
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.steps: deque[Step] = deque()
        self.next_step = 0
        self.count = 0

    @rule(seed=SEEDS, rounds=st.integers(1, 12))
    def work(self, seed: int, rounds: int) -> None:
        """Requests come, run and go, as in an engine."""
        rng = random.Random(seed)
        for _ in range(rounds):
            while len(self.waiting) < 3 and rng.random() < 0.6:
                self.submit(rng)
            if len(self.steps) < 2 and (self.running or self.waiting):
                self.launch(rng)
            while self.steps and (len(self.steps) > 1 or rng.random() < 0.6):
                self.collect(rng)
            for run in list(self.running):
                if run.settled and rng.random() < (0.05 if len(run.ids) < MAX_TOKENS else 0.9):
                    self.leave(run)
            self.clock.advance(rng.random())
            self.check_all()

    def submit(self, rng: random.Random) -> None:
        stem = rng.choice([[0] * 20, [1, 2] * 10, [2, 0, 1] * 7])
        ids = stem[: rng.randint(1, 20)] + [rng.randint(0, 2) for _ in range(rng.randint(0, 2))]
        request = Request(
            rid=str(self.count),
            prompt_token_ids=tuple(ids),
            cache_salt=rng.choice([None, None, None, "s"]),
            arrival_s=1.0,
        )
        self.count += 1
        self.waiting.append(Running(request, ids))

    def launch(self, rng: random.Random) -> None:
        cache, device = self.cache, self.device
        step = Step(self.next_step)
        planned: list[tuple[Running, int, int, Any]] = []
        free = cache.num_free_blocks
        for run in self.running:
            prefill = run.scheduled < len(run.ids)
            if run.failed or (not prefill and run.flights > 1):
                continue
            if prefill:
                count = min(rng.randint(1, CHUNK), len(run.ids) - run.scheduled)
                drafts = 0
            else:
                count, drafts = 1, rng.randint(0, DRAFTS)
            if run.scheduled + count > MAX_TOKENS:
                continue
            upto = run.scheduled + count + drafts
            need = cache.blocks_for(run.request, None, upto)
            if need > free:
                continue
            free -= need
            planned.append((run, run.scheduled + count, upto, None))
        slots = cache.peek(len(self.waiting))
        admitted = 0
        for run in list(self.waiting):
            if admitted >= len(slots) or len(run.ids) > MAX_TOKENS:
                continue
            hit = cache.lookup(run.request, run.ids, len(run.ids))
            assert hit == cache.lookup(run.request, list(run.ids), len(run.ids))
            assert hit.num_tokens % BLOCK == 0
            assert hit.num_tokens < len(run.ids)
            end = min(hit.num_tokens + rng.randint(1, CHUNK), len(run.ids))
            need = cache.blocks_for(run.request, hit, end)
            if need > free:
                continue
            free -= need
            admitted += 1
            planned.append((run, end, end, hit))
        admitted = 0
        for run, _, _, hit in planned:
            if hit is not None:
                before = cache.num_free_blocks
                given = cache.allocate(run.request, hit, upto=len(hit.blocks) * BLOCK)
                assert given is not None
                assert (given.slot, given.slot_generation) == slots[admitted]
                assert before - cache.num_free_blocks <= len(hit.blocks)
                admitted += 1
                run.slot, run.scheduled, run.settled = given.slot, hit.num_tokens, 0
                self.waiting.remove(run)
                self.running.append(run)
        for run, _, upto, _ in planned:
            assert cache.allocate(run.request, None, upto=upto) is not None
        assert cache.num_free_blocks >= free
        updates, copies = cache.take_updates()
        loading = sorted({copy.rid for copy in copies if copy.rid})
        failing = rng.choice([None, None, None, *loading]) if loading else None
        step.failed = device.carry_out(updates, copies, failing)
        for run, end, upto, hit in planned:
            truth = list(run.ids)
            while len(truth) < upto + 1:
                truth.append(next_token(truth))
            right = signatures(truth[:end], run.request.cache_salt)
            if hit is not None and run.request.rid not in step.failed:
                self.check_hit(run, hit, right, copies)
            wrong = [GARBAGE - 2] * (upto - end)
            device.write(run.slot, run.scheduled, right[run.scheduled :] + wrong)
            run.scheduled = end
            run.flights += 1
            run.last_step = step.number
            step.rows.append((run, run.epoch, end, run.slot))
            step.touched.update(device.tables[run.slot])
        if planned:
            self.steps.append(step)
            self.next_step += 1

    def check_hit(self, run: Running, hit: Any, right: list[int], copies: Any) -> None:
        """What a hit promises is there, bit for bit."""
        device, window = self.device, self.policy.window
        assert device.read(run.slot, hit.num_tokens) == right[: hit.num_tokens]
        if not window or not hit.num_tokens:
            return
        if hit.window_slot is not None:
            assert [c.kind for c in copies if c.rid == run.request.rid].count(
                CopyKind.LOAD_WINDOWS
            ) == 1
            assert hit.replay_start == hit.num_tokens
            assert hit.num_tokens > 0
            for position in range(max(0, hit.num_tokens - device.window_rows), hit.num_tokens):
                ring = device.rings[run.slot]
                assert ring[position % device.ring_size] == (position, right[position])
            return
        start = hit.replay_start
        assert 0 <= start < hit.num_tokens
        assert hit.num_tokens > window
        rows = [INEXACT + p for p in range(start, hit.num_tokens)]
        device.write_ring(run.slot, start, rows)

    def collect(self, rng: random.Random) -> None:
        step = self.steps.popleft()
        for run, epoch, end, _ in step.rows:
            if run.epoch != epoch or run not in self.running:
                continue
            run.flights -= 1
            if run.failed:
                continue
            if run.request.rid in step.failed:
                self.cache.load_failed(run.request)
                run.failed = True
                continue
            before, run.settled = run.settled, end
            while len(run.ids) <= end:
                run.ids.append(next_token(run.ids))
            if rng.random() < 0.5 or before // BLOCK != end // BLOCK:
                self.cache.settle(run.request, run.ids, end, step.number)
        self.cache.step_done(step.number)
        for run in [run for run in self.running if run.failed]:
            self.leave(run)
            run.failed = False
            self.waiting.append(run)

    def leave(self, run: Running) -> None:
        self.cache.release(run.request, run.last_step)
        self.running.remove(run)
        run.epoch += 1
        run.flights = run.scheduled = run.settled = 0

    @precondition(lambda self: self.running)
    @rule(seed=SEEDS, again=st.booleans(), twice=st.booleans())
    def release(self, seed: int, again: bool, twice: bool) -> None:
        run = random.Random(seed).choice(self.running)
        self.leave(run)
        if twice:
            self.cache.release(run.request, run.last_step)
        if again:
            run.failed = False
            self.waiting.append(run)

    @precondition(lambda self: self.waiting)
    @rule(seed=SEEDS)
    def forget(self, seed: int) -> None:
        run = random.Random(seed).choice(self.waiting)
        self.waiting.remove(run)
        self.cache.release(run.request, -1)

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.count % 3 == 2)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.cache.reset_prefix_cache()
        assert self.cache.stats().idle_blocks == 0
        assert isinstance(list(self.sink)[-1], CacheCleared)

    @precondition(lambda self: self.count % 5 == 4)
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.steps.clear()
        self.waiting += self.running
        for run in self.running:
            run.epoch += 1
            run.flights = run.scheduled = run.settled = 0
            run.failed = False
        self.running.clear()
        assert self.cache.num_free_blocks == self.cache.num_blocks

    @invariant()
    def check_all(self) -> None:
        self.books_add_up()
        self.nothing_in_flight_is_free()
        self.rows_of_running_requests_are_theirs()

    def books_add_up(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        parts = stats.free_blocks + stats.idle_blocks + stats.held_blocks + stats.quarantined_blocks
        assert parts == stats.num_blocks
        assert stats.free_slots + stats.held_slots + stats.quarantined_slots == stats.num_slots

    def nothing_in_flight_is_free(self) -> None:
        pool = self.cache._books.pool
        for step in self.steps:
            assert not any(map(pool.is_free, step.touched))

    def rows_of_running_requests_are_theirs(self) -> None:
        for run in self.running:
            if not run.failed and run.settled:
                right = signatures(run.ids[: run.settled], run.request.cache_salt)
                assert self.device.read(run.slot, run.settled) == right

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.steps:
            self.collect(random.Random(0))
        for run in list(self.running):
            self.leave(run)
        self.cache.step_done(self.next_step)
        self.cache.check()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert self.cache.num_held == 0


TestManager = Machine.TestCase
TestManager.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
