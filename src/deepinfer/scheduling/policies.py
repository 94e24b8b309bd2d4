"""In which order waiting requests start, and which running one gives way."""

from __future__ import annotations

from typing import Any, Protocol

from deepinfer.core.registry import Registry
from deepinfer.scheduling.ledger import Sequence

__all__ = ["ORDER_POLICIES", "VICTIM_POLICIES", "OrderPolicy", "VictimPolicy"]


class OrderPolicy(Protocol):
    """A sort key; the waiting request with the smallest one starts first.

    A policy with the attribute `reads_cache = True` may look at `Sequence.cached_tokens`, which the scheduler brings up
    to date between steps for the first requests of the queue; the queue is then sorted again. Other keys must not change
    while a request waits.
    """

    def __call__(self, sequence: Sequence) -> Any:
        """The key of a request."""
        ...


class VictimPolicy(Protocol):
    """A sort key; the running request with the smallest one gives its blocks up first.

    A request never takes blocks from one with a larger key, so the one with the largest always gets on.
    """

    def __call__(self, sequence: Sequence, admitted: int) -> Any:
        """The key of a request, the `admitted`-th oldest of those that run, from 0; keys must differ."""
        ...


def fcfs(sequence: Sequence) -> tuple[int]:
    """First come, first served."""
    return (sequence.order,)


def priority(sequence: Sequence) -> tuple[int, int]:
    """Lower `Request.priority` first, ties in order of arrival; running requests keep their slots."""
    return (sequence.request.priority, sequence.order)


class _ReadsCache:
    reads_cache = True


class LongestPrefix(_ReadsCache):
    """Most cached tokens first, ties in order of arrival: what is in the cache is used before it is evicted."""

    def __call__(self, sequence: Sequence) -> tuple[int, int]:
        """The key of a request."""
        return (-sequence.cached_tokens, sequence.order)


class ShortestUncached(_ReadsCache):
    """Fewest tokens to run first, ties in order of arrival: short questions do not wait for long documents."""

    def __call__(self, sequence: Sequence) -> tuple[int, int]:
        """The key of a request."""
        return (sequence.num_tokens - sequence.cached_tokens, sequence.order)


def last_admitted(sequence: Sequence, admitted: int) -> int:
    """The request that was admitted last gives way first."""
    return -admitted


def lowest_priority(sequence: Sequence, admitted: int) -> tuple[int, int]:
    """The request with the highest `Request.priority` number gives way first; among equals the one admitted last."""
    return (-sequence.request.priority, -admitted)


def _fcfs() -> OrderPolicy:
    return fcfs


def _priority() -> OrderPolicy:
    return priority


def _last_admitted() -> VictimPolicy:
    return last_admitted


def _lowest_priority() -> VictimPolicy:
    return lowest_priority


ORDER_POLICIES: Registry[OrderPolicy] = Registry("order policy", group="deepinfer.order_policies")
"""Order policies by name: "fcfs", "priority", "longest_prefix" and "shortest_uncached"."""
ORDER_POLICIES.register("fcfs", _fcfs)
ORDER_POLICIES.register("priority", _priority)
ORDER_POLICIES.register("longest_prefix", LongestPrefix)
ORDER_POLICIES.register("shortest_uncached", ShortestUncached)

VICTIM_POLICIES: Registry[VictimPolicy] = Registry(
    "victim policy", group="deepinfer.victim_policies"
)
"""Victim policies by name: "last_admitted" and "lowest_priority"."""
VICTIM_POLICIES.register("last_admitted", _last_admitted)
VICTIM_POLICIES.register("lowest_priority", _lowest_priority)
