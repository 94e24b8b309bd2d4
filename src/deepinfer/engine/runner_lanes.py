"""What a runner does about steps that verify as columns."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import Any

import numpy as np

from deepinfer.core.plan import StepPlan
from deepinfer.core.protocols import ModelInfo
from deepinfer.engine.future_tokens import FutureTokens
from deepinfer.engine.graphs import DecodeGraphs
from deepinfer.engine.step_batch import NumLegal, propose_drafts
from deepinfer.engine.step_state import RunningStep, SlotStates
from deepinfer.engine.verify_lane import BlocksAhead, VerifyLane
from deepinfer.engine.verify_steps import (
    judge_lane,
    keep_tokens,
    propose_for_lane,
    resolve_lane,
    start_ahead,
    wants_lessons,
)
from deepinfer.models.deepseek_v41.verify_books import take_back

__all__ = ["RunsVerifyLanes"]


class RunsVerifyLanes:
    """Drafts and verdicts of all rows at once where they can be had so, else row by row."""

    info: ModelInfo
    cache: Any
    num_legal: NumLegal | None
    length_policy: Any
    _sampler: Any
    _drafter: Any
    _graphs: DecodeGraphs | None
    _future: FutureTokens
    _states: SlotStates
    _never: Set[int]
    _next: StepPlan | None = None  # the plan that waits for the step that is settled
    _ahead: BlocksAhead | None = None

    @property
    def _wants_outputs(self) -> bool:
        return bool(getattr(self._sampler, "processors", True))

    @property
    def _has_verify_lanes(self) -> bool:
        """Whether steps that verify can be run as columns: recorded ones that feed a drafter which takes columns."""
        graphs = self._graphs
        if graphs is None or graphs.feed is None or graphs.unsupported or self._wants_outputs:
            return False
        return hasattr(self._drafter, "start_blocks")

    def _propose(self, step: RunningStep) -> None:
        rules = self.info.vocab_size, self._never
        if step.verify is not None:
            ahead, self._ahead = self._ahead, None
            given = *rules, self.length_policy, ahead
            if propose_for_lane(step.verify, self._drafter, *given):
                step.verify.is_taught = wants_lessons(self.length_policy)
                return
            self._take_apart(step)
        propose_drafts(step, self._drafter, *rules, self.num_legal, self.length_policy)

    def _take_apart(self, step: RunningStep) -> None:
        """Goes on row by row."""
        if step.verify is not None:
            resolve_lane(step.verify, self.info.vocab_size, self._never)
            step.rows, step.verify = step.verify.running_rows(), None
            self._future.flush()

    def _settle_lane(self, step: RunningStep, lane: VerifyLane) -> None:
        if step.done is not None:
            step.done.synchronize()
        resolve_lane(lane, self.info.vocab_size, self._never)
        judge_lane(step, lane)
        self._ahead = None
        if self._next is not None and lane.company.version == self._states.version:
            self._ahead = start_ahead(lane, self._next.rows, self._drafter)
        rows = keep_tokens(lane, self._states, partial(take_back, self.cache))
        last = lane.last
        slots, starts, ends = lane.company.host_slots, lane.starts, lane.starts + lane.used
        if rows is not None:
            slots, last = slots[rows], last[rows]
        self._future.put_late(slots, last)
        feeds = lane.shared.feeds
        if feeds is not None:
            rows = np.flatnonzero(feeds) if rows is None else rows[feeds[rows]]
        if rows is not None:
            slots, starts, ends = lane.company.host_slots[rows], starts[rows], ends[rows]
        self._drafter.settle(slots.tolist(), starts.tolist(), ends.tolist())
        step.is_settled = True
