"""The books of one request: its ids, its slot, and what it is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.types import FinishReason, Request

if TYPE_CHECKING:
    from deepinfer.scheduling.slot_table import SlotTable

__all__ = ["Sequence"]


class Sequence:
    """One request while the scheduler knows it.

    What is settled is the only counter. While the request runs it stands in the scheduler's `SlotTable`, with the number
    of known tokens beside it; what is in flight is read off the launched plans. So no two counters can drift apart.

    Args:
        request: The request.
        limit: Most tokens of prompt plus output.
        order: Number of the request in order of arrival at the scheduler.
        eos_token_ids: Token ids that end a sequence unless the request ignores them.

    Attributes:
        stop_token_ids: Every token id that ends it.
        has_own_stops: Whether it has stop ids besides the end-of-sequence tokens that all share.
        epoch: How often the request lost its slot.
        slot: Its slot, or None while it waits.
        slot_generation: Generation of that slot.
        num_orphans: Rows of earlier epochs in flight whose tokens are still to come; until then it waits.
        cached_tokens: Tokens of the longest prefix last found in the cache, for order policies that ask for it.
        adopted_tokens: Prompt tokens taken over from the cache when it was first admitted.
        replayed_tokens: Prompt tokens run again to rebuild window rows after that.
        is_approximate: Whether any of its epochs began with an approximate replay.
        num_skips: How often others were admitted past it while it was first in the queue.
        skipped_since_s: When that happened first, or None.
    """

    __slots__ = (
        "_ids",
        "_num_ids",
        "adopted_tokens",
        "cached_tokens",
        "epoch",
        "has_own_stops",
        "is_approximate",
        "limit",
        "num_orphans",
        "num_skips",
        "order",
        "replayed_tokens",
        "request",
        "skipped_since_s",
        "slot",
        "slot_generation",
        "stop_token_ids",
        "table",
    )

    def __init__(
        self, request: Request, limit: int, order: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.request = request
        self.limit = limit
        self.order = order
        params = request.params
        eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids) | eos
        self.has_own_stops = self.stop_token_ids != eos
        self._num_ids = request.num_prompt_tokens
        self._ids = np.empty(self._num_ids + 64, np.int32)
        self._ids[: self._num_ids] = request.prompt_token_ids
        self.table: SlotTable | None = None
        self.slot: int | None = None
        self.slot_generation = 0
        self.epoch = 0
        self.num_orphans = 0
        self.cached_tokens = 0
        self.adopted_tokens = 0
        self.replayed_tokens = 0
        self.is_approximate = False
        self.num_skips = 0
        self.skipped_since_s: float | None = None

    @property
    def rid(self) -> str:
        """Id of the request."""
        return self.request.rid

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and output so far, shape [tokens], int32; a view that must not be written."""
        if self.table is not None and self.slot is not None:
            self.table.flush(self.slot)
        return self._ids[: self._num_ids]

    @property
    def num_tokens(self) -> int:
        """Known tokens of prompt and output."""
        if self.table is None or self.slot is None:
            return self._num_ids
        return int(self.table.known[self.slot])

    @property
    def settled(self) -> int:
        """Tokens with final cache entries; after a prefix hit it begins where the replay begins."""
        if self.table is None or self.slot is None:
            return 0
        return int(self.table.settled[self.slot])

    @property
    def num_pending(self) -> int:
        """Known tokens without final cache entries; at least 1 until the request ends."""
        return self.num_tokens - self.settled

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - self.num_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to run is the token generated last."""
        return self.num_pending == 1 and self.settled >= self.request.num_prompt_tokens

    def store(self, token_ids: NDArray[np.integer] | tuple[int, ...]) -> None:
        """Adds ids to the end of the buffer, nothing else.

        Args:
            token_ids: The ids, shape [tokens].
        """
        end = self._num_ids + len(token_ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[: self._num_ids] = self._ids[: self._num_ids]
            self._ids = grown
        self._ids[self._num_ids : end] = token_ids
        self._num_ids = end

    def truncate(self, num_tokens: int) -> None:
        """Drops ids from the end of the buffer.

        Args:
            num_tokens: How many stay.
        """
        self._num_ids = num_tokens

    def cut(
        self, token_ids: tuple[int, ...], num_known: int
    ) -> tuple[int, FinishReason | None, int | None]:
        """Where generated tokens end the request.

        Args:
            token_ids: New tokens in order.
            num_known: Tokens known before them.

        Returns:
            How many of them count, why the request ended or None, and the stop token that ended it or None. A stop
            token wins over the length when both end it at once.
        """
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self.stop_token_ids:
                return count, FinishReason.STOP, token_id
            if num_known + count >= self.limit:
                return count, FinishReason.LENGTH, None
        return len(token_ids), None, None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.rid!r}, settled={self.settled}, tokens={self.num_tokens}, "
            f"slot={self.slot}, epoch={self.epoch})"
        )
