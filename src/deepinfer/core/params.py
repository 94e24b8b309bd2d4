"""How one request wants its tokens chosen."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import InvalidRequest

__all__ = ["SamplingParams"]

_INT_MAX = 2**31 - 1
_SEED_MAX = 2**64 - 1
_MAX_LOGPROBS = 1024
_MAX_SAMPLES = 1024
_MAX_STOPS = 128
_MAX_STOP_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request, checked when they are made.

    Temperature 0 takes the highest logit, ties to the lowest token id. With a seed the tokens are a pure
    function of (seed, output position, logits); without one the engine draws a seed for the request.

    Attributes:
        max_tokens: Most tokens to generate, from 1.
        temperature: 0 for greedy, else from 1e-5 to 100.
        top_p: Smallest set of tokens whose probability reaches this, above 0 up to 1; 1 is off.
        top_k: Keep this many highest logits; 0 and -1 are off. Ties at the edge keep the lower id.
        min_p: Keep tokens of at least this share of the highest probability, from 0 to 1.
        seed: From 0 to 2**64 - 1, or None.
        n: Samples to draw from one prompt; sample i uses a seed derived from (seed, i).
        stop: Strings that end the output; the match itself is not returned.
        stop_token_ids: Token ids that end the output.
        ignore_eos: Go on past the end-of-sequence token; with a grammar, as long as it lets the output go on.
        logprobs: None for none, 0 for the chosen token only, k for the k likeliest as well.
        prompt_logprobs: The same for the prompt's tokens.
        presence_penalty: Subtracted once from every token already generated, from -2 to 2.
        frequency_penalty: Subtracted for each time a token was generated, from -2 to 2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen, above 0 up to 100.
        logit_bias: Token id to number added to its logit, from -100 to 100.
        regex: Output must match this regular expression as a whole.
        json_schema: Output must be JSON valid against this schema: mapping, bool or JSON text.
        ebnf: Output must be derived from this grammar.

    Raises:
        InvalidRequest: A value has the wrong type or is out of range; more than one of regex, json_schema
            and ebnf is given.

    Examples:
        >>> SamplingParams(temperature=0, max_tokens=8).is_greedy
        True
        >>> SamplingParams(top_p=0)
        Traceback (most recent call last):
            ...
        deepinfer.core.errors.InvalidRequest: top_p is 0 (int); it must be a number above 0 up to 1.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    regex: str | None = None
    json_schema: Mapping[str, Any] | str | bool | None = field(default=None, hash=False)
    ebnf: str | None = None

    def __post_init__(self) -> None:
        """Checks every field and stores it in its plain type."""
        bad = InvalidRequest
        new: dict[str, Any] = {
            "max_tokens": checks.check_int("max_tokens", self.max_tokens, 1, _INT_MAX, bad),
            "temperature": _temperature(self.temperature),
            "top_p": checks.check_float("top_p", self.top_p, 0.0, 1.0, bad, open_low=True),
            "top_k": checks.check_int("top_k", self.top_k, -1, _INT_MAX, bad),
            "min_p": checks.check_float("min_p", self.min_p, 0.0, 1.0, bad),
            "n": checks.check_int("n", self.n, 1, _MAX_SAMPLES, bad),
            "stop": _stop(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "ignore_eos": checks.check_bool("ignore_eos", self.ignore_eos, bad),
            "repetition_penalty": checks.check_float(
                "repetition_penalty", self.repetition_penalty, 0.0, 100.0, bad, open_low=True
            ),
            "logit_bias": _logit_bias(self.logit_bias),
            "json_schema": _json_schema(self.json_schema),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            new[name] = checks.check_float(name, getattr(self, name), -2.0, 2.0, bad)
        for name, high in (
            ("seed", _SEED_MAX),
            ("logprobs", _MAX_LOGPROBS),
            ("prompt_logprobs", _MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            new[name] = None if value is None else checks.check_int(name, value, 0, high, bad)
        for name in ("regex", "ebnf"):
            value = getattr(self, name)
            new[name] = None if value is None else checks.check_text(name, value, bad)
        for name, value in new.items():
            object.__setattr__(self, name, value)
        grammars = [g for g in ("regex", "json_schema", "ebnf") if getattr(self, g) is not None]
        if len(grammars) > 1:
            raise InvalidRequest(
                f"{' and '.join(grammars)} are both given; one output can follow one grammar only. "
                "Give one of regex, json_schema and ebnf.",
                field=grammars[1],
                value=getattr(self, grammars[1]),
                limit="one grammar",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken without drawing."""
        return self.temperature == 0.0

    @property
    def has_grammar(self) -> bool:
        """Whether the output is constrained by regex, json_schema or ebnf."""
        return self.regex is not None or self.json_schema is not None or self.ebnf is not None

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes a logit."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed.

        Args:
            changes: Field names and new values.

        Returns:
            The checked copy.

        Raises:
            InvalidRequest: A name is unknown or a value unusable.
        """
        checks.check_keys("SamplingParams", changes, self.__dataclass_fields__, InvalidRequest)
        return dataclasses.replace(self, **changes)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with another seed that shares everything else; nothing is checked again but the seed.

        Args:
            seed: From 0 to 2**64 - 1.

        Returns:
            The copy.

        Raises:
            InvalidRequest: The seed is out of range.
        """
        seed = checks.check_int("seed", seed, 0, _SEED_MAX, InvalidRequest)
        out = copy.copy(self)
        object.__setattr__(out, "seed", seed)
        return out

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that `from_dict` takes; tuples become lists."""
        out: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value)
            out[name] = dict(value) if isinstance(value, Mapping) else value
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Makes parameters from a mapping such as parsed JSON.

        Args:
            values: Field names and values. Keys of `logit_bias` may be decimal strings, as in JSON.

        Returns:
            The checked parameters.

        Raises:
            InvalidRequest: A name is unknown (the message gives the nearest known one) or a value unusable.
        """
        checks.check_mapping("SamplingParams", values, InvalidRequest)
        checks.check_keys("SamplingParams", values, cls.__dataclass_fields__, InvalidRequest)
        values = dict(values)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_json_key(key): value for key, value in bias.items()}
        return cls(**values)


