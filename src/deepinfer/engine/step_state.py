"""What a runner keeps of slots, and of steps between launch and result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken, ShapeError
from deepinfer.core.plan import PlanRow, StepPlan
from deepinfer.core.protocols import Sampled
from deepinfer.core.types import Request, TokenLogprob
from deepinfer.models.deepseek_v41.batch import ForwardBatch

if TYPE_CHECKING:
    from deepinfer.engine.decode_lane import DecodeLane
    from deepinfer.engine.verify_lane import VerifyLane

__all__ = ["RunningRow", "RunningStep", "SlotState", "SlotStates"]


@dataclass(slots=True)
class SlotState:
    """Whose state a slot holds.

    Attributes:
        slot: The slot.
        rid: Id of the request.
        slot_generation: Generation of the slot.
        epoch: Epoch of the request.
        token_ids: Every token of the request that the host knows, shared by all states of the request.
        is_void: Whether what it was to hold could not be loaded.
    """

    slot: int
    rid: str
    slot_generation: int
    epoch: int
    token_ids: list[int]
    is_void: bool = False

    def is_of(self, row: PlanRow) -> bool:
        """Whether a row continues this state."""
        return (self.rid, self.slot_generation, self.epoch) == (
            row.rid,
            row.slot_generation,
            row.epoch,
        )


@dataclass(slots=True)
class RunningRow:
    """One row of a plan as it is run.

    Attributes:
        index: Its place in the plan.
        row: The plan's row.
        state: State of its slot.
        start: Its true first position.
        known: Input ids that the host knows, at the beginning of the row.
        draft: Drafts that are run after them.
        confidences: Confidences of the block that they are the beginning of, or empty.
        margins: Margins of that block, or empty.
        num_tokens: Tokens that are run.
        offset: Place of its first token in the batch.
        is_fed: Whether the step gave the features of its tokens to the drafter.
    """

    index: int
    row: PlanRow
    state: SlotState
    start: int
    known: tuple[int, ...]
    draft: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    num_tokens: int = 0
    offset: int = 0
    is_fed: bool = False

    @property
    def end(self) -> int:
        """Position behind the last token that is no draft."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def num_logits(self) -> int:
        """Rows of logits; at most those of the plan's row, since a drafter may propose less."""
        return len(self.draft) + 1 if self.row.num_logits else 0


