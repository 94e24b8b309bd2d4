"""What each step runs: continuous batching with chunked prefill, as data in and data out.

`Scheduler` plans steps for any runner. It needs the standard library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.scheduling.ledger import Flight as Flight
    from deepinfer.scheduling.ledger import Progress as Progress
    from deepinfer.scheduling.ledger import Sequence as Sequence
    from deepinfer.scheduling.limits import SchedulerLimits as SchedulerLimits
    from deepinfer.scheduling.limits import allows_drafts as allows_drafts
    from deepinfer.scheduling.plannable_cache import PlannableCache as PlannableCache
    from deepinfer.scheduling.policies import ORDER_POLICIES as ORDER_POLICIES
    from deepinfer.scheduling.policies import OrderPolicy as OrderPolicy
    from deepinfer.scheduling.scheduler import Scheduler as Scheduler

_EXPORTS = {
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
