"""The scheduler.

A step passes through three calls. `plan` looks and changes nothing, `launch` commits to a plan, and `apply`
settles its result; `cancel` takes the place of `apply` for a step that never finished.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from deepinfer.core.clock import Clock, MonotonicClock
from deepinfer.core.errors import (
    InvalidRequest,
    InvariantBroken,
    RequestTooLong,
    Unschedulable,
)
from deepinfer.core.plan import LoadSnapshot, PlanRow, RowResult, StepPlan, StepResult
from deepinfer.core.types import FinishReason, Request
from deepinfer.scheduling.ledger import Flight, Progress, Sequence
from deepinfer.scheduling.limits import SchedulerLimits, allows_drafts
from deepinfer.scheduling.plannable_cache import PlannableCache
from deepinfer.scheduling.policies import ORDER_POLICIES, OrderPolicy

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    Every step takes, within `limits.max_num_batched_tokens`: one token of each decoding request, with drafts
    as far as the budget goes; then chunks of the prompts that already hold a slot; then chunks of waiting
    requests while slots are free. Decoding requests never wait for a prompt. One step is in flight at a time.

    Args:
        limits: What every plan stays within.
        cache: Gives out slots.
        order: Name of an order policy, or the policy itself.
        may_draft: Which requests are planned with drafts.
        clock: Time of snapshots.

    Examples:
        >>> from deepinfer.cache import SlotCacheManager
        >>> limits = SchedulerLimits(max_model_len=64, prefill_chunk_tokens=4)
        >>> scheduler = Scheduler(limits, SlotCacheManager(num_slots=2, slot_tokens=64))
        >>> scheduler.add(Request(rid="a", prompt_token_ids=(1, 2, 3, 4, 5)))
        >>> scheduler.plan(now=0.0)
        StepPlan(step=0, tokens=4, rows=[a:prefill[0:4]])
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: PlannableCache,
        *,
        order: str | OrderPolicy = "fcfs",
        may_draft: Callable[[Any], bool] = allows_drafts,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self._key = ORDER_POLICIES.create(order) if isinstance(order, str) else order
        self.may_draft = may_draft
        self._clock = clock or MonotonicClock()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # sorted by the order policy
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._launched: dict[int, StepPlan] = {}
        self._next_step = 0
        self._num_added = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, runs, or is in flight."""
        return bool(self._sequences or self._launched)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Takes a request.

        The output is cut to the room that `limits.max_model_len` leaves after the prompt.

        Args:
            request: The request.

        Raises:
            InvalidRequest: A request with the same id is unfinished.
            RequestTooLong: The prompt leaves no room for a single token of output.
            Unschedulable: The prompt can never fit the cache.
        """
        rid, length = request.rid, request.num_prompt_tokens
        if rid in self._sequences:
            raise InvalidRequest(
                f"a request with id {rid!r} is not finished yet; give every request its own id.",
                rid=rid,
                field="rid",
                value=rid,
                limit="an id that no unfinished request has",
            )
        most = self.limits.max_model_len - 1
        if length > most:
            raise RequestTooLong(
                f"the prompt has {length} tokens and max_model_len is {self.limits.max_model_len}, so "
                f"it may have {most} at most. Shorten it, or raise max_model_len.",
                rid=rid,
                limit_tokens=most,
                asked_tokens=length,
            )
        if length + 1 > self.cache.capacity_tokens:
            raise Unschedulable(
                f"the prompt has {length} tokens and the whole cache holds "
                f"{self.cache.capacity_tokens}; make the cache larger or shorten the prompt.",
                rid=rid,
            )
        limit = min(length + request.params.max_tokens, self.limits.max_model_len)
        sequence = Sequence(request, limit, self._num_added, self.limits.eos_token_ids)
        self._num_added += 1
        self._sequences[rid] = sequence
        bisect.insort(self._waiting, sequence, key=self._key)

    def abort(self, rid: str) -> None:
        """Ends a request, because nobody wants it or its text is complete; unknown ids are ignored.

        Args:
            rid: Its id. The result of a step in flight is dropped for it.
        """
        sequence = self._sequences.get(rid)
        if sequence is not None:
            self._drop(sequence)

    def preempt(self, rid: str) -> None:
        """Takes the slot of a running request; it waits in its old place and is run again from the start.

        Args:
            rid: Its id. Unknown and waiting requests are left alone, and so are those in flight.
        """
        sequence = self._running.get(rid)
        if sequence is not None and not sequence.flights:
            self._requeue(sequence, after_step=self._next_step - 1)

    def plan(self, now: float) -> StepPlan | None:
        """Makes the next plan. It depends on the state and `now` only, and changes nothing.

        Args:
            now: Time in seconds.

        Returns:
            The plan, or None when nothing can run: no request is left, or a step is in flight.
        """
        if self._launched or not self._sequences:
            return None
        limits = self.limits
        rows: list[PlanRow] = []
        prefilling: list[Sequence] = []
        decoding: list[Sequence] = []
        for sequence in self._running.values():
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        budget = limits.max_num_batched_tokens - len(decoding)
        for sequence in decoding:
            num_drafts = 0
            if limits.draft_length and self.may_draft(sequence.request.params):
                num_drafts = max(0, min(limits.draft_length, budget, sequence.num_remaining - 1))
                budget -= num_drafts
            rows.append(self._row(sequence, 1, num_drafts))
        for sequence in prefilling:
            if budget <= 0:
                break
            chunk = min(sequence.num_pending, limits.prefill_chunk_tokens, budget)
            budget -= chunk
            rows.append(self._row(sequence, chunk, 0))
        free_places = limits.max_num_seqs - len(self._running)
        slots = self.cache.peek(min(free_places, len(self._waiting)))
        for sequence, (slot, generation) in zip(self._waiting, slots, strict=False):
            if budget <= 0:
                break
            chunk = min(sequence.num_pending, limits.prefill_chunk_tokens, budget)
            budget -= chunk
            rows.append(sequence.row(chunk, 0, slot, generation))
        return StepPlan(step=self._next_step, rows=tuple(rows)) if rows else None

    def launch(self, plan: StepPlan) -> None:
        """Commits to a plan: gives out its slots and notes its rows as in flight.

        Args:
            plan: What `plan` returned last.

        Raises:
            InvariantBroken: The plan does not fit the present state.
        """
        if plan.step != self._next_step:
            message = f"step {plan.step} came, and {self._next_step} is next"
            raise InvariantBroken(
                f"{message}; launch each plan once, before anything else changes."
            )
        self._next_step += 1
        self._launched[plan.step] = plan
        for row in plan.rows:
            sequence = self._sequences.get(row.rid)
            if sequence is None or sequence.epoch != row.epoch:
                raise InvariantBroken(f"step {plan.step} runs {row.rid!r}, which is not there.")
            if sequence.slot is None:
                self._admit(sequence, row)
            if (sequence.slot, sequence.settled) != (row.slot, row.first_position):
                raise InvariantBroken(f"step {plan.step} has the row {row}, and now is {sequence}.")
            sequence.flights.append(Flight(plan.step, row))

    def apply(self, result: StepResult) -> list[Progress]:
        """Settles the result of the oldest launched step.

        Args:
            result: The result. Rows of requests that ended meanwhile are dropped.

        Returns:
            What changed, one entry a row that still counts.

        Raises:
            InvariantBroken: The result is not that of the oldest launched step, or does not fit its plan.
        """
        plan = self._oldest_launched(result.step)
        if [row.rid for row in plan.rows] != [row.rid for row in result.rows]:
            raise InvariantBroken(f"the rows of the result of step {plan.step} are not its plan's.")
        del self._launched[plan.step]
        progress = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            sequence = self._running.get(row.rid)
            if sequence is None or not sequence.flights or sequence.flights[0].row is not row:
                continue
            sequence.flights.popleft()
            progress.append(self._settle(sequence, row, row_result, plan.step))
        self.cache.step_done(plan.step)
        return progress

    def cancel(self, step: int) -> None:
        """Takes a launched step back: its requests lose their slots and will be run again.

        Args:
            step: Id of the oldest launched step; one that was never launched is ignored.
        """
        if step not in self._launched:
            return
        plan = self._oldest_launched(step)
        del self._launched[step]
        for row in plan.rows:
            sequence = self._running.get(row.rid)
            if sequence is not None and sequence.epoch == row.epoch:
                self._requeue(sequence, after_step=step)
        self.cache.step_done(step)

    def reset(self) -> None:
        """Forgets every request and takes every slot back, in whatever state the books are."""
        self._waiting.clear()
        self._running.clear()
        self._sequences.clear()
        self._launched.clear()
        self.cache.reset()

    def snapshot(self) -> LoadSnapshot:
        """How busy the engine is."""
        sequences = self._sequences.values()
        return LoadSnapshot(
            time_s=self._clock.now(),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            waiting_tokens=sum(s.num_pending for s in sequences if not s.is_decoding),
            cached_tokens=sum(s.settled for s in self._running.values()),
            capacity_tokens=self.cache.capacity_tokens,
        )

    def check(self) -> None:
        """Walks every book, the cache manager's as well.

        Raises:
            InvariantBroken: They do not add up.
        """
        queued = [*self._waiting, *self._running.values()]
        if {s.rid: s for s in queued} != self._sequences or len(queued) != len(self._sequences):
            raise InvariantBroken("a request is in two queues or none, or an ended one is in one.")
        if not len(self._running) == self.cache.num_held <= self.limits.max_num_seqs:
            raise InvariantBroken(
                f"{len(self._running)} requests run, {self.cache.num_held} hold a slot, and "
                f"max_num_seqs is {self.limits.max_num_seqs}."
            )
        for sequence in self._sequences.values():
            self._check_sequence(sequence)
        self.cache.check()

    def _check_sequence(self, sequence: Sequence) -> None:
        flying = sum(flight.row.num_tokens for flight in sequence.flights)
        drafts = sum(flight.row.num_drafts for flight in sequence.flights)
        known = len(sequence.token_ids)
        if not (0 <= sequence.settled < known <= sequence.limit <= self.limits.max_model_len):
            raise InvariantBroken(f"counts are out of order: {sequence}.")
        if sequence.settled + flying - drafts > known or (
            drafts and known + drafts >= sequence.limit
        ):
            raise InvariantBroken(f"more is in flight than there is: {sequence}.")
        held = self.cache.holding(sequence.request)
        expected = (
            (sequence.slot, sequence.slot_generation) if sequence.rid in self._running else None
        )
        if (None if held is None else (held.slot, held.slot_generation)) != expected:
            raise InvariantBroken(f"the cache knows {held}, and the scheduler {sequence}.")
        for flight in sequence.flights:
            if flight.step not in self._launched:
                raise InvariantBroken(f"step {flight.step} is not in flight: {sequence}.")

    def _row(self, sequence: Sequence, num_tokens: int, num_drafts: int) -> PlanRow:
        assert sequence.slot is not None  # noqa: S101 - running requests hold one
        return sequence.row(num_tokens, num_drafts, sequence.slot, sequence.slot_generation)

    def _admit(self, sequence: Sequence, row: PlanRow) -> None:
        allocation = self.cache.allocate(sequence.request, None, upto=sequence.limit)
        if allocation is None:
            raise InvariantBroken(f"the cache has no room for the planned row {row}.")
        self._waiting.remove(sequence)
        self._running[sequence.rid] = sequence
        sequence.slot = allocation.slot
        sequence.slot_generation = allocation.slot_generation
        if (allocation.slot, allocation.slot_generation) != (row.slot, row.slot_generation):
            raise InvariantBroken(f"the cache gave {allocation} to the planned row {row}.")

    def _settle(self, sequence: Sequence, row: PlanRow, result: RowResult, step: int) -> Progress:
        count, reason, stop_token_id = 0, None, None
        error = result.error
        if error is None:
            expected = result.num_accepted + 1 if row.num_logits else 0
            if len(result.token_ids) != expected or not 0 <= result.num_accepted <= row.num_drafts:
                error = InvariantBroken(
                    f"step {step} gave {len(result.token_ids)} tokens with {result.num_accepted} "
                    f"drafts accepted for {row}; expected {expected}."
                )
        if error is not None:
            reason = FinishReason.ERROR
        else:
            sequence.settled = row.end_position - row.num_drafts + result.num_accepted
            count, reason, stop_token_id = sequence.append(result.token_ids)
            self.cache.settle(sequence.request, sequence.token_ids, sequence.settled, step)
        if reason is not None:
            self._drop(sequence)
        return Progress(
            request=sequence.request,
            token_ids=result.token_ids[:count],
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            plan_row=row,
            result=result,
        )

    def _oldest_launched(self, step: int) -> StepPlan:
        oldest = next(iter(self._launched), None)
        if step != oldest:
            raise InvariantBroken(
                f"got the result of step {step}, and the oldest step in flight is {oldest}."
            )
        return self._launched[step]

    def _drop(self, sequence: Sequence) -> None:
        after_step = sequence.flights[-1].step if sequence.flights else -1
        del self._sequences[sequence.rid]
        if self._running.pop(sequence.rid, None) is None:
            self._waiting.remove(sequence)
        sequence.flights.clear()
        self.cache.release(sequence.request, after_step)

    def _requeue(self, sequence: Sequence, after_step: int) -> None:
        self.cache.release(sequence.request, after_step)
        del self._running[sequence.rid]
        sequence.reset()
        bisect.insort(self._waiting, sequence, key=self._key)

    def __repr__(self) -> str:
        counts = f"{len(self._running)} running, {len(self._waiting)} waiting"
        return f"Scheduler({counts}, step {self._next_step})"
