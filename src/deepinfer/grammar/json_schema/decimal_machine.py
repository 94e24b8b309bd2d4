"""Automata that read a decimal number and know how it compares with bounds and what it leaves divided."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Expr,
    alt,
    byte_set,
    intersect,
    literal,
    optional,
    plus,
    repeat,
    seq,
)
from deepinfer.grammar.json_schema.decimal_states import State, explore, states_to_expr
from deepinfer.grammar.json_schema.decimal_text import (
    MAX_EXPONENT,
    decimal_digits,
    decimal_scale,
    exponents,
    normalised,
)
from deepinfer.grammar.json_schema.formula import (
    And,
    Compare,
    Formula,
    Multiple,
    NumberIn,
    Or,
    conjunction,
    evaluate,
    unit_atoms,
)

__all__ = ["Fractions", "Machine", "whole_scientific"]

_MAX_BOUNDS = 64
_MAX_DIVISOR = 10_000

Track = tuple[object, ...]
Fractions = Literal["no", "maybe", "must"]


class _Bound:
    """Compares the digits of a magnitude with a bound >= 0 while they are read."""

    def __init__(self, magnitude: Fraction) -> None:
        self.whole, self.rest = decimal_digits(magnitude)
        self.digits, self.exponent = normalised(magnitude) if magnitude else ("", 0)

    def first(self) -> Track:
        return (0, 0)

    def whole_digit(self, state: Track, digit: int) -> Track:
        read, order = state
        assert isinstance(read, int)  # noqa: S101 - for the type checker
        if read < len(self.whole):
            wanted = ord(self.whole[read]) - 48
            return (read + 1, order or (digit > wanted) - (digit < wanted))
        return (len(self.whole) + 1, 1)

    def point(self, state: Track) -> Track:
        read, order = state
        assert isinstance(read, int)  # noqa: S101
        if read < len(self.whole):
            order = -1
        return (0, order) if order == 0 else (-1, order)

    def fraction_digit(self, state: Track, digit: int) -> Track:
        read, order = state
        assert isinstance(read, int)  # noqa: S101
        if order:
            return state
        wanted = ord(self.rest[read]) - 48 if read < len(self.rest) else 0
        if digit != wanted:
            return (-1, 1 if digit > wanted else -1)
        return (min(read + 1, len(self.rest)), 0)

    def order(self, state: Track, in_fraction: bool) -> int:
        """-1, 0 or 1: the magnitude is below, at or above the bound if it ends here."""
        if not in_fraction:
            state = self.point(state)
        read, order = state
        assert isinstance(read, int) and isinstance(order, int)  # noqa: S101, PT018
        if order:
            return order
        return -1 if read < len(self.rest) else 0

    def mantissa_digit(self, state: Track, digit: int) -> Track:
        read, order = state
        assert isinstance(read, int)  # noqa: S101
        if order or not self.digits:
            return (-1, order or 1)
        wanted = ord(self.digits[read]) - 48 if read < len(self.digits) else 0
        if digit != wanted:
            return (-1, 1 if digit > wanted else -1)
        return (min(read + 1, len(self.digits)), 0)

    def mantissa_order(self, state: Track) -> int:
        read, order = state
        assert isinstance(read, int) and isinstance(order, int)  # noqa: S101, PT018
        return order or (-1 if read < len(self.digits) else 0)


class _Divisor:
    """Follows the remainder of a magnitude while its digits are read.

    The divisor is `modulus / 10**scale`; a number is a multiple when it has no digits behind `scale` places and,
    scaled up, leaves no remainder.
    """

    def __init__(self, of: Fraction) -> None:
        self.scale = decimal_scale(of.denominator)
        self.modulus = of.numerator * 10**self.scale // of.denominator
        if self.modulus > _MAX_DIVISOR:
            raise GrammarTooLarge(
                f"multipleOf {float(of):g} needs {self.modulus} remainders, more than {_MAX_DIVISOR}; "
                "use a divisor with fewer digits",
                resource="remainders",
                limit=_MAX_DIVISOR,
                found=self.modulus,
            )

    def first(self) -> Track:
        return (0, -1)

    def whole_digit(self, state: Track, digit: int) -> Track:
        return ((state[0] * 10 + digit) % self.modulus, -1)  # type: ignore[operator]

    def point(self, state: Track) -> Track:
        return (state[0], 0)

    def fraction_digit(self, state: Track, digit: int) -> Track:
        rest, places = state
        assert isinstance(rest, int) and isinstance(places, int)  # noqa: S101, PT018
        if places < self.scale:
            return ((rest * 10 + digit) % self.modulus, places + 1)
        return (rest, places) if digit == 0 and rest >= 0 else (-1, self.scale)

    def divides(self, state: Track) -> bool:
        rest, places = state
        assert isinstance(rest, int) and isinstance(places, int)  # noqa: S101, PT018
        return rest >= 0 and rest * 10 ** (self.scale - max(places, 0)) % self.modulus == 0

    def spare_exponent(self) -> int | None:
        """Least exponent from which on every integer, scaled by that power of ten, is a multiple; None: never."""
        for exponent in range(self.modulus.bit_length() + 1):
            if 10**exponent % self.modulus == 0:
                return exponent - self.scale
        return None


class Machine:
    """Builds the automata of one formula over numbers.

    Args:
        formula: The formula.
        bounds: Every bound in it.
        divisors: Every divisor in it.
        fraction: Whether plain decimals have a decimal point.
    """

    def __init__(
        self,
        formula: Formula,
        bounds: Iterable[Fraction],
        divisors: Iterable[Fraction],
        fraction: Fractions,
    ) -> None:
        self._formula = formula
        self._bounds = sorted(bounds)
        if len(self._bounds) > _MAX_BOUNDS:
            raise GrammarTooLarge(
                f"one number of the schema has {len(self._bounds)} different bounds, more than {_MAX_BOUNDS}; "
                "use fewer",
                resource="bounds",
                limit=_MAX_BOUNDS,
                found=len(self._bounds),
            )
        self._divisors = sorted(divisors)
        self._remainders = [_Divisor(of) for of in self._divisors]
        self._fraction = fraction

    def _holds(
        self,
        orders: dict[Fraction, int],
        divides: dict[Fraction, bool],
        formula: Formula | None = None,
    ) -> bool:
        def truth(atom: Formula) -> bool:
            if isinstance(atom, Compare):
                order = orders[atom.bound]
                return not atom.strict if order == 0 else (order > 0) == atom.above
            if isinstance(atom, Multiple):
                return divides[atom.of] == atom.holds
            if isinstance(atom, NumberIn):
                return any(orders[value] == 0 for value in atom.values) == atom.holds
            raise TypeError(f"{atom!r} does not speak of numbers")

        return evaluate(self._formula if formula is None else formula, truth)

    def _side(self, negative: bool) -> tuple[list[Fraction], dict[Fraction, int]]:
        """Bounds on this side of zero, and the order of every number of this side against the others."""
        here = [b for b in self._bounds if (b <= 0 if negative else b >= 0)]
        return here, {b: (-1 if negative else 1) for b in self._bounds if b not in here}

    def plain(self, negative: bool) -> tuple[State, ...]:
        """The automaton of plain decimals behind the sign, minimal; no states when it accepts nothing."""
        here, fixed = self._side(negative)
        bounds = [_Bound(abs(b)) for b in here]
        rests = self._remainders
        tracks: tuple[_Bound | _Divisor, ...] = (*bounds, *rests)
        count = len(bounds)

        def accepts(phase: str, track: tuple[Track, ...]) -> bool:
            orders = dict(fixed)
            for bound, compare, state in zip(here, bounds, track, strict=False):
                order = compare.order(state, phase == "fraction")
                orders[bound] = -order if negative else order
            divides = {
                of: rest.divides(state)
                for of, rest, state in zip(self._divisors, rests, track[count:], strict=True)
            }
            return self._holds(orders, divides)

        def moves(node: tuple[str, tuple[Track, ...]]) -> list[tuple[int, object]]:
            phase, track = node
            out: list[tuple[int, object]] = []
            if phase in ("start", "whole"):
                for digit in range(10):
                    after = tuple(
                        t.whole_digit(s, digit) for t, s in zip(tracks, track, strict=True)
                    )
                    zero = phase == "start" and digit == 0
                    out.append((48 + digit, ("zero" if zero else "whole", after)))
            if phase in ("zero", "whole") and self._fraction != "no":
                after = tuple(t.point(s) for t, s in zip(tracks, track, strict=True))
                out.append((46, ("point", after)))
            if phase in ("point", "fraction"):
                for digit in range(10):
                    after = tuple(
                        t.fraction_digit(s, digit) for t, s in zip(tracks, track, strict=True)
                    )
                    out.append((48 + digit, ("fraction", after)))
            return out

        start = ("start", tuple(t.first() for t in tracks))
        ends = ("fraction",) if self._fraction == "must" else ("zero", "whole", "fraction")
        return explore(start, moves, lambda n: n[0] in ends and accepts(n[0], n[1]))

    def scientific(self, negative: bool) -> Expr:
        """Scientific notation behind the sign: one digit 1 to 9, a fraction, an exponent."""
        spare: list[int] = []
        for atom in unit_atoms(self._formula):
            if isinstance(atom, Multiple) and atom.holds:
                exponent = _Divisor(atom.of).spare_exponent()
                if exponent is None:
                    return EMPTY
                spare.append(exponent)
        rest = conjunction(a for a in unit_atoms(self._formula) if not _is_multiple(a))
        if _speaks_of_multiples(rest):
            return EMPTY
        whole = whole_scientific(max(spare)) if spare else None
        here, fixed = self._side(negative)
        if not here or here == [Fraction(0)]:
            order = {Fraction(0): -1 if negative else 1} if here else {}
            if not self._holds({**fixed, **order}, {}, rest):
                return EMPTY
            return whole_scientific(None) if whole is None else whole
        expr = self._scientific_bounds(rest, here, fixed, negative)
        return expr if whole is None else intersect(expr, whole)

    def _scientific_bounds(
        self, formula: Formula, here: list[Fraction], fixed: dict[Fraction, int], negative: bool
    ) -> Expr:
        bounds = [_Bound(abs(b)) for b in here]
        edges = {-MAX_EXPONENT, MAX_EXPONENT + 1}
        for bound in bounds:
            edges.update((bound.exponent, bound.exponent + 1))
        cuts = sorted(c for c in edges if -MAX_EXPONENT <= c <= MAX_EXPONENT + 1)

        def powers(track: tuple[Track, ...]) -> Expr:
            sizes = [b.mantissa_order(s) for b, s in zip(bounds, track, strict=True)]
            ranges: list[tuple[int, int]] = []
            for low, after in itertools.pairwise(cuts):
                orders = dict(fixed)
                for value, bound, size in zip(here, bounds, sizes, strict=True):
                    if not bound.digits:
                        order = 1
                    elif low != bound.exponent:
                        order = 1 if low > bound.exponent else -1
                    else:
                        order = size
                    orders[value] = -order if negative else order
                if self._holds(orders, {}, formula):
                    if ranges and ranges[-1][1] == low - 1:
                        ranges[-1] = (ranges[-1][0], after - 1)
                    else:
                        ranges.append((low, after - 1))
            return exponents(tuple(ranges)) if ranges else EMPTY

        def moves(node: tuple[str, tuple[Track, ...]]) -> list[tuple[int, object]]:
            phase, track = node
            if phase == "point":  # behind the first digit
                return [(46, ("empty", track))]
            after = "point" if phase == "start" else "fraction"
            return [
                (
                    48 + digit,
                    (
                        after,
                        tuple(
                            b.mantissa_digit(s, digit) for b, s in zip(bounds, track, strict=True)
                        ),
                    ),
                )
                for digit in range(1 if phase == "start" else 0, 10)
            ]

        states = explore(
            ("start", tuple(b.first() for b in bounds)),
            moves,
            lambda node: False,
            final=lambda node: EMPTY if node[0] in ("start", "empty") else powers(node[1]),
        )
        expr = states_to_expr(states)
        return EMPTY if expr is None else expr


@functools.lru_cache(maxsize=256)
def whole_scientific(spare: int | None) -> Expr:
    """Scientific notation of integers times a power of ten.

    Args:
        spare: The number is an integer times 10**spare. None: any number.

    Returns:
        One digit, a fraction, an exponent. With `spare`, two places behind the point at most, and up to 16 of them
        when the exponent is at least 16 + spare.
    """
    digit = byte_set(b"0123456789")
    lead, mark = byte_set(b"123456789"), byte_set(b"eE")
    if spare is None:
        power = exponents(((-MAX_EXPONENT, MAX_EXPONENT),))
        return seq(lead, optional(seq(literal(b"."), plus(digit))), mark, power)
    parts = []
    for places, fraction in (
        (0, EPS),
        (1, digit),
        (2, repeat(digit, 2, 2)),
        (16, repeat(digit, 1, 16)),
    ):
        point = seq(literal(b"."), fraction) if places else EPS
        parts.append(seq(lead, point, mark, exponents(((places + spare, MAX_EXPONENT),))))
    return alt(*parts)


def _is_multiple(atom: Formula) -> bool:
    return isinstance(atom, Multiple) and atom.holds


def _speaks_of_multiples(formula: Formula) -> bool:
    stack = [formula]
    while stack:
        node = stack.pop()
        if isinstance(node, And | Or):
            stack.extend(node.parts)
        elif isinstance(node, Multiple):
            return True
    return False
