"""Decimal digits of numbers, and exponents as expressions."""

from __future__ import annotations

import functools
from fractions import Fraction

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.ir import EPS, Expr, alt, byte_set, literal, optional, seq

__all__ = ["MAX_EXPONENT", "decimal_digits", "decimal_scale", "exponents", "normalised"]

MAX_EXPONENT = 999
_MAX_DIGITS = 400


def decimal_digits(value: Fraction) -> tuple[str, str]:
    """Digits before and behind the point of a terminating decimal >= 0; the second part has no trailing zeros."""
    scale = decimal_scale(value.denominator)
    whole, rest = divmod(value.numerator * 10**scale // value.denominator, 10**scale)
    digits = str(rest).rjust(scale, "0") if scale else ""
    text = str(whole)
    if len(text) + len(digits) > _MAX_DIGITS:
        raise GrammarTooLarge(
            f"a number of {len(text) + len(digits)} digits is more than {_MAX_DIGITS}; use a smaller one",
            resource="digits",
            limit=_MAX_DIGITS,
            found=len(text) + len(digits),
        )
    return text, digits.rstrip("0")


def decimal_scale(denominator: int) -> int:
    """The least power of ten that a denominator of twos and fives divides."""
    scale = 0
    power = 1
    while power % denominator:
        power *= 10
        scale += 1
    return scale


def normalised(value: Fraction) -> tuple[str, int]:
    """Significant digits and exponent of a terminating decimal > 0: 0.015 -> ("15", -2)."""
    whole, rest = decimal_digits(value)
    digits = (whole + rest).lstrip("0")
    exponent = len(whole) - 1 - (len(whole + rest) - len(digits))
    return digits.rstrip("0"), exponent


@functools.lru_cache(maxsize=1024)
def exponents(ranges: tuple[tuple[int, int], ...]) -> Expr:
    """Integers of ranges within -999..999, with an optional plus and leading zeros, one to three digits."""
    parts: list[Expr] = []
    for sign, low, high in ((EPS, 0, MAX_EXPONENT), (literal(b"-"), -MAX_EXPONENT, 0)):
        wanted = [(max(a, low), min(b, high)) for a, b in ranges if max(a, low) <= min(b, high)]
        sizes = [(a, b) if sign is EPS else (-b, -a) for a, b in wanted]
        if sizes:
            digits = [
                _number_range(max(a, 0), min(b, 10**width - 1), width)
                for a, b in sizes
                for width in (1, 2, 3)
                if a <= 10**width - 1
            ]
            prefix = optional(literal(b"+")) if sign is EPS else sign
            parts.append(seq(prefix, alt(*digits)))
    return alt(*parts)


@functools.lru_cache(maxsize=4096)
def _number_range(first: int, last: int, width: int) -> Expr:
    """Numbers of a range in exactly `width` decimal digits; at most three deep."""
    if width == 0:
        return EPS
    unit = 10 ** (width - 1)
    parts = []
    for digit in range(first // unit, last // unit + 1):
        low, high = max(first - digit * unit, 0), min(last - digit * unit, unit - 1)
        parts.append((bytes((0x30 + digit,)), _number_range(low, high, width - 1)))
    grouped: dict[Expr, bytes] = {}
    for byte, rest in parts:
        grouped[rest] = grouped.get(rest, b"") + byte
    return alt(*(seq(byte_set(lead), rest) for rest, lead in grouped.items()))
