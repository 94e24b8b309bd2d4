"""Confidence without a head: from the gap between the two likeliest draft tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import matrix, shape_error
from deepinfer.speculative.calibration.sequential import sigmoid
from deepinfer.speculative.calibration.trials import verified_trials

__all__ = ["MarginEstimator"]

_Floats = npt.NDArray[np.float64]


class MarginEstimator:
    """`sigmoid(w_k * margin + b_k)` of each position, fitted to verified drafts.

    The margin is the gap between the highest and the second highest draft logit. Only drafts that were verified behind
    an accepted prefix count. A slope that comes out negative says that the margin knows nothing, and the position
    falls back to its mean acceptance.

    Args:
        num_drafts: Drafts of a block.
        decay: What an update leaves of the trials before it.
        min_trials: Trials below which a position predicts its mean.
        max_margin: Margins above count as this.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        num_drafts: int,
        *,
        decay: float = 0.999,
        min_trials: int = 50,
        max_margin: float = 30.0,
    ) -> None:
        self.num_drafts = checks.check_int("num_drafts", num_drafts, 1, 256, ConfigError)
        self.decay = checks.check_float("decay", decay, 0.0, 1.0, ConfigError)
        self.min_trials = checks.check_int("min_trials", min_trials, 1, 2**31, ConfigError)
        self.max_margin = checks.check_float(
            "max_margin", max_margin, 0.0, 1e6, ConfigError, open_low=True
        )
        self._bins = 120
        self._trials = np.zeros((num_drafts, self._bins))
        self._hits = np.zeros((num_drafts, self._bins))
        self._margins = np.zeros((num_drafts, self._bins))

    def update(self, margin: Any, accepted: Any, verified: Any) -> None:
        """Takes the blocks of a step.

        Args:
            margin: Gaps of the two highest draft logits, from 0, shape [blocks, drafts].
            accepted: Drafts of each block that were accepted, shape [blocks].
            verified: Drafts of each block that were verified, shape [blocks].

        Raises:
            ShapeError: Shapes do not fit.
        """
        values = self._margin(margin)
        rows, columns, hits = verified_trials(values, accepted, verified)
        clipped = values[rows, columns]
        # Finer near 0, where the answers change.
        share = np.sqrt(clipped / self.max_margin)
        bins = np.minimum((share * self._bins).astype(np.int64), self._bins - 1)
        for sums in (self._trials, self._hits, self._margins):
            sums *= self.decay
        np.add.at(self._trials, (columns, bins), 1.0)
        np.add.at(self._hits, (columns, bins), hits)
        np.add.at(self._margins, (columns, bins), clipped)

    @property
    def coefficients(self) -> _Floats:
        """Slope and offset of each position, shape [drafts, 2]."""
        found = np.zeros((self.num_drafts, 2))
        for position in range(self.num_drafts):
            trials = self._trials[position]
            total = float(trials.sum())
            mean = (float(self._hits[position].sum()) + 0.5) / (total + 1.0)
            found[position] = (0.0, np.log(mean / (1.0 - mean)))
            if total < self.min_trials:
                continue
            known = trials > 0
            x = self._margins[position][known] / trials[known]
            slope, offset = _logistic(x, trials[known], self._hits[position][known])
            if slope > 0:
                found[position] = (slope, offset)
        return found

    def predict(self, margin: Any) -> _Floats:
        """Confidences.

        Args:
            margin: Gaps, shape [blocks, drafts].

        Returns:
            Probability that each draft is accepted if all before it are, shape [blocks, drafts]; NaN gaps give 0.
        """
        values = self._margin(margin)
        coefficients = self.coefficients
        found = sigmoid(coefficients[:, 0] * np.nan_to_num(values) + coefficients[:, 1])
        return np.where(np.isnan(values), 0.0, found)

    def __repr__(self) -> str:
        return f"MarginEstimator({self.num_drafts}, {self._trials.sum():.0f} trials)"

    def _margin(self, margin: Any) -> _Floats:
        values: _Floats = matrix("margin", margin, f"[blocks, drafts={self.num_drafts}]")
        if values.shape[1] != self.num_drafts:
            raise shape_error("margin", values.shape, f"[blocks, drafts={self.num_drafts}]")
        return np.clip(values, 0.0, self.max_margin)


def _logistic(x: _Floats, trials: _Floats, hits: _Floats) -> tuple[float, float]:
    """Weighted logistic regression by Newton's method, slightly ridged so that separable data stay finite."""
    slope, offset = 0.0, 0.0
    for _ in range(50):
        p = sigmoid(slope * x + offset)
        weight = trials * p * (1.0 - p)
        residual = hits - trials * p
        gradient = np.array([(residual * x).sum() - 1e-3 * slope, residual.sum() - 1e-3 * offset])
        hessian = np.array(
            [
                [(weight * x * x).sum() + 1e-3, (weight * x).sum()],
                [(weight * x).sum(), weight.sum() + 1e-3],
            ]
        )
        change = np.linalg.solve(hessian, gradient)
        change *= min(1.0, 5.0 / max(1e-12, float(np.abs(change).max())))
        slope, offset = slope + float(change[0]), offset + float(change[1])
        if float(np.abs(change).max()) < 1e-9:
            break
    return slope, offset
