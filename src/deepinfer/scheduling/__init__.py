"""What each step runs: continuous batching with chunked prefill, as data in and data out.

`Scheduler` plans steps for any runner, and `StepCostModel` says how long one takes. They need the standard library
alone; fitting a cost model needs NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.scheduling.chunk_planner import TimedChunks as TimedChunks
    from deepinfer.scheduling.chunking import ChunkPolicy as ChunkPolicy
    from deepinfer.scheduling.chunking import FixedChunks as FixedChunks
    from deepinfer.scheduling.chunking import shape_chunk as shape_chunk
    from deepinfer.scheduling.cost_fit import fit_step_cost as fit_step_cost
    from deepinfer.scheduling.cost_model import PrefillCostModel as PrefillCostModel
    from deepinfer.scheduling.cost_model import StepCostModel as StepCostModel
    from deepinfer.scheduling.cost_report import BucketError as BucketError
    from deepinfer.scheduling.cost_report import FitRejection as FitRejection
    from deepinfer.scheduling.cost_report import FitReport as FitReport
    from deepinfer.scheduling.cost_report import StepCoefficients as StepCoefficients
    from deepinfer.scheduling.ledger import Flight as Flight
    from deepinfer.scheduling.ledger import Progress as Progress
    from deepinfer.scheduling.ledger import Sequence as Sequence
    from deepinfer.scheduling.limits import SchedulerLimits as SchedulerLimits
    from deepinfer.scheduling.limits import allows_drafts as allows_drafts
    from deepinfer.scheduling.plannable_cache import PlannableCache as PlannableCache
    from deepinfer.scheduling.policies import ORDER_POLICIES as ORDER_POLICIES
    from deepinfer.scheduling.policies import OrderPolicy as OrderPolicy
    from deepinfer.scheduling.scheduler import Scheduler as Scheduler
    from deepinfer.scheduling.simulation import RequestTiming as RequestTiming
    from deepinfer.scheduling.simulation import SimulatedStep as SimulatedStep
    from deepinfer.scheduling.simulation import Simulation as Simulation
    from deepinfer.scheduling.simulator import Simulator as Simulator
    from deepinfer.scheduling.step_work import Chunk as Chunk
    from deepinfer.scheduling.step_work import StepSample as StepSample
    from deepinfer.scheduling.step_work import StepWork as StepWork

_EXPORTS = {
    "Simulator": "deepinfer.scheduling.simulator",
    "Simulation": "deepinfer.scheduling.simulation",
    "SimulatedStep": "deepinfer.scheduling.simulation",
    "RequestTiming": "deepinfer.scheduling.simulation",
    "shape_chunk": "deepinfer.scheduling.chunking",
    "FixedChunks": "deepinfer.scheduling.chunking",
    "ChunkPolicy": "deepinfer.scheduling.chunking",
    "TimedChunks": "deepinfer.scheduling.chunk_planner",
    "Chunk": "deepinfer.scheduling.step_work",
    "StepSample": "deepinfer.scheduling.step_work",
    "StepWork": "deepinfer.scheduling.step_work",
    "BucketError": "deepinfer.scheduling.cost_report",
    "FitRejection": "deepinfer.scheduling.cost_report",
    "FitReport": "deepinfer.scheduling.cost_report",
    "StepCoefficients": "deepinfer.scheduling.cost_report",
    "PrefillCostModel": "deepinfer.scheduling.cost_model",
    "StepCostModel": "deepinfer.scheduling.cost_model",
    "fit_step_cost": "deepinfer.scheduling.cost_fit",
    "Flight": "deepinfer.scheduling.ledger",
    "ORDER_POLICIES": "deepinfer.scheduling.policies",
    "OrderPolicy": "deepinfer.scheduling.policies",
    "PlannableCache": "deepinfer.scheduling.plannable_cache",
    "Progress": "deepinfer.scheduling.ledger",
    "Scheduler": "deepinfer.scheduling.scheduler",
    "SchedulerLimits": "deepinfer.scheduling.limits",
    "Sequence": "deepinfer.scheduling.ledger",
    "allows_drafts": "deepinfer.scheduling.limits",
}

__all__ = [
    "Simulator",
    "Simulation",
    "SimulatedStep",
    "RequestTiming",
    "shape_chunk",
    "FixedChunks",
    "ChunkPolicy",
    "TimedChunks",
    "Chunk",
    "StepSample",
    "StepWork",
    "BucketError",
    "FitRejection",
    "FitReport",
    "StepCoefficients",
    "PrefillCostModel",
    "StepCostModel",
    "fit_step_cost",
    "ORDER_POLICIES",
    "Flight",
    "OrderPolicy",
    "PlannableCache",
    "Progress",
    "Scheduler",
    "SchedulerLimits",
    "Sequence",
    "allows_drafts",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
