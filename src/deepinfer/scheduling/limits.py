"""What a scheduler must stay within, and which requests may be decoded with drafts."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.params import SamplingParams

__all__ = ["SchedulerLimits", "allows_drafts"]

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Numbers that bound every plan.

    Attributes:
        max_model_len: Most tokens of prompt plus output.
        max_num_seqs: Most requests that hold a slot at once.
        max_num_batched_tokens: Most tokens in one step, at least `max_num_seqs`.
        prefill_chunk_tokens: Most tokens that one request runs in one step, drafts included.
        eos_token_ids: Token ids that end a sequence unless the request ignores them.
        draft_length: Most drafts a row; 0 plans no drafts.

    Raises:
        ConfigError: A number is out of range.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 32_768
    prefill_chunk_tokens: int = 512
    eos_token_ids: tuple[int, ...] = ()
    draft_length: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        for name, low in (
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", self.max_num_seqs),
            ("prefill_chunk_tokens", 1),
            ("draft_length", 0),
        ):
            checks.check_int(name, getattr(self, name), low, _INT_MAX, ConfigError)
        if self.draft_length >= self.prefill_chunk_tokens:
            checks.fail(
                "draft_length",
                self.draft_length,
                f"below prefill_chunk_tokens ({self.prefill_chunk_tokens})",
                ConfigError,
                "A row holds its drafts and one token more.",
            )
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))


def allows_drafts(params: SamplingParams) -> bool:
    """Whether a request's drafts can be verified by comparing them with the highest logits.

    That holds at temperature 0 without penalties, which would make a row's logits depend on which of the
    drafts before it are kept, and without a grammar.

    Args:
        params: The request's sampling options.

    Returns:
        True when its rows may carry drafts.
    """
    return params.is_greedy and not params.has_penalties and not params.has_grammar
