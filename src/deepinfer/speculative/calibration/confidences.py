"""A calibration between a draft's confidences and a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative.calibration.online import OnlineTemperatureScaling
from deepinfer.speculative.calibration.sequential import SequentialTemperatureScaling, sigmoid

__all__ = ["ConfidenceCalibration"]

_Floats = npt.NDArray[np.float64]
_REFIT_EVERY = 32
_EDGE = 1e-7


class ConfidenceCalibration:
    """Applies temperatures to confidences, and lets those that learn do so.

    Args:
        scaling: `SequentialTemperatureScaling` that was fitted, `OnlineTemperatureScaling`, or None for none.

    Attributes:
        scaling: As given.

    Raises:
        ConfigError: It is none of these, or was not fitted.
    """

    def __init__(self, scaling: Any = None) -> None:
        if scaling is not None and not isinstance(
            scaling, SequentialTemperatureScaling | OnlineTemperatureScaling
        ):
            checks.fail(
                "calibration", scaling, "SequentialTemperatureScaling or OnlineTemperatureScaling, or None", ConfigError
            )  # fmt: skip
        if isinstance(scaling, SequentialTemperatureScaling) and not scaling.temperatures.size:
            checks.fail("calibration", scaling, "fitted; call fit first", ConfigError)
        self.scaling = scaling
        self._temperatures: _Floats | None = None
        self._updates = 0

    @property
    def learns(self) -> bool:
        """Whether `learn` does anything."""
        return isinstance(self.scaling, OnlineTemperatureScaling)

    def __call__(self, confidences: npt.NDArray[np.float32]) -> npt.NDArray[np.floating[Any]]:
        """Calibrated confidences.

        Args:
            confidences: Shape [blocks, drafts], from 0 to 1; NaN stays NaN.

        Returns:
            Shape [blocks, drafts]. A position behind the last temperature takes the last.
        """
        if self.scaling is None:
            return confidences
        if self._temperatures is None:
            self._temperatures = np.asarray(self.scaling.temperatures, float)
        width, known = confidences.shape[1], self._temperatures
        if width > known.size:
            known = np.concatenate([known, np.full(width - known.size, known[-1])])
        # A confidence of exactly 0 stands for a draft that is not there.
        return np.where(confidences == 0, 0.0, sigmoid(_logits(confidences) / known[:width]))

    def learn(
        self,
        confidences: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Takes how blocks fared.

        Args:
            confidences: Of each block, uncalibrated; blocks may differ in length.
            verified: Drafts of each block that were verified.
            accepted: Those of them that were accepted.
        """
        scaling = self.scaling
        if not isinstance(scaling, OnlineTemperatureScaling) or not len(confidences):
            return
        values = np.full((len(confidences), scaling.num_drafts), np.nan)
        for at, row in enumerate(confidences):
            values[at, : len(row)] = row[: scaling.num_drafts]
        scaling.update(_logits(values), accepted, verified)
        self._updates += 1
        if self._updates % _REFIT_EVERY == 0 or self._updates == 8:
            self._temperatures = None

    def to_dict(self) -> dict[str, Any] | None:
        """What the scaling gives, or None without one."""
        return None if self.scaling is None else self.scaling.to_dict()


def _logits(confidences: npt.NDArray[Any]) -> _Floats:
    values = np.clip(confidences.astype(float), _EDGE, 1.0 - _EDGE)
    found: _Floats = np.log(values / (1.0 - values))
    return found
