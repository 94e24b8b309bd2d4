"""One output while it grows: tokens to deltas, stop strings, log probabilities, usage and times."""

from __future__ import annotations

import copy
from collections.abc import Callable

from deepinfer.core import _checks as checks
from deepinfer.core.errors import DeepInferError, EngineDead, InvalidRequest, RequestError
from deepinfer.core.plan import RowRole
from deepinfer.core.protocols import Tokenizer
from deepinfer.core.types import FinishReason, Output, OutputDelta, Request, TokenLogprob, Usage
from deepinfer.engine.stop import OutputText
from deepinfer.engine.token_delta import block_delta, token_delta, usage_of
from deepinfer.scheduling import Progress

__all__ = ["OutputBuilder", "Sink", "as_request_error"]

Sink = Callable[[OutputDelta], None]
"""Takes deltas. One with a true attribute `only_ends` is spared those that bring tokens and no end."""


def as_request_error(error: BaseException, rid: str) -> DeepInferError:
    """The error that one request ends with.

    Args:
        error: What happened.
        rid: Id of the request.

    Returns:
        The error itself when it is one of a request or the end of the engine, else a `RequestError` with it as the cause.
    """
    if isinstance(error, EngineDead):
        return error
    if isinstance(error, RequestError):
        if error.rid not in (None, rid):  # one failure can end several requests
            cause, error = error, copy.copy(error)
            error.__cause__ = cause
        error.rid = rid
        return error
    wrapped = RequestError(
        f"request {rid!r} ended because its step failed ({type(error).__name__}: {error}); the engine "
        "is still usable, and __cause__ holds the failure.",
        rid=rid,
    )
    wrapped.__cause__ = error
    return wrapped


