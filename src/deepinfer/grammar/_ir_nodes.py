"""The expressions that every front end builds and the automaton runs, as immutable nodes.

A node describes a language of byte strings. Nodes are made by the constructors of `deepinfer.grammar.ir`, which
keep them in a normal form; the classes here only hold the fields. Equality and hash are structural, computed
without recursion, so expressions may be nested as deeply as memory allows.
"""

from __future__ import annotations

from typing import Any, NoReturn

ALL_BYTES = (1 << 256) - 1


class Expr:
    """A language of byte strings; base of all nodes.

    Instances are immutable, hashable, picklable, and compare by structure.

    Attributes:
        has_ref: Whether a `Ref` occurs in it.
    """

    __slots__ = ("_hash", "has_ref")

    _hash: int
    has_ref: bool

    def children(self) -> tuple[Expr, ...]:
        """Sub-expressions, in order; empty for a leaf."""
        return ()

    def data(self) -> tuple[Any, ...]:
        """Everything of the node but its children, as hashable plain values."""
        return ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; build another one for {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expr):
            return NotImplemented
        return _equal(self, other)

    def __reduce__(self) -> tuple[Any, ...]:
        from deepinfer.grammar._ir_walk import flatten, restore

        return restore, (flatten(self),)

    def __repr__(self) -> str:
        from deepinfer.grammar._ir_text import to_text

        return f"<{type(self).__name__} {to_text(self, limit=200)}>"


_put = object.__setattr__


def _seal(node: Expr, value: int, has_ref: bool) -> None:
    _put(node, "_hash", value)
    _put(node, "has_ref", has_ref)


class Empty(Expr):
    """The language without any string."""

    __slots__ = ()

    def __init__(self) -> None:
        _seal(self, 0x1F3B, False)


class Eps(Expr):
    """The language of the empty string alone."""

    __slots__ = ()

    def __init__(self) -> None:
        _seal(self, 0x2E5D, False)


class Bytes(Expr):
    """One byte out of a set.

    Attributes:
        mask: 256-bit integer; bit b is set when byte b is in the set. Not 0.
    """

    __slots__ = ("mask",)

    mask: int

    def __init__(self, mask: int) -> None:
        _put(self, "mask", mask)
        _seal(self, hash((3, mask)), False)

    def data(self) -> tuple[Any, ...]:
        return (self.mask,)


class Literal(Expr):
    """One byte string of two bytes or more.

    Attributes:
        text: The string.
    """

    __slots__ = ("text",)

    text: bytes

    def __init__(self, text: bytes) -> None:
        _put(self, "text", text)
        _seal(self, hash((4, text)), False)

    def data(self) -> tuple[Any, ...]:
        return (self.text,)


class _Many(Expr):
    __slots__ = ("parts",)

    parts: tuple[Expr, ...]

    def __init__(self, parts: tuple[Expr, ...]) -> None:
        _put(self, "parts", parts)
        hashes: list[object] = [type(self).__name__]
        has_ref = False
        for part in parts:
            hashes.append(part._hash)
            has_ref = has_ref or part.has_ref
        _seal(self, hash(tuple(hashes)), has_ref)

    def children(self) -> tuple[Expr, ...]:
        return self.parts


class Seq(_Many):
    """Concatenation of two parts or more.

    Attributes:
        parts: The parts in order; none is Eps or Empty, and a Seq only if it is long.
    """

    __slots__ = ()


class Alt(_Many):
    """Union of two parts or more.

    Attributes:
        parts: The parts in the order given, without doubles; none is Empty, at most one is a Bytes, and an
            Alt only if it is long.
    """

    __slots__ = ()


class And(_Many):
    """Intersection of two parts or more.

    Attributes:
        parts: The parts in the order given, without doubles; none is an And.
    """

    __slots__ = ()


class Not(Expr):
    """All byte strings that are not in an expression.

    Attributes:
        expr: The expression.
    """

    __slots__ = ("expr",)

    expr: Expr

    def __init__(self, expr: Expr) -> None:
        _put(self, "expr", expr)
        _seal(self, hash((8, expr._hash)), expr.has_ref)

    def children(self) -> tuple[Expr, ...]:
        return (self.expr,)


class Repeat(Expr):
    """Between `low` and `high` copies of an expression.

    Attributes:
        expr: The expression; not Eps or Empty.
        low: Fewest copies, >= 0.
        high: Most copies, or None for no bound; never below `low`, never 0.
    """

    __slots__ = ("expr", "high", "low")

    expr: Expr
    low: int
    high: int | None

    def __init__(self, expr: Expr, low: int, high: int | None) -> None:
        _put(self, "expr", expr)
        _put(self, "low", low)
        _put(self, "high", high)
        _seal(self, hash((9, expr._hash, low, high)), expr.has_ref)

    def children(self) -> tuple[Expr, ...]:
        return (self.expr,)

    def data(self) -> tuple[Any, ...]:
        return (self.low, self.high)


