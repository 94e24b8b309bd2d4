"""The books of one request: what is settled, what is in flight, and what a result changed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deepinfer.core.plan import PlanRow, RowResult, RowRole
from deepinfer.core.types import FinishReason, Request

__all__ = ["Flight", "Progress", "Sequence"]


@dataclass(frozen=True, slots=True)
class Flight:
    """One row of a launched step whose result has not come yet.

    Attributes:
        step: Id of the step.
        row: The row.
    """

    step: int
    row: PlanRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one result changed for one request.

    Attributes:
        request: The request.
        token_ids: New tokens, cut after the one that ended the request.
        finish_reason: Why it ended, or None while it runs.
        stop_token_id: The token that ended it, or None.
        error: Why it failed, or None.
        plan_row: The row of the plan.
        result: The row's result, with tokens after the end still in it.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    error: Exception | None
    plan_row: PlanRow
    result: RowResult


class Sequence:
    """One request while the scheduler knows it.

    There is one counter, `settled`: tokens whose cache entries are final. Everything else is derived from it,
    from the ids, and from the flights, so that no two counters can drift apart.

    Args:
        request: The request.
        limit: Most tokens of prompt plus output.
        order: Number of the request in order of arrival at the scheduler.

    Attributes:
        token_ids: Prompt and output, in order.
        settled: Tokens with final cache entries.
        flights: Launched rows without a result, oldest first.
        epoch: How often the request lost its slot.
        slot: Its slot, or None while it waits.
        slot_generation: Generation of that slot.
    """

    __slots__ = (
        "epoch",
        "flights",
        "limit",
        "order",
        "request",
        "settled",
        "slot",
        "slot_generation",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self, request: Request, limit: int, order: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.request = request
        self.limit = limit
        self.order = order
        params = request.params
        self.stop_token_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else eos_token_ids
        )
        self.token_ids = list(request.prompt_token_ids)
        self.settled = 0
        self.flights: deque[Flight] = deque()
        self.epoch = 0
        self.slot: int | None = None
        self.slot_generation = 0

    @property
    def rid(self) -> str:
        """Id of the request."""
        return self.request.rid

    @property
    def num_pending(self) -> int:
        """Known tokens without final cache entries; at least 1 until the request ends."""
        return len(self.token_ids) - self.settled

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to run is the token generated last."""
        return self.num_pending == 1 and self.settled >= len(self.request.prompt_token_ids)

    def row(self, num_tokens: int, num_drafts: int, slot: int, slot_generation: int) -> PlanRow:
        """The next row of this request.

        Args:
            num_tokens: Known tokens to run.
            num_drafts: Drafts to run after them.
            slot: Slot of the row.
            slot_generation: Generation of that slot.

        Returns:
            The row, with the ids that are known.
        """
        first = self.settled
        if num_drafts:
            role = RowRole.VERIFY
        elif self.is_decoding:
            role = RowRole.DECODE
        elif num_tokens == self.num_pending:
            role = RowRole.LAST_PREFILL
        else:
            role = RowRole.PREFILL
        return PlanRow(
            rid=self.request.rid,
            slot=slot,
            slot_generation=slot_generation,
            epoch=self.epoch,
            first_position=first,
            num_tokens=num_tokens + num_drafts,
            num_drafts=num_drafts,
            role=role,
            token_ids=tuple(self.token_ids[first : first + num_tokens]),
        )

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None, int | None]:
        """Adds generated tokens up to the one that ends the request.

        Args:
            token_ids: Tokens in order.

        Returns:
            How many were added, why the request ended or None, and the stop token that ended it or None.
            A stop token wins over the length when both end it at once.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                return count, FinishReason.STOP, token_id
            if len(self.token_ids) >= self.limit:
                return count, FinishReason.LENGTH, None
        return len(token_ids), None, None

    def reset(self) -> None:
        """Forgets slot, flights and settled tokens; the ids stay and will be run again."""
        self.epoch += 1
        self.settled = 0
        self.flights.clear()
        self.slot = None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.rid!r}, settled={self.settled}, tokens={len(self.token_ids)}, "
            f"slot={self.slot}, flights={len(self.flights)})"
        )
