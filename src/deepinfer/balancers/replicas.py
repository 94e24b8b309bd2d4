"""Any router as a `Balancer`: choosing among the engines of one process by their own load reports."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.balancers.base import Router, RouteRequest, WorkerSnapshot
from deepinfer.balancers.fleet import Fleet
from deepinfer.core.errors import Unschedulable
from deepinfer.core.plan import LoadSnapshot
from deepinfer.core.types import Request

__all__ = ["ReplicaBalancer"]


class ReplicaBalancer:
    """Chooses a replica with a router.

    Every call looks at fresh reports, as engines of the same process can give them, so nothing is remembered between
    calls. A router that is asked more often than its workers report needs a `Fleet` of its own.

    Args:
        router: Any router; it sees each replica under the name of its index.

    Examples:
        >>> from deepinfer.balancers import DecodeBalancer
        >>> balancer = ReplicaBalancer(DecodeBalancer())
        >>> busy = LoadSnapshot(time_s=1.0, num_running=4, num_waiting=2)
        >>> idle = LoadSnapshot(time_s=1.0, num_running=1, num_waiting=0)
        >>> balancer.route(Request(rid="r", prompt_token_ids=(1, 2)), [busy, idle])
        1
    """

    def __init__(self, router: Router) -> None:
        self.router = router

    def route(self, request: Request, replicas: Sequence[LoadSnapshot]) -> int:
        """Index of the chosen replica; ties go to the lowest.

        Args:
            request: What is to be placed.
            replicas: One report a replica.

        Returns:
            The index.

        Raises:
            Unschedulable: No replica can take the request now.
        """
        fleet = Fleet(WorkerSnapshot.of(str(index), load) for index, load in enumerate(replicas))
        decision = self.router.decide(RouteRequest.of(request), fleet)
        if decision.target is None:
            raise Unschedulable(
                f"none of {len(replicas)} replicas can take request {request.rid!r} now ({decision.reason}); "
                "keep it and ask again when one has room."
            )
        return decision.target
