"""Boolean formulas over what one JSON value of a known type may be asked.

A schema, restricted to one JSON type, is a formula in negation normal form: `And` and `Or` over atoms, and an atom
can always be negated into a formula. What the atoms mean depends on the type; this file only knows their kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

__all__ = [
    "FALSE",
    "TRUE",
    "And",
    "Atom",
    "Compare",
    "Conjunction",
    "Contains",
    "Formula",
    "Format",
    "ItemCount",
    "Items",
    "Length",
    "Multiple",
    "NumberIn",
    "Or",
    "Pattern",
    "Properties",
    "PropertyCount",
    "StringIn",
    "Unique",
    "Whole",
    "conjunction",
    "disjunction",
    "evaluate",
    "negate",
    "unit_atoms",
]

Conjunction = frozenset[int]
"""Signed node numbers: +n for a schema that holds, -n for one that fails. Empty: any value."""


class Formula:
    """Base of all formulas."""

    __slots__ = ()


class Atom(Formula):
    """A formula without parts."""

    __slots__ = ()

    def negated(self) -> Formula:
        """The formula that holds exactly where this one fails, for values of the same type."""
        raise NotImplementedError


class _Nary(Formula):
    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Formula, ...]) -> None:
        self.parts = parts
        self._hash = hash((type(self).__name__, parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            type(self) is type(other) and self._hash == other._hash and self.parts == other.parts
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.parts!r}"


class And(_Nary):
    """All parts hold. Without parts: true."""

    __slots__ = ()


class Or(_Nary):
    """At least one part holds. Without parts: false."""

    __slots__ = ()


TRUE = And(())
FALSE = Or(())


def conjunction(parts: Iterable[Formula]) -> Formula:
    """The formula that all parts hold, flattened, without doubles."""
    flat: dict[Formula, None] = {}
    for part in parts:
        if isinstance(part, And):
            flat.update(dict.fromkeys(part.parts))
        elif isinstance(part, Or) and not part.parts:
            return FALSE
        else:
            flat[part] = None
    return next(iter(flat)) if len(flat) == 1 else And(tuple(flat)) if flat else TRUE


def disjunction(parts: Iterable[Formula]) -> Formula:
    """The formula that some part holds, flattened, without doubles."""
    flat: dict[Formula, None] = {}
    for part in parts:
        if isinstance(part, Or):
            flat.update(dict.fromkeys(part.parts))
        elif isinstance(part, And) and not part.parts:
            return TRUE
        else:
            flat[part] = None
    return next(iter(flat)) if len(flat) == 1 else Or(tuple(flat)) if flat else FALSE


def negate(formula: Formula, spend: Callable[[int], None] | None = None) -> Formula:
    """The formula that holds exactly where `formula` fails; `spend` is told of the work, which nesting multiplies."""
    memo: dict[int, Formula] = {}
    stack = [formula]
    while stack:
        top = stack[-1]
        if spend is not None:
            spend(len(top.parts) if isinstance(top, And | Or) else 1)
        if id(top) in memo:
            stack.pop()
        elif isinstance(top, And | Or):
            missing = [part for part in top.parts if id(part) not in memo]
            if missing:
                stack.extend(missing)
                continue
            parts = [memo[id(part)] for part in top.parts]
            memo[id(top)] = disjunction(parts) if isinstance(top, And) else conjunction(parts)
            stack.pop()
        else:
            assert isinstance(top, Atom)  # noqa: S101 - for the type checker: nothing else exists
            memo[id(top)] = top.negated()
            stack.pop()
    return memo[id(formula)]


def evaluate(formula: Formula, truth: Callable[[Formula], bool]) -> bool:
    """The truth of a formula, given that of its atoms."""
    if not isinstance(formula, And | Or):
        return truth(formula)
    stack: list[tuple[Formula, bool]] = [(formula, False)]
    results: list[bool] = []
    while stack:
        node, done = stack.pop()
        if not isinstance(node, And | Or):
            results.append(truth(node))
        elif done:
            first = len(results) - len(node.parts)
            tail = results[first:]
            del results[first:]
            results.append(all(tail) if isinstance(node, And) else any(tail))
        else:
            stack.append((node, True))
            stack.extend((part, False) for part in node.parts)
    return results[0]


def unit_atoms(formula: Formula) -> Iterator[Formula]:
    """Parts of a conjunction, or the formula itself.

    Yields:
        Formulas that all hold where the formula does.
    """
    if isinstance(formula, And):
        yield from formula.parts
    else:
        yield formula


@dataclass(frozen=True, slots=True)
class Compare(Atom):
    """A number against a bound: `number < bound`, or `number <= bound`, or the contrary of it.

    Attributes:
        bound: The bound.
        strict: Whether equality is left out.
        above: False: the number is below the bound. True: above.
    """

    bound: Fraction
    strict: bool
    above: bool

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Compare(self.bound, not self.strict, not self.above)


@dataclass(frozen=True, slots=True)
class Multiple(Atom):
    """A number is (not) a multiple of a positive number."""

    of: Fraction
    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Multiple(self.of, not self.holds)


@dataclass(frozen=True, slots=True)
class Whole(Atom):
    """A number is (not) written as an integer, without point and exponent: `integer` of draft 4."""

    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Whole(not self.holds)


@dataclass(frozen=True, slots=True)
class NumberIn(Atom):
    """A number is (not) one of a finite set."""

    values: frozenset[Fraction]
    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return NumberIn(self.values, not self.holds)


@dataclass(frozen=True, slots=True)
class StringIn(Atom):
    """A string is (not) one of a finite set."""

    values: frozenset[str]
    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return StringIn(self.values, not self.holds)


@dataclass(frozen=True, slots=True)
class Pattern(Atom):
    """A string does (not) match a pattern somewhere."""

    source: str
    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Pattern(self.source, not self.holds)


@dataclass(frozen=True, slots=True)
class Format(Atom):
    """A string does (not) have a format."""

    name: str
    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Format(self.name, not self.holds)


@dataclass(frozen=True, slots=True)
class Length(Atom):
    """A string has a number of code points between two bounds (None: no upper bound)."""

    low: int
    high: int | None

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        parts: list[Formula] = [Length(0, self.low - 1)] if self.low > 0 else []
        if self.high is not None:
            parts.append(Length(self.high + 1, None))
        return disjunction(parts)


@dataclass(frozen=True, slots=True)
class Properties(Atom):
    """Members of an object whose key is in a language: every one has, or some one has, a value of a kind.

    Attributes:
        keys: A formula over strings: which keys are meant.
        value: What the value must satisfy; one signed node number at most.
        every: True: every such member does (none need exist). False: at least one does.
    """

    keys: Formula
    value: Conjunction
    every: bool

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Properties(self.keys, negated_value(self.value), not self.every)


NOTHING: Conjunction = frozenset((0,))
"""The value set without any value; 0 is the node that nothing satisfies."""
ANYTHING: Conjunction = frozenset()


def negated_value(value: Conjunction) -> Conjunction:
    """The complement of a value set of one literal at most."""
    if not value:
        return NOTHING
    if value == NOTHING:
        return ANYTHING
    (literal,) = value
    return frozenset((-literal,))


@dataclass(frozen=True, slots=True)
class PropertyCount(Atom):
    """The number of members is between two bounds (None: no upper bound)."""

    low: int
    high: int | None

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        parts: list[Formula] = [PropertyCount(0, self.low - 1)] if self.low > 0 else []
        if self.high is not None:
            parts.append(PropertyCount(self.high + 1, None))
        return disjunction(parts)


@dataclass(frozen=True, slots=True)
class Items(Atom):
    """Items of an array at positions start..stop - 1 (stop None: to the end): every, or some, item is of a kind."""

    start: int
    stop: int | None
    value: Conjunction
    every: bool

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Items(self.start, self.stop, negated_value(self.value), not self.every)


@dataclass(frozen=True, slots=True)
class ItemCount(Atom):
    """The number of items is between two bounds (None: no upper bound)."""

    low: int
    high: int | None

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        parts: list[Formula] = [ItemCount(0, self.low - 1)] if self.low > 0 else []
        if self.high is not None:
            parts.append(ItemCount(self.high + 1, None))
        return disjunction(parts)


@dataclass(frozen=True, slots=True)
class Contains(Atom):
    """The number of items of a kind is between two bounds (None: no upper bound)."""

    value: Conjunction
    low: int
    high: int | None

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        parts: list[Formula] = [Contains(self.value, 0, self.low - 1)] if self.low > 0 else []
        if self.high is not None:
            parts.append(Contains(self.value, self.high + 1, None))
        return disjunction(parts)


@dataclass(frozen=True, slots=True)
class Unique(Atom):
    """The items of an array are all different, or are not.

    Attributes:
        node: Number of the schema that says so, for messages.
        holds: Whether they are.
    """

    node: int
    holds: bool = True

    def negated(self) -> Formula:
        """See `Atom.negated`."""
        return Unique(self.node, not self.holds)
