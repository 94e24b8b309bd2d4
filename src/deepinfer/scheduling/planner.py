"""Makes plans. Nothing here changes the books."""

from __future__ import annotations

import numpy as np

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import PlanRows, StepPlan
from deepinfer.core.protocols import Hit, VerifyLengthPolicy
from deepinfer.scheduling.admission import AdmissionPolicy, Demand, Supply
from deepinfer.scheduling.books import Books
from deepinfer.scheduling.chunking import ChunkPolicy, shape_chunk
from deepinfer.scheduling.decode_planner import DecodePlanner
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.plan_draft import Admission, Decision, PlanDraft
from deepinfer.scheduling.policies import VictimPolicy
from deepinfer.scheduling.victims import BlockSupply

__all__ = ["Planner"]

_SCANNED = 32  # requests behind a blocked first one that are looked at in one step


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
        self._decodes = DecodePlanner(books, verify_lengths, chunks.reads_work)

    @property
    def verify_lengths(self) -> VerifyLengthPolicy | None:
        """How many drafts of each row are verified, or None for as many as there are."""
        return self._decodes.verify_lengths

    @verify_lengths.setter
    def verify_lengths(self, policy: VerifyLengthPolicy | None) -> None:
        """Asks another policy from the next plan on."""
        self._decodes.verify_lengths = policy

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

    def _draft(self, now: float, gone: tuple[Sequence, ...]) -> PlanDraft:
        books = self.books
        cache = books.cache
        supply = BlockSupply(
            books, self.victim, cache.num_free_blocks, cache.num_quarantined_blocks
        )
        for sequence in gone:
            supply.preempt(sequence)
        draft = PlanDraft(now, books.limits.max_num_batched_tokens, supply)
        prompts: list[tuple[int, int]] = []
        if books.running:
            prompts = self._decodes.add(draft)
        if prompts:
            self._prompts(draft, prompts)
        if books.waiting and not supply.is_short:
            self._admit(draft)
        return draft

    def _prompts(self, draft: PlanDraft, prompts: list[tuple[int, int]]) -> None:
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

    def _chunk(self, draft: PlanDraft, position: int, remaining: int) -> int:
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
        draft: PlanDraft,
        sequence: Sequence,
        held: tuple[int, ...],
        position: int,
        chunk: int,
        known: int,
    ) -> None:
        draft.prefills.add(sequence, held, position, chunk)
        self._charge(draft, position, chunk, known)

    def _charge(self, draft: PlanDraft, position: int, chunk: int, known: int) -> None:
        draft.budget -= chunk
        if self.chunks.reads_work:
            work = draft.work
            draft.work = work._replace(
                prefix_tokens=work.prefix_tokens + position,
                tokens=work.tokens + chunk,
                pairs=work.pairs + chunk * (2 * position + chunk),
                ended_prompts=work.ended_prompts + (position + chunk == known),
                ended_prefix_tokens=work.ended_prefix_tokens
                + position * (position + chunk == known),
                max_prefix=max(work.max_prefix, position),
            )

    def _admit(self, draft: PlanDraft) -> None:
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
        draft: PlanDraft,
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

    def _finish(self, draft: PlanDraft) -> Decision | None:
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
