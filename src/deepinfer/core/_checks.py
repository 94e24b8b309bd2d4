"""Checks of user input, shared by the dataclasses of core; each failure says found, limit and remedy."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from deepinfer.core.errors import ConfigError, InvalidRequest

InputError = type[ConfigError] | type[InvalidRequest]

_REPR_LIMIT = 80


def show(value: object) -> str:
    """A short repr for messages, never longer than about 80 characters; values without a repr are described."""
    try:
        text = repr(value)
    except Exception:  # Python refuses to write out huge integers, and a repr may be broken
        bits = (
            f" of {value.bit_length()} bits" if isinstance(value, int) else " that cannot be shown"
        )
        text = f"<{type(value).__name__}{bits}>"
    return text if len(text) <= _REPR_LIMIT else f"{text[: _REPR_LIMIT - 3]}..."


def plain_text(value: str) -> str:
    """The characters of a string as a plain `str`; `str()` would give the name of a string enum's member."""
    return str.__str__(value)


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when none is close; ties go to the first in sorted order."""
    text = name if isinstance(name, str) else show(name)
    matches = difflib.get_close_matches(text, sorted(known), n=1, cutoff=0.55)
    return matches[0] if matches else None


def unknown_key_message(what: str, name: object, known: Iterable[str]) -> str:
    """Message for an unknown option: the name, the nearest known one, and the whole list."""
    known = sorted(known)
    nearest = nearest_name(name, known)
    hint = f"did you mean {nearest!r}? " if nearest else ""
    return f"{what} has no option {show(name)}; {hint}Known options: {', '.join(known)}."


def check_keys(what: str, given: Iterable[object], known: Iterable[str], error: InputError) -> None:
    """Refuses the first key of `given` that is not among `known`."""
    known = set(known)
    for name in given:
        if name not in known:
            text = name if isinstance(name, str) else show(name)
            raise error(unknown_key_message(what, name, known), field=text, value=name)


def fail(what: str, value: object, limit: str, error: InputError, hint: str = "") -> Any:
    """Raises `error` for option `what`."""
    message = f"{what} is {show(value)} ({type(value).__name__}); it must be {limit}."
    raise error(f"{message} {hint}" if hint else message, field=what, value=value, limit=limit)


def check_int(
    what: str, value: object, low: int, high: int, error: InputError, hint: str = ""
) -> int:
    """An integer within [low, high]; bool is refused, NumPy integers are taken."""
    limit = f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        fail(what, value, limit, error, hint)
    number: int = int(value)  # type: ignore[call-overload]
    if not low <= number <= high:
        fail(what, value, limit, error, hint)
    return number


def check_float(
    what: str,
    value: object,
    low: float,
    high: float,
    error: InputError,
    hint: str = "",
    *,
    open_low: bool = False,
) -> float:
    """A finite number within [low, high], or (low, high] with `open_low`; bool, NaN and infinity are refused."""
    limit = (
        f"a number {'above' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
    )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(what, value, limit, error, hint)
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        fail(what, value, limit, error, hint)
    if math.isnan(number) or not low <= number <= high or (open_low and number == low):
        fail(what, value, limit, error, hint)
    return number


def check_bool(what: str, value: object, error: InputError) -> bool:
    """A bool and nothing else."""
    if not isinstance(value, bool):
        fail(what, value, "True or False", error)
    return bool(value)


def check_text(what: str, value: object, error: InputError, hint: str = "") -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value:
        fail(what, value, "a non-empty string", error, hint)
    return plain_text(value)  # type: ignore[arg-type]


def check_choice(what: str, value: object, choices: Iterable[str], error: InputError) -> str:
    """One of a few strings."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        nearest = nearest_name(value, known)
        hint = f"Did you mean {nearest!r}?" if nearest else ""
        fail(what, value, "one of " + ", ".join(repr(name) for name in known), error, hint)
    return plain_text(value)  # type: ignore[arg-type]


T = TypeVar("T")


def optional(value: object, check: Callable[[object], T]) -> T | None:
    """None, or whatever `check` makes of the value."""
    return None if value is None else check(value)


def check_mapping(what: str, value: object, error: InputError) -> Mapping[Any, Any]:
    """A mapping."""
    if not isinstance(value, Mapping):
        fail(what, value, "a mapping", error)
    return value  # type: ignore[return-value]
