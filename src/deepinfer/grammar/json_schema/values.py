"""JSON values as immutable keys under JSON Schema's equality: 1 equals 1.0, member order is void, true is not 1."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from deepinfer.core.errors import GrammarSyntaxError, GrammarTooLarge

__all__ = ["JsonValue", "freeze", "to_fraction", "type_of"]

_MAX_NESTING = 200
_MAX_POWER = 1000

JsonValue = tuple[str, Any]
"""(type, content): type is "null", "true", "false", "number" (a Fraction), "string", "array" (a tuple of values) or
"object" (a tuple of (key, value), by key)."""


def to_fraction(value: Any) -> Fraction | None:
    """A JSON number exactly, as its shortest decimal; None when it is no finite number.

    Raises:
        GrammarTooLarge: Its exponent is beyond 1,000.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, int):
        return Fraction(value)
    number = Decimal(repr(value)) if isinstance(value, float) else value
    if not number.is_finite():
        return None
    if number and abs(number.adjusted()) > _MAX_POWER:
        raise GrammarTooLarge(
            f"number {number} has an exponent beyond {_MAX_POWER}; use a smaller one",
            resource="exponent",
            limit=_MAX_POWER,
            found=abs(number.adjusted()),
        )
    return Fraction(number)


def freeze(value: Any, pointer: str, nesting: int = 0) -> JsonValue:
    """A JSON value as an immutable key.

    Args:
        value: The value, as `json.loads` gives it.
        pointer: Where it stands, for messages.
        nesting: How many values it is in.

    Returns:
        The key; equal for equal JSON values.

    Raises:
        GrammarTooLarge: It is nested more than 200 levels deep.
        GrammarSyntaxError: It is no JSON value.
    """
    if value is None:
        return ("null", None)
    if value is True:
        return ("true", None)
    if value is False:
        return ("false", None)
    if isinstance(value, str):
        return ("string", value)
    if nesting > _MAX_NESTING:
        raise GrammarTooLarge(
            f"the value at {pointer!r} is nested more than {_MAX_NESTING} levels deep; use a flatter one",
            resource="nesting",
            limit=_MAX_NESTING,
            found=nesting,
        )
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise GrammarSyntaxError(
                    f"a value at {pointer!r} has a member named {name!r} ({type(name).__name__}); names are texts"
                )
        pairs = [(name, freeze(v, pointer, nesting + 1)) for name, v in value.items()]
        return ("object", tuple(sorted(pairs, key=lambda pair: pair[0])))
    if isinstance(value, list | tuple):
        return ("array", tuple(freeze(item, pointer, nesting + 1) for item in value))
    number = to_fraction(value)
    if number is None:
        raise GrammarSyntaxError(
            f"{value!r} at {pointer!r} is no JSON value; use null, a number, ..."
        )
    return ("number", number)


def type_of(value: JsonValue) -> str:
    """The type of a frozen value; "true" and "false" are types of their own."""
    return value[0]
