"""Where prompts run: the cost of a prompt, who holds its prefix, and the rules that choose an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.balancers.prefill.baselines import DynamoCost as DynamoCost
    from deepinfer.balancers.prefill.baselines import LeastRequests as LeastRequests
    from deepinfer.balancers.prefill.baselines import LeastWork as LeastWork
    from deepinfer.balancers.prefill.baselines import LoadAware as LoadAware
    from deepinfer.balancers.prefill.baselines import LongestPrefix as LongestPrefix
    from deepinfer.balancers.prefill.baselines import PowerOfTwo as PowerOfTwo
    from deepinfer.balancers.prefill.baselines import RandomChoice as RandomChoice
    from deepinfer.balancers.prefill.baselines import RoundRobin as RoundRobin
    from deepinfer.balancers.prefill.baselines import SglangCacheAware as SglangCacheAware
    from deepinfer.balancers.prefill.cost import PrefillCost as PrefillCost
    from deepinfer.balancers.prefill.earliest import EarliestCompletion as EarliestCompletion
    from deepinfer.balancers.prefill.prefix_index import CacheSnapshot as CacheSnapshot
    from deepinfer.balancers.prefill.prefix_index import CacheUpdate as CacheUpdate
    from deepinfer.balancers.prefill.prefix_index import PrefixIndex as PrefixIndex
    from deepinfer.balancers.prefill.tiers import TierRouter as TierRouter
    from deepinfer.balancers.prefill.tiers import assign_tiers as assign_tiers

_EXPORTS = {
    "CacheSnapshot": "deepinfer.balancers.prefill.prefix_index",
    "CacheUpdate": "deepinfer.balancers.prefill.prefix_index",
    "DynamoCost": "deepinfer.balancers.prefill.baselines",
    "EarliestCompletion": "deepinfer.balancers.prefill.earliest",
    "LeastRequests": "deepinfer.balancers.prefill.baselines",
    "LeastWork": "deepinfer.balancers.prefill.baselines",
    "LoadAware": "deepinfer.balancers.prefill.baselines",
    "LongestPrefix": "deepinfer.balancers.prefill.baselines",
    "PowerOfTwo": "deepinfer.balancers.prefill.baselines",
    "PrefillCost": "deepinfer.balancers.prefill.cost",
    "PrefixIndex": "deepinfer.balancers.prefill.prefix_index",
    "RandomChoice": "deepinfer.balancers.prefill.baselines",
    "RoundRobin": "deepinfer.balancers.prefill.baselines",
    "SglangCacheAware": "deepinfer.balancers.prefill.baselines",
    "TierRouter": "deepinfer.balancers.prefill.tiers",
    "assign_tiers": "deepinfer.balancers.prefill.tiers",
}

__all__ = [
    "CacheSnapshot",
    "CacheUpdate",
    "DynamoCost",
    "EarliestCompletion",
    "LeastRequests",
    "LeastWork",
    "LoadAware",
    "LongestPrefix",
    "PowerOfTwo",
    "PrefillCost",
    "PrefixIndex",
    "RandomChoice",
    "RoundRobin",
    "SglangCacheAware",
    "TierRouter",
    "assign_tiers",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
