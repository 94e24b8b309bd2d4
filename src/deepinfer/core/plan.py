"""One engine step as data: what is to run, and what came out of it.

Plans and results are frozen and hold plain values only, so they can be logged, compared, sent to another
process and replayed. Results are matched by identity (request id, slot generation, epoch, step), never by
order of arrival.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from deepinfer.core.types import TokenLogprob

__all__ = [
    "BlockUpdate",
    "CacheCopy",
    "CopyKind",
    "LoadSnapshot",
    "PlanRow",
    "RowResult",
    "RowRole",
    "StepPlan",
    "StepResult",
]


class RowRole(enum.StrEnum):
    """What a row of a plan does; given, never inferred from a shape."""

    REPLAY = "replay"
    """Prompt tokens run again to rebuild window state; nothing is sampled or published."""
    PREFILL = "prefill"
    """A chunk of prompt that is not the last one; nothing is sampled."""
    LAST_PREFILL = "last_prefill"
    """The chunk that ends the prompt; one token is sampled."""
    DECODE = "decode"
    """One token in, one token sampled."""
    VERIFY = "verify"
    """One token and `num_drafts` drafts in, from one to `num_drafts + 1` tokens out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A run of consecutive positions of one request.

    Attributes:
        rid: Id of the request.
        slot: Cache and state slot, from 0.
        slot_generation: How often the slot was given out before; tells a late result from a current one.
        epoch: How often the request was preempted or reset; results of an older epoch are not counted.
        first_position: Position of the row's first token, from 0.
        num_tokens: Tokens that the row runs, drafts included, at least 1.
        num_drafts: How many of them are drafts, at the end of the row.
        role: What the row does.
        token_ids: The row's input ids when the host knows them, in full or as a leading part; the rest is
            on the device (the token sampled last, the drafts).
        is_late: Whether sampling waits for host state of the token before (a grammar mask).
        num_open: Drafts of this request still in flight when the plan was made. Any of them may be rejected, so
            the true first position may be lower by up to as many; the runner knows it.
        window_start: Lowest position whose window rows may be read: where a replay began, else 0.
        pool_start: Lowest position whose pool rows and index keys are written: the length of the adopted
            prefix, else 0.
        full_start: Lowest position that runs every layer; rows before it stop behind the last layer that owns a
            pool, and have neither logits nor draft features.
    """

    rid: str
    slot: int
    slot_generation: int = 0
    epoch: int = 0
    first_position: int
    num_tokens: int
    num_drafts: int = 0
    role: RowRole
    token_ids: tuple[int, ...] = ()
    is_late: bool = False
    num_open: int = 0
    window_start: int = 0
    pool_start: int = 0
    full_start: int = 0

    @property
    def end_position(self) -> int:
        """Position after the row's last token."""
        return self.first_position + self.num_tokens

    @property
    def num_logits(self) -> int:
        """Rows of logits that sampling needs: 0, 1, or the drafts plus 1; they are the row's last."""
        if self.role in (RowRole.REPLAY, RowRole.PREFILL):
            return 0
        return self.num_drafts + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdate:
    """New entries of the block table of a slot.

    Attributes:
        slot: The slot.
        first: Index in its table of the first new entry; 0 starts a new table.
        blocks: Block ids, in order.
    """

    slot: int
    first: int
    blocks: tuple[int, ...]


class CopyKind(enum.StrEnum):
    """Between which memories cache content moves."""

    SAVE_BLOCK = "save_block"
    """A block, device to host."""
    LOAD_BLOCK = "load_block"
    """A block, host to device."""
    SAVE_WINDOWS = "save_windows"
    """The window rows before a position of a slot, device to host."""
    LOAD_WINDOWS = "load_windows"
    """The same, host to device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCopy:
    """A copy that a runner makes before the forward pass of a plan, in the order of the plan.

    Attributes:
        kind: What moves where.
        device: Block id, or slot for windows.
        host: Block or window slot of the host tier.
        end_position: For windows: the position behind the last row.
        rid: The request that waits for a load, or "" for a save.
    """

    kind: CopyKind
    device: int
    host: int
    end_position: int = 0
    rid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that one step runs.

    Attributes:
        step: Step id, rising by one.
        rows: The rows, in batch order; a slot occurs at most once, or as REPLAY followed by another role.
        preempted: Ids of requests that lose their slot when this plan is launched.
        block_updates: New block table entries; filled in when the plan is launched.
        copies: Cache copies to make first; filled in when the plan is launched.
        released_slots: Slots that may be given out again once this step was collected.
        predicted_s: Predicted duration in seconds, or None without a cost model.
    """

    step: int
    rows: tuple[PlanRow, ...]
    preempted: tuple[str, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    copies: tuple[CacheCopy, ...] = ()
    released_slots: tuple[int, ...] = ()
    predicted_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step needs."""
        return sum(row.num_logits for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{row.rid}:{row.role}[{row.first_position}:{row.end_position}]" for row in self.rows
        )
        return f"StepPlan(step={self.step}, tokens={self.num_tokens}, rows=[{rows}])"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What one row produced.

    Attributes:
        rid: Id of the request.
        slot: Slot of the row.
        slot_generation: Slot generation of the row.
        epoch: Epoch of the row.
        token_ids: New tokens, accepted drafts first; empty for rows that sample nothing.
        num_drafts: Drafts that were verified.
        num_accepted: Drafts that were accepted.
        logprobs: One entry a new token when asked for, else empty.
        prompt_logprobs: One entry a prompt token of the row when asked for, else empty.
        draft_token_ids: Drafts proposed for the next step, or empty.
        draft_confidences: One probability a proposed draft that it and all before it are accepted, or empty.
        error: Why this row failed, or None.
    """

    rid: str
    slot: int
    slot_generation: int = 0
    epoch: int = 0
    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    draft_confidences: tuple[float, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step produced; applied in step order.

    Attributes:
        step: Step id of the plan.
        rows: One result a row of the plan, in the same order.
        duration_s: Seconds from launch to the last token, or None when not measured.
        failed_loads: Ids of requests whose `CacheCopy` loads failed; their rows count for nothing, and they are
            run again without what was to be loaded.
    """

    step: int
    rows: tuple[RowResult, ...]
    duration_s: float | None = None
    failed_loads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """How busy one engine is: what routers and balancers see.

    Attributes:
        time_s: When it was taken, on the engine's clock, in seconds.
        num_running: Requests that hold a slot.
        num_waiting: Requests that wait for one.
        waiting_tokens: Prompt tokens not yet run, waiting and running.
        cached_tokens: Tokens whose cache entries are held.
        capacity_tokens: Tokens that the cache can hold, or 0 when unknown.
        predicted_s: Predicted seconds to run the waiting tokens, or None.
    """

    time_s: float
    num_running: int
    num_waiting: int
    waiting_tokens: int = 0
    cached_tokens: int = 0
    capacity_tokens: int = 0
    predicted_s: float | None = None

    @property
    def used_ratio(self) -> float:
        """Held share of the cache, from 0 to 1; 0 when the capacity is unknown."""
        return self.cached_tokens / self.capacity_tokens if self.capacity_tokens else 0.0
