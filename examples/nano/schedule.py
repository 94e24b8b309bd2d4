"""How far training is, by steps or by the clock, and what depends on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

WARMUP_STEPS = 100


@dataclass
class Budget:
    """Ends a phase at a number of steps or of seconds, whichever comes first.

    Attributes:
        steps: Most steps.
        max_seconds: Most seconds from `start` on.
        first_share: Share of the schedule that an earlier run has done.
        clock: Gives seconds.
    """

    steps: int
    max_seconds: float = math.inf
    first_share: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    _started: float | None = field(default=None, repr=False)

    def start(self, already_spent: float = 0.0) -> None:
        """Starts the clock; `already_spent` seconds of preparation count against the limit."""
        self.max_seconds = max(0.0, self.max_seconds - already_spent)
        self._started = self.clock()

    def share(self, step: int) -> float:
        """Share of the schedule done before `step`, 0 to 1: of steps or seconds, the larger."""
        done = max(self._steps_share(step), self._seconds_share())
        return min(1.0, self.first_share + (1 - self.first_share) * done)

    def ended_by(self, step: int) -> str | None:
        """What has used the budget up before `step`: "steps", "seconds" or, if nothing has, None."""
        if self._steps_share(step) >= 1:
            return "steps"
        return "seconds" if self._seconds_share() >= 1 else None

    def _steps_share(self, step: int) -> float:
        return step / self.steps if self.steps else 1.0

    def _seconds_share(self) -> float:
        if self._started is None or math.isinf(self.max_seconds):
            return 0.0
        elapsed = self.clock() - self._started
        return elapsed / self.max_seconds if self.max_seconds > 0 else 1.0


@dataclass(frozen=True)
class Schedule:
    """What changes over the trunk's training, by the share of it that is done."""

    sparse_from: float = 0.15
    round_from: float = 0.10
    round_until: float = 0.40
    decay_from: float = 0.6
    replay_from: float = 0.80

    def learning_rate(self, step: int, share: float) -> float:
        """Factor of the step size: warm-up by steps, then flat, then linear to 0 at share 1."""
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        return warm * min(1.0, max(0.0, (1 - share) / (1 - self.decay_from)))

    def blend(self, share: float) -> float:
        """How far weights are moved to their stored formats, 0 to 1."""
        return min(1.0, max(0.0, (share - self.round_from) / (self.round_until - self.round_from)))
