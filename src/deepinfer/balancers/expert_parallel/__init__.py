"""Which GPU holds which expert, in how many copies, and which copy gets which tokens.

`rebalance_experts` plans from loads, `ExpertPlanner` from a running count of them and with few moves, and `split_tokens`
divides the tokens of one step over the copies. NumPy only; torch tensors are taken and given back where they come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.balancers.expert_parallel.imbalance import (
        planned_imbalance as planned_imbalance,
    )
    from deepinfer.balancers.expert_parallel.imbalance import (
        realised_imbalance as realised_imbalance,
    )
    from deepinfer.balancers.expert_parallel.imbalance import slot_imbalance as slot_imbalance
    from deepinfer.balancers.expert_parallel.rebalance import place_experts as place_experts
    from deepinfer.balancers.expert_parallel.rebalance import (
        rebalance_experts as rebalance_experts,
    )

_EXPORTS = {
    "place_experts": "deepinfer.balancers.expert_parallel.rebalance",
    "planned_imbalance": "deepinfer.balancers.expert_parallel.imbalance",
    "realised_imbalance": "deepinfer.balancers.expert_parallel.imbalance",
    "rebalance_experts": "deepinfer.balancers.expert_parallel.rebalance",
    "slot_imbalance": "deepinfer.balancers.expert_parallel.imbalance",
}

__all__ = [
    "place_experts",
    "planned_imbalance",
    "realised_imbalance",
    "rebalance_experts",
    "slot_imbalance",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
