"""The verification scheduler as the policy that an engine's scheduler asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative.calibration.confidences import ConfidenceCalibration
from deepinfer.speculative.outcomes import block_rows, block_widths
from deepinfer.speculative.scheduler import VerificationScheduler
from deepinfer.speculative.survival import prefix_survival

__all__ = ["ScheduledLengths"]

_FIRST_GAP = 4


class ScheduledLengths:
    """Plans lengths from the confidences that came with the drafts.

    For engines whose tokens do not depend on how many drafts are verified, greedy or coupled ones: there any schedule
    keeps the output law, so the confidences at hand may choose the budget too. An engine that asks before the drafts of
    the step are made has those of the block before; `LiveLengths` is for engines that can ask later.

    Drafting is switched off where the whole round does not pay: `off_gain` is what the plan must promise over
    verifying nothing. It comes back on when the promise is `off_gain + hysteresis`, so that noise does not toggle it.
    A row without drafts gets no new confidences either, so now and then each row verifies at least one: what was hard
    text some time ago need not be now. Once no row gets any that is soon, then ever more rarely: the gaps between two
    probes double from 4 choices up to `probe_every`. While others get some, rows that got none are asked every
    `probe_every` choices.

    Args:
        scheduler: Chooses budget and lengths.
        calibration: `SequentialTemperatureScaling` that was fitted, or one that learns from what `learn` is told; None takes
            confidences as they are. Margins are not known here.
        off_gain: Share of tokens a second that verifying must be expected to add.
        hysteresis: Share more that is needed to begin again.
        probe_every: Most choices from one probe to the next.

    Attributes:
        is_on: Whether drafts are verified at all, as of the last choice.

    Raises:
        ConfigError: A number is out of range, or the scheduler is none.

    Examples:
        >>> from deepinfer.speculative import StepCostModel
        >>> policy = ScheduledLengths(VerificationScheduler(StepCostModel.additive(1e-3, 1e-3)))
        >>> list(policy.choose([[0.9, 0.9], [0.2, 0.1], []], num_running=3))
        [2, 0, 0]
    """

    def __init__(
        self,
        scheduler: VerificationScheduler,
        *,
        calibration: Any = None,
        off_gain: float = 0.0,
        hysteresis: float = 0.05,
        probe_every: int = 32,
    ) -> None:
        self.scheduler = planner(scheduler)
        self._calibrated = ConfidenceCalibration(calibration)
        self.off_gain = checks.check_float("off_gain", off_gain, -1.0, 10.0, ConfigError)
        self.hysteresis = checks.check_float("hysteresis", hysteresis, 0.0, 10.0, ConfigError)
        self.probe_every = checks.check_int("probe_every", probe_every, 1, 2**31, ConfigError)
        self.is_on = True
        self._num_choices = 0  # since the last probe
        self._gap = _FIRST_GAP

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> Sequence[int]:
        """Drafts to verify.

        Args:
            confidences: Of each row, those of the block proposed for it: one probability a draft that it is accepted
                if all before it are.
            num_running: Requests that run; rows without drafts cost time as well.

        Returns:
            One number a row.
        """
        counts = block_widths(confidences)
        width = int(counts.max(initial=0))
        if not width:
            return [0] * len(confidences)
        values = block_rows(confidences, width)
        others = max(0, num_running - len(confidences))
        if others:
            values = np.concatenate([values, np.zeros((others, width), np.float32)])
        survival = prefix_survival(self._calibrated(values))
        plan = self.scheduler.plan(survival, invariant=True)
        off = len(values) / self.scheduler.cost.plain_seconds(len(values))
        promised = plan.theta / off - 1.0
        needed = self.off_gain if self.is_on else self.off_gain + self.hysteresis
        self.is_on = promised >= needed
        lengths = plan.lengths[: len(confidences)] if self.is_on else np.zeros_like(counts)
        self._num_choices += 1
        gap = self.probe_every
        if lengths.any():
            self._gap = _FIRST_GAP
        else:
            gap = min(self._gap, gap)
        if self._num_choices >= gap:
            self._num_choices = 0
            self._gap *= 2
            lengths = np.maximum(lengths, 1)
        chosen: list[int] = np.minimum(lengths, counts).tolist()
        return chosen

    @property
    def wants_outcomes(self) -> bool:
        """Whether the calibration learns."""
        return self._calibrated.learns

    def learn(
        self,
        confidences: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
        *,
        margins: Sequence[Sequence[float]] = (),
    ) -> None:
        """Takes how blocks fared, for a calibration that learns.

        Args:
            confidences: Of each block, uncalibrated.
            verified: Drafts of each block that were verified.
            accepted: Those of them that were accepted.
            margins: Left out.
        """
        self._calibrated.learn(confidences, verified, accepted)


def planner(scheduler: object) -> VerificationScheduler:
    """A scheduler, or an error.

    Args:
        scheduler: What was given.

    Returns:
        The same.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(scheduler, VerificationScheduler):
        return scheduler
    hint = "VerificationScheduler(cost) makes one of a StepCostModel."
    none: VerificationScheduler = checks.fail(
        "scheduler", scheduler, "a VerificationScheduler", ConfigError, hint
    )
    return none
