"""Bounds on what a grammar may cost: states, bytes of memory, time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deepinfer.core.errors import GrammarTooLarge

__all__ = ["Budget", "GrammarLimits", "NODE_BYTES"]

NODE_BYTES = 480
"""Memory of one state in bytes, its share of the tables included; measured, rounded up."""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Bounds of one grammar.

    Attributes:
        max_states: Most automaton states, inner ones included, that may ever exist.
        max_bytes: Most memory of the automaton in bytes, estimated from the number of states.
        build_ms: Most CPU time of one piece of work in milliseconds: the construction, or one call that extends it.
        search_states: Most states that one search for a dead end visits before it gives up and assumes that there
            is none.
    """

    max_states: int = 1_000_000
    max_bytes: int = 400_000_000
    build_ms: float = 2_000.0
    search_states: int = 20_000


class Budget:
    """Counts against `GrammarLimits`.

    Args:
        limits: The bounds.
    """

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self.limits = limits or GrammarLimits()
        self._most = min(self.limits.max_states, self.limits.max_bytes // NODE_BYTES)
        self._deadline_s = float("inf")
        self._depth = 0

    def __enter__(self) -> Budget:
        """Begin a piece of work; nested pieces share the time of the outermost."""
        if self._depth == 0:
            self._deadline_s = time.thread_time() + self.limits.build_ms / 1000.0
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def check(self, num_states: int) -> None:
        """Compare with the bounds.

        Args:
            num_states: States that exist.

        Raises:
            GrammarTooLarge: A bound is passed.
        """
        if num_states > self._most:
            raise GrammarTooLarge(
                f"the grammar needs more than {self._most} states (limits max_states={self.limits.max_states},"
                f" max_bytes={self.limits.max_bytes}); simplify it or raise the limit in GrammarLimits",
                resource="states",
                limit=self._most,
            )
        if self._depth and time.thread_time() > self._deadline_s:
            raise GrammarTooLarge(
                f"the grammar took more than {self.limits.build_ms:g} ms with {num_states} states;"
                " simplify it or raise build_ms in GrammarLimits",
                resource="ms",
                limit=self.limits.build_ms,
            )
