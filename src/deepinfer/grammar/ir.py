"""The intermediate form of all grammars: regular expressions over bytes, with rules.

Front ends (regular expressions, JSON Schema, EBNF, tags) build `Expr` values with the constructors below and put
them in `Rules`; `Automaton` runs them. An expression is a language of byte strings: text must be encoded before it
comes here. Intersection, complement, counted repeats and bags (members in any order under conditions) are part of
the form, so a front end never has to expand them.

The constructors normalise: short nested sequences and unions are flattened, what cannot match is dropped, byte sets in a
union are merged, neighbouring single bytes join to a literal. They never change the language.

    >>> digit = byte_set(range(0x30, 0x3A))
    >>> rules = Rules("root", {"root": seq(literal(b"v"), repeat(digit, 1, 3))})
    >>> rules.rules["root"]
    <Seq ([v] [0-9]{1,3})>
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.core.errors import ConfigError
from deepinfer.grammar._ir_nodes import (
    ALL_BYTES,
    Alt,
    And,
    Bag,
    Bytes,
    Clause,
    Empty,
    Eps,
    Expr,
    Literal,
    Member,
    Not,
    Ref,
    Repeat,
    Seq,
)
from deepinfer.grammar._ir_rules import Rules
from deepinfer.grammar._ir_text import bytes_to_text, to_text
from deepinfer.grammar._ir_walk import walk

__all__ = [
    "ALL_BYTES",
    "Alt",
    "And",
    "Bag",
    "Bytes",
    "Clause",
    "EMPTY",
    "EPS",
    "Empty",
    "Eps",
    "Expr",
    "Literal",
    "Member",
    "Not",
    "Ref",
    "Repeat",
    "Rules",
    "Seq",
    "alt",
    "any_byte",
    "anything",
    "bag",
    "byte_set",
    "bytes_to_text",
    "complement",
    "intersect",
    "literal",
    "optional",
    "plus",
    "ref",
    "repeat",
    "seq",
    "star",
    "to_text",
    "walk",
]

# Longer sequences and literals are kept as parts: copying them at every level would make nesting quadratic.
_FLAT_PARTS = 64
_JOINED_BYTES = 1024

EMPTY = Empty()
EPS = Eps()
_SINGLE = tuple(Bytes(1 << value) for value in range(256))
_ANY_BYTE = Bytes(ALL_BYTES)
_ANYTHING = Not(EMPTY)


def literal(text: bytes) -> Expr:
    """The byte string itself; `EPS` when it is empty."""
    if not text:
        return EPS
    return _SINGLE[text[0]] if len(text) == 1 else Literal(bytes(text))


def byte_set(items: Iterable[int | tuple[int, int]]) -> Expr:
    """One byte out of a set.

    Args:
        items: Byte values 0..255, or pairs (first, last), both ends included.

    Returns:
        A `Bytes`, or `EMPTY` when `items` is empty.

    Raises:
        ConfigError: A value is outside 0..255.
    """
    mask = 0
    for item in items:
        first, last = item if isinstance(item, tuple) else (item, item)
        if not 0 <= first <= last <= 255:
            raise ConfigError(
                f"byte range {first}..{last} is not within 0..255 in ascending order; encode text before it comes here",
                field="items",
                value=item,
            )
        mask |= (1 << (last + 1)) - (1 << first)
    return Bytes(mask) if mask else EMPTY


def any_byte() -> Expr:
    """Any one byte."""
    return _ANY_BYTE


def anything() -> Expr:
    """Any byte string, the empty one included."""
    return _ANYTHING


def _text_of(node: Expr) -> bytes | None:
    if isinstance(node, Literal):
        return node.text
    if isinstance(node, Bytes) and node.mask & (node.mask - 1) == 0:
        return bytes((node.mask.bit_length() - 1,))
    return None


def seq(*parts: Expr) -> Expr:
    """Concatenation; `EPS` without parts, `EMPTY` as soon as one part is."""
    flat: list[Expr] = []
    pending: list[bytes] = []
    pending_bytes = 0
    stack = list(reversed(parts))
    while stack:
        part = stack.pop()
        kind = type(part)
        if isinstance(part, Seq) and len(part.parts) <= _FLAT_PARTS:
            stack.extend(reversed(part.parts))
            continue
        if kind is Eps:
            continue
        if kind is Empty:
            return EMPTY
        text = _text_of(part)
        if text is not None:
            pending.append(text)
            pending_bytes += len(text)
            if pending_bytes > _JOINED_BYTES:
                flat.append(literal(b"".join(pending)))
                pending, pending_bytes = [], 0
            continue
        if pending:
            flat.append(literal(b"".join(pending)))
            pending, pending_bytes = [], 0
        flat.append(part)
    if pending:
        flat.append(literal(b"".join(pending)))
    if not flat:
        return EPS
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*parts: Expr) -> Expr:
    """Union, in the order given and without doubles; `EMPTY` without parts."""
    flat: dict[Expr, None] = {}
    mask = 0
    first_set: Expr | None = None
    stack = list(reversed(parts))
    while stack:
        part = stack.pop()
        if isinstance(part, Alt) and len(part.parts) <= _FLAT_PARTS:
            stack.extend(reversed(part.parts))
        elif isinstance(part, Bytes):
            mask |= part.mask
            if first_set is None:
                first_set = part
                flat[part] = None
        elif part is _ANYTHING or (isinstance(part, Not) and isinstance(part.expr, Empty)):
            return _ANYTHING
        elif not isinstance(part, Empty):
            flat[part] = None
    if first_set is not None and isinstance(first_set, Bytes) and mask != first_set.mask:
        merged = Bytes(mask)
        nodes = [merged if node is first_set else node for node in flat]
    else:
        nodes = list(flat)
    if not nodes:
        return EMPTY
    return nodes[0] if len(nodes) == 1 else Alt(tuple(nodes))


def intersect(*parts: Expr) -> Expr:
    """Strings that are in every part; `anything()` without parts."""
    flat: dict[Expr, None] = {}
    mask = ALL_BYTES
    sets = False
    stack = list(reversed(parts))
    while stack:
        part = stack.pop()
        if isinstance(part, And):
            stack.extend(reversed(part.parts))
        elif isinstance(part, Empty):
            return EMPTY
        elif isinstance(part, Bytes):
            mask &= part.mask
            sets = True
        elif not (isinstance(part, Not) and isinstance(part.expr, Empty)):
            flat[part] = None
    nodes = list(flat)
    if sets:
        if not mask or any(isinstance(node, Eps | Literal) for node in nodes):
            return EMPTY
        nodes.insert(0, Bytes(mask))
    if not nodes:
        return _ANYTHING
    return nodes[0] if len(nodes) == 1 else And(tuple(nodes))


def complement(expr: Expr) -> Expr:
    """All byte strings that are not in `expr` (over all bytes, whether or not they are text)."""
    return expr.expr if isinstance(expr, Not) else Not(expr)


def repeat(expr: Expr, low: int, high: int | None = None) -> Expr:
    """Between `low` and `high` copies.

    Args:
        expr: What is repeated.
        low: Fewest copies, >= 0.
        high: Most copies, None for no bound.

    Returns:
        A `Repeat`, or something simpler with the same language.

    Raises:
        ConfigError: `low` is negative or `high` below `low`.
    """
    if low < 0 or (high is not None and high < low):
        raise ConfigError(
            f"repeat bounds {low}..{high} are not 0 <= low <= high; correct the bounds",
            field="low",
            value=(low, high),
        )
    if isinstance(expr, Empty):
        return EPS if low == 0 else EMPTY
    if isinstance(expr, Eps) or high == 0:
        return EPS
    if low == 1 and high == 1:
        return expr
    if isinstance(expr, Repeat) and (expr.low <= 1 or low == high):
        most = None if expr.high is None or high is None else expr.high * high
        return Repeat(expr.expr, expr.low * low, most)
    return Repeat(expr, low, high)


def star(expr: Expr) -> Expr:
    """Any number of copies, none included."""
    return repeat(expr, 0, None)


def plus(expr: Expr) -> Expr:
    """One copy or more."""
    return repeat(expr, 1, None)


def optional(expr: Expr) -> Expr:
    """The expression or the empty string."""
    return repeat(expr, 0, 1)


def ref(name: str) -> Expr:
    """The rule of that name."""
    return Ref(name)


def bag(
    members: Iterable[Member],
    separator: Expr = EPS,
    clauses: Iterable[Clause] = (),
    low: int = 0,
    high: int | None = None,
    ordered: bool = False,
) -> Expr:
    """A `Bag` after a check of its fields.

    Args:
        members: Kinds of members. A member with `high` 0 may not occur.
        separator: What stands between two members.
        clauses: Conditions on which members occurred.
        low: Fewest members in all, >= 0.
        high: Most members in all, None for no bound.
        ordered: Members in their order only.

    Returns:
        The bag. An unsatisfiable one is built all the same; the automaton finds that it is empty.

    Raises:
        ConfigError: A bound is negative, or a clause names a member that does not exist.
    """
    kinds, conditions = tuple(members), tuple(clauses)
    for member in kinds:
        if member.low < 0 or (member.high is not None and member.high < 0):
            raise ConfigError(
                f"member bounds {member.low}..{member.high} are negative; use 0 or more",
                field="members",
            )
    if low < 0 or (high is not None and high < 0):
        raise ConfigError(
            f"total bounds {low}..{high} are negative; use 0 or more", field="low", value=low
        )
    for clause in conditions:
        for index in clause.positive | clause.negative:
            if not 0 <= index < len(kinds):
                raise ConfigError(
                    f"a clause names member {index}, but there are {len(kinds)}; count from 0",
                    field="clauses",
                    value=index,
                )
    return Bag(kinds, separator, conditions, low, high, ordered)
