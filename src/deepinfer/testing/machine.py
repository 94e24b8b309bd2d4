"""Drives a whole engine on a toy model through any order of calls, and compares everything with what must be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from deepinfer.core.errors import InvariantBroken, RequestTooLong
from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import StepPlan
from deepinfer.core.types import FinishReason, Output, OutputDelta
from deepinfer.engine import Engine
from deepinfer.scheduling import Scheduler
from deepinfer.testing.faults import (
    FaultInjector,
    JumpingClock,
    PlantedFault,
    PlantedInterrupt,
    RaisingSink,
    plant,
)
from deepinfer.testing.invariants import check_all, check_drained, check_pure
from deepinfer.testing.machine_config import MAX_LEN, VOCAB, Action, MachineConfig
from deepinfer.testing.observed_scheduler import ObservedScheduler
from deepinfer.testing.shadow_books import ShadowBooks
from deepinfer.testing.toy_model import ToyModel
from deepinfer.testing.toy_reference import ToyGrammar
from deepinfer.testing.toy_tokenizer import ToyTokenizer
from deepinfer.testing.trace_player import ScheduleRecorder, play_calls

__all__ = ["Machine", "Mutation"]

_MOST_STEPS = 4_000


@dataclass(slots=True, eq=False)
class _Record:
    """What was asked and what came."""

    prompt: tuple[int, ...]
    params: SamplingParams
    is_heard: bool = True
    steps: int = 0
    deltas: list[OutputDelta] = field(default_factory=list)


class Mutation:
    """Breaks an engine on purpose, to see that a `Machine` finds it."""

    def scheduler(self, scheduler: Scheduler) -> None:
        """Breaks the scheduler or its cache, before anything is asked of them.

        Args:
            scheduler: The scheduler.
        """

    def engine(self, engine: Engine) -> None:
        """Breaks the engine or its runner.

        Args:
            engine: The engine.
        """


class Machine:
    """An engine on a toy model, with books of its own beside it, and everything that can be done to it.

    After each action all invariants are checked, and each output that ended is compared with `ToyReference`.

    Args:
        config: Sizes and options.
        mutation: Breaks it, or None.
        record: Whether to record the schedule, and to play it to fresh objects in `finish`.

    Attributes:
        engine: The engine.
        books: Shadow books.
        scheduler: The observed scheduler.
        counts: Actions done, by name, and what came of them.
        outcomes: Outputs that ended, by finish reason.
        recorder: What records the schedule, or None.
        num_steps: Steps of the engine.

    Examples:
        >>> machine = Machine(MachineConfig())
        >>> machine.do(("add", {"prompt": (5, 6, 7), "params": {"temperature": 0.0}}))
        >>> machine.do(("step", {"times": 3}))
        >>> machine.finish()
        >>> machine.counts["step"]
        1
    """

    def __init__(
        self, config: MachineConfig, mutation: Mutation | None = None, *, record: bool = False
    ) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.num_steps = 0
        self.model = ToyModel(config.toy())
        self.clock = JumpingClock()
        self.recorder = ScheduleRecorder(self.clock) if record else None
        self.injector = FaultInjector()
        self._mutation = mutation or Mutation()
        self.engine = Engine(
            model=self.model,
            tokenizer=ToyTokenizer(VOCAB),
            config=config.engine(),
            scheduler=self._make_scheduler,
            cache="slots" if config.slots_only else "blocks",
            drafter="dspark" if config.drafts else None,
            grammar=lambda params: ToyGrammar.compile(params, VOCAB),
            clock=self.clock,
        )
        plant(self.engine, self.injector, duration_s=self._duration, clock=self.clock)
        self._mutation.engine(self.engine)
        self._reference = config.reference()
        self._records: dict[str, _Record] = {}
        self._count = self._num_tokens = 0
        self._drafts = (0, 0)
        self._is_paused = False

    def _make_scheduler(self, limits: Any, cache: Any) -> ObservedScheduler:
        scheduler = self.config.scheduler(limits, cache, self.clock)
        self._mutation.scheduler(scheduler)
        self.scheduler = ObservedScheduler(scheduler)
        self.books = ShadowBooks(self.scheduler)
        self.scheduler.observers.append(self.books)
        if self.recorder is not None:
            self.scheduler.observers.append(self.recorder)
        return self.scheduler

    def _duration(self, plan: StepPlan) -> float:
        return 1e-3 + 1e-4 * plan.num_tokens + (10.0 if plan.step % 97 == 96 else 0.0)

    @property
    def unfinished(self) -> list[str]:
        """Ids of requests that did not end, in order."""
        return list(self._records)

    def do(self, action: Action) -> None:
        """Does one action and checks everything.

        Args:
            action: Name and arguments, as `MachineConfig.draw` gives them. One that does not fit the present state does
                nothing, so that any part of a list of actions can be done as well.

        Raises:
            InvariantBroken: Something is not as it must be.
        """
        name, arguments = action
        self.counts[name] += 1
        try:
            getattr(self, f"_do_{name}")(**arguments)
        except PlantedInterrupt:  # steps are run by more calls than `step`
            self.counts["interrupted"] += 1
        self.check()

    def check(self) -> None:
        """Checks everything that must hold at any moment.

        Raises:
            InvariantBroken: Something does not.
        """
        check_all(self.scheduler, self.books, self.engine)
        check_pure(self.scheduler, self.clock.now())
        for rid in list(self._records):
            self._compare(rid)

    def finish(self) -> None:
        """Lets everything end, and checks that nothing is left.

        Raises:
            InvariantBroken: Something is left, or does not end.
        """
        self.injector.disarm()
        self._do_resume()
        most = 80 * (len(self._records) + 1)
        for _ in range(most):
            if not self.engine.has_unfinished:
                break
            self._do_step(1)
            self.check()
        if self.engine.has_unfinished or self._records:
            raise InvariantBroken(f"I7: {self.unfinished} did not end in {most} steps.")
        check_drained(self.scheduler, self.books, self.engine)
        self._check_totals()
        self.engine.close()
        if self.recorder is not None:
            for launch_recorded in (False, True):
                other = Machine(self.config)
                play_calls(
                    self.recorder.calls,
                    other.scheduler.inner,
                    clock=other.clock,
                    launch_recorded=launch_recorded,
                )
                other.engine.close()
            self.counts["replayed"] += 1

    def _check_totals(self) -> None:
        stats = self.engine.stats()
        ended = dict(self.outcomes)
        found = {name: count for name, count in stats.requests_finished.items() if count}
        left = stats.requests_running + stats.requests_waiting
        drafts = (stats.draft_tokens_verified, stats.draft_tokens_accepted)
        right = stats.generated_tokens == self._num_tokens and drafts == self._drafts
        if left or found != ended or not right:
            raise InvariantBroken(
                f"I10: {ended} ended with {self._num_tokens} tokens and {self._drafts} drafts, and the statistics are "
                f"{stats}."
            )

    def _do_add(
        self,
        prompt: tuple[int, ...],
        params: dict[str, Any],
        priority: int = 0,
        sink_fails_at: int | None = None,
    ) -> None:
        rid = f"r{self._count}"
        self._count += 1
        record = _Record(tuple(prompt), SamplingParams(**{"seed": 0, **params}))
        sink: Any = record.deltas.append
        if sink_fails_at is not None:
            sink = RaisingSink(sink, sink_fails_at)
            record.is_heard = False
        try:
            self.engine.add_request(
                record.prompt,
                record.params,
                rid=rid,
                priority=priority,
                sink=sink,
                keep_output=True,
            )
        except RequestTooLong:
            if len(prompt) < MAX_LEN:
                raise
            self.counts["too long"] += 1
            return
        if len(prompt) >= MAX_LEN:
            raise InvariantBroken(f"a prompt of {len(prompt)} tokens was taken.")
        self._records[rid] = record

    def _do_step(self, times: int = 1) -> None:
        for _ in range(times):
            self.num_steps += 1
            try:
                self.engine.step()
            except PlantedInterrupt:
                self.counts["interrupted"] += 1
            if not self._is_paused:
                self._grow_older()

    def _grow_older(self) -> None:
        for rid, record in self._records.items():
            record.steps += 1
            if record.steps > _MOST_STEPS:
                raise InvariantBroken(f"I7: {rid!r} did not end in {_MOST_STEPS} steps.")

    def _pick(self, pick: int) -> str | None:
        rids = self.unfinished
        return rids[pick % len(rids)] if rids else None

    def _do_abort(self, pick: int) -> None:
        rid = self._pick(pick)
        if rid is not None:
            self.engine.abort(rid)
            self.engine.abort(rid)

    def _do_preempt(self, pick: int) -> None:
        rid = self._pick(pick)
        if rid is not None:
            self.engine.preempt(rid)

    def _do_reset(self) -> None:
        self.engine.reset_prefix_cache()

    def _do_fail(self, site: str, after: int = 0, interrupt: bool = False) -> None:
        self.injector.arm(site, PlantedInterrupt() if interrupt else None, after=after)

    def _do_between(self, site: str, what: str, pick: int = 0, after: int = 0) -> None:
        def act() -> None:
            if what == "reset":
                self._do_reset()
            else:
                getattr(self, f"_do_{what}")(pick)

        self.injector.arm(site, act, after=after)

    def _do_clock(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _do_pause(self) -> None:
        self.engine.pause()
        self._is_paused = True

    def _do_resume(self) -> None:
        self.engine.resume()
        self._is_paused = False

    def _compare(self, rid: str) -> None:
        record = self._records[rid]
        if self.engine._loop.has(rid):
            return
        del self._records[rid]
        for output in self.engine.take_output(rid):
            self.outcomes[str(output.finish_reason)] += 1
            usage, (verified, accepted) = output.usage, self._drafts
            self._num_tokens += len(output.token_ids)
            self._drafts = (verified + usage.verified, accepted + usage.accepted)
            self._compare_output(rid, record, output)

    def _compare_output(self, rid: str, record: _Record, output: Output) -> None:
        def fail(what: str) -> None:
            raise InvariantBroken(f"I8: {rid!r} ({record.prompt}, {record.params}): {what}.")

        deltas = [delta for delta in record.deltas if delta.index == output.index]
        reason = output.finish_reason
        is_cut = reason in (FinishReason.ABORT, FinishReason.ERROR)
        if sum(delta.finished for delta in deltas) > 1 or any(d.finished for d in deltas[:-1]):
            fail(f"it ended more than once: {deltas}")
        if not is_cut and record.is_heard:
            ids = tuple(token for delta in deltas for token in delta.token_ids)
            text = "".join(delta.text for delta in deltas)
            if (ids, text) != (output.token_ids, output.text) or not deltas[-1].finished:
                fail(f"its deltas are {deltas}, and its output is {output}")
        if output.usage.generated != len(output.token_ids):
            fail(f"its usage is {output.usage}")
        if output.usage.prompt != len(record.prompt):
            fail(f"its usage is {output.usage}")
        if reason is FinishReason.ERROR and not self._is_planted(output.error):
            fail(f"it failed: {output.error!r}, caused by {_causes(output.error)}")
        if output.approximate_prefix:
            self.counts["approximate"] += 1
            if self.config.is_exact:
                fail("it says that its prefix is approximate")
            return
        wanted = self._reference.output(record.prompt, record.params, output.index)
        if is_cut:
            if wanted.token_ids[: len(output.token_ids)] != output.token_ids:
                fail(f"it gave {output.token_ids} before it was cut, and alone {wanted.token_ids}")
            return
        found = (output.text, output.token_ids, reason)
        if found != (wanted.text, wanted.token_ids, wanted.finish_reason):
            fail(f"it gave {found}, and alone {wanted}")
        if (output.logprobs or ()) != wanted.logprobs:
            fail(f"its log probabilities are {output.logprobs}, and alone {wanted.logprobs}")

    def _is_planted(self, error: BaseException | None) -> bool:
        if not self.injector.fired:
            return False
        causes = _causes(error)
        return any(isinstance(cause, PlantedFault) for cause in causes) or (
            self.counts["interrupted"] > 0 and "interrupt" in str(causes[0])
        )


def _causes(error: BaseException | None) -> list[BaseException]:
    out: list[BaseException] = []
    while error is not None and error not in out:
        out.append(error)
        error = error.__cause__
    return out
