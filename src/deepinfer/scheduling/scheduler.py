"""The scheduler.

A step passes through three calls. `plan` looks and changes nothing, `launch` commits to a plan, and `apply`
settles its result; `cancel` takes the place of `apply` for a step that never finished.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer.core.clock import Clock, MonotonicClock
from deepinfer.core.errors import InvalidRequest, InvariantBroken, RequestTooLong, Unschedulable
from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import LoadSnapshot, StepPlan, StepResult
from deepinfer.core.protocols import CacheManager, VerifyLengthPolicy
from deepinfer.core.types import Request
from deepinfer.scheduling.admission import AdmissionPolicy, FreeBlocks
from deepinfer.scheduling.book_check import check_books
from deepinfer.scheduling.books import Books
from deepinfer.scheduling.chunking import ChunkPolicy, FixedChunks
from deepinfer.scheduling.launching import decision_of, execute
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.limits import SchedulerLimits
from deepinfer.scheduling.plan_draft import Decision
from deepinfer.scheduling.planner import Planner
from deepinfer.scheduling.policies import (
    ORDER_POLICIES,
    VICTIM_POLICIES,
    OrderPolicy,
    VictimPolicy,
)
from deepinfer.scheduling.progress import ProgressList
from deepinfer.scheduling.settling import settle_result
from deepinfer.scheduling.step_work import StepWork

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching: decoding requests and chunks of prompts in one step, under one budget of tokens.

    Every step takes, within `limits.max_num_batched_tokens`: one token of each decoding request, with drafts
    as far as the budget goes; then chunks of the prompts that already hold a slot; then chunks of waiting
    requests while there is room. Decoding requests never wait for a prompt.

    At `limits.async_depth` 1 a step may be planned and launched while the one before it is in flight. A request whose
    last token is not known yet is planned once more, unless what is in flight ends it for sure; its row has no
    `token_ids`, and after a row with drafts `num_open` says how many of them may still be rejected.

    When blocks run out, requests give way in the order of the victim policy: they lose slot and blocks, wait in their old
    place, and are run again from the start or from a cached prefix. Tokens that steps in flight sample for them are kept.

    Args:
        limits: What every plan stays within.
        cache: Gives out slots and blocks.
        order: Name of an order policy, or the policy itself.
        victim: Name of a victim policy, or the policy itself.
        admission: Who may start; None keeps a hundredth of the blocks free and starts prompts that fit as a whole.
        chunks: How long chunks of prompts are; None takes as much as the limits allow.
        may_draft: Which requests are planned with drafts; None for all.
        verify_lengths: How many drafts of each row are verified, from the confidences that came with the result applied
            last; None for as many as the limits allow.
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
        cache: CacheManager,
        *,
        order: str | OrderPolicy = "fcfs",
        victim: str | VictimPolicy = "last_admitted",
        admission: AdmissionPolicy | None = None,
        chunks: ChunkPolicy | None = None,
        may_draft: Callable[[SamplingParams], bool] | None = None,
        verify_lengths: VerifyLengthPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        key = ORDER_POLICIES.create(order) if isinstance(order, str) else order
        give_way = VICTIM_POLICIES.create(victim) if isinstance(victim, str) else victim
        self._clock = clock or MonotonicClock()
        self._chunks = chunks or FixedChunks(limits.prefill_chunk_tokens)
        self._books = Books(limits, cache, key, may_draft)
        self._planner = Planner(
            self._books, give_way, admission or FreeBlocks(), self._chunks, verify_lengths
        )
        self._decision: Decision | None = None  # of the plan made last
        self._num_preempted = 0

    @property
    def may_draft(self) -> Callable[[SamplingParams], bool] | None:
        """Which requests are planned with drafts; None for all."""
        return self._books.may_draft

    @property
    def verify_lengths(self) -> VerifyLengthPolicy | None:
        """How many drafts of each row are verified; None for as many as the limits allow. It may be set between steps."""
        return self._planner.verify_lengths

    @verify_lengths.setter
    def verify_lengths(self, policy: VerifyLengthPolicy | None) -> None:
        """Asks another policy from the next plan on."""
        self._planner.verify_lengths = policy

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, runs, or is in flight."""
        return bool(self._books.sequences or self._books.launched)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._books.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._books.waiting)

    @property
    def num_in_flight(self) -> int:
        """Launched steps whose result was not applied."""
        return len(self._books.launched)

    @property
    def num_preempted(self) -> int:
        """How often a request lost its slot because blocks ran out, since the start."""
        return self._num_preempted

    def sequence(self, rid: str) -> Sequence | None:
        """The books of an unfinished request, to be read only, or None."""
        return self._books.sequences.get(rid)

    def add(self, request: Request) -> None:
        """Takes a request.

        The output is cut to the room that `limits.max_model_len` and the cache leave after the prompt.

        Args:
            request: The request.

        Raises:
            InvalidRequest: A request with the same id is unfinished.
            RequestTooLong: The prompt leaves no room for a single token of output.
            Unschedulable: The prompt can never fit the cache.
        """
        books = self._books
        rid, length = request.rid, request.num_prompt_tokens
        if rid in books.sequences:
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
        capacity = self.cache.capacity_tokens
        if length + 1 > capacity:
            raise Unschedulable(
                f"the prompt has {length} tokens and the whole cache holds {capacity}; make the cache "
                "larger or shorten the prompt.",
                rid=rid,
            )
        limit = min(length + request.params.max_tokens, self.limits.max_model_len, capacity)
        sequence = Sequence(request, limit, books.num_added, self.limits.eos_token_ids)
        try:
            books.enqueue(sequence)
        except BaseException:  # the order is somebody's own code
            self.cache.release(request, books.next_step - 1)
            raise
        books.num_added += 1
        books.version += 1
        books.sequences[rid] = sequence

    def abort(self, rid: str) -> None:
        """Ends a request, because nobody wants it or its text is complete; unknown ids are ignored.

        Args:
            rid: Its id. The result of a step in flight is dropped for it.
        """
        sequence = self._books.sequences.get(rid)
        if sequence is not None:
            self._books.version += 1
            self._books.drop(sequence)

    def preempt(self, rid: str) -> None:
        """Takes the slot of a running request; it waits in its old place and is run again from the start.

        Args:
            rid: Its id. Unknown and waiting requests are left alone. Tokens that steps in flight sample are kept.
        """
        sequence = self._books.running.get(rid)
        if sequence is not None:
            self._books.version += 1
            self._books.requeue(sequence, keep_tokens=True)

    def reset_prefix_cache(self) -> None:
        """Runs every request again without what is cached, as after a change of the weights.

        Running requests lose their slots, and tokens that steps in flight sample do not count. Tokens that came before
        stay. What the cache holds for nobody is forgotten, if it has `reset_prefix_cache`.
        """
        books = self._books
        books.version += 1
        for sequence in list(books.running.values()):
            books.requeue(sequence, keep_tokens=False)
        for sequence in books.waiting:
            books.discard_orphans(sequence)
        forget = getattr(self.cache, "reset_prefix_cache", None)
        if forget is not None:
            forget()

    def plan(self, now: float) -> StepPlan | None:
        """Makes the next plan. It depends on the state and `now` only, and changes nothing.

        Args:
            now: Time in seconds.

        Returns:
            The plan, or None when nothing can run now: no request is left, or what is in flight must be applied first.
        """
        self._decision = decision = self._planner.decide(now)
        return None if decision is None else decision.plan

    def launch(self, plan: StepPlan) -> StepPlan:
        """Commits to a plan: takes the slots of those that give way, gives out room, and notes the rows as in flight.

        Args:
            plan: What `plan` returned last; or an equal one, such as a logged one in the same state.

        Returns:
            The plan with block updates and copies filled in, which is the one to run.

        Raises:
            InvariantBroken: The plan does not fit the present state.
        """
        books = self._books
        if plan.step != books.next_step:
            message = f"step {plan.step} came, and {books.next_step} is next"
            raise InvariantBroken(
                f"{message}; launch each plan once, before anything else changes."
            )
        decision = self._decision
        is_current = decision is not None and decision.version == books.version
        if decision is None or not is_current or not _same(decision.plan, plan):
            decision = decision_of(books, plan, self._clock.now())
        self._decision = None
        self._num_preempted += len(decision.preempted)
        return execute(books, decision)

    def apply(self, result: StepResult) -> ProgressList:
        """Settles the result of the oldest launched step.

        Args:
            result: The result. Rows of requests that ended meanwhile are dropped.

        Returns:
            What changed, one entry a row that still counts.

        Raises:
            InvariantBroken: The result is not that of the oldest launched step, or does not fit its plan.
        """
        books = self._books
        plan = self._oldest_launched(result.step)
        rows, results = plan.rows, result.rows
        same = rows.rids is results.rids or rows.rids == results.rids
        if same and rows.slots is not results.slots:
            same = np.array_equal(rows.slots, results.slots) and np.array_equal(
                rows.slot_generations, results.slot_generations
            )
        if not same:
            raise InvariantBroken(f"the rows of the result of step {plan.step} are not its plan's.")
        books.version += 1
        del books.launched[plan.step]
        for rid in result.failed_loads:
            self._fail_load(rid, plan)
        progress = settle_result(books, plan, results)
        self.cache.step_done(plan.step)
        books.refresh_order(plan.step)
        if self._chunks.reads_work and result.duration_s:
            self._chunks.observe(StepWork.of_plan(plan), result.duration_s)
        return progress

    def cancel(self, step: int) -> None:
        """Takes a launched step back: its requests lose their slots and will be run again.

        What later steps in flight make of them does not count.

        Args:
            step: Id of the oldest launched step; one that was never launched is ignored.
        """
        books = self._books
        if step not in books.launched:
            return
        plan = self._oldest_launched(step)
        books.version += 1
        for slot in np.unique(plan.rows.slots[books.valid(plan.rows)]).tolist():
            sequence = books.table.sequences[slot]
            if sequence is not None:
                books.requeue(sequence, keep_tokens=False)
        for _, sequence in list(books.orphans.get(step, ())):
            books.discard_orphans(sequence)
        books.orphans.pop(step, None)
        del books.launched[step]
        self.cache.step_done(step)

    def reset(self) -> None:
        """Forgets every request and takes every slot back, in whatever state the books are."""
        self._books.clear()
        self.cache.reset()

    def snapshot(self) -> LoadSnapshot:
        """How busy the engine is."""
        books = self._books
        table, slots = books.table, np.flatnonzero(books.table.is_held)
        known, settled = table.known[slots], table.settled[slots]
        pending = known - settled
        decodes = (pending == 1) & (settled >= table.prompt[slots])
        waiting = sum(sequence.num_tokens for sequence in books.waiting)
        return LoadSnapshot(
            time_s=self._clock.now(),
            num_running=len(books.running),
            num_waiting=len(books.waiting),
            waiting_tokens=waiting + int(pending[~decodes].sum()),
            cached_tokens=int(settled.sum()),
            capacity_tokens=self.cache.num_blocks * self.cache.block_size,
        )

    def check(self) -> None:
        """Walks every book, the cache manager's as well.

        Raises:
            InvariantBroken: They do not add up.
        """
        check_books(self._books)
        self.cache.check()

    def _fail_load(self, rid: str, plan: StepPlan) -> None:
        """Runs a request again whose cache content did not arrive."""
        books = self._books
        sequence = books.sequences.get(rid)
        if sequence is None or rid not in plan.rows.rids:
            return
        self.cache.load_failed(sequence.request)
        if sequence.slot is not None:
            books.requeue(sequence, keep_tokens=False)
        books.discard_orphans(sequence)

    def _oldest_launched(self, step: int) -> StepPlan:
        launched = self._books.launched
        oldest = next(iter(launched), None)
        if step != oldest:
            raise InvariantBroken(
                f"got the result of step {step}, and the oldest step in flight is {oldest}."
            )
        return launched[step]

    def __repr__(self) -> str:
        counts = f"{self.num_running} running, {self.num_waiting} waiting"
        return f"Scheduler({counts}, step {self._books.next_step})"


def _same(made: StepPlan, given: StepPlan) -> bool:
    """Whether two plans are equal; a plan given back as it was costs nothing to compare."""
    return made is given or made == given
