"""One row of a step as a value: what it runs, and what came of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepinfer.core.types import TokenLogprob

__all__ = ["PlanRow", "RowResult", "RowRole"]


class RowRole(enum.StrEnum):
    """What a row of a plan does; given, never inferred from a shape."""

    REPLAY = "replay"
    """Prompt tokens run again to rebuild window state; nothing is sampled or published."""
    PREFILL = "prefill"
    """A chunk of prompt that is not the last one; nothing is sampled."""
    LAST_PREFILL = "last_prefill"
    """The chunk that ends the prompt; one token is sampled."""
    DECODE = "decode"
    """One token in, one token sampled."""
    VERIFY = "verify"
    """One token and `num_drafts` drafts in, from one to `num_drafts + 1` tokens out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A run of consecutive positions of one request.

    Attributes:
        rid: Id of the request.
        slot: Cache and state slot, from 0.
        slot_generation: How often the slot was given out before; tells a late result from a current one.
        epoch: How often the request was preempted or reset; results of an older epoch are not counted.
        first_position: Position of the row's first token, from 0.
        num_tokens: Tokens that the row runs, drafts included, at least 1.
        num_drafts: How many of them are drafts, at the end of the row.
        role: What the row does.
        token_ids: The row's input ids when the host knows them, in full or as a leading part; the rest is
            on the device (the token sampled last, the drafts).
        is_late: Whether sampling waits for host state of the token before (a grammar mask).
        num_open: Drafts of this request still in flight when the plan was made. Any of them may be rejected, so
            the true first position may be lower by up to as many; the runner knows it.
        window_start: Lowest position whose window rows may be read: where a replay began, else 0.
        pool_start: Lowest position whose pool rows and index keys are written: the length of the adopted
            prefix, else 0.
        full_start: Lowest position that runs every layer; rows before it stop behind the last layer that owns a
            pool, and have neither logits nor draft features.
    """

    rid: str
    slot: int
    slot_generation: int = 0
    epoch: int = 0
    first_position: int
    num_tokens: int
    num_drafts: int = 0
    role: RowRole
    token_ids: tuple[int, ...] = ()
    is_late: bool = False
    num_open: int = 0
    window_start: int = 0
    pool_start: int = 0
    full_start: int = 0

    @property
    def end_position(self) -> int:
        """Position after the row's last token."""
        return self.first_position + self.num_tokens

    @property
    def num_logits(self) -> int:
        """Rows of logits that sampling needs: 0, 1, or the drafts plus 1; they are the row's last."""
        if self.role in (RowRole.REPLAY, RowRole.PREFILL):
            return 0
        return self.num_drafts + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What one row produced.

    Attributes:
        rid: Id of the request.
        slot: Slot of the row.
        slot_generation: Slot generation of the row.
        epoch: Epoch of the row.
        token_ids: New tokens, accepted drafts first; empty for rows that sample nothing.
        num_drafts: Drafts that were verified.
        num_accepted: Drafts that were accepted.
        logprobs: One entry a new token when asked for, else empty.
        prompt_logprobs: One entry a prompt token of the row when asked for, else empty.
        draft_token_ids: Drafts proposed for the next step, or empty.
        draft_confidences: One probability a draft of the block proposed last that it is accepted if all before it are,
            drafts that the plan left out included; or empty.
        error: Why this row failed, or None.
    """

    rid: str
    slot: int
    slot_generation: int = 0
    epoch: int = 0
    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    draft_confidences: tuple[float, ...] = ()
    error: Exception | None = None
