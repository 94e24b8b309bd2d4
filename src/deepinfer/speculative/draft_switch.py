"""Whether drafting pays at all: the switch in front of a schedule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative.cost import StepCostModel

__all__ = ["DraftSwitch"]

_ROWS = 256
_PROBE_STEPS = 5  # the first may only feed the draft, and the next have little behind them


class DraftSwitch:
    """Turns drafting off where a whole round of it promises fewer tokens a second than plain decoding, and on again.

    What drafts are worth is read off the survivals of the blocks seen last, whoever they were for: so a change of load
    is judged at once, and also while nothing is drafted. Text that became easier shows in probes only: a few steps with
    drafts, as seldom as keeps their cost below `probe_share` of the time.

    Args:
        cost: Seconds of a step.
        off_gain: Share of tokens a second that drafting must be expected to add more than.
        hysteresis: Share more that is needed to begin again, so that noise does not toggle it.
        probe_share: Share of the time that probes may take; 0 never probes.

    Attributes:
        is_on: Whether drafts are made, probes not counted.
        promise: Share of tokens a second that drafting was expected to add at the last look.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        cost: StepCostModel,
        *,
        off_gain: float = 0.0,
        hysteresis: float = 0.02,
        probe_share: float = 0.004,
    ) -> None:
        self.cost = cost
        self.off_gain = checks.check_float("off_gain", off_gain, -1.0, 10.0, ConfigError)
        self.hysteresis = checks.check_float("hysteresis", hysteresis, 0.0, 10.0, ConfigError)
        self.probe_share = checks.check_float("probe_share", probe_share, 0.0, 1.0, ConfigError)
        self.is_on = True
        self.promise = 0.0
        self._seen: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._falling: npt.NDArray[np.float64] = np.zeros(0)
        self._promises: dict[int, float] = {}
        self._idle = 0  # steps since drafting stopped or was last probed
        self._probe = 0  # steps of a probe that are left

    def note(self, survival: npt.NDArray[np.float32]) -> None:
        """Takes the survivals of a step's blocks.

        Args:
            survival: Shape [requests, drafts].
        """
        if self._probe > 1 or not survival.size:
            return
        rows = survival[-_ROWS:]
        if rows.shape[0] < _ROWS and rows.shape[1] == self._seen.shape[1]:
            rows = np.concatenate([self._seen[rows.shape[0] - _ROWS :], rows])
        self._seen = rows.copy()
        self._falling = np.sort(self._seen.ravel())[::-1].cumsum(dtype=np.float64)
        self._promises.clear()

    def draws(self, num_requests: int) -> bool:
        """Whether the next step drafts.

        Args:
            num_requests: Requests that decode in it.
        """
        if num_requests < 1:
            return False
        if not self._seen.size:
            return True  # nothing is known yet
        self.promise = self._promise(num_requests)
        needed = self.off_gain if self.is_on else self.off_gain + self.hysteresis
        was_on, self.is_on = self.is_on, self.promise > needed
        if self.is_on:
            self._idle = self._probe = 0
            return True
        if was_on:
            self._idle = 0
        if self._probe:
            self._probe -= 1
        else:
            self._idle += 1
            if self._idle >= self._gap(num_requests):
                self._idle, self._probe = 0, _PROBE_STEPS
        return self._probe > 0

    def state(self) -> dict[str, Any]:
        """What is known, for people who look."""
        return {
            "is_on": self.is_on,
            "promise": self.promise,
            "mean_survival": self._seen.mean(0).tolist() if self._seen.size else [],
        }

    def _promise(self, requests: int) -> float:
        if requests not in self._promises:
            seen = self._seen.shape[0]
            slots = np.arange(self._falling.size + 1) * (requests / seen)
            tokens = requests + np.concatenate([[0.0], self._falling]) * (requests / seen)
            rows = requests + np.ceil(slots).astype(np.int64)
            theta = (tokens / self.cost.seconds(requests, rows)).max()
            plain = requests / self.cost.plain_seconds(requests)
            self._promises[requests] = float(theta / plain) - 1.0
        return self._promises[requests]

    def _gap(self, requests: int) -> float:
        if not self.probe_share:
            return math.inf
        plain = self.cost.plain_seconds(requests)
        rows = requests * (1 + self._seen.shape[1])
        extra = float(self.cost.seconds(requests, rows)) - plain
        return max(8.0, _PROBE_STEPS * extra / (self.probe_share * plain))
