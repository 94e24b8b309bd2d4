"""Speculative decoding: drafts, how likely they survive, how many are worth verifying, and the verdict.

The planning half (survival, costs, schedules, calibration) needs NumPy only; heads and verifiers load torch on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.speculative.block_drafter import BlockDrafter as BlockDrafter
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
    from deepinfer.speculative.calibration.report import calibration_report as calibration_report
    from deepinfer.speculative.calibration.sequential import (
        SequentialTemperatureScaling as SequentialTemperatureScaling,
    )
    from deepinfer.speculative.cost import StepCostModel as StepCostModel
    from deepinfer.speculative.draft_config import DraftConfig as DraftConfig
    from deepinfer.speculative.draft_module import DraftModule as DraftModule
    from deepinfer.speculative.draft_module import TargetEnds as TargetEnds
    from deepinfer.speculative.draft_switch import DraftSwitch as DraftSwitch
    from deepinfer.speculative.draft_training import DraftBlocks as DraftBlocks
    from deepinfer.speculative.draft_training import draft_training_loss as draft_training_loss
    from deepinfer.speculative.draft_training import draw_blocks as draw_blocks
    from deepinfer.speculative.generate import CausalTarget as CausalTarget
    from deepinfer.speculative.generate import GenerationStats as GenerationStats
    from deepinfer.speculative.generate import SpeculativeGeneration as SpeculativeGeneration
    from deepinfer.speculative.generate import TargetOutput as TargetOutput
    from deepinfer.speculative.generate import speculative_generate as speculative_generate
    from deepinfer.speculative.heads import ConfidenceHead as ConfidenceHead
    from deepinfer.speculative.heads import GatedMarkovHead as GatedMarkovHead
    from deepinfer.speculative.heads import MarkovHead as MarkovHead
    from deepinfer.speculative.heads import RnnHead as RnnHead
    from deepinfer.speculative.heads import SequentialHead as SequentialHead
    from deepinfer.speculative.heads import make_sequential_head as make_sequential_head
    from deepinfer.speculative.lagged import LaggedConfidence as LaggedConfidence
    from deepinfer.speculative.laws import block_acceptance as block_acceptance
    from deepinfer.speculative.laws import residual_law as residual_law
    from deepinfer.speculative.laws import standard_acceptance as standard_acceptance
    from deepinfer.speculative.live_policy import LiveLengths as LiveLengths
    from deepinfer.speculative.loss import LossTerms as LossTerms
    from deepinfer.speculative.loss import dspark_loss as dspark_loss
    from deepinfer.speculative.model_drafter import ModelDrafter as ModelDrafter
    from deepinfer.speculative.ngram import NgramDrafter as NgramDrafter
    from deepinfer.speculative.noise import CounterNoise as CounterNoise
    from deepinfer.speculative.noise import DrawStream as DrawStream
    from deepinfer.speculative.noise import NoiseSource as NoiseSource
    from deepinfer.speculative.policy import ScheduledLengths as ScheduledLengths
    from deepinfer.speculative.recorder import BlockRecorder as BlockRecorder
    from deepinfer.speculative.rejection import RejectionSampler as RejectionSampler
    from deepinfer.speculative.rejection import VerifyResult as VerifyResult
    from deepinfer.speculative.scheduler import BudgetDecision as BudgetDecision
    from deepinfer.speculative.scheduler import VerificationScheduler as VerificationScheduler
    from deepinfer.speculative.scheduler import VerifyPlan as VerifyPlan
    from deepinfer.speculative.survival import SlotOrder as SlotOrder
    from deepinfer.speculative.survival import prefix_survival as prefix_survival
    from deepinfer.speculative.survival import slot_order as slot_order

_EXPORTS = {
    "AcceptanceEstimator": "deepinfer.speculative.calibration.estimator",
    "BlockRecorder": "deepinfer.speculative.recorder",
    "BlockDrafter": "deepinfer.speculative.block_drafter",
    "BudgetDecision": "deepinfer.speculative.scheduler",
    "CausalTarget": "deepinfer.speculative.generate",
    "ConfidenceHead": "deepinfer.speculative.heads",
    "CounterNoise": "deepinfer.speculative.noise",
    "DraftBlocks": "deepinfer.speculative.draft_training",
    "DraftConfig": "deepinfer.speculative.draft_config",
    "DraftModule": "deepinfer.speculative.draft_module",
    "DraftSwitch": "deepinfer.speculative.draft_switch",
    "DrawStream": "deepinfer.speculative.noise",
    "GatedMarkovHead": "deepinfer.speculative.heads",
    "GenerationStats": "deepinfer.speculative.generate",
    "LaggedConfidence": "deepinfer.speculative.lagged",
    "LiveLengths": "deepinfer.speculative.live_policy",
    "LossTerms": "deepinfer.speculative.loss",
    "MarginEstimator": "deepinfer.speculative.calibration.margin",
    "MarkovHead": "deepinfer.speculative.heads",
    "ModelDrafter": "deepinfer.speculative.model_drafter",
    "NgramDrafter": "deepinfer.speculative.ngram",
    "NoiseSource": "deepinfer.speculative.noise",
    "OnlineTemperatureScaling": "deepinfer.speculative.calibration.online",
    "RejectionSampler": "deepinfer.speculative.rejection",
    "RnnHead": "deepinfer.speculative.heads",
    "ScheduledLengths": "deepinfer.speculative.policy",
    "SequentialHead": "deepinfer.speculative.heads",
    "SequentialIsotonicScaling": "deepinfer.speculative.calibration.isotonic",
    "SequentialTemperatureScaling": "deepinfer.speculative.calibration.sequential",
    "SlotOrder": "deepinfer.speculative.survival",
    "SpeculativeGeneration": "deepinfer.speculative.generate",
    "StepCostModel": "deepinfer.speculative.cost",
    "TargetEnds": "deepinfer.speculative.draft_module",
    "TargetOutput": "deepinfer.speculative.generate",
    "VerificationScheduler": "deepinfer.speculative.scheduler",
    "VerifyPlan": "deepinfer.speculative.scheduler",
    "VerifyResult": "deepinfer.speculative.rejection",
    "block_acceptance": "deepinfer.speculative.laws",
    "calibration_report": "deepinfer.speculative.calibration.report",
    "draft_training_loss": "deepinfer.speculative.draft_training",
    "draw_blocks": "deepinfer.speculative.draft_training",
    "dspark_loss": "deepinfer.speculative.loss",
    "make_sequential_head": "deepinfer.speculative.heads",
    "prefix_survival": "deepinfer.speculative.survival",
    "residual_law": "deepinfer.speculative.laws",
    "slot_order": "deepinfer.speculative.survival",
    "speculative_generate": "deepinfer.speculative.generate",
    "standard_acceptance": "deepinfer.speculative.laws",
}

__all__ = [
    "AcceptanceEstimator",
    "BlockDrafter",
    "BlockRecorder",
    "BudgetDecision",
    "CausalTarget",
    "ConfidenceHead",
    "CounterNoise",
    "DraftBlocks",
    "DraftConfig",
    "DraftModule",
    "DraftSwitch",
    "DrawStream",
    "GatedMarkovHead",
    "GenerationStats",
    "LaggedConfidence",
    "LiveLengths",
    "LossTerms",
    "MarginEstimator",
    "MarkovHead",
    "ModelDrafter",
    "NgramDrafter",
    "NoiseSource",
    "OnlineTemperatureScaling",
    "RejectionSampler",
    "RnnHead",
    "ScheduledLengths",
    "SequentialHead",
    "SequentialIsotonicScaling",
    "SequentialTemperatureScaling",
    "SlotOrder",
    "SpeculativeGeneration",
    "StepCostModel",
    "TargetEnds",
    "TargetOutput",
    "VerificationScheduler",
    "VerifyPlan",
    "VerifyResult",
    "block_acceptance",
    "calibration_report",
    "draft_training_loss",
    "draw_blocks",
    "dspark_loss",
    "make_sequential_head",
    "prefix_survival",
    "residual_law",
    "slot_order",
    "speculative_generate",
    "standard_acceptance",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
