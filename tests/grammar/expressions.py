"""Random expressions and rules over the letters a, b and the comma, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from deepinfer.grammar.ir import (
    EPS,
    Clause,
    Expr,
    Member,
    Rules,
    alt,
    any_byte,
    bag,
    byte_set,
    complement,
    intersect,
    literal,
    plus,
    ref,
    repeat,
    seq,
)


def leaves(names: tuple[str, ...] = ()) -> st.SearchStrategy[Expr]:
    choices: list[st.SearchStrategy[Expr]] = [
        st.just(EPS),
        st.sampled_from([b"a", b"b", b"ab", b"ba", b"aa", b","]).map(literal),
        st.sampled_from([b"ab", b"a,", b"b"]).map(byte_set),
    ]
    if names:
        choices.append(st.sampled_from(names).map(ref))
    return st.one_of(choices)


@st.composite
def repeats(draw: st.DrawFn, inner: st.SearchStrategy[Expr]) -> Expr:
    low = draw(st.integers(0, 3))
    high = draw(st.one_of(st.none(), st.integers(low, low + 3)))
    return repeat(draw(inner), low, high)


def _grown(inner: st.SearchStrategy[Expr]) -> list[st.SearchStrategy[Expr]]:
    several = st.lists(inner, min_size=1, max_size=3)
    return [
        several.map(lambda parts: seq(*parts)),
        several.map(lambda parts: alt(*parts)),
        repeats(inner),
    ]


def plain(names: tuple[str, ...] = ()) -> st.SearchStrategy[Expr]:
    """Sequences, unions and repeats, with references to rules of the names given."""
    return st.recursive(leaves(names), lambda inner: st.one_of(_grown(inner)), max_leaves=8)


@st.composite
def bags(draw: st.DrawFn, inner: st.SearchStrategy[Expr]) -> Expr:
    count = draw(st.integers(1, 3))
    members = []
    for _ in range(count):
        low = draw(st.sampled_from([0, 0, 0, 1, 2]))
        high = draw(st.sampled_from([1, 1, 2, None])) if low < 2 else None
        group = draw(st.sampled_from([None, None, 1]))
        members.append(Member(intersect(draw(inner), plus(any_byte())), low, high, group))
    indices = st.frozensets(st.integers(0, count - 1), max_size=2)
    clauses = draw(st.lists(st.builds(Clause, indices, indices), max_size=2))
    low = draw(st.sampled_from([0, 0, 1, 2]))
    high = draw(st.sampled_from([None, None, low + 1]))
    separator = draw(st.sampled_from([EPS, literal(b","), literal(b"a")]))
    return bag(members, separator, clauses, low, high, draw(st.booleans()))


def full() -> st.SearchStrategy[Expr]:
    """Everything that needs no rules: intersections, complements and bags too."""
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            *_grown(inner),
            st.lists(inner, min_size=2, max_size=2).map(lambda parts: intersect(*parts)),
            inner.map(complement),
            bags(inner),
        ),
        max_leaves=8,
    )


@st.composite
def recursive_rules(draw: st.DrawFn) -> Rules:
    """Up to three rules that may refer to each other in every way, left recursion included."""
    names = ("A", "B", "C")[: draw(st.integers(1, 3))]
    return Rules("A", {name: draw(plain(names)) for name in names})
