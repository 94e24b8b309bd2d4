"""Makes plans. Nothing here changes the books."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import PlanRows, StepPlan
from deepinfer.core.protocols import Hit, VerifyLengthPolicy
from deepinfer.scheduling.admission import AdmissionPolicy, Demand, Supply
from deepinfer.scheduling.books import DECODE, LAST_PREFILL, PREFILL, REPLAY, VERIFY, Books
from deepinfer.scheduling.chunking import ChunkPolicy, shape_chunk
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.policies import VictimPolicy
from deepinfer.scheduling.step_work import StepWork
from deepinfer.scheduling.victims import BlockSupply

__all__ = ["Admission", "Decision", "Planner"]

Ints = NDArray[np.int64]

_SCANNED = 32  # requests behind a blocked first one that are looked at in one step
_NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request that a plan starts.

    Attributes:
        sequence: The request.
        hit: The prefix that it takes over, or None.
        upto: Tokens to make room for.
    """

    sequence: Sequence
    hit: Hit | None
    upto: int


@dataclass(slots=True)
class Decision:
    """A plan and what launching it means for the books.

    Attributes:
        plan: The plan.
        version: Version of the books that it was made for.
        now: The time that it was made for, in seconds.
        growth: Running requests that need room, and for how many tokens.
        admissions: Requests that start, in the order of their slots.
        preempted: Requests that lose their slot.
        passed: Requests that others were admitted past, once for each.
    """

    plan: StepPlan
    version: int
    now: float
    growth: list[tuple[Sequence, int]]
    admissions: list[Admission]
    preempted: list[Sequence]
    passed: list[Sequence]


