"""Numbers in JSON under bounds and divisibility, exactly, as automata over their decimal spelling.

A formula over `Compare`, `Multiple` and `NumberIn` becomes a deterministic automaton whose state holds, for each
bound, how the digits read so far compare with it, and for each divisor the remainder. The spellings are

- plain decimals with any number of trailing zeros: `12`, `-0.50`, `1.0`;
- scientific notation with one digit before the point and an exponent of one to three digits: `1e2`, `1.5E-07`;
  not where a set of more than 32 numbers is named, or a divisor is no power of ten but for factors 2 and 5.

An unconstrained number has every spelling of RFC 8259.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Expr,
    alt,
    byte_set,
    complement,
    intersect,
    literal,
    optional,
    plus,
    ref,
    seq,
    star,
)
from deepinfer.grammar.json_schema.decimal_machine import Fractions, Machine
from deepinfer.grammar.json_schema.decimal_states import State, states_to_expr
from deepinfer.grammar.json_schema.decimal_text import (
    MAX_EXPONENT,
    decimal_digits,
    exponents,
    normalised,
)
from deepinfer.grammar.json_schema.digits import capped
from deepinfer.grammar.json_schema.formula import (
    FALSE,
    TRUE,
    And,
    Compare,
    Formula,
    Multiple,
    NumberIn,
    Or,
    Whole,
    conjunction,
    disjunction,
    evaluate,
    unit_atoms,
)

__all__ = ["NumberLanguage", "any_number", "number_holds", "number_language"]

# Sets of more numbers than this have no scientific notation.
_FEW = 32
_DIGITS = byte_set(b"0123456789")


@dataclass(frozen=True, slots=True)
class NumberLanguage:
    """Spellings of a set of numbers.

    Attributes:
        expr: The spellings that need no rules of their own.
        machines: For each sign that needs rules, whether it is the minus and the states of its automaton.
    """

    expr: Expr
    machines: tuple[tuple[bool, tuple[State, ...]], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no number is in the set."""
        return self.expr == EMPTY and not self.machines

    def emit(self, prefix: str, max_digits: int | None = None) -> tuple[Expr, dict[str, Expr]]:
        """The whole expression and the rules it refers to.

        Args:
            prefix: What the names of the rules begin with.
            max_digits: Bound of each repeat of a digit. Digits that a remainder depends on have none.
        """
        parts, rules = [capped(self.expr, max_digits)], {}
        for number, (negative, states) in enumerate(self.machines):
            stem = f"{prefix}{number}."
            for index, (accepting, edges) in enumerate(states):
                loop = [byte for byte, target in edges if target == index]
                branches = [
                    seq(byte, ref(f"{stem}{target}")) for byte, target in edges if target != index
                ]
                rest = alt(*([EPS] if accepting else []), *branches)
                if loop:
                    rest = seq(capped(star(alt(*loop)), max_digits), rest)
                rules[f"{stem}{index}"] = rest
            parts.append(seq(literal(b"-" if negative else b""), ref(f"{stem}0")))
        return alt(*parts), rules


@functools.cache
def any_number() -> Expr:
    """Every JSON number."""
    whole = alt(literal(b"0"), seq(byte_set(b"123456789"), star(_DIGITS)))
    fraction = seq(literal(b"."), plus(_DIGITS))
    exponent = seq(byte_set(b"eE"), optional(byte_set(b"+-")), plus(_DIGITS))
    return seq(optional(literal(b"-")), whole, optional(fraction), optional(exponent))


def number_holds(formula: Formula, value: Fraction) -> bool:
    """Whether a number satisfies a formula."""
    return evaluate(formula, lambda atom: _atom_holds(atom, value))


def _atom_holds(atom: Formula, value: Fraction) -> bool:
    if isinstance(atom, Compare):
        if value == atom.bound:
            return not atom.strict
        return (value > atom.bound) == atom.above
    if isinstance(atom, Multiple):
        return ((value / atom.of).denominator == 1) == atom.holds
    if isinstance(atom, NumberIn):
        return (value in atom.values) == atom.holds
    if isinstance(atom, Whole):
        return (value.denominator == 1) == atom.holds
    raise TypeError(f"{atom!r} does not speak of numbers")


def finite_numbers(formula: Formula) -> frozenset[Fraction] | None:
    """The numbers that satisfy a formula, when a part of it names a finite set that must hold; else None."""
    named: frozenset[Fraction] | None = None
    for atom in unit_atoms(formula):
        found = None
        if isinstance(atom, NumberIn) and atom.holds:
            found = atom.values
        elif isinstance(atom, Or):
            sets = [finite_numbers(part) for part in atom.parts]
            if all(values is not None for values in sets):
                found = frozenset().union(*(values for values in sets if values is not None))
        if found is not None and (named is None or len(found) < len(named)):
            named = found
    if named is None:
        return None
    return frozenset(value for value in named if number_holds(formula, value))


