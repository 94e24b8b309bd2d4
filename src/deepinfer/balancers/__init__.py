"""Who runs what: balancers of prompts, decoding requests, images and experts.

Every balancer is a pure function of snapshots that it is given: no threads, no clock of its own, nothing hidden. Decisions
carry a reason and a prediction, so they can be logged, replayed and compared with what happened. Needs NumPy only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.balancers.base import Router as Router
    from deepinfer.balancers.base import RouteRequest as RouteRequest
    from deepinfer.balancers.base import WorkerSnapshot as WorkerSnapshot
    from deepinfer.balancers.base import WorkerState as WorkerState
    from deepinfer.balancers.decision import Decision as Decision
    from deepinfer.balancers.decode import DecodeBalancer as DecodeBalancer
    from deepinfer.balancers.decode_cost import DecodeCost as DecodeCost
    from deepinfer.balancers.decode_outputs import OutputLengths as OutputLengths
    from deepinfer.balancers.decode_trial import DecodeTrial as DecodeTrial
    from deepinfer.balancers.decode_trial import TrialReport as TrialReport
    from deepinfer.balancers.decode_trial import run_decode_trial as run_decode_trial
    from deepinfer.balancers.encoder import EncoderBalancer as EncoderBalancer
    from deepinfer.balancers.encoder_fleet import EncoderCost as EncoderCost
    from deepinfer.balancers.encoder_fleet import EncoderFleet as EncoderFleet
    from deepinfer.balancers.encoder_fleet import ImageTask as ImageTask
    from deepinfer.balancers.expert_parallel.planner import ExpertPlanner as ExpertPlanner
    from deepinfer.balancers.expert_parallel.rebalance import rebalance_experts as rebalance_experts
    from deepinfer.balancers.expert_parallel.splitter import TokenSplitter as TokenSplitter
    from deepinfer.balancers.fleet import Fleet as Fleet
    from deepinfer.balancers.prefill.cost import PrefillCost as PrefillCost
    from deepinfer.balancers.prefill.earliest import EarliestCompletion as EarliestCompletion
    from deepinfer.balancers.prefill.prefix_index import CacheSnapshot as CacheSnapshot
    from deepinfer.balancers.prefill.prefix_index import CacheUpdate as CacheUpdate
    from deepinfer.balancers.prefill.prefix_index import PrefixIndex as PrefixIndex
    from deepinfer.balancers.prefill.tiers import TierRouter as TierRouter
    from deepinfer.balancers.replicas import ReplicaBalancer as ReplicaBalancer
    from deepinfer.balancers.simulator.simulator import FleetSimulator as FleetSimulator

_EXPORTS = {
    "CacheSnapshot": "deepinfer.balancers.prefill.prefix_index",
    "CacheUpdate": "deepinfer.balancers.prefill.prefix_index",
    "Decision": "deepinfer.balancers.decision",
    "DecodeBalancer": "deepinfer.balancers.decode",
    "DecodeCost": "deepinfer.balancers.decode_cost",
    "DecodeTrial": "deepinfer.balancers.decode_trial",
    "EarliestCompletion": "deepinfer.balancers.prefill.earliest",
    "EncoderBalancer": "deepinfer.balancers.encoder",
    "EncoderCost": "deepinfer.balancers.encoder_fleet",
    "EncoderFleet": "deepinfer.balancers.encoder_fleet",
    "ExpertPlanner": "deepinfer.balancers.expert_parallel.planner",
    "Fleet": "deepinfer.balancers.fleet",
    "FleetSimulator": "deepinfer.balancers.simulator.simulator",
    "ImageTask": "deepinfer.balancers.encoder_fleet",
    "OutputLengths": "deepinfer.balancers.decode_outputs",
    "PrefillCost": "deepinfer.balancers.prefill.cost",
    "PrefixIndex": "deepinfer.balancers.prefill.prefix_index",
    "ReplicaBalancer": "deepinfer.balancers.replicas",
    "RouteRequest": "deepinfer.balancers.base",
    "Router": "deepinfer.balancers.base",
    "TierRouter": "deepinfer.balancers.prefill.tiers",
    "TokenSplitter": "deepinfer.balancers.expert_parallel.splitter",
    "TrialReport": "deepinfer.balancers.decode_trial",
    "WorkerSnapshot": "deepinfer.balancers.base",
    "WorkerState": "deepinfer.balancers.base",
    "rebalance_experts": "deepinfer.balancers.expert_parallel.rebalance",
    "run_decode_trial": "deepinfer.balancers.decode_trial",
}

__all__ = [
    "CacheSnapshot",
    "CacheUpdate",
    "Decision",
    "DecodeBalancer",
    "DecodeCost",
    "DecodeTrial",
    "EarliestCompletion",
    "EncoderBalancer",
    "EncoderCost",
    "EncoderFleet",
    "ExpertPlanner",
    "Fleet",
    "FleetSimulator",
    "ImageTask",
    "OutputLengths",
    "PrefillCost",
    "PrefixIndex",
    "ReplicaBalancer",
    "RouteRequest",
    "Router",
    "TierRouter",
    "TokenSplitter",
    "TrialReport",
    "WorkerSnapshot",
    "WorkerState",
    "rebalance_experts",
    "run_decode_trial",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