class OutputBuilder:
    """Collects what the steps add to one sample of one prompt.

    Args:
        request: The request of this sample.
        parent_rid: Id that the caller knows.
        tokenizer: Makes the text, or None for an output of ids only.
        sink: Takes the deltas.

    Raises:
        InvalidRequest: The sink cannot be called.

    Attributes:
        finish_reason: Why it ended, or None while it runs.
        error: Why it failed, or None.
        wants_ends_only: Whether the sink is to hear of the end only.
        takes_tokens: Whether a token that is nothing but a token may be given to `push_token`.
        takes_blocks: Whether tokens that are nothing but tokens may be given to `push_block`.
    """

    def __init__(
        self, request: Request, parent_rid: str, tokenizer: Tokenizer | None, sink: Sink
    ) -> None:
        if not callable(sink):
            checks.fail("sink", sink, "a function of one delta", InvalidRequest)
        params = request.params
        self.request = request
        self.parent_rid = parent_rid
        self.sink = sink
        self.finish_reason: FinishReason | None = None
        self.error: DeepInferError | None = None
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finish_s: float | None = None
        self._text = OutputText(tokenizer.stream(), params.stop) if tokenizer is not None else None
        self._token_ids: list[int] = []
        self._stop_reason: str | int | None = None
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._drafted = self._verified = self._accepted = 0
        self._cached = self._replayed = 0
        self._is_approximate = False
        self._num_prompt_tokens = request.num_prompt_tokens
        self.wants_ends_only = bool(getattr(sink, "only_ends", False))
        self.takes_tokens = params.logprobs is None and request.grammar is None
        self.takes_blocks = self.takes_tokens and not params.stop

    @property
    def rid(self) -> str:
        """Id of the request inside the engine."""
        return self.request.rid

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return len(self._token_ids)

    @property
    def drafts(self) -> tuple[int, int]:
        """Drafts verified, and how many of them became output."""
        return self._verified, self._accepted

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return usage_of(
            self._num_prompt_tokens,
            self._cached,
            self._replayed,
            len(self._token_ids),
            self._drafted,
            self._verified,
            self._accepted,
        )

    def push_token(self, token_id: int, now: float) -> OutputDelta | None:
        """Takes one token that was decoded and after which the request goes on, as far as the scheduler knows.

        Args:
            token_id: Its id.
            now: Time in seconds.

        Returns:
            The delta; None when the sink wants to hear of the end only, and this is none.
        """
        text = ""
        if self._text is not None:
            text = self._text.push_one(token_id)
        self._token_ids.append(token_id)
        self.last_token_s = now
        if self._text is not None and self._text.stop_reason is not None:
            self.finish_reason, self.finish_s = FinishReason.STOP, now
            self._stop_reason = self._text.stop_reason
        elif self.wants_ends_only:
            return None
        else:
            return token_delta(
                self.parent_rid, self.request.sample_index, text, token_id, self.usage
            )
        return OutputDelta(
            rid=self.parent_rid,
            index=self.request.sample_index,
            text=text,
            token_ids=(token_id,),
            finish_reason=FinishReason.STOP,
            usage=self.usage,
            stop_reason=self._stop_reason,
        )

    def push_block(
        self, token_ids: list[int], drafts: int, accepted: int, now: float
    ) -> OutputDelta | None:
        """Takes the tokens of one step after which the request goes on.

        Args:
            token_ids: Their ids, at least one.
            drafts: Drafts that the step verified.
            accepted: How many of the tokens they are.
            now: Time in seconds.

        Returns:
            The delta; None when the sink wants to hear of the end only.
        """
        text = "" if self._text is None else self._text.push(token_ids)
        self._token_ids += token_ids
        self._drafted += drafts
        self._verified += drafts
        self._accepted += accepted
        self.last_token_s = now
        if self.wants_ends_only:
            return None
        usage = usage_of(
            self._num_prompt_tokens, self._cached, self._replayed, len(self._token_ids), self._drafted,
            self._verified, self._accepted,
        )  # fmt: skip
        return block_delta(
            self.parent_rid, self.request.sample_index, text, tuple(token_ids), usage
        )

    def push(self, progress: Progress, now: float) -> OutputDelta | None:
        """Takes what one step changed.

        Args:
            progress: The change.
            now: Time in seconds.

        Returns:
            The delta, or None when there is nothing to tell: a chunk of prompt was run.
        """
        self._take_prompt_logprobs(progress)
        sequence = progress.sequence
        if sequence.is_approximate:
            self._is_approximate = True
        self._cached, self._replayed = sequence.adopted_tokens, sequence.replayed_tokens
        if progress.error is not None:
            return self.end(FinishReason.ERROR, now, error=progress.error)
        tokens = progress.token_ids
        if not tokens:
            return None
        reason, stop_reason = progress.finish_reason, progress.stop_token_id
        text = ""
        if self._text is not None:
            text = self._text.push(tokens if stop_reason is None else tokens[:-1])
            if self._text.stop_reason is None and reason is not None:
                text += self._text.finish()
            if self._text.stop_reason is not None:
                tokens = tokens[: len(self._text.token_ids) - len(self._token_ids)]
                reason, self._stop_reason = FinishReason.STOP, self._text.stop_reason
        if self._stop_reason is None:
            self._stop_reason = stop_reason
        return self._grow(progress, tokens, text, reason, now)

    def _grow(
        self,
        progress: Progress,
        tokens: tuple[int, ...],
        text: str,
        reason: FinishReason | None,
        now: float,
    ) -> OutputDelta:
        self._token_ids += tokens
        logprobs = None
        if self._logprobs is not None:
            logprobs = progress.logprobs[: len(tokens)]
            self._logprobs += logprobs
        if progress.role is RowRole.VERIFY:
            self._drafted += progress.num_drafts
            self._verified += progress.num_drafts
            self._accepted += min(progress.num_accepted, len(tokens))
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now
        if reason is not None:
            self.finish_reason, self.finish_s = reason, now
        return OutputDelta(
            rid=self.parent_rid,
            index=self.request.sample_index,
            text=text,
            token_ids=tokens,
            finish_reason=reason,
            logprobs=logprobs,
            usage=self.usage,
            stop_reason=self._stop_reason,
        )

    def end(
        self, reason: FinishReason, now: float, error: BaseException | None = None
    ) -> OutputDelta:
        """Ends the output from outside: aborted, or failed. Held-back text is let out.

        Args:
            reason: Why.
            now: Time in seconds.
            error: The cause of a failure, or None.

        Returns:
            The last delta.
        """
        text = ""
        try:
            text = self._text.finish() if self._text is not None else ""
        except Exception as failure:  # a request must end, whatever its tokenizer does
            reason, error = FinishReason.ERROR, error or failure
        if error is not None:
            self.error = as_request_error(error, self.parent_rid)
        self.finish_reason, self.finish_s = reason, now
        return OutputDelta(
            rid=self.parent_rid,
            index=self.request.sample_index,
            text=text,
            finish_reason=reason,
            logprobs=() if self._logprobs is not None else None,
            usage=self.usage,
            error=self.error,
        )

    def output(self) -> Output:
        """Everything so far."""
        prompt_logprobs = self._prompt_logprobs
        return Output(
            rid=self.parent_rid,
            text=self._text.text if self._text is not None else "",
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            index=self.request.sample_index,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            usage=self.usage,
            approximate_prefix=self._is_approximate,
            arrival_s=self.request.arrival_s,
            first_token_s=self.first_token_s,
            finish_s=self.finish_s,
            error=self.error,
        )

    def _take_prompt_logprobs(self, progress: Progress) -> None:
        """Adds the entries that are new; a request that is run again brings the old ones once more."""
        if self._prompt_logprobs is not None:
            entries = progress.results.prompt_logprobs.get(progress.index, ())
            if entries:
                first = int(progress.plan_rows.first_positions[progress.index])
                known = len(self._prompt_logprobs) - 1 - first
                self._prompt_logprobs += entries[max(0, known) :]
