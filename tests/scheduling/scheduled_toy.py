"""A model of a few lines behind a paged cache of a few integers, and a loop of any depth around a scheduler.

The next token depends on every token before it, and the runner reads these out of the blocks that the plan names, so a
block that is given away too early, or written by the wrong request, changes the output.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from deepinfer.cache import SlotCacheManager
from deepinfer.core import (
    CacheCopy,
    CopyKind,
    FinishReason,
    PlanRow,
    Request,
    RowResult,
    RowRole,
    SamplingParams,
    StepPlan,
    StepResult,
)
from deepinfer.scheduling import Progress, Scheduler

VOCAB = 50
EOS = 3


def choose(ids: tuple[int, ...]) -> int:
    """The model: the next token depends on every token before it."""
    state = 17
    for token in ids:
        state = (state * 31 + token) % 10_007
    return state % VOCAB


def alone(request: Request, max_model_len: int) -> tuple[int, ...]:
    """Output of a request that runs alone."""
    params = request.params
    ids = list(request.prompt_token_ids)
    limit = min(len(ids) + params.max_tokens, max_model_len)
    while len(ids) < limit:
        ids.append(choose(tuple(ids)))
        if ids[-1] in params.stop_token_ids or (ids[-1] == EOS and not params.ignore_eos):
            break
    return tuple(ids[request.num_prompt_tokens :])


def request(rid: str, prompt: Any = 3, *, priority: int = 0, **params: Any) -> Request:
    """A request; a number for a prompt means so many ids of its own."""
    if isinstance(prompt, int):
        base = sum(map(ord, rid))
        prompt = tuple((base + 7 * i) % VOCAB for i in range(prompt))
    given = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
    return Request(
        rid=rid, prompt_token_ids=tuple(prompt), params=SamplingParams(**given), priority=priority
    )


@dataclass
class Slot:
    """What a device knows of the request in a slot."""

    owner: tuple[str, int, int]
    begin: int
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    is_void: bool = False


class FakeRunner:
    """Runs plans in order, and refuses rows that do not continue what their slot holds.

    Args:
        block_size: Tokens in one block, or 0 for slots without blocks.
        window: Rows before each token that it reads besides those in blocks; they belong to the slot.
    """

    def __init__(self, block_size: int = 0, window: int = 0) -> None:
        self.block_size = block_size
        self.window = window
        self.windows: dict[int, dict[int, int]] = {}
        self.host_blocks: dict[int, list[int] | None] = {}
        self.host_windows: dict[int, dict[int, int] | None] = {}
        self.num_loads = 0
        self.slots: dict[int, Slot] = {}
        self.tables: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], int] = {}
        self.private: dict[int, dict[int, int]] = {}
        self.read: set[int] = set()

    def forward(
        self,
        plan: StepPlan,
        num_right: int = 1,
        failing: str | None = None,
        copies_fail: bool = False,
    ) -> StepResult:
        """The result of a plan; whoever calls keeps it until the step is to be collected."""
        for update in plan.block_updates:
            table = self.tables.setdefault(update.slot, [])
            assert update.first <= len(table)
            table[update.first :] = update.blocks
        failed: dict[str, None] = {}
        restored: dict[int, str] = {}
        for copy in plan.copies:
            if not self._copy(copy, copies_fail):
                failed[copy.rid] = None
            elif copy.kind is CopyKind.LOAD_WINDOWS:
                restored[copy.device] = copy.rid
        rows = []
        for row in plan.rows:
            self._enter(row, restored, row.rid in failed)
            rows.append(self._run(row, num_right, row.rid == failing))
        return StepResult(step=plan.step, rows=tuple(rows), failed_loads=tuple(failed))

    def _copy(self, copy: CacheCopy, fails: bool) -> bool:
        """Makes a copy; whether a load succeeded."""
        positions = range(max(0, copy.end_position - self.window), copy.end_position)
        if copy.kind is CopyKind.SAVE_BLOCK:
            block = [self.memory.get((copy.device, at), -1) for at in range(self.block_size)]
            self.host_blocks[copy.host] = None if fails else block
        elif copy.kind is CopyKind.SAVE_WINDOWS:
            rows = {at: self.windows[copy.device][at] for at in positions}
            self.host_windows[copy.host] = None if fails else rows
        else:
            is_block = copy.kind is CopyKind.LOAD_BLOCK
            data: Any = (self.host_blocks if is_block else self.host_windows)[copy.host]
            if fails or data is None:
                return False
            self.num_loads += 1
            if is_block:
                self.memory.update({(copy.device, at): data[at] for at in range(self.block_size)})
            else:
                assert sorted(data) == list(positions)
                self.windows[copy.device] = dict(data)
        return True

    def _place(self, row: PlanRow, position: int) -> tuple[dict[Any, int], Any]:
        if not self.block_size:
            return self.private.setdefault(row.slot, {}), position
        table = self.tables[row.slot]
        return self.memory, (table[position // self.block_size], position % self.block_size)

    def _write(self, row: PlanRow, position: int, token: int) -> None:
        assert position >= row.pool_start
        memory, at = self._place(row, position)
        memory[at] = token

    def _read(self, row: PlanRow, position: int) -> int:
        memory, at = self._place(row, position)
        return memory[at]

    def _enter(self, row: PlanRow, restored: dict[int, str], is_void: bool) -> None:
        """Starts a slot anew where the row is not of the request that it held."""
        owner = (row.rid, row.slot_generation, row.epoch)
        slot = self.slots.get(row.slot)
        if slot is not None and slot.owner == owner:
            slot.is_void = slot.is_void or is_void
            return
        assert row.num_open == 0
        assert row.first_position <= row.pool_start
        begin = row.first_position
        if restored.get(row.slot) == row.rid:
            assert row.first_position == row.pool_start
            begin = max(0, begin - self.window)
        else:
            self.windows[row.slot] = {}
        self.slots[row.slot] = slot = Slot(owner, begin, cached=row.first_position, is_void=is_void)
        if not is_void:
            assert row.window_start == begin
            slot.ids = [self._read(row, at) for at in range(row.first_position)]

    def _look_back(self, row: PlanRow, slot: Slot | None, at: int, token: int) -> None:
        """Writes a window row, and reads those before it."""
        rows = self.windows[row.slot]
        rows[at] = token
        for position in range(max(row.window_start, at - self.window + 1), at):
            assert rows[position] >= 0
            assert slot is None or rows[position] == slot.ids[position]

    def _run(self, row: PlanRow, num_right: int, fails: bool) -> RowResult:
        slot = self.slots[row.slot]
        if slot.is_void:
            return RowResult(
                rid=row.rid, slot=row.slot, slot_generation=row.slot_generation, epoch=row.epoch
            )
        first = slot.cached
        assert row.first_position - row.num_open <= first <= row.first_position
        assert row.window_start == slot.begin
        known = row.token_ids
        wanted = row.num_tokens - row.num_drafts
        assert all(0 <= token < VOCAB for token in known)
        if known:
            assert len(known) == wanted
            held = slot.ids[first : first + wanted]
            assert held == list(known[: len(held)])
            del slot.ids[first:]
            slot.ids += known
        else:
            assert wanted == 1
            assert len(slot.ids) == first + 1
        if row.role is RowRole.REPLAY:
            assert row.end_position <= row.pool_start
            held = [self._read(row, at) for at in range(first, row.end_position)]
            assert held == list(known)
        else:
            for at in range(first, first + wanted):
                self._write(row, at, slot.ids[at])
        for at in range(first, first + wanted):
            self._look_back(row, slot, at, slot.ids[at])
        slot.cached = first + wanted
        tokens: list[int] = []
        accepted = 0
        if row.num_logits:
            seen = tuple(self._read(row, at) for at in range(slot.cached))
            accepted = min(num_right, row.num_drafts)
            for index in range(row.num_drafts):
                draft = choose(seen) if index < accepted else (choose(seen) + 1) % VOCAB
                self._write(row, slot.cached + index, draft)
                if index < accepted:
                    self._look_back(row, None, slot.cached + index, draft)
                else:
                    self.windows[row.slot][slot.cached + index] = -1
                if index < accepted:
                    tokens.append(draft)
                    seen = (*seen, draft)
            tokens.append(choose(seen))
            slot.ids += tokens
            slot.cached += accepted
        return RowResult(
            rid=row.rid,
            slot=row.slot,
            slot_generation=row.slot_generation,
            epoch=row.epoch,
            token_ids=() if fails else tuple(tokens),
            num_drafts=row.num_drafts,
            num_accepted=0 if fails else accepted,
            error=ValueError("planted") if fails else None,
        )


class Loop:
    """Drives a scheduler at its own depth.

    Args:
        scheduler: The scheduler.
        num_right: Drafts that the model confirms.
    """

    def __init__(self, scheduler: Scheduler, num_right: int = 1) -> None:
        self.scheduler = scheduler
        cache = scheduler.cache
        blocks = not isinstance(cache, SlotCacheManager)
        self.runner = FakeRunner(cache.block_size if blocks else 0)
        self.num_right = num_right
        self.flying: deque[tuple[StepPlan, StepResult]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        """Submits requests."""
        for request in requests:
            self.scheduler.add(request)
            self.outputs[request.rid] = []

    def launch(self, now: float = 0.0) -> StepPlan | None:
        """Plans, launches and runs one step."""
        first, plan = self.scheduler.plan(now), self.scheduler.plan(now)
        assert plan == first
        if plan is None:
            return None
        limits = self.scheduler.limits
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        per_slot: dict[int, int] = {}
        for row in plan.rows:
            assert row.num_tokens > 0
            assert row.slot not in per_slot or plan.rows[plan.rows.index(row) - 1].role == "replay"
            per_slot[row.slot] = per_slot.get(row.slot, 0) + row.num_tokens
        assert max(per_slot.values()) <= limits.prefill_chunk_tokens
        assert len(per_slot) <= limits.max_num_seqs
        plan = self.scheduler.launch(plan)
        self.plans.append(plan)
        self.flying.append((plan, self.runner.forward(plan, self.num_right)))
        return plan

    def collect(self) -> list[Progress]:
        """Applies the oldest step in flight."""
        _, result = self.flying.popleft()
        progress = list(self.scheduler.apply(result))
        for entry in progress:
            rid = entry.request.rid
            self.outputs[rid] += entry.token_ids
            if entry.finish_reason is not None:
                self.reasons[rid] = entry.finish_reason
        return progress

    def step(self, now: float = 0.0) -> StepPlan | None:
        """One turn: launch, then collect what is one step too far ahead."""
        plan = self.launch(now)
        if plan is None or len(self.flying) > self.scheduler.limits.async_depth:
            if self.flying:
                self.collect()
            else:
                assert plan is not None or not self.scheduler.has_unfinished
        self.scheduler.check()
        return plan

    def run(self, bound: int = 500) -> dict[str, tuple[int, ...]]:
        """Runs until nothing is left."""
        for _ in range(bound):
            if not self.scheduler.has_unfinished:
                return {rid: tuple(ids) for rid, ids in self.outputs.items()}
            self.step()
        raise AssertionError(f"not finished after {bound} steps: {self.scheduler}")
