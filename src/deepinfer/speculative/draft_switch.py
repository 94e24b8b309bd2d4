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

_MOST_BLOCKS = 512  # that an opinion rests on, so many of one step at most:
_STEP_BLOCKS = 64
_FRESH_BLOCKS = 256  # of a probe
_LEAST_BLOCKS = 48
_LEAST_STEPS = 12
_POOR_STEPS = (
    4  # of a probe: the first may only feed the draft, and the next have little behind them
)
_PROBE_STEPS = 24  # at most
_TRUST_DRAFTS = 1000.0  # expected drafts over which trust is averaged,
_FIRST_TRUST = 100.0  # fewer in the beginning
_MOST_TRUST = 0.2  # share of one step
_MOST_ASLEEP = 2**16  # steps
_FIRST_GAP = 24  # steps; doubles with each probe that finds nothing
_HOPELESS = -0.25  # a probe that finds this little ends at once


class DraftSwitch:
    """Turns drafting off where a whole round of it promises fewer tokens a second than plain decoding, and on again.

    What drafts are worth is read off the survivals of the blocks seen last, whoever they were for: so a change of load
    is judged at once, and also while nothing is drafted. Text that became easier shows in probes only: some steps with
    drafts. What a probe loses is known, and probes are as seldom as keeps that below `probe_share` of the time: soon
    where drafting nearly pays, rare where it is far from it. A young opinion is looked at again sooner, since answers begin
    harder than they go on: after 24 steps, and twice as many after each probe that finds nothing.

    Args:
        cost: Seconds of a step.
        off_gain: Share of tokens a second that drafting must be expected to add more than.
        hysteresis: Share more that is needed to begin again; a quarter of it may be missing to go on, so that noise toggles
            nothing.
        probe_share: Share of the time that probes may lose in the long run; 0 never probes.

    Attributes:
        is_on: Whether drafts are made, probes not counted.
        promise: Share of tokens a second that drafting was expected to add at the last look.
        trust: Drafts accepted for each that was expected to be, of late; what drafting promises is corrected by it.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        cost: StepCostModel,
        *,
        off_gain: float = 0.0,
        hysteresis: float = 0.02,
        probe_share: float = 0.003,
    ) -> None:
        self.cost = cost
        self.off_gain = checks.check_float("off_gain", off_gain, -1.0, 10.0, ConfigError)
        self.hysteresis = checks.check_float("hysteresis", hysteresis, 0.0, 10.0, ConfigError)
        self.probe_share = checks.check_float("probe_share", probe_share, 0.0, 1.0, ConfigError)
        self.is_on = True
        self.promise = 0.0
        self.trust = 1.0
        self._compared = _FIRST_TRUST  # expected drafts that trust rests on
        self._seen: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._fresh: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)  # of the probe
        self._promises: dict[int, tuple[float, float]] = {}
        self._steps = 0  # since drafting began
        self._idle = 0  # steps since drafting stopped or was last probed
        self._probe = 0  # steps of the probe so far
        self._spent = 0  # steps of the last probe
        self._wait = _FIRST_GAP // 2  # steps without drafts that a young opinion holds
        self._asleep = 0  # steps for which nothing changes unless there are other than:
        self._sleepers = 0  # requests

    def note(self, survival: npt.NDArray[np.float32]) -> None:
        """Takes the survivals of a step's blocks.

        Args:
            survival: Shape [requests, drafts].
        """
        if not survival.size:
            return
        self._asleep = 0
        if not self._probe:
            some = survival[:: -(-len(survival) // _STEP_BLOCKS)]
            self._seen = _newest(self._seen, some, _MOST_BLOCKS)
            self._promises.clear()
        elif self._probe > _POOR_STEPS:
            self._fresh = _newest(self._fresh, survival, _FRESH_BLOCKS)

    def compare(self, expected: float, accepted: float) -> None:
        """Takes how many drafts of a step were expected to be accepted, and how many were.

        Args:
            expected: Survivals of the verified drafts added up.
            accepted: Drafts accepted.
        """
        if expected > 0:
            self._compared = min(_TRUST_DRAFTS, self._compared + expected)
            weight = min(_MOST_TRUST, expected / self._compared)
            self.trust += weight * (min(2.0, accepted / expected) - self.trust)
            self._promises.clear()
            self._asleep = 0

    def draws(self, num_requests: int) -> bool:
        """Whether the next step drafts.

        Args:
            num_requests: Requests that decode in it.
        """
        if self._asleep and num_requests == self._sleepers:
            self._asleep -= 1
            self._idle += 1
            return False
        if num_requests < 1:
            return False
        self._asleep = 0
        self._steps += 1
        if self.is_on and self._seen.shape[0] < _LEAST_BLOCKS:
            return True  # too little is known
        if self._probe:
            return self._go_on(num_requests)
        self.promise, _ = self._look_up(num_requests)
        missing = 0.25 * self.hysteresis if self.is_on else -self.hysteresis
        needed = self.off_gain - missing
        if self.is_on and self._steps < _LEAST_STEPS and self.promise > _HOPELESS:
            return True  # the beginnings of answers are harder than the rest
        if not self.is_on and self.promise > needed:
            self._steps = 0
        was_on, self.is_on = self.is_on, self.promise > needed
        if self.is_on:
            self._idle = 0
            return True
        if was_on:  # what lasted less than the wait before it was a long probe
            self._wait = _FIRST_GAP if self._steps > self._wait else 2 * self._wait
        self._idle += 1
        gap = self._gap(num_requests)
        if self._idle < gap:
            self._asleep = math.ceil(min(gap - self._idle, _MOST_ASLEEP)) - 1
            self._sleepers = num_requests
            return False
        self._idle, self._probe, self._fresh = 0, 1, self._fresh[:0]
        return True

    def state(self) -> dict[str, Any]:
        """What is known, for people who look."""
        return {
            "is_on": self.is_on,
            "promise": self.promise,
            "trust": self.trust,
            "blocks": self._seen.shape[0],
            "mean_survival": self._seen.mean(0).tolist() if self._seen.size else [],
        }

    def _go_on(self, requests: int) -> bool:
        """One more step of a probe, or its end."""
        known, steps = self._fresh.shape[0], self._probe
        if known >= min(_LEAST_BLOCKS, _PROBE_STEPS * requests) or (
            known and steps >= _PROBE_STEPS
        ):
            promise, _ = _promise(self._fresh, self.cost, requests, self.trust)
            is_good = promise > self.off_gain + self.hysteresis
            if is_good or promise < _HOPELESS or steps >= _PROBE_STEPS:
                self._seen, self._spent, self._probe = self._fresh, steps, 0
                self._promises.clear()
                self.promise, self.is_on, self._steps = promise, is_good, 0
                self._wait = min(_MOST_ASLEEP, self._wait if is_good else 2 * self._wait)
                return is_good
        if steps >= 2 * _PROBE_STEPS:  # nothing was drafted
            self._spent, self._probe = steps, 0
            return False
        self._probe += 1
        return True

    def _look_up(self, requests: int) -> tuple[float, float]:
        if requests not in self._promises:
            self._promises[requests] = _promise(self._seen, self.cost, requests, self.trust)
        return self._promises[requests]

    def _gap(self, requests: int) -> float:
        """Steps from one probe to the next."""
        if not self.probe_share:
            return math.inf
        promise, seconds = self._look_up(requests)
        plain = self.cost.plain_seconds(requests)
        steps = max(self._spent, _POOR_STEPS + 1)
        lost = steps * max(seconds * max(-promise, 0.02), 0.01 * plain)
        return min(max(8.0, lost / (self.probe_share * plain)), self._wait)


def _newest(
    seen: npt.NDArray[np.float32], survival: npt.NDArray[np.float32], most: int
) -> npt.NDArray[np.float32]:
    rows = survival[-most:]
    if rows.shape[0] < most and rows.shape[1] == seen.shape[1]:
        rows = np.concatenate([seen[max(0, seen.shape[0] + rows.shape[0] - most) :], rows])
    return np.array(rows, np.float32)


def _promise(
    survival: npt.NDArray[np.float32], cost: StepCostModel, requests: int, trust: float
) -> tuple[float, float]:
    """Share of tokens a second that the best budget from one draft on adds, and the seconds of its step."""
    scale = requests / survival.shape[0]
    falling = np.sort(survival.ravel())[::-1].cumsum(dtype=np.float64)
    tokens = np.empty(falling.size + 1)
    tokens[0] = requests
    tokens[1:] = requests + trust * scale * falling
    rows = requests + np.ceil(np.arange(tokens.size) * scale).astype(np.int64)
    seconds = cost.seconds(requests, rows)
    theta = tokens / seconds
    best = 1 + int(theta[1:].argmax())  # drafts that are never verified are not made
    plain = requests / cost.plain_seconds(requests)
    return float(theta[best] / plain) - 1.0, float(seconds[best])
