"""What each step runs: continuous batching with chunked prefill, as data in and data out.

`Scheduler` plans steps for any runner, and `StepTimeModel` says how long one takes. They need NumPy and
no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.scheduling.admission import AdmissionPolicy as AdmissionPolicy
    from deepinfer.scheduling.admission import Demand as Demand
    from deepinfer.scheduling.admission import FreeBlocks as FreeBlocks
    from deepinfer.scheduling.admission import Supply as Supply
    from deepinfer.scheduling.chunk_planner import TimedChunks as TimedChunks
    from deepinfer.scheduling.chunking import ChunkPolicy as ChunkPolicy
    from deepinfer.scheduling.chunking import FixedChunks as FixedChunks
    from deepinfer.scheduling.chunking import shape_chunk as shape_chunk
    from deepinfer.scheduling.cost_fit import fit_step_cost as fit_step_cost
    from deepinfer.scheduling.cost_model import PrefillCostModel as PrefillCostModel
    from deepinfer.scheduling.cost_model import StepTimeModel as StepTimeModel
    from deepinfer.scheduling.cost_report import BucketError as BucketError
    from deepinfer.scheduling.cost_report import FitRejection as FitRejection
    from deepinfer.scheduling.cost_report import FitReport as FitReport
    from deepinfer.scheduling.cost_report import StepCoefficients as StepCoefficients
    from deepinfer.scheduling.ledger import Sequence as Sequence
    from deepinfer.scheduling.limits import SchedulerLimits as SchedulerLimits
    from deepinfer.scheduling.limits import waits_for_host as waits_for_host
    from deepinfer.scheduling.policies import ORDER_POLICIES as ORDER_POLICIES
    from deepinfer.scheduling.policies import VICTIM_POLICIES as VICTIM_POLICIES
    from deepinfer.scheduling.policies import OrderPolicy as OrderPolicy
    from deepinfer.scheduling.policies import VictimPolicy as VictimPolicy
    from deepinfer.scheduling.progress import Progress as Progress
    from deepinfer.scheduling.progress import ProgressList as ProgressList
    from deepinfer.scheduling.scheduler import Scheduler as Scheduler
    from deepinfer.scheduling.simulation import RequestTiming as RequestTiming
    from deepinfer.scheduling.simulation import SimulatedStep as SimulatedStep
    from deepinfer.scheduling.simulation import Simulation as Simulation
    from deepinfer.scheduling.simulator import Simulator as Simulator
    from deepinfer.scheduling.step_work import Chunk as Chunk
    from deepinfer.scheduling.step_work import StepSample as StepSample
    from deepinfer.scheduling.step_work import StepWork as StepWork

_EXPORTS = {
    "ORDER_POLICIES": "deepinfer.scheduling.policies",
    "VICTIM_POLICIES": "deepinfer.scheduling.policies",
    "AdmissionPolicy": "deepinfer.scheduling.admission",
    "BucketError": "deepinfer.scheduling.cost_report",
    "Chunk": "deepinfer.scheduling.step_work",
    "ChunkPolicy": "deepinfer.scheduling.chunking",
    "Demand": "deepinfer.scheduling.admission",
    "FitRejection": "deepinfer.scheduling.cost_report",
    "FitReport": "deepinfer.scheduling.cost_report",
    "FixedChunks": "deepinfer.scheduling.chunking",
    "FreeBlocks": "deepinfer.scheduling.admission",
    "OrderPolicy": "deepinfer.scheduling.policies",
    "PrefillCostModel": "deepinfer.scheduling.cost_model",
    "Progress": "deepinfer.scheduling.progress",
    "ProgressList": "deepinfer.scheduling.progress",
    "RequestTiming": "deepinfer.scheduling.simulation",
    "Scheduler": "deepinfer.scheduling.scheduler",
    "SchedulerLimits": "deepinfer.scheduling.limits",
    "Sequence": "deepinfer.scheduling.ledger",
    "SimulatedStep": "deepinfer.scheduling.simulation",
    "Simulation": "deepinfer.scheduling.simulation",
    "Simulator": "deepinfer.scheduling.simulator",
    "StepCoefficients": "deepinfer.scheduling.cost_report",
    "StepTimeModel": "deepinfer.scheduling.cost_model",
    "StepSample": "deepinfer.scheduling.step_work",
    "StepWork": "deepinfer.scheduling.step_work",
    "Supply": "deepinfer.scheduling.admission",
    "TimedChunks": "deepinfer.scheduling.chunk_planner",
    "VictimPolicy": "deepinfer.scheduling.policies",
    "fit_step_cost": "deepinfer.scheduling.cost_fit",
    "shape_chunk": "deepinfer.scheduling.chunking",
    "waits_for_host": "deepinfer.scheduling.limits",
}

__all__ = [
    "ORDER_POLICIES",
    "VICTIM_POLICIES",
    "AdmissionPolicy",
    "BucketError",
    "Chunk",
    "ChunkPolicy",
    "Demand",
    "FitRejection",
    "FitReport",
    "FixedChunks",
    "FreeBlocks",
    "OrderPolicy",
    "PrefillCostModel",
    "Progress",
    "ProgressList",
    "RequestTiming",
    "Scheduler",
    "SchedulerLimits",
    "Sequence",
    "SimulatedStep",
    "Simulation",
    "Simulator",
    "StepCoefficients",
    "StepTimeModel",
    "StepSample",
    "StepWork",
    "Supply",
    "TimedChunks",
    "VictimPolicy",
    "fit_step_cost",
    "shape_chunk",
    "waits_for_host",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
