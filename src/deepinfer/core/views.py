"""Values that parts hand each other where protocols meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.core.plan import PlanRow
from deepinfer.core.types import Request, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Allocation",
    "DraftBatch",
    "DraftView",
    "Hit",
    "ModelInfo",
    "SampleRows",
    "Sampled",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the other parts need to know of a model.

    Attributes:
        vocab_size: Rows of the logits.
        max_model_len: Most tokens of one sequence.
        eos_token_ids: Token ids that end a sequence.
        bos_token_id: Token id put before a prompt, or None.
        window: Width of the sliding attention window in tokens, or 0 without one.
        draft_length: Most draft tokens that the model's own drafter proposes, or 0 without one.
        fingerprint: Identity of weights and number formats; part of every cache key.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    window: int = 0
    draft_length: int = 0
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Cache entries found for the beginning of a prompt.

    Attributes:
        num_tokens: Tokens covered, a multiple of the block size.
        blocks: Device blocks of the leading tokens, in order.
        host_blocks: Host blocks of the tokens behind those, in order.
        window_slot: Host slot with the window rows before `num_tokens`, which make the hit exact, or None.
        replay_start: Position from which tokens must be run again to rebuild window rows; `num_tokens` when a window
            slot restores them.
        approximate: Whether that replay gives other numbers than a full run.
    """

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    host_blocks: tuple[int, ...] = ()
    window_slot: int | None = None
    replay_start: int = 0
    approximate: bool = False

    @property
    def replay_tokens(self) -> int:
        """Tokens before the end of the hit that are run again."""
        return self.num_tokens - self.replay_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Room given to one request.

    Attributes:
        slot: State slot.
        slot_generation: How often the slot was given out before.
        num_tokens: Tokens for which there is room.
        blocks: Blocks held, in order; empty for a cache without blocks.
    """

    slot: int
    slot_generation: int
    num_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """What a drafter sees: the batch after its last verified token.

    Attributes:
        rids: Request ids, one a row.
        slots: State slots, one a row.
        anchor_ids: The last token of each row.
        positions: Position of that token.
        hidden: Features of the rows from the target model, shape [rows, features], or None.
        token_ids: All tokens of each row, for drafters that look at text only, or empty.
        temperatures: Temperature of each row, or empty when all rows take the likeliest token.
        seeds: Seed of each row's noise, or empty. A drafter that draws with the noise of the sampler
            (`deepinfer.sampling.CoupledDraw`) agrees with it more often than one that proposes the likeliest tokens.
    """

    rids: tuple[str, ...]
    slots: tuple[int, ...]
    anchor_ids: tuple[int, ...]
    positions: tuple[int, ...]
    hidden: Tensor | None = None
    token_ids: tuple[Sequence[int], ...] = ()
    temperatures: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Proposed tokens.

    Attributes:
        token_ids: Drafts of each row, in order; may be empty.
        confidences: One probability a draft that it is accepted if all before it are; or empty.
        margins: Gap between the two highest logits that each draft was chosen by; or empty.
    """

    token_ids: tuple[tuple[int, ...], ...]
    confidences: tuple[tuple[float, ...], ...] = ()
    margins: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The rows of logits of one step, one entry each.

    Attributes:
        requests: Request of each row.
        positions: Position of the token to be chosen, in the whole sequence.
        seeds: Seed of each row, from 0 to 2**64 - 1.
        output_token_ids: Tokens generated so far, drafts before the row included.
        plan_rows: The plan's row that each belongs to; made when somebody looks.
    """

    requests: tuple[Request, ...]
    positions: tuple[int, ...]
    seeds: tuple[int, ...]
    output_token_ids: tuple[Sequence[int], ...] = ()
    plan_rows: Sequence[PlanRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Chosen tokens.

    Attributes:
        token_ids: Shape [rows], int64.
        logprobs: One entry a row, None for rows that asked for none; empty when no row did.
    """

    token_ids: Tensor
    logprobs: tuple[TokenLogprob | None, ...] = ()
