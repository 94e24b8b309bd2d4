"""Which GPU holds which expert, in how many copies, and which copy gets which tokens.

`rebalance_experts` plans from loads, `ExpertPlanner` from a running count of them and with few moves, and `split_tokens`
divides the tokens of one step over the copies. NumPy only; torch tensors are taken and given back where they come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.balancers.expert_parallel.drift import DriftingLoad as DriftingLoad
    from deepinfer.balancers.expert_parallel.imbalance import planned_imbalance as planned_imbalance
    from deepinfer.balancers.expert_parallel.imbalance import (
        realised_imbalance as realised_imbalance,
    )
    from deepinfer.balancers.expert_parallel.imbalance import slot_imbalance as slot_imbalance
    from deepinfer.balancers.expert_parallel.placement import Placement as Placement
    from deepinfer.balancers.expert_parallel.plan_diff import count_moves as count_moves
    from deepinfer.balancers.expert_parallel.plan_diff import relabel as relabel
    from deepinfer.balancers.expert_parallel.planner import ExpertPlan as ExpertPlan
    from deepinfer.balancers.expert_parallel.planner import ExpertPlanner as ExpertPlanner
    from deepinfer.balancers.expert_parallel.rebalance import place_experts as place_experts
    from deepinfer.balancers.expert_parallel.rebalance import rebalance_experts as rebalance_experts
    from deepinfer.balancers.expert_parallel.splitter import TokenSplitter as TokenSplitter
    from deepinfer.balancers.expert_parallel.splitter import split_tokens as split_tokens
    from deepinfer.balancers.expert_parallel.stages import Move as Move
    from deepinfer.balancers.expert_parallel.stages import MoveQueue as MoveQueue
    from deepinfer.balancers.expert_parallel.stages import Stage as Stage
    from deepinfer.balancers.expert_parallel.stages import stage_moves as stage_moves

_EXPORTS = {
    "DriftingLoad": "deepinfer.balancers.expert_parallel.drift",
    "ExpertPlan": "deepinfer.balancers.expert_parallel.planner",
    "ExpertPlanner": "deepinfer.balancers.expert_parallel.planner",
    "Move": "deepinfer.balancers.expert_parallel.stages",
    "MoveQueue": "deepinfer.balancers.expert_parallel.stages",
    "Placement": "deepinfer.balancers.expert_parallel.placement",
    "Stage": "deepinfer.balancers.expert_parallel.stages",
    "TokenSplitter": "deepinfer.balancers.expert_parallel.splitter",
    "count_moves": "deepinfer.balancers.expert_parallel.plan_diff",
    "place_experts": "deepinfer.balancers.expert_parallel.rebalance",
    "planned_imbalance": "deepinfer.balancers.expert_parallel.imbalance",
    "realised_imbalance": "deepinfer.balancers.expert_parallel.imbalance",
    "rebalance_experts": "deepinfer.balancers.expert_parallel.rebalance",
    "relabel": "deepinfer.balancers.expert_parallel.plan_diff",
    "slot_imbalance": "deepinfer.balancers.expert_parallel.imbalance",
    "split_tokens": "deepinfer.balancers.expert_parallel.splitter",
    "stage_moves": "deepinfer.balancers.expert_parallel.stages",
}

__all__ = [
    "DriftingLoad",
    "ExpertPlan",
    "ExpertPlanner",
    "Move",
    "MoveQueue",
    "Placement",
    "Stage",
    "TokenSplitter",
    "count_moves",
    "place_experts",
    "planned_imbalance",
    "realised_imbalance",
    "rebalance_experts",
    "relabel",
    "slot_imbalance",
    "split_tokens",
    "stage_moves",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
