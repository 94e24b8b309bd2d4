"""How likely a draft is accepted, from its confidence and its margin together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import matrix, shape_error
from deepinfer.speculative._saved import read_json, write_json
from deepinfer.speculative.calibration.sequential import sigmoid
from deepinfer.speculative.calibration.trials import verified_trials

__all__ = ["AcceptanceEstimator"]

_FORMAT = "deepinfer-acceptance-1"
_FEATURES = 5
_MOST_LOGIT, _MOST_MARGIN = 12.0, 30.0
_Floats = npt.NDArray[np.float64]
_HELD_TO_START, _HELD_TO_COMMON = 1.0, 8.0  # how much a deviation of 1 costs, in log likelihood
_START = np.array([1.0, 0.0, 0.0, 0.0, 0.0])  # the confidence as it is


class AcceptanceEstimator:
    """One logistic regression a position, over the confidence logit z and the margin m: `z, m, sqrt(m), log(1 + m), 1`.

    A confidence head sees the token before a draft and not the draft; the margin, the gap between the two highest logits
    that the draft was chosen by, says how contested it was. They know different things. Where margins are missing the
    confidence is scaled and moved alone.

    Only drafts that were verified behind an accepted prefix count; of the latest of them, `capacity` a position are kept.
    All positions together are fitted first, and each of them is held near that: deep positions are rarely reached.

    Args:
        num_drafts: Drafts of a block.
        capacity: Trials of a position that are remembered.
        min_trials: Trials of all positions below which nothing is fitted.

    Attributes:
        coefficients: Of each position, shape [drafts, 5]; at first they leave confidences as they are.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, num_drafts: int, *, capacity: int = 1024, min_trials: int = 256) -> None:
        self.num_drafts = checks.check_int("num_drafts", num_drafts, 1, 256, ConfigError)
        self.capacity = checks.check_int("capacity", capacity, 1, 2**24, ConfigError)
        self.min_trials = checks.check_int("min_trials", min_trials, 1, 2**31, ConfigError)
        self.coefficients: _Floats = np.tile(_START, (num_drafts, 1))
        self._common = _START
        self._trials = np.zeros((num_drafts, capacity, 3))  # logit, margin, outcome
        self._counts = np.zeros(num_drafts, np.int64)

    def update(self, logits: Any, margins: Any, accepted: Any, verified: Any) -> None:
        """Remembers the blocks of a step; `refit` draws the conclusions.

        Args:
            logits: Confidence logits, shape [blocks, drafts].
            margins: Margins, shape [blocks, drafts], or None.
            accepted: Drafts of each block that were accepted, shape [blocks].
            verified: Drafts of each block that were verified, shape [blocks].

        Raises:
            ShapeError: Shapes do not fit.
        """
        z, m = self._inputs(logits, margins)
        rows, columns, hits = verified_trials(z, accepted, verified)
        for position in range(self.num_drafts):
            mine = columns == position
            count = min(int(np.count_nonzero(mine)), self.capacity)
            if not count:
                continue
            at = (self._counts[position] + np.arange(count)) % self.capacity
            new = np.stack([z[rows[mine], position], m[rows[mine], position], hits[mine]], 1)
            self._trials[position, at] = new[-count:]
            self._counts[position] += count

    @property
    def is_fitted(self) -> bool:
        """Whether it is more than confidences as they are."""
        return bool((self.coefficients != _START).any())

    @property
    def num_trials(self) -> int:
        """Trials that are remembered."""
        return int(np.minimum(self._counts, self.capacity).sum())

    def refit(self) -> AcceptanceEstimator:
        """Fits what is remembered, if it is enough.

        Returns:
            Itself.
        """
        counts = np.minimum(self._counts, self.capacity).tolist()
        return self._fit([self._trials[k, :count].T for k, count in enumerate(counts)])

    def fit(self, logits: Any, margins: Any, accepted: Any, verified: Any = None) -> AcceptanceEstimator:  # fmt: skip
        """Fits recorded blocks, all of them at once, if they hold `min_trials` trials; else nothing changes (`is_fitted`).

        Args:
            logits: Confidence logits, shape [blocks, drafts].
            margins: Margins, shape [blocks, drafts], or None.
            accepted: Drafts of each block that were accepted, shape [blocks].
            verified: Drafts of each block that were verified, shape [blocks]; None says all.

        Returns:
            Itself.

        Raises:
            ShapeError: Shapes do not fit.
        """
        z, m = self._inputs(logits, margins)
        seen = np.full(len(z), self.num_drafts) if verified is None else verified
        rows, columns, hits = verified_trials(z, accepted, seen)
        places = [np.flatnonzero(columns == position) for position in range(self.num_drafts)]
        return self._fit(
            [
                np.stack([z[rows[mine], position], m[rows[mine], position], hits[mine]])
                for position, mine in enumerate(places)
            ]
        )

    def predict(self, logits: Any, margins: Any = None) -> _Floats:
        """Calibrated confidences.

        Args:
            logits: Confidence logits, shape [blocks, drafts].
            margins: Margins, shape [blocks, drafts], or None.

        Returns:
            Probability that each draft is accepted if all before it are, shape [blocks, drafts]; NaN logits give NaN.
        """
        z, m = self._inputs(logits, margins)
        w = self.coefficients.T
        return sigmoid(w[0] * z + w[1] * m + w[2] * np.sqrt(m) + w[3] * np.log1p(m) + w[4])

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` takes: the fit, not the trials behind it."""
        return {"format": _FORMAT, "coefficients": self.coefficients.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, capacity: int = 1024) -> AcceptanceEstimator:
        """Takes a fit from plain values; what it learns from then on moves away from it.

        Args:
            values: What `to_dict` gave.
            capacity: As in the constructor.

        Returns:
            The estimator.

        Raises:
            ConfigError: The values are no such fit.
        """
        checks.check_mapping("an acceptance estimator", values, ConfigError)
        if values.get("format") != _FORMAT:
            checks.fail("format", values.get("format"), repr(_FORMAT), ConfigError)
        try:
            found = np.array(values.get("coefficients"), float)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.ndim != 2 or found.shape[1] != _FEATURES or not np.isfinite(found).all():
            limit = f"finite numbers, {_FEATURES} a position"
            checks.fail("coefficients", values.get("coefficients"), limit, ConfigError)
        made = cls(len(found), capacity=capacity)
        made.coefficients = found
        return made

    def save(self, path: str | Path) -> None:
        """Writes the fit to a JSON file.

        Args:
            path: The file; it is replaced.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> AcceptanceEstimator:
        """Reads a fit from a JSON file.

        Args:
            path: The file.

        Returns:
            The estimator.

        Raises:
            ConfigError: The file holds no such fit.
        """
        return cls.from_dict(read_json(path, "acceptance estimator"))

    def __repr__(self) -> str:
        state = "fitted" if self.is_fitted else "not fitted"
        return f"AcceptanceEstimator({self.num_drafts}, {state}, {self.num_trials} trials)"

    def _fit(self, trials: Sequence[_Floats]) -> AcceptanceEstimator:
        """Fits trials of each position, shape [3, trials] each: logit, margin, outcome."""
        z, m, hits = np.concatenate(trials, 1)
        if hits.size < self.min_trials:
            return self
        self._common = _logistic(_features(z, m), hits, _START, _HELD_TO_START, self._common)
        for position, (z, m, hits) in enumerate(trials):
            x, before = _features(z, m), self.coefficients[position]
            found = _logistic(x, hits, self._common, _HELD_TO_COMMON, before)
            self.coefficients[position] = found
        return self

    def _inputs(self, logits: Any, margins: Any) -> tuple[_Floats, _Floats]:
        shape = f"[blocks, drafts={self.num_drafts}]"
        z: _Floats = matrix("logits", logits, shape)
        if z.shape[1] != self.num_drafts:
            raise shape_error("logits", z.shape, shape)
        m: _Floats = np.zeros_like(z) if margins is None else matrix("margins", margins, shape)
        if m.shape != z.shape:
            raise shape_error("margins", m.shape, f"{list(z.shape)}")
        return z.clip(-_MOST_LOGIT, _MOST_LOGIT), np.fmin(np.fmax(m, 0.0), _MOST_MARGIN)


def _features(z: _Floats, m: _Floats) -> _Floats:
    return np.stack([z, m, np.sqrt(m), np.log1p(m), np.ones_like(z)], -1)


def _logistic(x: _Floats, hits: _Floats, center: _Floats, weight: float, start: _Floats) -> _Floats:
    """Logistic regression by Newton's method from `start`, held near `center`."""
    if not hits.size:
        return center.copy()

    def loss(w: _Floats) -> float:
        scores = x @ w
        penalty = 0.5 * weight * float(((w - center) ** 2).sum())
        return float((np.logaddexp(0.0, scores) - hits * scores).sum()) + penalty

    found, best = min(((w, loss(w)) for w in (start, center)), key=lambda pair: pair[1])
    for _ in range(30):
        p = sigmoid(x @ found)
        gradient = x.T @ (hits - p) - weight * (found - center)
        hessian = (x * (p * (1.0 - p))[:, None]).T @ x + weight * np.eye(x.shape[1])
        change = np.linalg.solve(hessian, gradient)
        for _ in range(12):  # a whole step may overshoot where predictions are sure
            new = loss(found + change)
            if new <= best:
                break
            change = 0.5 * change
        else:
            break
        found, gained, best = found + change, best - new, new
        if gained < 1e-5:
            break
    return found.copy()
