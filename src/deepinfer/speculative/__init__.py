"""Speculative decoding: drafts, how likely they survive, how many are worth verifying, and the verdict.

The planning half (survival, costs, schedules, calibration) needs NumPy only; heads and verifiers load torch on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.speculative.calibration.margin import MarginEstimator as MarginEstimator
    from deepinfer.speculative.calibration.online import (
        OnlineTemperatureScaling as OnlineTemperatureScaling,
    )
    from deepinfer.speculative.calibration.report import calibration_report as calibration_report
    from deepinfer.speculative.calibration.sequential import (
        SequentialTemperatureScaling as SequentialTemperatureScaling,
    )
    from deepinfer.speculative.cost import StepCostModel as StepCostModel
    from deepinfer.speculative.lagged import LaggedConfidence as LaggedConfidence
    from deepinfer.speculative.scheduler import BudgetDecision as BudgetDecision
    from deepinfer.speculative.scheduler import VerificationScheduler as VerificationScheduler
    from deepinfer.speculative.scheduler import VerifyPlan as VerifyPlan
    from deepinfer.speculative.survival import SlotOrder as SlotOrder
    from deepinfer.speculative.survival import prefix_survival as prefix_survival
    from deepinfer.speculative.survival import slot_order as slot_order

_EXPORTS = {
    "BudgetDecision": "deepinfer.speculative.scheduler",
    "LaggedConfidence": "deepinfer.speculative.lagged",
    "MarginEstimator": "deepinfer.speculative.calibration.margin",
    "OnlineTemperatureScaling": "deepinfer.speculative.calibration.online",
    "SequentialTemperatureScaling": "deepinfer.speculative.calibration.sequential",
    "SlotOrder": "deepinfer.speculative.survival",
    "StepCostModel": "deepinfer.speculative.cost",
    "VerificationScheduler": "deepinfer.speculative.scheduler",
    "VerifyPlan": "deepinfer.speculative.scheduler",
    "calibration_report": "deepinfer.speculative.calibration.report",
    "prefix_survival": "deepinfer.speculative.survival",
    "slot_order": "deepinfer.speculative.survival",
}

__all__ = [
    "BudgetDecision",
    "LaggedConfidence",
    "MarginEstimator",
    "OnlineTemperatureScaling",
    "SequentialTemperatureScaling",
    "SlotOrder",
    "StepCostModel",
    "VerificationScheduler",
    "VerifyPlan",
    "calibration_report",
    "prefix_survival",
    "slot_order",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
