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
    from deepinfer.balancers.fleet import Fleet as Fleet

_EXPORTS = {
    "Decision": "deepinfer.balancers.decision",
    "Fleet": "deepinfer.balancers.fleet",
    "RouteRequest": "deepinfer.balancers.base",
    "Router": "deepinfer.balancers.base",
    "WorkerSnapshot": "deepinfer.balancers.base",
    "WorkerState": "deepinfer.balancers.base",
}

__all__ = [
    "Decision",
    "Fleet",
    "RouteRequest",
    "Router",
    "WorkerSnapshot",
    "WorkerState",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
