"""Every request of one scheduler: who waits, who runs, and what is in flight."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import ROLES, PlanRows, RowRole, StepPlan
from deepinfer.core.protocols import Allocation, CacheManager, Hit
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.limits import SchedulerLimits, waits_for_host
from deepinfer.scheduling.policies import OrderPolicy
from deepinfer.scheduling.slot_table import SlotTable

__all__ = ["DECODE", "LAST_PREFILL", "PREFILL", "REPLAY", "VERIFY", "Active", "Books", "Flying"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

REPLAY, PREFILL, LAST_PREFILL, DECODE, VERIFY = (ROLES.index(role) for role in RowRole)

_STRIDE = 128
_REFRESHED = 128
_REFRESH_STEPS = 8


@dataclass(frozen=True, slots=True)
class Active:
    """What does not change while the same requests run: one entry a request, in order of admission.

    Attributes:
        rids: Request ids.
        sequences: The requests.
        slots: Their slots.
        columns: Constant columns of a plan in which each of them decodes one known token.
        limit: As in `SlotTable`.
        prompt: As in `SlotTable`.
        may_draft: As in `SlotTable`, or None when none may.
        is_host_bound: As in `SlotTable`, or None when none is.
        uses_eos: As in `SlotTable`.
        own_stops: Places of requests with stop tokens of their own.
        all_true: True for each.
    """

    rids: tuple[str, ...]
    sequences: tuple[Sequence, ...]
    slots: Ints
    columns: dict[str, NDArray[Any]]
    limit: Ints
    prompt: Ints
    may_draft: Flags | None
    is_host_bound: Flags | None
    uses_eos: Flags
    own_stops: tuple[int, ...]
    all_true: Flags

    @classmethod
    def of(cls, sequences: tuple[Sequence, ...], table: SlotTable) -> Active:
        """Reads the constants off a table.

        Args:
            sequences: The running requests.
            table: Where they stand.

        Returns:
            The constants.
        """
        slots = np.array([sequence.slot for sequence in sequences], np.int64)
        count = len(slots)
        zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
        columns: dict[str, NDArray[Any]] = {
            "slots": slots,
            "slot_generations": table.generation[slots],
            "epochs": table.epoch[slots],
            "num_tokens": ones,
            "num_drafts": zeros,
            "num_open": zeros,
            "num_known": ones,
            "window_starts": table.window_start[slots],
            "pool_starts": table.pool_start[slots],
            "full_starts": table.full_start[slots],
            "roles": np.full(count, DECODE, np.uint8),
            "is_late": np.zeros(count, np.bool_),
        }
        may_draft, host_bound = table.may_draft[slots], table.is_host_bound[slots]
        return cls(
            rids=tuple(sequence.request.rid for sequence in sequences),
            sequences=sequences,
            slots=slots,
            columns=columns,
            limit=table.limit[slots],
            prompt=table.prompt[slots],
            may_draft=may_draft if may_draft.any() else None,
            is_host_bound=host_bound if host_bound.any() else None,
            uses_eos=table.uses_eos[slots],
            own_stops=tuple(np.flatnonzero(table.has_own_stops[slots]).tolist()),
            all_true=np.ones(count, np.bool_),
        )


@dataclass(frozen=True, slots=True)
class Flying:
    """What launched steps without a result hold of each running request.

    Attributes:
        tokens: Tokens that they run.
        samples: Whether one of them samples, so that the last tokens are not known.
        drafts: Drafts among the tokens, any of which may be rejected.
    """

    tokens: Ints
    samples: Flags
    drafts: Ints


class Books:
    """The state of a scheduler and the few moves that all changes of it are made of.

    Args:
        limits: What every plan stays within.
        cache: Gives out slots and blocks.
        key: Order of the queue.
        may_draft: Which requests are planned with drafts; None for all.

    Attributes:
        sequences: Every unfinished request by id.
        waiting: Requests without a slot, sorted by the order policy.
        running: Requests with a slot by id, in order of admission.
        launched: Steps in flight, oldest first.
        orphans: By step in flight: rows of requests that lost their slot since, whose tokens still count.
        next_step: Id of the next step.
        num_added: Requests taken so far.
        stride: Tokens after which a decoding request asks for blocks and shows those that it filled: a block, or several
            small ones at once, so that a step costs the same whatever the block size.
        version: Rises with every change, so that a plan of an earlier state is told from a current one.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        key: OrderPolicy,
        may_draft: Callable[[SamplingParams], bool] | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.key = key
        self.may_draft = may_draft
        self.table = SlotTable(cache.num_slots, limits.draft_length + 1, limits.eos_token_ids)
        self.sequences: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: dict[str, Sequence] = {}
        self.launched: dict[int, StepPlan] = {}
        self.orphans: dict[int, list[tuple[int, Sequence]]] = {}
        self.next_step = 0
        self.num_added = 0
        self.version = 0
        self._active: Active | None = None
        self._reads_cache = bool(getattr(key, "reads_cache", False))
        self._num_published = 0
        self.notes_confidences = True
        self.grows = cache.block_size < cache.capacity_tokens
        self.block_size = cache.block_size
        self.stride = self.block_size
        while self.stride < _STRIDE:
            self.stride *= 2

    @property
    def active(self) -> Active:
        """The constants of the running requests; the same object while the same requests run."""
        if self._active is None:
            self._active = Active.of(tuple(self.running.values()), self.table)
        return self._active

    def is_active(self, rows: PlanRows) -> bool:
        """Whether the rows are those of all requests that run now, one each, in order."""
        return self._active is not None and rows.slots is self._active.slots

    def valid(self, rows: PlanRows) -> Flags:
        """Which rows belong to what runs in their slot now."""
        table = self.table
        same: Flags = table.generation[rows.slots] == rows.slot_generations
        same &= table.epoch[rows.slots] == rows.epochs
        same &= table.is_held[rows.slots]
        return same

    def flying(self) -> Flying | None:
        """What is in flight of each request of `active`, or None without launched steps."""
        plans = tuple(self.launched.values())
        if not plans:
            return None
        active = self.active
        if len(plans) == 1 and plans[0].rows.slots is active.slots:
            rows = plans[0].rows
            return Flying(rows.num_tokens, active.all_true, rows.num_drafts)
        size = len(self.table.settled)
        tokens, drafts = np.zeros(size, np.int64), np.zeros(size, np.int64)
        samples = np.zeros(size, np.bool_)
        for plan in plans:
            rows = plan.rows
            keep = np.flatnonzero(self.valid(rows))
            slots = rows.slots[keep]
            np.add.at(tokens, slots, rows.num_tokens[keep])
            np.add.at(drafts, slots, rows.num_drafts[keep])
            samples[slots[rows.roles[keep] >= LAST_PREFILL]] = True
        return Flying(tokens[active.slots], samples[active.slots], drafts[active.slots])

    def is_flying(self, sequence: Sequence) -> bool:
        """Whether a launched step without a result runs a request."""
        if sequence.slot is None:
            return False
        return int(self.table.last_step[sequence.slot]) in self.launched

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a request into the queue."""
        if self._reads_cache:
            self._look_up(sequence)
        bisect.insort(self.waiting, sequence, key=self.key)

    def admit(self, sequence: Sequence, allocation: Allocation, hit: Hit | None) -> None:
        """Gives a waiting request its slot."""
        self.waiting.remove(sequence)
        request = sequence.request
        params = request.params
        self.table.take(
            sequence,
            allocation,
            hit,
            window=self.limits.window,
            full_start=self.full_start(sequence),
            may_draft=bool(self.limits.draft_length)
            and (self.may_draft is None or self.may_draft(params)),
            is_host_bound=waits_for_host(params),
            ignores_eos=params.ignore_eos,
        )
        self.running[request.rid] = sequence
        self._active = None
        sequence.num_skips, sequence.skipped_since_s = 0, None
        if hit is not None:
            sequence.is_approximate |= hit.approximate
            if sequence.epoch == 0:
                sequence.adopted_tokens = hit.num_tokens
                sequence.replayed_tokens = hit.replay_tokens

    def full_start(self, sequence: Sequence) -> int:
        """Lowest position of a request that runs every layer."""
        request = sequence.request
        if not self.limits.narrows or request.params.prompt_logprobs is not None:
            return 0
        return max(0, request.num_prompt_tokens - self.limits.window)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a request, wherever it is; rows in flight become void."""
        del self.sequences[sequence.rid]
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def requeue(self, sequence: Sequence, *, keep_tokens: bool) -> None:
        """Takes the slot of a running request, which waits in its old place and is run again from the start.

        Args:
            sequence: The request.
            keep_tokens: Whether tokens that steps in flight sample still count.
        """
        slot = sequence.slot
        assert slot is not None  # noqa: S101 - running requests hold one
        if keep_tokens:
            generation = sequence.slot_generation
            for step, plan in self.launched.items():
                rows = plan.rows
                mine = (rows.slots == slot) & (rows.slot_generations == generation)
                for index in np.flatnonzero(mine & (rows.roles >= LAST_PREFILL)).tolist():
                    self.orphans.setdefault(step, []).append((index, sequence))
                    sequence.num_orphans += 1
        self._leave(sequence)
        sequence.epoch += 1
        self.enqueue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None  # noqa: S101 - running requests hold one
        after_step = int(self.table.last_step[slot])
        if self.grows and int(self.table.settled[slot]) >= self.block_size:
            self.settle_blocks(sequence, after_step)
        self.table.free(slot)
        del self.running[sequence.rid]
        self._active = None
        self.cache.release(sequence.request, after_step)

    def discard_orphans(self, sequence: Sequence) -> None:
        """Forgets tokens of earlier epochs that were still to come."""
        if sequence.num_orphans:
            for entries in self.orphans.values():
                entries[:] = [entry for entry in entries if entry[1] is not sequence]
            sequence.num_orphans = 0

    def settle_blocks(self, sequence: Sequence, step: int) -> None:
        """Tells the cache that a request settled a block more."""
        self._num_published += 1
        ids: Any = sequence.token_ids
        self.cache.settle(sequence.request, ids, sequence.settled, step)

    def store_waiting(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Adds tokens to a request that waits, whose place in the queue may depend on how many it has."""
        self.waiting.remove(sequence)
        sequence.store(token_ids)
        bisect.insort(self.waiting, sequence, key=self.key)

    def refresh_order(self, step: int) -> None:
        """Sorts the queue again when its order depends on the cache and the cache changed."""
        if not self._reads_cache or not self._num_published or step % _REFRESH_STEPS:
            return
        self._num_published = 0
        for sequence in self.waiting[:_REFRESHED]:
            self._look_up(sequence)
        self.waiting.sort(key=self.key)

    def _look_up(self, sequence: Sequence) -> None:
        hit = self.look_up(sequence)
        sequence.cached_tokens = 0 if hit is None else hit.num_tokens

    def look_up(self, sequence: Sequence) -> Hit | None:
        """The prefix of a waiting request that the cache holds, or None; changes nothing."""
        if sequence.request.params.prompt_logprobs is not None:
            return None  # every prompt token has to pass the last layer
        ids: Any = sequence.token_ids
        hit = self.cache.lookup(sequence.request, ids, len(ids) - 1)
        return hit if hit.num_tokens else None

    def clear(self) -> None:
        """Forgets every request."""
        self.waiting.clear()
        self.running.clear()
        self.sequences.clear()
        self.launched.clear()
        self.orphans.clear()
        self.table.clear()
        self._active = None
        self.version += 1
