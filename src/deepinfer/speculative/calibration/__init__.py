"""Confidences that mean what they say: temperatures, margins, and reports of how far off they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.speculative.calibration.estimator import (
        AcceptanceEstimator as AcceptanceEstimator,
    )
    from deepinfer.speculative.calibration.isotonic import (
        SequentialIsotonicScaling as SequentialIsotonicScaling,
    )
    from deepinfer.speculative.calibration.margin import MarginEstimator as MarginEstimator
    from deepinfer.speculative.calibration.online import (
        OnlineTemperatureScaling as OnlineTemperatureScaling,
    )
    from deepinfer.speculative.calibration.report import PositionReport as PositionReport
    from deepinfer.speculative.calibration.report import ReliabilityBin as ReliabilityBin
    from deepinfer.speculative.calibration.report import auroc as auroc
    from deepinfer.speculative.calibration.report import calibration_report as calibration_report
    from deepinfer.speculative.calibration.report import expected_error as expected_error
    from deepinfer.speculative.calibration.sequential import (
        SequentialTemperatureScaling as SequentialTemperatureScaling,
    )

_EXPORTS = {
    "AcceptanceEstimator": "deepinfer.speculative.calibration.estimator",
    "MarginEstimator": "deepinfer.speculative.calibration.margin",
    "OnlineTemperatureScaling": "deepinfer.speculative.calibration.online",
    "PositionReport": "deepinfer.speculative.calibration.report",
    "ReliabilityBin": "deepinfer.speculative.calibration.report",
    "SequentialIsotonicScaling": "deepinfer.speculative.calibration.isotonic",
    "SequentialTemperatureScaling": "deepinfer.speculative.calibration.sequential",
    "auroc": "deepinfer.speculative.calibration.report",
    "calibration_report": "deepinfer.speculative.calibration.report",
    "expected_error": "deepinfer.speculative.calibration.report",
}

__all__ = [
    "AcceptanceEstimator",
    "MarginEstimator",
    "OnlineTemperatureScaling",
    "PositionReport",
    "ReliabilityBin",
    "SequentialIsotonicScaling",
    "SequentialTemperatureScaling",
    "auroc",
    "calibration_report",
    "expected_error",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
