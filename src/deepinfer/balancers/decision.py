"""What a balancer answers: whom, why, and what it expects of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decision"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of a balancer, fit to be logged and compared with what happened.

    Attributes:
        target: Index of the chosen worker in the fleet that was asked about, or None when none can take the request
            now: it waits at the router and is asked about again.
        reason: Why, in a few stable words with underscores, such as `"least_cost"` or `"no_room"`.
        predicted: What the balancer expects, in the unit that its page names (seconds for routers of prompts and
            images, seconds of a step for decode), or None when it predicts nothing.

    Examples:
        >>> Decision(2, "least_cost", 0.25).is_placed
        True
    """

    target: int | None
    reason: str
    predicted: float | None = None

    @property
    def is_placed(self) -> bool:
        """Whether a worker was chosen."""
        return self.target is not None
