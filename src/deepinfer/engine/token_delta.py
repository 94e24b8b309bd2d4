"""The delta of one more token, made for every decoding request in every step."""

from __future__ import annotations

from deepinfer.core.types import OutputDelta, Usage

__all__ = ["block_delta", "token_delta", "usage_of"]

# A frozen dataclass sets each field through a check; the setters of its slots take a third of the time.
_USAGE = tuple(
    getattr(Usage, name).__set__
    for name in ("prompt", "cached", "replayed", "generated", "drafted", "verified", "accepted")
)
_DELTA = tuple(
    getattr(OutputDelta, name).__set__
    for name in (
        "rid", "index", "text", "token_ids", "finish_reason", "logprobs", "usage", "error",
        "stop_reason",
    )
)  # fmt: skip
_PROMPT, _CACHED, _REPLAYED, _GENERATED, _DRAFTED, _VERIFIED, _ACCEPTED = _USAGE
_RID, _INDEX, _TEXT, _TOKEN_IDS, _FINISH_REASON, _LOGPROBS, _USED, _ERROR, _STOP_REASON = _DELTA
_new = object.__new__


def usage_of(
    prompt: int,
    cached: int,
    replayed: int,
    generated: int,
    drafted: int,
    verified: int,
    accepted: int,
) -> Usage:
    """`Usage` of these numbers.

    Args:
        prompt: As in `Usage`.
        cached: As in `Usage`.
        replayed: As in `Usage`.
        generated: As in `Usage`.
        drafted: As in `Usage`.
        verified: As in `Usage`.
        accepted: As in `Usage`.
    """
    out = _new(Usage)
    _PROMPT(out, prompt)
    _CACHED(out, cached)
    _REPLAYED(out, replayed)
    _GENERATED(out, generated)
    _DRAFTED(out, drafted)
    _VERIFIED(out, verified)
    _ACCEPTED(out, accepted)
    return out


def token_delta(rid: str, index: int, text: str, token_id: int, usage: Usage) -> OutputDelta:
    """`OutputDelta` of one token of an output that goes on.

    Args:
        rid: As in `OutputDelta`.
        index: As in `OutputDelta`.
        text: As in `OutputDelta`.
        token_id: The token.
        usage: As in `OutputDelta`.
    """
    return block_delta(rid, index, text, (token_id,), usage)


def block_delta(
    rid: str, index: int, text: str, token_ids: tuple[int, ...], usage: Usage
) -> OutputDelta:
    """`OutputDelta` of some tokens of an output that goes on.

    Args:
        rid: As in `OutputDelta`.
        index: As in `OutputDelta`.
        text: As in `OutputDelta`.
        token_ids: The tokens.
        usage: As in `OutputDelta`.
    """
    out = _new(OutputDelta)
    _RID(out, rid)
    _INDEX(out, index)
    _TEXT(out, text)
    _TOKEN_IDS(out, token_ids)
    _FINISH_REASON(out, None)
    _LOGPROBS(out, None)
    _USED(out, usage)
    _ERROR(out, None)
    _STOP_REASON(out, None)
    return out