def _json_key(key: object) -> object:
    is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    return int(key) if is_digits else key  # type: ignore[call-overload]


def _temperature(value: object) -> float:
    number = checks.check_float("temperature", value, 0.0, 100.0, InvalidRequest)
    if 0.0 < number < 1e-5:
        checks.fail(
            "temperature", value, "0, or from 1e-05 to 100", InvalidRequest, "Use 0 for greedy."
        )
    return number


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        checks.fail("stop", value, "a string or a sequence of strings", InvalidRequest)
    if len(value) > _MAX_STOPS:
        checks.fail("stop", len(value), f"at most {_MAX_STOPS} strings", InvalidRequest)
    texts = tuple(
        checks.check_text(f"stop[{index}]", text, InvalidRequest)
        for index, text in enumerate(value)
    )
    for index, text in enumerate(texts):
        if len(text) > _MAX_STOP_CHARS:
            checks.fail(
                f"stop[{index}]", text, f"at most {_MAX_STOP_CHARS} characters", InvalidRequest
            )
    return texts


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        value = value.tolist()  # an array, as prompts may be
    if not isinstance(value, Sequence | set | frozenset) or isinstance(
        value, str | bytes | bytearray
    ):
        checks.fail("stop_token_ids", value, "a sequence of token ids", InvalidRequest)
    return tuple(
        checks.check_int(f"stop_token_ids[{index}]", item, 0, _INT_MAX, InvalidRequest)
        for index, item in enumerate(value)
    )


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    bias = checks.check_mapping("logit_bias", value, InvalidRequest)
    return {
        checks.check_int("logit_bias key", key, 0, _INT_MAX, InvalidRequest): checks.check_float(
            f"logit_bias[{checks.show(key)}]", number, -100.0, 100.0, InvalidRequest
        )
        for key, number in bias.items()
    }


def _json_schema(value: object) -> Mapping[str, Any] | str | bool | None:
    if isinstance(value, str) and value:
        return checks.plain_text(value)
    if value is None or isinstance(value, bool | Mapping):
        return value
    checks.fail("json_schema", value, "a mapping, a bool or JSON text", InvalidRequest)
    return None
