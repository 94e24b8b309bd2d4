"""A fleet simulator: routers, prefill and decode pools, caches and failures on recorded traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.balancers.simulator.config import CacheKind as CacheKind
    from deepinfer.balancers.simulator.config import DecodeConfig as DecodeConfig
    from deepinfer.balancers.simulator.config import FleetChange as FleetChange
    from deepinfer.balancers.simulator.config import FleetChangeKind as FleetChangeKind
    from deepinfer.balancers.simulator.config import PrefillConfig as PrefillConfig
    from deepinfer.balancers.simulator.config import RankChoice as RankChoice
    from deepinfer.balancers.simulator.config import Slo as Slo
    from deepinfer.balancers.simulator.config import TransferConfig as TransferConfig
    from deepinfer.balancers.simulator.report import FleetReport as FleetReport
    from deepinfer.balancers.simulator.simulator import FleetSimulator as FleetSimulator

_EXPORTS = {
    "CacheKind": "deepinfer.balancers.simulator.config",
    "DecodeConfig": "deepinfer.balancers.simulator.config",
    "FleetChange": "deepinfer.balancers.simulator.config",
    "FleetChangeKind": "deepinfer.balancers.simulator.config",
    "FleetReport": "deepinfer.balancers.simulator.report",
    "FleetSimulator": "deepinfer.balancers.simulator.simulator",
    "PrefillConfig": "deepinfer.balancers.simulator.config",
    "RankChoice": "deepinfer.balancers.simulator.config",
    "Slo": "deepinfer.balancers.simulator.config",
    "TransferConfig": "deepinfer.balancers.simulator.config",
}

__all__ = [
    "CacheKind",
    "DecodeConfig",
    "FleetChange",
    "FleetChangeKind",
    "FleetReport",
    "FleetSimulator",
    "PrefillConfig",
    "RankChoice",
    "Slo",
    "TransferConfig",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
