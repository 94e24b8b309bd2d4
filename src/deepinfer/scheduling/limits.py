"""What a scheduler must stay within, and which requests must wait for the host."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.params import SamplingParams

__all__ = ["SchedulerLimits", "waits_for_host"]

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Numbers that bound every plan.

    Attributes:
        max_model_len: Most tokens of prompt plus output.
        max_num_seqs: Most requests that hold a slot at once.
        max_num_batched_tokens: Most tokens in one step, replayed ones and drafts included. With fewer than running
            requests, these take turns.
        prefill_chunk_tokens: Most tokens that one request runs in one step, replayed ones and drafts included.
        eos_token_ids: Token ids that end a sequence unless the request ignores them.
        draft_length: Most drafts a row; 0 plans no drafts.
        async_depth: Steps planned before the results of those ahead are known: 0 or 1.
        window: Width of the model's attention window in tokens, or 0 without one. No prompt is left with a last chunk
            shorter than that where it can be helped.
        narrows: Whether the layers above the last one that owns a pool run for the last window of a prompt only
            (`PlanRow.full_start`).
        chunk_grain: Multiple of tokens on which chunks end where they can.
        max_skips: How often smaller requests may be admitted past the first of the queue when there is no room for it;
            then it gets the next free room.
        max_skip_s: For how many seconds they may, from the first time on.

    Raises:
        ConfigError: A number is out of range.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 32_768
    prefill_chunk_tokens: int = 512
    eos_token_ids: tuple[int, ...] = ()
    draft_length: int = 0
    async_depth: int = 0
    window: int = 0
    narrows: bool = False
    chunk_grain: int = 1
    max_skips: int = 16
    max_skip_s: float = 1.0

    def __post_init__(self) -> None:
        """Checks every field."""
        for name, low in (
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("prefill_chunk_tokens", 1),
            ("draft_length", 0),
            ("window", 0),
            ("chunk_grain", 1),
            ("max_skips", 0),
        ):
            checks.check_int(name, getattr(self, name), low, _INT_MAX, ConfigError)
        checks.check_int("async_depth", self.async_depth, 0, 1, ConfigError)
        checks.check_float("max_skip_s", self.max_skip_s, 0.0, 1e9, ConfigError)
        if self.draft_length >= self.prefill_chunk_tokens:
            checks.fail(
                "draft_length",
                self.draft_length,
                f"below prefill_chunk_tokens ({self.prefill_chunk_tokens})",
                ConfigError,
                "A row holds its drafts and one token more.",
            )
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))


def waits_for_host(params: SamplingParams) -> bool:
    """Whether a request's tokens can be sampled only once the host knows the token before.

    Args:
        params: The request's sampling options.

    Returns:
        True with a grammar or penalties.
    """
    return params.has_penalties or params.has_grammar
