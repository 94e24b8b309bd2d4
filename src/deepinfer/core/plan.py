"""One engine step as data: what is to run, and what came out of it.

Plans and results are frozen and hold plain values only, so they can be logged, compared, sent to another
process and replayed. Results are matched by identity (request id, slot generation, epoch, step), never by
order of arrival. Their rows are stored as columns (`PlanRows`, `RowResults`) and read as values.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.core.result_columns import RowResults as RowResults
from deepinfer.core.row_columns import ROLES as ROLES
from deepinfer.core.row_columns import PlanRows as PlanRows
from deepinfer.core.rows import PlanRow as PlanRow
from deepinfer.core.rows import RowResult as RowResult
from deepinfer.core.rows import RowRole as RowRole

__all__ = [
    "ROLES",
    "BlockUpdate",
    "CacheCopy",
    "CopyKind",
    "LoadSnapshot",
    "PlanRow",
    "PlanRows",
    "RowResult",
    "RowResults",
    "RowRole",
    "StepPlan",
    "StepResult",
]


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
        rows: The rows, in batch order; a slot occurs at most once, or as REPLAY followed by another role. Any
            sequence of `PlanRow` is taken, and kept as `PlanRows`.
        preempted: Ids of requests that lose their slot when this plan is launched.
        block_updates: New block table entries; filled in when the plan is launched.
        copies: Cache copies to make first; filled in when the plan is launched.
        released_slots: Slots that may be given out again once this step was collected.
        predicted_s: Predicted duration in seconds, or None without a cost model.
    """

    step: int
    rows: PlanRows
    preempted: tuple[str, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    copies: tuple[CacheCopy, ...] = ()
    released_slots: tuple[int, ...] = ()
    predicted_s: float | None = None

    def __post_init__(self) -> None:
        """Takes rows in any form."""
        if not isinstance(self.rows, PlanRows):
            object.__setattr__(self, "rows", PlanRows.of(self.rows))

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return int(self.rows.num_tokens.sum())

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step needs."""
        return int(self.rows.num_logits.sum())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON; `from_dict` takes it back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("rows", "block_updates", "copies"):
            values[name] = [dataclasses.asdict(value) for value in values[name]]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepPlan:
        """The plan that `to_dict` wrote, also after a passage through JSON.

        Args:
            values: The fields.

        Returns:
            The plan.

        Raises:
            TypeError: A field is unknown or missing.
        """
        given = dict(values)
        rows = [
            {**row, "role": RowRole(row["role"]), "token_ids": tuple(row["token_ids"])}
            for row in given.pop("rows")
        ]
        updates = [
            {**update, "blocks": tuple(update["blocks"])}
            for update in given.pop("block_updates", ())
        ]
        copies = [{**copy, "kind": CopyKind(copy["kind"])} for copy in given.pop("copies", ())]
        for name in ("preempted", "released_slots"):
            given[name] = tuple(given.get(name, ()))
        return cls(
            rows=PlanRows.of(PlanRow(**row) for row in rows),
            block_updates=tuple(BlockUpdate(**update) for update in updates),
            copies=tuple(CacheCopy(**copy) for copy in copies),
            **given,
        )

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{row.rid}:{row.role}[{row.first_position}:{row.end_position}]" for row in self.rows
        )
        return f"StepPlan(step={self.step}, tokens={self.num_tokens}, rows=[{rows}])"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step produced; applied in step order.

    Attributes:
        step: Step id of the plan.
        rows: One result a row of the plan, in the same order. Any sequence of `RowResult` is taken, and kept as
            `RowResults`.
        duration_s: Seconds from launch to the last token, or None when not measured.
        failed_loads: Ids of requests whose `CacheCopy` loads failed; their rows count for nothing, and they are
            run again without what was to be loaded.
    """

    step: int
    rows: RowResults
    duration_s: float | None = None
    failed_loads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Takes rows in any form."""
        if not isinstance(self.rows, RowResults):
            object.__setattr__(self, "rows", RowResults.of(self.rows))


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
