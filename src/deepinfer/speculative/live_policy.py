"""Schedules made when the drafts are there: the policy for engines that can shorten a row after drafting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.calibration.confidences import ConfidenceCalibration
from deepinfer.speculative.draft_switch import DraftSwitch
from deepinfer.speculative.outcomes import HeldOutcomes, block_rows, known_blocks
from deepinfer.speculative.policy import planner
from deepinfer.speculative.scheduler import VerificationScheduler, VerifyPlan
from deepinfer.speculative.survival import prefix_survival

__all__ = ["LiveLengths"]

_NOTE_EVERY, _MOST_NOTE_EVERY = 4, 64  # steps; what text is like changes slowly
_SKIP, _MOST_SKIPS = 15, 255
_LOOK_SHARE = 0.002  # of the time
_EXPLORE = 64  # blocks
_ENOUGH = 16  # blocks
_WHOLE_EVERY = 256  # steps
_LEAST_GAIN = 0.01
_OTHER_LOAD = 0.125  # share of the blocks
_MOST_WAITED = 1  # step: results may come one step late


class LiveLengths:
    """Plans lengths from the confidences of the very drafts that they are about.

    A step is planned before its drafts are made, so the plan only says whether there are any (`drafts`) and keeps room for
    whole blocks. Once they are made, `trim` says how much of each block is verified. For engines whose tokens do not
    depend on how many drafts are verified, greedy or coupled ones; the engine of this library is one. For others that
    would let drafts decide about themselves; only the searches "early_stop" and "static" never do.

    What is never looked at is never learnt: for a calibration that learns everything is verified until it knows something. Then
    one block of 64 comes before the rest, and in one step of 256 about 64 do, as far as the budget goes; up to 64 requests
    that step verifies everything.

    Planning takes time on the host too, and a step whose lengths are planned waits for its drafts on the way. Where it would
    win less than that, or less than 1 %, everything is verified. Such a step waits for nothing: what its drafts were like
    is seen with its results (`learn`), now and then, and tells whether a plan would have paid; from then on lengths are
    planned. Where rows are so cheap that no plan can pay, none is made. All this is for the searches "global" and "all";
    what another search plans is what is verified, but for what a calibration is taught. `max_drafts` of the scheduler holds
    always.

    Args:
        scheduler: Chooses budget and lengths.
        calibration: `SequentialTemperatureScaling` that was fitted; `AcceptanceEstimator` or `OnlineTemperatureScaling`,
            which learn from what `learn` is told; None takes confidences as they are.
        off_gain: As in `DraftSwitch`.
        hysteresis: As in `DraftSwitch`.
        probe_share: As in `DraftSwitch`.

    Attributes:
        takes_arrays: True: `trim` and `learn` take arrays with one row a block too.
        scheduler: As given.
        calibration: The calibration that is in use, or None.
        switch: Turns drafting off and on.

    Raises:
        ConfigError: A number is out of range, the calibration cannot be used, or the scheduler is none.

    Examples:
        >>> from deepinfer.speculative import StepCostModel
        >>> policy = LiveLengths(VerificationScheduler(StepCostModel.additive(1e-3, 1e-3)))
        >>> policy.drafts(2)
        True
        >>> policy.trim([[0.9, 0.9], [0.2, 0.1]], [2, 2])
        [2, 0]
    """

    takes_arrays = True

    def __init__(
        self,
        scheduler: VerificationScheduler,
        *,
        calibration: Any = None,
        off_gain: float = 0.0,
        hysteresis: float = 0.02,
        probe_share: float = 0.003,
    ) -> None:
        self.scheduler = planner(scheduler)
        # Any look at live drafts that may end in whole blocks would undo what these searches are careful about.
        self._is_exact = scheduler.search not in ("global", "all")
        self._limit = scheduler.max_drafts
        self._calibrated = ConfidenceCalibration(calibration)
        self.switch = DraftSwitch(
            scheduler.cost, off_gain=off_gain, hysteresis=hysteresis, probe_share=probe_share
        )
        self._is_whole = self._calibrated.is_new  # whether everything is verified for now,
        self._skipped = 0  # and for how many steps more without a look
        self._is_due = False  # whether `learn` is to look at a step that was verified whole,
        self._waited = 0  # for so many steps
        self._held, self._direct = HeldOutcomes(_ENOUGH), HeldOutcomes(1)
        self._steps = 0
        self._rows = 0
        self._wants = False
        self._planning_s = 0.0
        self._looking_s = 0.0  # of a look at a step that is over
        self._waiting_s = 0.0
        self._note_every = _NOTE_EVERY

    @property
    def calibration(self) -> Any:
        """As given."""
        return self._calibrated.scaling

    @property
    def is_on(self) -> bool:
        """Whether drafts are made, probes not counted."""
        return self.switch.is_on

    def drafts(self, num_requests: int) -> bool:
        """Whether the next step drafts.

        Args:
            num_requests: Requests that decode in it.
        """
        return self._limit != 0 and self.switch.draws(num_requests)

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        """Whole blocks or nothing, for schedulers that do not know `drafts`.

        Args:
            confidences: Of each row, those of the block proposed for it last.
            num_running: Requests that run.

        Returns:
            One number a row.
        """
        draws = self.drafts(len(confidences))
        counts = [len(known) if draws else 0 for known in confidences]
        return counts if self._limit is None else [min(self._limit, count) for count in counts]

    def skips(self, num_blocks: int) -> bool:
        """Whether everything of a step is verified without a look at its confidences.

        Args:
            num_blocks: Rows with drafts.

        Returns:
            True for such a step, whose `trim` need not be asked.
        """
        return self._limit is None and self._rests(num_blocks)

    def _rests(self, num_blocks: int) -> bool:
        """The same, whatever the limit."""
        if not (self._is_whole and self.switch.is_on and num_blocks):
            return False
        if self._is_due:  # and nobody told how that step fared
            self._waited += 1
            if self._waited > _MOST_WAITED:
                self._is_due = self._is_whole = False
                return False
        self._steps += 1
        self._wants = False
        if self._is_due:
            return True
        differs = abs(num_blocks - self._rows) > _OTHER_LOAD * self._rows
        if self._skipped and not differs:
            self._skipped -= 1
        else:
            self._is_due = self._wants = True
            self._waited, self._rows = 0, num_blocks
        return True

    def trim(
        self,
        confidences: Sequence[Sequence[float]],
        counts: Sequence[int],
        other_rows: int = 0,
        *,
        margins: Sequence[Sequence[float]] = (),
    ) -> list[int]:
        """How much of each block is verified.

        Args:
            confidences: Of each row, those of the block at hand: one probability a draft that it is accepted if all
                before it are. A row without any is verified whole; a NaN counts as 0.
            counts: Drafts of each row that can be verified.
            other_rows: Rows of the step that verify nothing and cost time as well.
            margins: Margins of each row, see `AcceptanceEstimator`; or empty.

        Returns:
            One number a row, from 0 to its count.

        Raises:
            ShapeError: There is not one row of confidences a count.
        """
        if len(confidences) != len(counts):
            raise shape_error("confidences", (len(confidences),), f"[rows={len(counts)}]")
        if not len(counts):
            return _like(counts, counts)
        most = np.asarray(counts, np.int64)
        if self._limit is not None:
            most = np.minimum(most, self._limit)
        if self._rests(len(counts)):
            return _like(counts, most)
        self._steps += 1
        self._wants = False
        is_new, is_noted, was_whole = self._calibrated.is_new, self._is_noted, self._is_whole
        began = time.perf_counter()
        self._wants, self._rows = was_whole or is_noted, len(counts)
        known, width = known_blocks(confidences, most)
        if not width:
            self._skipped = 0
            return _like(counts, most)
        room = most if known is None else most[known]
        rows = len(room)
        values = block_rows(confidences, width, known)
        gaps = block_rows(margins, width, known) if len(margins) else None
        survival = prefix_survival(self._calibrated(values, gaps))
        if was_whole or is_noted or not self.switch.is_on:
            self.switch.note(survival)
        if is_new:
            self._is_whole, self._skipped, self._wants = True, _NOTE_EVERY - 1, True
            return _like(counts, most)
        if int(room.min()) < width:
            survival = np.where(np.arange(width) < room[:, None], survival, np.float32(0))
        drafts = int(room.sum())
        whole = int(most.sum()) - drafts if known is not None else 0  # of rows without confidences
        others = max(0, other_rows) + len(counts) - rows + whole
        if others:
            survival = np.concatenate([survival, np.zeros((others, width), np.float32)])
        explored = self._explored(survival, rows)
        if explored is survival:
            plan = self.scheduler.plan(survival, invariant=True)
        else:
            plan = self.scheduler.plan(explored, lagged=survival)
        teaches = self._teaches
        pays = not teaches and (self._is_exact or self._pays(plan, survival, drafts))
        lengths = most
        if pays:
            lengths = np.minimum(plan.lengths[:rows], room)
            if known is not None:
                chosen, lengths = lengths, most.copy()
                lengths[known] = chosen
        elapsed = time.perf_counter() - began
        # The least of late: what disturbs the host now and then is no reason to plan less.
        self._planning_s = min(elapsed, 1.1 * self._planning_s or elapsed)
        self._is_whole = not (pays or teaches)
        self._wants = self._wants or self._is_whole
        self._skipped = self._rest(plan.seconds)
        return _like(counts, lengths)

    def _rest(self, step_s: float) -> int:
        """Steps until the next look, so that looks that win nothing take a small share of the time."""
        look_s = max(self._looking_s, self._planning_s)
        return int(min(_MOST_SKIPS, max(_SKIP, look_s / (_LOOK_SHARE * step_s))))

    @property
    def _is_noted(self) -> bool:
        """Whether a step whose lengths are planned is one of those that are learnt from."""
        return self._steps % self._note_every == 1

    @property
    def _teaches(self) -> bool:
        """Whether everything is verified so that the calibration learns."""
        made = self._calibrated
        return made.learns and (made.is_new or (self._is_lesson and self._rows <= _EXPLORE))

    @property
    def _is_lesson(self) -> bool:
        return self._steps % _WHOLE_EVERY == 1

    def _explored(self, survival: npt.NDArray[np.float32], blocks: int) -> npt.NDArray[np.float32]:
        """Puts a block now and then before all others."""
        first, every = -self._steps % _EXPLORE, _EXPLORE
        if self._is_lesson:
            first, every = 0, max(1, blocks // _EXPLORE)
        if not self._calibrated.learns or first >= blocks:
            return survival
        changed = survival.copy()
        whole = changed[first:blocks:every]
        whole[whole > 0] = 1.0
        return changed

    def _pays(self, plan: VerifyPlan, survival: npt.NDArray[np.float32], drafts: int) -> bool:
        """Whether a plan is worth the time that it takes to make it."""
        requests = len(survival)
        tokens = requests + float(survival.sum(dtype=np.float64))
        gain = plan.theta * self._seconds(requests, requests + drafts) / tokens - 1.0
        return gain > self._least_gain(plan.seconds)

    def _least_gain(self, step_s: float) -> float:
        return max(_LEAST_GAIN, max(self._planning_s, self._waiting_s) / step_s)

    def _seconds(self, requests: int, rows: int) -> float:
        cost = self.scheduler.cost
        return float(cost.table(rows + 1)[rows]) + cost.draft_seconds(requests)

    def took(self, seconds: float) -> None:
        """Takes what a look at drafts cost, if that is more than the plan alone.

        Args:
            seconds: From when the drafts were known to when the step was launched; a step that is verified whole need not
                wait for them.
        """
        self._waiting_s = min(seconds, 1.1 * self._waiting_s or seconds)

    @property
    def wants_outcomes(self) -> bool:
        """Whether `learn` is to be told of the step that `skips` or `trim` was asked about last; it need not be of all."""
        return self._wants

    def learn(
        self,
        confidences: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
        *,
        margins: Sequence[Sequence[float]] = (),
    ) -> None:
        """Takes how blocks fared: for the switch, for a calibration that learns, and to see whether a plan would have paid.

        Args:
            confidences: Of each block, as `trim` is given them.
            verified: Drafts of each block that were verified.
            accepted: Those of them that were accepted.
            margins: Margins of each block; or empty.
        """
        if not len(verified):
            return
        began = time.perf_counter()
        step_s = self._seconds(len(verified), len(verified) + int(np.sum(verified)))
        is_late, self._is_due = self._is_due, False
        held = self._held if is_late else self._direct
        found = held.add(confidences, verified, accepted, margins)
        if found is None:
            return
        survival = prefix_survival(self._calibrated(found.confidences, found.margins))
        if is_late:
            self.switch.note(survival)
        taken = np.arange(survival.shape[1]) < found.verified[:, None]
        survival = np.where(taken, survival, np.float32(0))
        if is_late and not self._calibrated.is_new:
            self._look_back(survival[-found.last :], int(found.verified[-found.last :].sum()))
        self.switch.compare(float(survival.sum(dtype=np.float64)), float(found.accepted.sum()))
        gaps: Any = () if found.margins is None else found.margins
        rows: Any = found.confidences
        counts: Any = found.verified, found.accepted
        self._calibrated.learn(rows, counts[0], counts[1], gaps)
        elapsed = time.perf_counter() - began
        self._looking_s = min(elapsed, 1.1 * self._looking_s or elapsed)
        if is_late:
            self._skipped = self._rest(step_s)
            if self._calibrated.is_new:  # the sooner it knows something the better
                self._skipped = min(self._skipped // 5, _NOTE_EVERY - 1)
        else:
            every = self._looking_s / (_LOOK_SHARE * step_s)
            self._note_every = int(min(_MOST_NOTE_EVERY, max(_NOTE_EVERY, every)))

    def _look_back(self, survival: npt.NDArray[np.float32], drafts: int) -> None:
        """Looks at a step that was verified whole: would a plan have paid?"""
        if self._is_exact:
            self._is_whole = False
            return
        blocks, width = survival.shape
        requests = max(blocks, self._rows)
        whole_s = self._seconds(requests, requests + drafts)
        if whole_s / self._seconds(requests, requests) - 1.0 <= self._least_gain(whole_s):
            return  # a plan that saved every draft and lost no token would not pay
        began = time.perf_counter()
        others = np.zeros((requests - blocks, width), np.float32)
        survival = np.concatenate([survival, others])
        plan = self.scheduler.plan(survival, invariant=True)
        self._planning_s = self._planning_s or time.perf_counter() - began
        self._is_whole = not self._pays(plan, survival, drafts)

    def to_dict(self) -> dict[str, Any]:
        """State of switch and calibration, as plain values."""
        return {"switch": self.switch.state(), "calibration": self._calibrated.to_dict()}


def _like(given: Sequence[int], lengths: Any) -> list[int]:
    """Lengths as an array where an array was given, else as a list."""
    found: Any = np.array(lengths)
    if not isinstance(given, np.ndarray):
        found = lengths.tolist() if isinstance(lengths, np.ndarray) else list(lengths)
    made: list[int] = found
    return made
