"""A calibration between a draft's confidences and a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative.calibration.estimator import AcceptanceEstimator
from deepinfer.speculative.calibration.isotonic import SequentialIsotonicScaling
from deepinfer.speculative.calibration.online import OnlineTemperatureScaling
from deepinfer.speculative.calibration.sequential import SequentialTemperatureScaling, sigmoid

__all__ = ["ConfidenceCalibration", "padded"]

_Floats = npt.NDArray[np.float64]
_REFIT_EVERY = 64
_MOST_UPDATES = 512  # for which a calibration may count as new
_EDGE = 1e-7


class ConfidenceCalibration:
    """Makes probabilities of confidences, and lets what learns do so.

    Args:
        scaling: `SequentialTemperatureScaling` or `SequentialIsotonicScaling` that was fitted; `OnlineTemperatureScaling` or `AcceptanceEstimator`, which
            learn; or None to take confidences as they are.

    Attributes:
        scaling: As given.

    Raises:
        ConfigError: It is none of these, or was not fitted.
    """

    def __init__(self, scaling: Any = None) -> None:
        fitted = SequentialTemperatureScaling | SequentialIsotonicScaling
        if scaling is not None and not isinstance(scaling, fitted | OnlineTemperatureScaling | AcceptanceEstimator):  # fmt: skip
            limit = (
                "SequentialTemperatureScaling, SequentialIsotonicScaling, OnlineTemperatureScaling, AcceptanceEstimator "
                "or None"
            )
            checks.fail("calibration", scaling, limit, ConfigError)
        if isinstance(scaling, fitted) and not scaling.temperatures.size:
            checks.fail("calibration", scaling, "fitted; call fit first", ConfigError)
        self.scaling = scaling
        self._is_new = isinstance(scaling, AcceptanceEstimator)
        self._temperatures: _Floats | None = None
        self._updates = 0
        self._next_fit = 8

    @property
    def learns(self) -> bool:
        """Whether `learn` does anything."""
        return isinstance(self.scaling, OnlineTemperatureScaling | AcceptanceEstimator)

    @property
    def is_new(self) -> bool:
        """Whether it learns, and knows too little to be acted upon."""
        if self._is_new and (self.scaling.is_fitted or self._updates >= _MOST_UPDATES):
            self._is_new = False  # for good
        return self._is_new

    def __call__(
        self, confidences: npt.NDArray[np.float32], margins: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.floating[Any]]:
        """Calibrated confidences.

        Args:
            confidences: Shape [blocks, drafts], from 0 to 1; NaN stays NaN, and exactly 0 stands for a draft that is not
                there.
            margins: Shape [blocks, drafts], or None.

        Returns:
            Shape [blocks, drafts]. A position behind the last temperature takes the last.
        """
        scaling = self.scaling
        if scaling is None:
            return confidences
        logits = _logits(confidences)
        if isinstance(scaling, AcceptanceEstimator):
            width = scaling.num_drafts
            m = None if margins is None else _fitted(margins, width)
            found = scaling.predict(_fitted(logits, width), m)[:, : logits.shape[1]]
            if logits.shape[1] > width:
                found = np.concatenate([found, sigmoid(logits[:, width:])], 1)
        elif isinstance(scaling, SequentialIsotonicScaling):
            width = scaling.temperatures.size
            found = scaling.transform(_fitted(logits, width))[:, : logits.shape[1]]
            if logits.shape[1] > width:
                rest = sigmoid(logits[:, width:] / scaling.temperatures[-1])
                found = np.concatenate([found, rest], 1)
        else:
            if self._temperatures is None:
                self._temperatures = np.asarray(scaling.temperatures, float)
            width, known = confidences.shape[1], self._temperatures
            if width > known.size:
                known = np.concatenate([known, np.full(width - known.size, known[-1])])
            found = sigmoid(logits / known[:width])
        found *= confidences != 0
        return found

    def learn(
        self,
        confidences: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
        margins: Sequence[Sequence[float]] = (),
    ) -> None:
        """Takes how blocks fared.

        Args:
            confidences: Of each block, uncalibrated; blocks may differ in length.
            verified: Drafts of each block that were verified.
            accepted: Those of them that were accepted.
            margins: Of each block; or empty.
        """
        scaling = self.scaling
        if not self.learns or not len(confidences):
            return
        logits = _logits(padded(confidences, scaling.num_drafts))
        self._updates += 1
        is_due = self._updates >= self._next_fit or (
            self.is_new and scaling.num_trials + logits.size >= scaling.min_trials
        )
        if isinstance(scaling, AcceptanceEstimator):
            m = padded(margins, scaling.num_drafts) if len(margins) else None
            scaling.update(logits, m, accepted, verified)
            if is_due:
                scaling.refit()
        else:
            scaling.update(logits, accepted, verified)
            if is_due:
                self._temperatures = None
        if is_due:  # often at first, when each fit changes much
            self._next_fit = min(2 * self._updates, self._updates + _REFIT_EVERY)

    def to_dict(self) -> dict[str, Any] | None:
        """What the scaling gives, or None without one."""
        return None if self.scaling is None else self.scaling.to_dict()


def padded(rows: Sequence[Sequence[float]], width: int) -> _Floats:
    """Rows of several lengths side by side.

    Args:
        rows: The rows; what lies behind `width` is left out.
        width: Columns.

    Returns:
        Shape [rows, width]; NaN where a row ended.
    """
    if isinstance(rows, np.ndarray):
        return _fitted(rows.astype(float), width)
    values = np.full((len(rows), width), np.nan)
    for at, row in enumerate(rows):
        known = row[:width]
        values[at, : len(known)] = known
    return values


def _fitted(values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    if values.shape[1] == width:
        return values
    found = np.full((len(values), width), np.nan)
    found[:, : values.shape[1]] = values[:, :width]
    return found


def _logits(confidences: npt.NDArray[Any]) -> _Floats:
    values = confidences.astype(float).clip(_EDGE, 1.0 - _EDGE)
    found: _Floats = np.log(values / (1.0 - values))
    return found