@dataclass(slots=True)
class RunningStep:
    """A step between `forward` and `collect`.

    Attributes:
        step: Its id.
        plan: The plan.
        requests: The requests of its rows by id.
        lane: The leading rows that decode one token each, or None when there are none, or others look after them.
        verify: All rows, when each of them decodes or verifies; there are no other rows then, or None.
        rows: The other rows that are run: not those whose cache content could not be loaded.
        batch: What the model ran, or None for a step without rows.
        features: Draft features, or None.
        features_from: Place in the output of the token that they begin with.
        kept: Places in the batch of the tokens that ran every layer, ascending, or None for all.
        logits: Logits until they are sampled from, or None.
        prompt_logprobs: Entries by place in the plan.
        failed_loads: Requests whose cache content could not be loaded.
        busy_s: Seconds that the host spent in the calls for this step.
        draft_s: Seconds of them that drafting took.
        sampled: What was chosen.
        host_tokens: The chosen tokens on the host, once they are there.
        vocab_size: Columns of the logits that were sampled from, or 0 before.
        has_failed: Whether one of the tokens is no id, which stands for a row that failed.
        started: Event before the step, on CUDA.
        done: Event behind the copies to the host, on CUDA.
        tokens: Chosen tokens of each of the other rows once they were looked at.
        is_settled: Whether rejected drafts were taken back and the drafter was fed.
        error: What went wrong in that.
    """

    step: int
    plan: StepPlan
    requests: Mapping[str, Request]
    rows: list[RunningRow]
    lane: DecodeLane | None = None
    verify: VerifyLane | None = None
    batch: ForwardBatch | None = None
    features: Tensor | None = None
    features_from: int = 0
    kept: np.ndarray | None = None
    logits: Tensor | None = None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    failed_loads: tuple[str, ...] = ()
    busy_s: float = 0.0
    draft_s: float = 0.0
    sampled: Sampled | None = None
    host_tokens: Tensor | None = None
    vocab_size: int = 0
    has_failed: bool = False
    started: Any = None
    done: Any = None
    tokens: list[list[int]] = field(default_factory=list)
    is_settled: bool = False
    error: Exception | None = None

    def copy_to_host(self, sampled: Sampled) -> None:
        """Starts the copies that `wait` waits for.

        Args:
            sampled: What was chosen.

        Raises:
            ShapeError: It is not one int64 a row of logits.
        """
        self.sampled = sampled
        tokens = getattr(sampled, "token_ids", None)
        rows = self.lane_count + sum(running.num_logits for running in self.rows)
        if self.verify is not None:
            rows = self.verify.num_logits
        if not isinstance(tokens, Tensor) or tokens.shape != (rows,) or tokens.dtype != torch.int64:
            found = type(sampled).__name__ if tokens is None else type(tokens).__name__
            if isinstance(tokens, Tensor):
                found = f"token_ids of shape {list(tokens.shape)}, {tokens.dtype}"
            raise ShapeError(
                f"the sampler returned {found}; it must return an object with token_ids of shape [{rows}], int64.",
                argument="token_ids",
                expected=(rows,),
            )
        if tokens.device.type != "cuda":
            self.host_tokens = tokens
            return
        self.host_tokens = _pinned_copy(tokens)
        self.done = torch.cuda.Event(enable_timing=True)
        self.done.record()

    def wait(self) -> list[int]:
        """Waits for the chosen tokens, and for nothing behind them.

        Returns:
            One token a row of logits.
        """
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = [] if self.host_tokens is None else self.host_tokens.tolist()
        self.has_failed = bool(tokens) and not 0 <= min(tokens) <= max(tokens) < self.vocab_size
        return tokens

    @property
    def lane_count(self) -> int:
        """Rows of the lane, each of one token and one row of logits, before those of all others."""
        return 0 if self.lane is None else self.lane.count

    @property
    def drafts(self) -> dict[int, tuple[int, ...]]:
        """Drafts that are run, by row of the plan."""
        return {running.index: running.draft for running in self.rows if running.draft}

    @property
    def has_logits(self) -> bool:
        """Whether any row has logits."""
        return (
            bool(self.lane_count)
            or self.verify is not None
            or any(running.num_logits for running in self.rows)
        )

    @property
    def duration_s(self) -> float:
        """Seconds that the step took: on the device where that is known, else in the calls for it."""
        if self.started is not None and self.done is not None:
            return float(self.started.elapsed_time(self.done)) / 1e3
        return self.busy_s


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class SlotStates:
    """The states of all slots, and the tokens of every request that has not ended.

    Args:
        num_slots: Slots.
        cache: The model's cache; a slot that is taken over is emptied in it.

    Attributes:
        version: Rises whenever a slot gets another state, or a state becomes void.
    """

    def __init__(self, num_slots: int, cache: Any) -> None:
        self.version = 0
        self._states: list[SlotState | None] = [None] * num_slots
        self._tokens: dict[str, list[int]] = {}
        self._latest: dict[str, SlotState] = {}
        self._cache = cache

    def __getitem__(self, slot: int) -> SlotState | None:
        return self._states[slot]

    def holds(self, state: SlotState) -> bool:
        """Whether a state is still that of its slot."""
        return self._states[state.slot] is state

    def is_latest(self, state: SlotState) -> bool:
        """Whether the request of a state did not start again since."""
        return self._latest.get(state.rid) is state

    def enter(self, row: PlanRow, request: Request) -> SlotState:
        """The state that a row continues, a new one if its slot was another's or its request starts again.

        Args:
            row: The row.
            request: Its request.

        Returns:
            The state, with the row's known ids noted.

        Raises:
            InvariantBroken: The row does not continue what is known of its request.
        """
        state = self._states[row.slot]
        if state is None or not state.is_of(row):
            state = self._start(row, request)
        ids = state.token_ids
        if row.token_ids:
            if row.first_position > len(ids):
                raise InvariantBroken(
                    f"slot {row.slot} was given {len(ids)} tokens of {row.rid!r}, and a row starts at "
                    f"{row.first_position}."
                )
            # What lies behind a row that samples nothing is still known, and a later hit may need it.
            end = len(ids) if row.num_logits else row.first_position + len(row.token_ids)
            ids[row.first_position : end] = row.token_ids
        return state

    def make_void(self, state: SlotState) -> None:
        """Notes that what a slot was to hold could not be loaded."""
        self.version += 1
        state.is_void = True

    def _start(self, row: PlanRow, request: Request) -> SlotState:
        self.version += 1
        self._cache.reset(row.slot)
        prompt, prefix = request.prompt_token_ids, row.pool_start
        ids = self._tokens.setdefault(row.rid, [])
        both = min(len(ids), len(prompt))
        if tuple(ids[:both]) != prompt[:both]:  # of an earlier request with this id
            ids = self._tokens[row.rid] = []
        if len(ids) < prefix:
            ids += prompt[len(ids) : prefix]
        state = SlotState(row.slot, row.rid, row.slot_generation, row.epoch, ids)
        self._states[row.slot] = self._latest[row.rid] = state
        if prefix:
            if len(ids) < prefix:
                raise InvariantBroken(
                    f"{row.rid!r} starts behind a prefix of {prefix} tokens, and {len(ids)} are known."
                )
            self._cache.adopt_prefix(row.slot, torch.tensor(ids[:prefix], dtype=torch.int64))
        return state

    def clear_slot(self, slot: int) -> None:
        """Forgets whose state a slot holds."""
        self.version += 1
        self._states[slot] = None

    def forget(self, rid: str) -> int | None:
        """Forgets the tokens of a request that ended; tells its slot, unless that is another's by now."""
        self.version += 1
        self._tokens.pop(rid, None)
        state = self._latest.pop(rid, None)
        return state.slot if state is not None and self.holds(state) else None

    def clear(self) -> None:
        """Forgets everything."""
        self.version += 1
        self._states = []
        self._tokens.clear()
        self._latest.clear()
