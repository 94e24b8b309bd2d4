"""What an engine reports while it runs, and the simplest places to send it.

Names follow the usual metric names (`time_to_first_token_seconds`, `prefix_cache_hits_total`, ...) in base
units, so an exporter needs no table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.core.types import FinishReason, Usage

__all__ = [
    "Event",
    "MemorySink",
    "NullSink",
    "RequestAdded",
    "RequestFinished",
    "RequestPreempted",
    "StepFinished",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events.

    Attributes:
        time_s: When, on the engine's clock, in seconds.
    """

    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdded(Event):
    """A request was accepted.

    Attributes:
        rid: Its id.
        prompt_tokens: Tokens of its prompt.
    """

    rid: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted(Event):
    """A running request lost its slot and waits again.

    Attributes:
        rid: Its id.
        lost_tokens: Tokens that must be run again.
    """

    rid: str
    lost_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished(Event):
    """A request ended.

    Attributes:
        rid: Its id.
        finish_reason: Why.
        usage: Its token counts.
        queue_seconds: From arrival to the first step.
        time_to_first_token_seconds: From arrival to the first token, or None without one.
        inter_token_seconds: Mean time between tokens, or None with fewer than two.
    """

    rid: str
    finish_reason: FinishReason
    usage: Usage
    queue_seconds: float = 0.0
    time_to_first_token_seconds: float | None = None
    inter_token_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(Event):
    """A step was collected and applied.

    Attributes:
        step: Its id.
        step_seconds: From launch to the last token.
        plan_seconds: Other time of the host: planning, books, text.
        predicted_seconds: What the scheduler predicted for it, or None.
        prefill_tokens: Prompt tokens run.
        replayed_tokens: Tokens run again to rebuild window rows after a prefix hit.
        decode_tokens: Other tokens run, drafts included.
        generated_tokens: Tokens that became output.
        draft_tokens_verified: Drafts checked.
        draft_tokens_accepted: Drafts that became output.
        requests_running: Requests that hold a slot after it.
        requests_waiting: Requests that wait after it.
        kv_used_ratio: Held share of the cache, from 0 to 1.
    """

    step: int
    step_seconds: float
    plan_seconds: float = 0.0
    predicted_seconds: float | None = None
    prefill_tokens: int = 0
    replayed_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens_verified: int = 0
    draft_tokens_accepted: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    kv_used_ratio: float = 0.0


class NullSink:
    """Drops every event."""

    __slots__ = ()

    def record(self, event: Event) -> None:
        """Does nothing.

        Args:
            event: Ignored.
        """


class MemorySink:
    """Keeps the latest events in memory.

    Args:
        capacity: Most events kept; older ones are dropped first.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)

    def record(self, event: Event) -> None:
        """Keeps an event.

        Args:
            event: The event.
        """
        self._events.append(event)

    def of_type(self, kind: type[Event]) -> list[Event]:
        """The kept events of one class, oldest first.

        Args:
            kind: The class.

        Returns:
            A new list.
        """
        return [event for event in self._events if isinstance(event, kind)]

    def clear(self) -> None:
        """Forgets everything."""
        self._events.clear()

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))
