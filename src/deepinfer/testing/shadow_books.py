"""Books of a schedule that are kept from plans and results alone, to compare a scheduler's and a cache's with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.cache import SlotCacheManager
from deepinfer.core.plan import CopyKind, PlanRow, RowRole, StepPlan, StepResult
from deepinfer.core.types import FinishReason, Request
from deepinfer.testing.shadow_types import BlockContent, Seat, ShadowFlight

__all__ = ["ShadowBooks"]

_NOTHING = -1


class ShadowBooks:
    """Keeps its own books of what an `ObservedScheduler` is told and answers.

    It knows no code of the scheduler or the cache: tables come from the block updates of launched plans, settled tokens
    from the rows of results, token ids from the results. What cannot be is noted in `problems`;
    `deepinfer.testing.check_all` raises them and compares the rest.

    Args:
        scheduler: Gives `limits`, and through its `cache` the size of a block.

    Attributes:
        problems: What was seen that cannot be, oldest first.
        requests: Unfinished requests by id.
        ids: Their prompt and output tokens.
        seats: Those that run, by id.
        flights: Launched steps without a result, oldest first.
        tables: Blocks of each slot.
        content: What each block holds.
        first_hits: Adopted and replayed tokens of each unfinished request when it first got a slot.
        sampled: Tokens that counted, in all.
        dropped: Tokens of void rows, in all.
    """

    def __init__(self, scheduler: Any) -> None:
        self.limits = scheduler.limits
        self.block_size = int(scheduler.cache.block_size)
        self.has_blocks = not isinstance(scheduler.cache, SlotCacheManager)
        self.capacity = int(scheduler.cache.capacity_tokens)
        self.problems: list[str] = []
        self.requests: dict[str, Request] = {}
        self.ids: dict[str, list[int]] = {}
        self.seats: dict[str, Seat] = {}
        self.flights: dict[int, ShadowFlight] = {}
        self.tables: dict[int, list[int]] = {}
        self.content: dict[int, BlockContent] = {}
        self.first_hits: dict[str, tuple[int, int]] = {}
        self.sampled = self.dropped = 0
        self._epochs: dict[str, int] = {}
        self._generations: dict[int, int] = {}
        self._host: dict[int, BlockContent | None] = {}
        self._next_step = 0

    def on_call(self, name: str, argument: Any, result: Any) -> None:
        """Takes one call of the scheduler.

        Args:
            name: Name of the method.
            argument: Its argument.
            result: What it returned.
        """
        if name == "add":
            self._add(argument)
        elif name == "abort":
            self._end(argument)
        elif name == "preempt":
            self._lose(argument, keep=True)
        elif name == "reset_prefix_cache":
            self._drop_kept(None)
            for rid in list(self.seats):
                self._lose(rid, keep=False)
        elif name == "launch":
            self._launch(result)
        elif name == "apply":
            self._apply(argument, result)
        elif name == "cancel":
            self._cancel(argument)
        elif name == "reset":
            books: Any = (self.requests, self.ids, self.seats, self.flights, self._epochs)
            for book in (*books, self.first_hits):
                book.clear()

    def limit(self, request: Request) -> int:
        """Most tokens of prompt plus output of a request.

        Args:
            request: The request.

        Returns:
            The number.
        """
        asked = request.num_prompt_tokens + request.params.max_tokens
        return min(asked, self.limits.max_model_len, self.capacity)

    def in_flight(self, rid: str) -> tuple[int, int, bool]:
        """What launched steps hold of the seat of a request.

        Args:
            rid: Its id.

        Returns:
            Tokens, drafts among them, and whether one of the steps samples.
        """
        seat = self.seats[rid]
        tokens, drafts, samples = 0, 0, False
        for flight in self.flights.values():
            for row in flight.plan.rows:
                if _key(row) == seat.key:
                    tokens += row.num_tokens
                    drafts += row.num_drafts
                    samples = samples or row.num_logits > 0
        return tokens, drafts, samples

    def _note(self, problem: str) -> None:
        self.problems.append(problem)

    def _add(self, request: Request) -> None:
        rid = request.rid
        if rid in self.requests:
            self._note(f"{rid!r} was taken although it is not finished")
        self.requests[rid] = request
        self.ids[rid] = list(request.prompt_token_ids)
        self._epochs[rid] = -1

    def _end(self, rid: str) -> None:
        if self.requests.pop(rid, None) is None:
            return
        del self.ids[rid], self._epochs[rid]
        self.first_hits.pop(rid, None)
        self.seats.pop(rid, None)
        self._drop_kept(rid)

    def _lose(self, rid: str, *, keep: bool) -> None:
        seat = self.seats.pop(rid, None)
        if seat is not None and keep:
            for flight in self.flights.values():
                if any(_key(row) == seat.key and row.num_logits for row in flight.plan.rows):
                    flight.kept.add(seat.key)

    def _drop_kept(self, rid: str | None) -> None:
        for flight in self.flights.values():
            flight.kept = {key for key in flight.kept if rid is not None and key[0] != rid}

    def _launch(self, plan: StepPlan) -> None:
        if plan.step != self._next_step:
            self._note(f"step {plan.step} was launched, and {self._next_step} is next")
        self._next_step = plan.step + 1
        for rid in plan.preempted:
            if rid not in self.seats:
                self._note(f"step {plan.step} preempts {rid!r}, which does not run")
            self._lose(rid, keep=True)
        self._check_size(plan)
        self._move(plan)
        for row in plan.rows:
            self._check_row(plan, row)
        blocks: set[int] = set()
        for row in plan.rows:
            table = self.tables.get(row.slot, [])
            need = -(-row.end_position // self.block_size)
            if self.has_blocks and need > len(table):
                self._note(f"step {plan.step} has no block for the end of {row}")
            blocks.update(table[:need])
        self.flights[plan.step] = ShadowFlight(plan, frozenset(blocks))

    def _check_size(self, plan: StepPlan) -> None:
        limits = self.limits
        if not 0 < plan.num_tokens <= limits.max_num_batched_tokens:
            self._note(f"step {plan.step} runs {plan.num_tokens} tokens")
        per_slot: dict[int, list[PlanRow]] = {}
        for row in plan.rows:
            per_slot.setdefault(row.slot, []).append(row)
        if len(per_slot) > limits.max_num_seqs:
            self._note(f"step {plan.step} runs {len(per_slot)} requests")
        for rows in per_slot.values():
            roles = [row.role is RowRole.REPLAY for row in rows]
            if len(rows) > 1 and roles != [True, False]:
                self._note(f"step {plan.step} has a slot in the rows {rows}")
            if sum(row.num_tokens for row in rows) > limits.prefill_chunk_tokens:
                self._note(f"step {plan.step} has too long a chunk in {rows}")

    def _move(self, plan: StepPlan) -> None:
        """Block updates and copies, and what they do to the content of blocks."""
        busy = {block for flight in self.flights.values() for block in flight.blocks}
        adopted = {row.slot: row.pool_start // self.block_size for row in reversed(plan.rows)}
        loaded: dict[int, BlockContent | None] = {}
        for copy in plan.copies:
            if copy.kind is CopyKind.SAVE_BLOCK:
                self._host[copy.host] = self.content.get(copy.device)
            elif copy.kind is CopyKind.LOAD_BLOCK:
                loaded[copy.device] = self._host.get(copy.host)
        for update in plan.block_updates:
            table = self.tables.setdefault(update.slot, [])
            if update.first not in (0, len(table)):
                self._note(f"{update} does not continue the table {table}")
            table[update.first :] = update.blocks
            shared = adopted.get(update.slot, 0) if update.first == 0 else 0
            held = {
                block
                for seat in self.seats.values()
                if seat.slot != update.slot
                for block in self.tables.get(seat.slot, ())
            }
            for block in update.blocks[shared:]:
                if block in busy or block in held:
                    self._note(f"step {plan.step} gives block {block} away, which is in use")
            for block in update.blocks[shared:]:
                self.content.pop(block, None)
        for block, content in loaded.items():
            if block in busy:
                self._note(f"step {plan.step} loads block {block}, which a step in flight uses")
            if content is None:
                self.content.pop(block, None)
            else:
                self.content[block] = BlockContent(content.prefix, list(content.ids))

    def _check_row(self, plan: StepPlan, row: PlanRow) -> None:
        where = f"step {plan.step}, {row}"
        request = self.requests.get(row.rid)
        if request is None:
            self._note(f"{where}: the request is not there")
            return
        seat = self.seats.get(row.rid)
        if seat is None:
            seat = self._sit_down(where, row)
        if _key(row) != seat.key:
            self._note(f"{where}: it runs in {seat}")
        earlier = [r for r in plan.rows if r.slot == row.slot]
        before = sum(r.num_tokens for r in earlier[: earlier.index(row)])
        tokens, drafts, samples = self.in_flight(row.rid)
        if row.first_position != seat.settled + tokens + before or row.num_open != drafts:
            self._note(f"{where}: {seat.settled} tokens are settled and {tokens} in flight")
        ids, wanted = self.ids[row.rid], row.num_tokens - row.num_drafts
        known = tuple(ids[row.first_position : row.first_position + wanted])
        if row.token_ids and tuple(row.token_ids) != known:
            self._note(f"{where}: its ids are {known}")
        if not row.token_ids and not (samples and wanted == 1):
            self._note(f"{where}: its ids are not known")
        if row.pool_start != seat.adopted:
            self._note(f"{where}: {seat.adopted} tokens were taken over")
        if row.end_position > self.limit(request):
            self._note(f"{where}: {self.limit(request)} tokens may be")
        whole = row.end_position - row.num_drafts >= len(ids)
        if (row.num_logits > 0) is not whole:
            self._note(f"{where}: the role does not fit {len(ids)} known tokens")

    def _sit_down(self, where: str, row: PlanRow) -> Seat:
        rid, slot = row.rid, row.slot
        begin, adopted = row.first_position, row.pool_start
        seat = Seat(rid, slot, row.slot_generation, row.epoch, begin, adopted)
        flights = self.flights.values()
        others = [s.rid for s in self.seats.values() if s.slot == slot]
        others += [r.rid for f in flights for r in f.plan.rows if r.slot == slot]
        if others:
            self._note(f"{where}: the slot is still used by {others}")
        if row.epoch <= self._epochs[rid]:
            self._note(f"{where}: it lost its slot in epoch {self._epochs[rid]}")
        if row.slot_generation <= self._generations.get(slot, -1):
            self._note(f"{where}: the slot had generation {self._generations[slot]}")
        if row.pool_start > len(self.ids[rid]) - 1 or row.first_position > row.pool_start:
            self._note(f"{where}: no token is left to run behind the hit")
        if row.epoch == 0:
            self.first_hits[rid] = (adopted, adopted - begin)
        self._epochs[rid], self._generations[slot] = row.epoch, row.slot_generation
        self.seats[rid] = seat
        if self.has_blocks:
            table, ids = self.tables.get(slot, []), self.ids[rid]
            for number in range(row.pool_start // self.block_size):
                begin = number * self.block_size
                content = self.content.get(table[number])
                wanted = ids[begin : begin + self.block_size]
                if content is None or content.ids != wanted or content.prefix != tuple(ids[:begin]):
                    self._note(f"{where}: block {table[number]} holds {content}, not {wanted}")
        return seat

    def _apply(self, result: StepResult, progress: Sequence[Any]) -> None:
        oldest = next(iter(self.flights), None)
        if result.step != oldest:
            self._note(f"the result of step {result.step} was taken, and {oldest} is the oldest")
            return
        flight = self.flights[result.step]
        for rid in result.failed_loads:
            if rid in flight.plan.rows.rids:
                self._lose(rid, keep=False)
                self._drop_kept(rid)
        del self.flights[result.step]
        told = {(p.request.rid, p.index): p for p in progress}
        failed = [p.request.rid for p in progress if p.finish_reason is FinishReason.ERROR]
        if len(set(failed)) < len(failed):
            self._note(f"step {result.step}: {failed} failed, some of them twice")
        for index, (row, out) in enumerate(zip(flight.plan.rows, result.rows, strict=True)):
            entry = told.pop((row.rid, index), None)
            seat = self.seats.get(row.rid)
            is_seated = seat is not None and seat.key == _key(row)
            is_kept = _key(row) in flight.kept and row.num_logits > 0
            if not (is_seated or is_kept) or row.rid not in self.requests:
                self.dropped += len(out.token_ids)
                ends = entry is not None and row.rid not in failed and entry.finish_reason
                if ends or (entry is not None and entry.token_ids):
                    self._note(f"step {result.step}: {entry.token_ids} of the void {row} count")
                continue
            if out.error is None:
                self._settle(result.step, row, out, seat if is_seated else None, entry)
            elif row.rid in failed:
                self._end(row.rid)
            else:
                self._note(f"step {result.step}: {row} failed with {out.error}, and nobody knows")
        if told:
            self._note(f"step {result.step}: {list(told)} changed and were not run")

    def _settle(self, step: int, row: PlanRow, out: Any, seat: Seat | None, entry: Any) -> None:
        request, ids = self.requests[row.rid], self.ids[row.rid]
        reason, count = None, 0
        if len(out.token_ids) != (out.num_accepted + 1 if row.num_logits else 0):
            self._note(f"step {step}: {row} brought {out}")
        if not 0 <= out.num_accepted <= out.num_drafts <= row.num_drafts:
            self._note(f"step {step}: {row} brought {out}")
        for token in out.token_ids:
            count += 1
            ids.append(token)
            eos = () if request.params.ignore_eos else self.limits.eos_token_ids
            if token in request.params.stop_token_ids or token in eos:
                reason = FinishReason.STOP
            elif len(ids) >= self.limit(request):
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        mine = (tuple(out.token_ids[:count]), reason)
        theirs = ((), None) if entry is None else (tuple(entry.token_ids), entry.finish_reason)
        if mine != theirs:
            self._note(f"step {step}: {row} brought {mine}, and {theirs} was made of it")
        self.sampled += count
        if seat is not None:
            first = seat.settled
            seat.settled += row.num_tokens - row.num_drafts + out.num_accepted
            self._write(seat, max(first, seat.adopted), min(seat.settled, len(ids)))
        if reason is not None:
            self._end(row.rid)

    def _write(self, seat: Seat, first: int, stop: int) -> None:
        if not self.has_blocks:
            return
        table, ids, size = self.tables.get(seat.slot, []), self.ids[seat.rid], self.block_size
        for position in range(first, stop):
            block = table[position // size]
            begin = position - position % size
            content = self.content.get(block)
            if content is None or begin == position:
                prefix = tuple(ids[:begin])
                content = self.content[block] = BlockContent(prefix, [_NOTHING] * size)
            content.ids[position - begin] = ids[position]

    def _cancel(self, step: int) -> None:
        flight = self.flights.pop(step, None)
        if flight is None:
            return
        for row in flight.plan.rows:
            seat = self.seats.get(row.rid)
            if seat is not None and seat.key == _key(row):
                self._lose(row.rid, keep=False)
        for key in flight.kept:
            self._drop_kept(key[0])


def _key(row: PlanRow) -> tuple[str, int, int, int]:
    return (row.rid, row.slot, row.slot_generation, row.epoch)