def _mentions_whole(formula: Formula) -> bool:
    stack = [formula]
    while stack:
        node = stack.pop()
        if isinstance(node, And | Or):
            stack.extend(node.parts)
        elif isinstance(node, Whole):
            return True
    return False


def _decided(formula: Formula, whole: bool) -> Formula:
    """The formula for numbers that are, or are not, written as integers."""
    if isinstance(formula, And):
        return conjunction([_decided(part, whole) for part in formula.parts])
    if isinstance(formula, Or):
        return disjunction([_decided(part, whole) for part in formula.parts])
    if isinstance(formula, Whole):
        return TRUE if formula.holds == whole else FALSE
    return formula


@functools.lru_cache(maxsize=512)
def number_language(
    formula: Formula, *, scientific: bool = True, fraction: Fractions = "maybe"
) -> NumberLanguage:
    """Spellings of the numbers that satisfy a formula.

    Args:
        formula: The formula.
        scientific: Whether scientific notation is among the spellings.
        fraction: Whether plain decimals have a decimal point.

    Returns:
        The language; its `start` is `EMPTY` when no number satisfies the formula.

    Raises:
        GrammarTooLarge: The automaton would need too many states.
    """
    if formula == TRUE and scientific and fraction == "maybe":
        return NumberLanguage(any_number())
    if _mentions_whole(formula):
        # Integers and other spellings are different numbers here, so that each has its own formula.
        plain = number_language(_decided(formula, True), scientific=False, fraction="no")
        other = number_language(_decided(formula, False), scientific=scientific, fraction="must")
        return NumberLanguage(alt(plain.expr, other.expr), (*plain.machines, *other.machines))
    finite = finite_numbers(formula)
    if finite is not None:
        ordered = sorted(finite)
        scientific = scientific and len(ordered) <= _FEW
        return NumberLanguage(_spell_all(ordered, scientific, fraction))
    excluded = frozenset[Fraction]()
    rest = []
    for atom in unit_atoms(formula):
        if isinstance(atom, NumberIn) and not atom.holds and len(atom.values) > _FEW:
            excluded |= atom.values
        else:
            rest.append(atom)
    if excluded:
        base = number_language(conjunction(rest), scientific=False, fraction=fraction)
        if not base.machines:
            taken = _spell_all(sorted(excluded), False, fraction)
            return NumberLanguage(intersect(base.expr, complement(taken)))
    bounds: set[Fraction] = set()
    divisors: set[Fraction] = set()
    stack = [formula]
    while stack:
        node = stack.pop()
        if isinstance(node, And | Or):
            stack.extend(node.parts)
        elif isinstance(node, Compare):
            bounds.add(node.bound)
        elif isinstance(node, Multiple):
            divisors.add(node.of)
        elif isinstance(node, NumberIn):
            bounds.update(node.values)
    machine = Machine(formula, bounds, divisors, fraction)
    parts: list[Expr] = []
    machines: list[tuple[bool, tuple[State, ...]]] = []
    for negative in (False, True):
        sign = literal(b"-" if negative else b"")
        states = machine.plain(negative)
        expr = states_to_expr(states)
        if expr is None:
            machines.append((negative, states))
        else:
            parts.append(seq(sign, expr))
        if scientific:
            parts.append(seq(sign, machine.scientific(negative)))
    return NumberLanguage(alt(*parts), tuple(machines))


def _spell_all(values: list[Fraction], scientific: bool, fraction: Fractions) -> Expr:
    """All spellings of some numbers."""
    if scientific or not all(value.denominator == 1 for value in values):
        return alt(*(_spell(value, scientific, fraction) for value in values))
    texts = [literal(str(value.numerator).encode()) for value in values]
    if any(value == 0 for value in values):
        texts.append(literal(b"-0"))
    return seq(alt(*texts), _zeros(fraction))


def _zeros(fraction: Fractions) -> Expr:
    """The fraction of a whole number."""
    tail = seq(literal(b".0"), star(literal(b"0")))
    return {"no": EPS, "maybe": optional(tail), "must": tail}[fraction]


def _spell(value: Fraction, scientific: bool, fraction: Fractions) -> Expr:
    """All spellings of one number."""
    whole, rest = decimal_digits(abs(value))
    zeros = star(literal(b"0"))
    parts = []
    if rest:
        if fraction != "no":
            parts.append(seq(literal(f"{whole}.{rest}".encode()), zeros))
    else:
        parts.append(seq(literal(whole.encode()), _zeros(fraction)))
    if scientific and value:
        digits, exponent = normalised(abs(value))
        mantissa = seq(literal(digits[1:].encode()), zeros)
        if len(digits) > 1:
            mantissa = seq(literal(b"."), mantissa)
        else:
            mantissa = optional(seq(literal(b".0"), zeros))
        if abs(exponent) <= MAX_EXPONENT:
            power = exponents(((exponent, exponent),))
            parts.append(seq(literal(digits[:1].encode()), mantissa, byte_set(b"eE"), power))
    sign = literal(b"-") if value < 0 else optional(literal(b"-")) if value == 0 else EPS
    return seq(sign, alt(*parts))
