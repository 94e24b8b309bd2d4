"""In which order waiting requests start."""

from __future__ import annotations

from typing import Any, Protocol

from deepinfer.core.registry import Registry
from deepinfer.scheduling.ledger import Sequence

__all__ = ["ORDER_POLICIES", "OrderPolicy"]


class OrderPolicy(Protocol):
    """A sort key; the request with the smallest one starts first."""

    def __call__(self, sequence: Sequence) -> Any:
        """The key of a request; it must not change while the request waits."""
        ...


def fcfs(sequence: Sequence) -> tuple[int]:
    """First come, first served."""
    return (sequence.order,)


def priority(sequence: Sequence) -> tuple[int, int]:
    """Lower `Request.priority` first, ties in order of arrival; running requests keep their slots."""
    return (sequence.request.priority, sequence.order)


def _fcfs() -> OrderPolicy:
    return fcfs


def _priority() -> OrderPolicy:
    return priority


ORDER_POLICIES: Registry[OrderPolicy] = Registry("order policy", group="deepinfer.order_policies")
"""Order policies by name: "fcfs" and "priority"."""
ORDER_POLICIES.register("fcfs", _fcfs)
ORDER_POLICIES.register("priority", _priority)
