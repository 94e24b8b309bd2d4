"""What goes into an engine and what comes out of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import DeepInferError, InvalidRequest
from deepinfer.core.params import SamplingParams as SamplingParams

__all__ = [
    "FinishReason",
    "Output",
    "OutputDelta",
    "Request",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
]

_INT_MAX = 2**31 - 1


class FinishReason(enum.StrEnum):
    """Why an output ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, a stop string, or the end of a grammar."""
    LENGTH = "length"
    """`max_tokens` or the model's context is used up."""
    ABORT = "abort"
    """The caller ended it."""
    ERROR = "error"
    """It failed; `Output.error` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one output.

    Attributes:
        prompt: Tokens of the prompt.
        cached: Prompt tokens whose cache entries were reused.
        replayed: Prompt tokens run again to rebuild window state after a cache hit.
        generated: Tokens of the output.
        drafted: Draft tokens that the model ran, so as many as `verified`; those that a schedule left out are in the
            engine's statistics.
        verified: Draft tokens that the model checked.
        accepted: Draft tokens that became output.
    """

    prompt: int = 0
    cached: int = 0
    replayed: int = 0
    generated: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def total(self) -> int:
        """Prompt plus generated tokens."""
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural log probability of one token, after penalties and bias and before temperature and filters.

    Attributes:
        token_id: The token chosen, or the prompt's token.
        logprob: Its log probability, at most 0.
        rank: Its place from 1 among all tokens, ties to the lower id, or None when not computed.
        top: The likeliest tokens as (token id, log probability), best first, ties to the lower id.
    """

    token_id: int
    logprob: float
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue, as it was submitted; it does not change while it runs.

    Attributes:
        rid: Unique id within an engine.
        prompt_token_ids: Token ids of the prompt, at least one.
        params: Sampling options.
        priority: Lower runs first; ties by arrival, then by rid.
        arrival_s: Time of arrival on the engine's clock, in seconds.
        sample_index: Which of the `n` samples of a prompt this is, from 0.
        cache_salt: Requests share cache entries only when their salts are equal.
        images: Decoded images of a multimodal prompt, opaque to every part but the model.
        grammar: A compiled grammar (`deepinfer.core.protocols.Grammar`), or None.

    Raises:
        InvalidRequest: The prompt is empty, an id is not an integer from 0, or another field is unusable.
    """

    rid: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    arrival_s: float = 0.0
    sample_index: int = 0
    cache_salt: str | None = None
    images: tuple[Any, ...] = ()
    grammar: Any = None

    def __post_init__(self) -> None:
        """Checks every field and stores it in its plain type."""
        checks.check_text("rid", self.rid, InvalidRequest)
        object.__setattr__(self, "prompt_token_ids", _token_ids(self.prompt_token_ids))
        if not isinstance(self.params, SamplingParams):
            checks.fail("params", self.params, "a SamplingParams", InvalidRequest)
        checks.check_int("priority", self.priority, -_INT_MAX, _INT_MAX, InvalidRequest)
        checks.check_float("arrival_s", self.arrival_s, 0.0, 1e18, InvalidRequest)
        checks.check_int("sample_index", self.sample_index, 0, _INT_MAX, InvalidRequest)
        if self.cache_salt is not None:
            checks.check_text("cache_salt", self.cache_salt, InvalidRequest)
        object.__setattr__(self, "images", tuple(self.images))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.prompt_token_ids)

    def __repr__(self) -> str:
        return f"Request({self.rid!r}, {self.num_prompt_tokens} prompt tokens, priority={self.priority})"


def _token_ids(values: Any) -> tuple[int, ...]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        checks.fail(
            "prompt_token_ids",
            values,
            "a sequence of integers",
            InvalidRequest,
            "Encode text with the tokenizer first.",
        )
    ids = tuple(values)
    if not ids:
        checks.fail("prompt_token_ids", ids, "at least one token id", InvalidRequest)
    # The one pass over types keeps a prompt of a million tokens cheap; the slow path only finds the culprit.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _INT_MAX:
        return ids
    return tuple(
        checks.check_int(f"prompt_token_ids[{index}]", item, 0, _INT_MAX, InvalidRequest)
        for index, item in enumerate(ids)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What one step added to one output.

    Attributes:
        rid: Id of the request.
        index: Which of the `n` samples.
        text: New text that is safe to show: no broken character, no beginning of a stop string.
        token_ids: New token ids; text may lag behind them.
        finish_reason: Set on the last delta.
        logprobs: One entry a new token when asked for, else None.
        usage: Token counts so far.
        error: Why the request failed, or None.
        stop_reason: On the last delta, the stop string or stop token id that ended it, or None.
    """

    rid: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    usage: Usage = field(default_factory=Usage)
    error: DeepInferError | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One finished, or so far produced, continuation.

    Attributes:
        rid: Id of the request.
        text: Generated text, without the stop string that ended it.
        token_ids: Generated token ids, with the token that ended it.
        finish_reason: Why it ended, or None while it runs.
        stop_reason: The stop string or stop token id that ended it, or None.
        index: Which of the `n` samples.
        logprobs: One entry a generated token when asked for, else None.
        prompt_logprobs: One entry a prompt token when asked for, the first None, else None.
        usage: Token counts.
        approximate_prefix: Whether window state was rebuilt by a bounded replay after a cache hit.
        arrival_s: Arrival on the engine's clock, in seconds.
        first_token_s: Time of the first token on that clock, or None.
        finish_s: Time of the end on that clock, or None.
        error: Why it failed, or None.
    """

    rid: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage = field(default_factory=Usage)
    approximate_prefix: bool = False
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finish_s: float | None = None
    error: DeepInferError | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token, or None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s