@dataclass(slots=True)
class _Prefills:
    """Rows of prompts, gathered one by one."""

    rids: list[str] = field(default_factory=list)
    ints: list[tuple[int, ...]] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, sequence: Sequence, held: tuple[int, ...], position: int, count: int) -> None:
        """Adds `count` tokens from `position` on: what is before the adopted prefix's end is replayed."""
        pool_start = held[4]
        ids = sequence.token_ids
        end = position + count
        if position < pool_start:
            cut = min(end, pool_start)
            self._row(sequence, held, position, cut, REPLAY, ids)
            position = cut
        if position < end:
            role = LAST_PREFILL if end == len(ids) else PREFILL
            self._row(sequence, held, position, end, role, ids)

    def _row(
        self,
        sequence: Sequence,
        held: tuple[int, ...],
        position: int,
        end: int,
        role: int,
        ids: NDArray[np.int32],
    ) -> None:
        self.rids.append(sequence.request.rid)
        self.ints.append((*held, position, end - position, role))
        self.ids.append(ids[position:end])

    def columns(self) -> dict[str, NDArray[Any]]:
        """The gathered rows as columns."""
        table = np.array(self.ints, np.int64)
        zeros = np.zeros(len(table), np.int64)
        names = ("slots", "slot_generations", "epochs", "window_starts", "pool_starts",
                 "full_starts", "first_positions", "num_tokens")  # fmt: skip
        columns: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(names)
        }
        columns["roles"] = table[:, 8].astype(np.uint8)
        columns["is_late"] = np.zeros(len(table), np.bool_)
        columns["num_drafts"] = columns["num_open"] = zeros
        columns["num_known"] = columns["num_tokens"]
        columns["token_ids"] = np.concatenate(self.ids).astype(np.int64)
        return columns


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    now: float
    budget: int
    supply: BlockSupply
    work: StepWork = _NO_WORK
    rids: tuple[str, ...] = ()
    decode: dict[str, NDArray[Any]] | None = None
    prefills: _Prefills = field(default_factory=_Prefills)
    growth: list[tuple[Sequence, int]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    passed: list[Sequence] = field(default_factory=list)
    promised: int = 0

    @property
    def is_empty(self) -> bool:
        return self.decode is None and not self.prefills.rids


class Planner:
    """Makes the next plan from the books.

    Args:
        books: The requests.
        victim: Who gives way when blocks run out.
        admission: Who may start.
        chunks: How long chunks are.
        verify_lengths: How many drafts of each row are verified, or None for as many as there are.
    """

    def __init__(
        self,
        books: Books,
        victim: VictimPolicy,
        admission: AdmissionPolicy,
        chunks: ChunkPolicy,
        verify_lengths: VerifyLengthPolicy | None,
    ) -> None:
        self.books = books
        self.victim = victim
        self.admission = admission
        self.chunks = chunks
        self.verify_lengths = verify_lengths

    def decide(self, now: float) -> Decision | None:
        """Makes the next plan.

        Args:
            now: Time in seconds.

        Returns:
            The plan and its meaning, or None when nothing can run now.
        """
        books = self.books
        if len(books.launched) > books.limits.async_depth or not books.sequences:
            return None
        draft = self._draft(now, ())
        if draft.is_empty:
            if books.launched or not books.running:
                return None  # what is in flight comes back first
            draft = self._draft(now, self._make_way())
        return self._finish(draft)

    def _draft(self, now: float, gone: tuple[Sequence, ...]) -> _Draft:
        books = self.books
        cache = books.cache
        supply = BlockSupply(
            books, self.victim, cache.num_free_blocks, cache.num_quarantined_blocks
        )
        for sequence in gone:
            supply.preempt(sequence)
        draft = _Draft(now, books.limits.max_num_batched_tokens, supply)
        prompts: list[tuple[int, int]] = []
        if books.running:
            prompts = self._decodes(draft)
        if prompts:
            self._prompts(draft, prompts)
        if books.waiting and not supply.is_short:
            self._admit(draft)
        return draft

    def _decodes(self, draft: _Draft) -> list[tuple[int, int]]:
        """Adds the rows that decode; returns place and position of the others, whose prompt runs."""
        books = self.books
        table, active = books.table, books.active
        slots = active.slots
        first, known = table.settled[slots], table.known[slots]
        flying = books.flying()
        if flying is None:
            decodes = (known - first == 1) & (first >= active.prompt)
            takes = decodes
        else:
            first = first + flying.tokens
            decodes = flying.samples | ((known - first == 1) & (first >= active.prompt))
            takes = decodes & ~(flying.samples & (known + 1 >= active.limit))
        prompts = []
        if np.count_nonzero(decodes) < len(slots):
            places = np.flatnonzero(~decodes)
            prompts = list(zip(places.tolist(), first[places].tolist(), strict=True))
        if draft.supply.preempted:
            gone = {sequence.rid for sequence in draft.supply.preempted}
            takes = takes & np.array([rid not in gone for rid in active.rids])
        count = int(np.count_nonzero(takes))
        chosen = None if count == len(slots) else np.flatnonzero(takes)
        if not count:
            return prompts
        if count > draft.budget:  # they take turns
            chosen = np.arange(count) if chosen is None else chosen
            turn = (books.next_step * draft.budget) % count
            chosen = np.sort(np.roll(chosen, -turn)[: draft.budget])
        num_drafts = self._draft_lengths(draft, chosen, first, known, flying)
        chosen, num_drafts = self._grant(draft, chosen, first, num_drafts)
        count = len(slots) if chosen is None else len(chosen)
        if not count:
            return prompts
        total = count if num_drafts is None else count + int(num_drafts.sum())
        draft.budget -= total
        open_drafts = None if flying is None else flying.drafts
        samples = None if flying is None else flying.samples
        if chosen is None:
            columns = dict(active.columns)
            draft.rids = active.rids
        else:
            columns = {name: array[chosen] for name, array in active.columns.items()}
            draft.rids = tuple([active.rids[place] for place in chosen.tolist()])
            first, slots = first[chosen], slots[chosen]
            open_drafts = None if open_drafts is None else open_drafts[chosen]
            samples = None if samples is None else samples[chosen]
        columns["first_positions"] = first
        if num_drafts is not None:
            columns["num_drafts"] = num_drafts
            columns["num_tokens"] = num_drafts + 1
            columns["roles"] = np.where(num_drafts > 0, VERIFY, DECODE).astype(np.uint8)
        if samples is None or open_drafts is None or not np.count_nonzero(samples):
            columns["token_ids"] = table.last_token[slots]
        else:
            columns["num_known"] = (~samples).astype(np.int64)
            columns["token_ids"] = table.last_token[slots[~samples]]
            columns["num_open"] = np.where(samples, open_drafts, 0)
            if active.is_host_bound is not None:
                columns["is_late"] = table.is_host_bound[slots] & samples
        draft.decode = columns
        if self.chunks.reads_work:
            draft.work = StepWork(
                tokens=total - count, decode_rows=count, decode_context=int(first.sum())
            )
        return prompts

    def _draft_lengths(
        self, draft: _Draft, chosen: Ints | None, first: Ints, known: Ints, flying: Any
    ) -> Ints | None:
        """Drafts of each decoding row, or None when no row gets any."""
        books = self.books
        active = books.active
        if active.may_draft is None:
            return None
        room = active.limit - known - 1
        if flying is not None:
            room = room - np.where(flying.samples, flying.drafts + 1, 0)
        want = np.clip(room, 0, books.limits.draft_length) * active.may_draft
        if chosen is not None:
            want = want[chosen]
        if self.verify_lengths is not None:
            want = np.minimum(want, self._asked(chosen, want))
        left = draft.budget - len(want)
        before = np.cumsum(want) - want
        want = np.minimum(want, np.maximum(left - before, 0))
        return want if np.count_nonzero(want) else None

    def _asked(self, chosen: Ints | None, want: Ints) -> Ints:
        """What the policy of verify lengths says; rows without confidences are not asked about."""
        assert self.verify_lengths is not None  # noqa: S101 - the caller looked
        active = self.books.active
        slots = active.slots if chosen is None else active.slots[chosen]
        known = self.books.table.confidences
        places = [at for at, slot in enumerate(slots.tolist()) if slot in known and want[at]]
        if places:
            given = [known[int(slots[at])][: int(want[at])] for at in places]
            want = want.copy()
            want[places] = self.verify_lengths.choose(given, len(active.rids))
        return np.maximum(want, 0)

    def _grant(
        self, draft: _Draft, chosen: Ints | None, first: Ints, num_drafts: Ints | None
    ) -> tuple[Ints | None, Ints | None]:
        """Finds blocks for the decoding rows; returns the rows that stay, and their drafts."""
        books = self.books
        if not books.grows:
            return chosen, num_drafts
        active, cache = books.active, books.cache
        slots, starts = active.slots, first
        if chosen is not None:
            slots, starts = slots[chosen], starts[chosen]
        room = books.table.room[slots]
        ends = starts + 1 if num_drafts is None else starts + 1 + num_drafts
        growing = ends > room
        if not np.count_nonzero(growing):
            return chosen, num_drafts

        def needs(stride: int) -> list[tuple[Sequence, int, int]]:
            out = []
            for at in np.flatnonzero(growing).tolist():
                place = at if chosen is None else int(chosen[at])
                sequence = active.sequences[place]
                upto = min(-(-int(ends[at]) // stride) * stride, sequence.limit)
                out.append((sequence, cache.blocks_for(sequence.request, None, upto), upto))
            return out

        supply = draft.supply
        wanted = needs(books.stride)
        if (
            books.stride > books.block_size
            and sum(need for _, need, _ in wanted) > supply.free // 2
        ):
            wanted = needs(1)  # no more than must be
        if num_drafts is not None and sum(need for _, need, _ in wanted) > supply.free:
            num_drafts = np.minimum(num_drafts, np.maximum(room - starts - 1, 0))
            ends = starts + 1 + num_drafts
            growing = ends > room
            wanted = needs(1)
        supply.grant((sequence, need) for sequence, need, _ in wanted)
        if not supply.is_short:
            draft.growth += [(sequence, upto) for sequence, _, upto in wanted]
            return chosen, num_drafts
        lost = {sequence.rid for sequence in (*supply.preempted, *supply.starved)}
        draft.growth += [(seq, upto) for seq, _, upto in wanted if seq.rid not in lost]
        places = range(len(active.rids)) if chosen is None else chosen.tolist()
        stay = np.array([active.rids[place] not in lost for place in places], np.bool_)
        chosen = np.flatnonzero(stay) if chosen is None else chosen[stay]
        return chosen, None if num_drafts is None else num_drafts[stay]

    def _prompts(self, draft: _Draft, prompts: list[tuple[int, int]]) -> None:
        """Adds chunks of prompts that hold a slot."""
        books = self.books
        table, cache = books.table, books.cache
        gone = {sequence.rid for sequence in draft.supply.preempted}
        for place, position in prompts:
            sequence = books.active.sequences[place]
            slot = sequence.slot
            if sequence.rid in gone or slot is None:
                continue
            known = int(table.known[slot])
            needed = cache.blocks_for(sequence.request, None, known) if books.grows else 0
            chunk = self._chunk(draft, position, known - position)
            room = int(table.room[slot])
            need = 0
            if chunk and position + chunk > room:
                need = cache.blocks_for(sequence.request, None, position + chunk)
                if need > draft.supply.free:
                    most = room + draft.supply.free * cache.block_size - position
                    chunk = max(0, min(chunk, most))
                    need = draft.supply.free if position + chunk > room else 0
            draft.promised += needed - need
            if not chunk:
                continue
            draft.supply.free -= need
            if need:
                draft.growth.append((sequence, position + chunk))
            held = (
                slot,
                sequence.slot_generation,
                sequence.epoch,
                int(table.window_start[slot]),
                int(table.pool_start[slot]),
                int(table.full_start[slot]),
            )
            self._take(draft, sequence, held, position, chunk, known)

    def _chunk(self, draft: _Draft, position: int, remaining: int) -> int:
        """Length of the next chunk of a prompt, 0 for none in this step."""
        limits = self.books.limits
        cap = min(draft.budget, limits.prefill_chunk_tokens)
        if cap <= 0:
            return 0
        wished = min(self.chunks.chunk(position, remaining, cap, draft.work), cap, remaining)
        if wished <= 0:
            if not draft.is_empty or draft.admissions or self.books.launched:
                return 0
            wished = min(cap, remaining, max(limits.window, limits.chunk_grain, 1))
        chunk = shape_chunk(
            wished, position, remaining, cap, window=limits.window, grain=limits.chunk_grain
        )
        if chunk < min(remaining, limits.window, limits.prefill_chunk_tokens) and (
            draft.prefills.rids or draft.admissions
        ):
            return 0  # a scrap of budget behind other prompts is not worth a row
        return chunk

    def _take(
        self,
        draft: _Draft,
        sequence: Sequence,
        held: tuple[int, ...],
        position: int,
        chunk: int,
        known: int,
    ) -> None:
        draft.prefills.add(sequence, held, position, chunk)
        self._charge(draft, position, chunk, known)

    def _charge(self, draft: _Draft, position: int, chunk: int, known: int) -> None:
        draft.budget -= chunk
        if self.chunks.reads_work:
            work = draft.work
            draft.work = work._replace(
                prefix_tokens=work.prefix_tokens + position,
                tokens=work.tokens + chunk,
                pairs=work.pairs + chunk * (2 * position + chunk),
                ended_prompts=work.ended_prompts + (position + chunk == known),
                max_prefix=max(work.max_prefix, position),
            )

    def _admit(self, draft: _Draft) -> None:
        """Starts waiting requests."""
        books, limits = self.books, self.books.limits
        places = min(limits.max_num_seqs - len(books.running), len(books.waiting))
        if places <= 0 or draft.budget <= 0 or draft.supply.free <= 0:
            return
        slots = books.cache.peek(places)
        if not slots:
            return
        chosen: list[tuple[Admission, int, int]] = []
        first: Sequence | None = None
        behind = 0
        for sequence in books.waiting:
            if len(chosen) == len(slots) or draft.budget <= 0 or draft.supply.free <= 0:
                break
            if sequence.num_orphans:
                continue
            if first is not None:
                behind += 1
                if behind > _SCANNED or not self._may_pass(first, draft.now, len(draft.passed)):
                    break
            hit = books.look_up(sequence)
            position = hit.replay_start if hit is not None else 0
            known = sequence.num_tokens
            chunk = self._chunk(draft, position, known - position)
            if not chunk:
                break
            upto = max(position + chunk, hit.num_tokens if hit is not None else 0)
            must = draft.is_empty and not chosen and not books.running and not books.launched
            need = self._fits(draft, sequence, hit, upto, known, len(chosen), must=must)
            if need is None:
                first = first or sequence
                continue
            draft.supply.free -= need
            self._charge(draft, position, chunk, known)
            chosen.append((Admission(sequence, hit, upto), position, chunk))
            draft.admissions.append(chosen[-1][0])
            if first is not None:
                draft.passed.append(first)
        # Hits are adopted before anything new is given out, so that nothing takes their idle blocks.
        chosen.sort(key=lambda item: item[0].hit is None)
        draft.admissions = [admission for admission, _, _ in chosen]
        for (admission, position, chunk), (slot, generation) in zip(chosen, slots, strict=False):
            sequence, hit = admission.sequence, admission.hit
            window, pool = 0, 0
            if hit is not None:
                window, pool = hit.replay_start, hit.num_tokens
                if hit.window_slot is not None:
                    window = max(0, pool - limits.window)
            held = (slot, generation, sequence.epoch, window, pool, books.full_start(sequence))
            draft.prefills.add(sequence, held, position, chunk)

    def _fits(
        self,
        draft: _Draft,
        sequence: Sequence,
        hit: Hit | None,
        upto: int,
        known: int,
        num_chosen: int,
        *,
        must: bool,
    ) -> int | None:
        """Blocks that starting a request takes, or None when it has to wait."""
        books, cache = self.books, self.books.cache
        need = cache.blocks_for(sequence.request, hit, upto)
        if need > draft.supply.free:
            return None
        whole = cache.blocks_for(sequence.request, hit, known) if books.grows else need
        if books.grows and not must:
            supply = Supply(
                draft.supply.free,
                draft.promised,
                cache.num_blocks,
                len(books.running) + num_chosen,
            )
            if not self.admission.may_start(sequence, Demand(need, whole), supply):
                return None
        draft.promised += whole - need
        return need

    def _may_pass(self, first: Sequence, now: float, num_passed: int) -> bool:
        limits = self.books.limits
        since = first.skipped_since_s
        return first.num_skips + num_passed < limits.max_skips and (
            since is None or now - since < limits.max_skip_s
        )

    def _make_way(self) -> tuple[Sequence, ...]:
        """Who gives way so that the request that gives way last can go on; nothing is in flight."""
        books, cache = self.books, self.books.cache
        supply = BlockSupply(
            books, self.victim, cache.num_free_blocks, cache.num_quarantined_blocks
        )
        ranks = supply.protection()
        rids = sorted(ranks, key=ranks.__getitem__)
        last = books.running[rids.pop()]
        upto = max(last.settled + 1, int(books.table.room[last.slot]) + 1)
        need = cache.blocks_for(last.request, None, min(upto, last.num_tokens))
        while need > supply.free and rids:
            supply.preempt(books.running[rids.pop(0)])
        if need > supply.free:
            raise InvariantBroken(
                f"{last} runs alone and cannot get {need} more blocks: {supply.free} are free, and the "
                f"cache says that one request may hold {cache.capacity_tokens} tokens."
            )
        return tuple(supply.preempted)

    def _finish(self, draft: _Draft) -> Decision | None:
        books = self.books
        if draft.is_empty:
            return None
        rids, columns = draft.rids, draft.decode
        if draft.prefills.rids:
            more = draft.prefills.columns()
            rids = (*rids, *draft.prefills.rids)
            if columns is None:
                columns = more
            else:
                columns = {
                    name: np.concatenate((array, more[name])) for name, array in columns.items()
                }
        rows = PlanRows.trusted(rids, columns or {})
        predicted = self.chunks.predict(draft.work) if self.chunks.reads_work else None
        preempted = draft.supply.preempted
        plan = StepPlan(
            step=books.next_step,
            rows=rows,
            preempted=tuple(sequence.rid for sequence in preempted) if preempted else (),
            predicted_s=predicted,
        )
        return Decision(
            plan, books.version, draft.now, draft.growth, draft.admissions, preempted, draft.passed
        )