class Ref(Expr):
    """A rule by its name.

    Attributes:
        name: Name of the rule in the `Rules` that hold the expression.
    """

    __slots__ = ("name",)

    name: str

    def __init__(self, name: str) -> None:
        _put(self, "name", name)
        _seal(self, hash((10, name)), True)

    def data(self) -> tuple[Any, ...]:
        return (self.name,)


class Member:
    """One kind of member of a `Bag`.

    Attributes:
        expr: What a member of this kind looks like. Must not match the empty string.
        low: Fewest occurrences.
        high: Most occurrences, or None for no bound.
        group: Members with the same group are variants of one key: together they occur at most once. None: no group.
    """

    __slots__ = ("expr", "group", "high", "low")

    expr: Expr
    low: int
    high: int | None
    group: int | None

    def __init__(
        self, expr: Expr, low: int = 0, high: int | None = 1, group: int | None = None
    ) -> None:
        _put(self, "expr", expr)
        _put(self, "low", low)
        _put(self, "high", high)
        _put(self, "group", group)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Member is immutable; build another one for {name!r}")

    def _key(self) -> tuple[Any, ...]:
        return (self.expr, self.low, self.high, self.group)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Member) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return Member, self._key()

    def __repr__(self) -> str:
        return f"Member({self.expr!r}, low={self.low}, high={self.high}, group={self.group})"


class Clause:
    """A disjunction that must hold at the end of a `Bag`.

    Attributes:
        positive: Members of which at least one occurred, or ...
        negative: ... members of which at least one did not occur.
    """

    __slots__ = ("negative", "positive")

    positive: frozenset[int]
    negative: frozenset[int]

    def __init__(
        self, positive: frozenset[int] = frozenset(), negative: frozenset[int] = frozenset()
    ) -> None:
        _put(self, "positive", frozenset(positive))
        _put(self, "negative", frozenset(negative))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Clause is immutable; build another one for {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Clause):
            return NotImplemented
        return self.positive == other.positive and self.negative == other.negative

    def __hash__(self) -> int:
        return hash((self.positive, self.negative))

    def __reduce__(self) -> tuple[Any, ...]:
        return Clause, (self.positive, self.negative)

    def __repr__(self) -> str:
        return f"Clause(positive={sorted(self.positive)}, negative={sorted(self.negative)})"


class Bag(Expr):
    """Members with separators between them: `a`, `a, b`, `b, a, c`, ... without the brackets around.

    Attributes:
        members: The kinds of members.
        separator: What stands between two members.
        clauses: Conditions on which members occurred; all must hold at the end.
        low: Fewest members in all.
        high: Most members in all, or None for no bound.
        ordered: True: members in the order of `members` only. False: in any order.
    """

    __slots__ = ("clauses", "high", "low", "members", "ordered", "separator")

    members: tuple[Member, ...]
    separator: Expr
    clauses: tuple[Clause, ...]
    low: int
    high: int | None
    ordered: bool

    def __init__(
        self,
        members: tuple[Member, ...],
        separator: Expr,
        clauses: tuple[Clause, ...] = (),
        low: int = 0,
        high: int | None = None,
        ordered: bool = False,
    ) -> None:
        _put(self, "members", tuple(members))
        _put(self, "separator", separator)
        _put(self, "clauses", tuple(clauses))
        _put(self, "low", low)
        _put(self, "high", high)
        _put(self, "ordered", ordered)
        has_ref = separator.has_ref or any(m.expr.has_ref for m in members)
        hashes = [m.expr._hash for m in members]
        _seal(self, hash((11, separator._hash, self.data(), *hashes)), has_ref)

    def children(self) -> tuple[Expr, ...]:
        return (self.separator, *(m.expr for m in self.members))

    def data(self) -> tuple[Any, ...]:
        kinds = tuple((m.low, m.high, m.group) for m in self.members)
        return (kinds, self.clauses, self.low, self.high, self.ordered)


def _equal(left: Expr, right: Expr) -> bool:
    seen: set[tuple[int, int]] = set()
    stack = [(left, right)]
    while stack:
        a, b = stack.pop()
        if a is b:
            continue
        if a._hash != b._hash or type(a) is not type(b) or a.data() != b.data():
            return False
        if (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        left_children, right_children = a.children(), b.children()
        if len(left_children) != len(right_children):
            return False
        stack.extend(zip(left_children, right_children, strict=True))
    return True
