"""A plan in the making, and what launching it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.plan import StepPlan
from deepinfer.core.protocols import Hit
from deepinfer.scheduling.books import LAST_PREFILL, PREFILL, REPLAY
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.step_work import StepWork
from deepinfer.scheduling.victims import BlockSupply

__all__ = ["NO_WORK", "Admission", "Decision", "PlanDraft", "PromptRows"]

NO_WORK = StepWork()
"""The work of an empty step."""


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
class PromptRows:
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
class PlanDraft:
    """A plan in the making.

    Attributes:
        now: Time in seconds.
        budget: Tokens that may still be added.
        supply: Blocks that may still be given out.
        work: What the step holds so far, when the chunk policy wants to know.
        rids: Ids of the decoding rows.
        decode: Their columns, or None without any.
        prefills: Rows of prompts.
        growth: As in `Decision`.
        admissions: As in `Decision`.
        passed: As in `Decision`.
        promised: Blocks that running prompts still need after this step.
    """

    now: float
    budget: int
    supply: BlockSupply
    work: StepWork = NO_WORK
    rids: tuple[str, ...] = ()
    decode: dict[str, NDArray[Any]] | None = None
    prefills: PromptRows = field(default_factory=PromptRows)
    growth: list[tuple[Sequence, int]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    passed: list[Sequence] = field(default_factory=list)
    promised: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether no row was added yet."""
        return self.decode is None and not self.prefills.rids
