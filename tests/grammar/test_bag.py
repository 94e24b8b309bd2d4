from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.grammar.expressions import bags, plain
from tests.grammar.test_automaton import accepts, check_against_oracle

from deepinfer.core.errors import EmptyLanguage
from deepinfer.grammar.automaton import DEAD, Automaton
from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Clause,
    Expr,
    Member,
    Rules,
    alt,
    anything,
    bag,
    byte_set,
    complement,
    intersect,
    literal,
    plus,
    ref,
    seq,
)


def lit(text: str) -> Expr:
    return literal(text.encode())


def clause(*terms: int) -> Clause:
    """Members, counted from 1; a negative number says that the member did not occur."""
    return Clause(
        frozenset(t - 1 for t in terms if t > 0), frozenset(-t - 1 for t in terms if t < 0)
    )


def members(text: str) -> list[Member]:
    return [Member(lit(char)) for char in text]


def run(expr: Expr, *texts: str) -> list[bool]:
    automaton = Automaton(Rules.of(expr))
    return [accepts(automaton, text.encode()) for text in texts]


COMMA = lit(",")


@given(bags(plain()))
@settings(max_examples=200, deadline=None)
def test_equals_enumeration(expr: Expr) -> None:
    check_against_oracle(Rules.of(expr), b"ab,", 4)


def test_any_order_and_declared_order() -> None:
    texts = ("", "a", "b,a", "a,b,c", "c,b,a", "a,a", "a,", "a,b,c,a")
    free = [True, True, True, True, True, False, False, False]
    assert run(bag(members("abc"), COMMA), *texts) == free
    ordered = [True, True, False, True, False, False, False, False]
    assert run(bag(members("abc"), COMMA, ordered=True), *texts) == ordered


def test_required_members_and_totals() -> None:
    kinds = [Member(lit("a"), 1), Member(lit("b")), Member(lit("x"), 0, None)]
    texts = ("", "a", "b", "b,a", "x,x,x", "x,a,x", "x,a,x,x")
    assert run(bag(kinds, COMMA, low=2, high=3), *texts) == [
        False, False, False, True, False, True, False,
    ]  # fmt: skip


def test_what_must_still_come_leaves_no_other_choice() -> None:
    kinds = [Member(lit("a"), 1), Member(lit("b"), 1), Member(lit("x"), 0, None)]
    automaton = Automaton(Rules.of(bag(kinds, COMMA, high=3)))
    state = automaton.run(automaton.start, b"x,")
    assert automaton.step(state, ord("x")) == DEAD
    assert automaton.step(state, ord("a")) != DEAD
    ordered = Automaton(Rules.of(bag(kinds, COMMA, ordered=True)))
    assert ordered.step(ordered.start, ord("b")) == DEAD


def test_a_dependent_member() -> None:
    expr = bag(members("abc"), COMMA, [clause(-1, 2)])
    assert run(expr, "", "b", "a", "c,a", "a,b", "b,c,a") == [True, True, False, False, True, True]
    automaton = Automaton(Rules.of(bag(members("ab"), COMMA, [clause(-1, 2)], ordered=True)))
    assert automaton.step(automaton.start, ord("a")) != DEAD
    backwards = Automaton(Rules.of(bag(members("ba"), COMMA, [clause(-2, 1)], ordered=True)))
    assert backwards.step(backwards.start, ord("a")) == DEAD


def test_forbidden_pairs_and_alternatives() -> None:
    expr = bag(members("abc"), COMMA, [clause(-1, -2), clause(2, 3)])
    assert run(expr, "a", "b", "c", "a,c", "b,a", "a,b", "c,b") == [
        False, True, True, True, False, False, True,
    ]  # fmt: skip


def test_variants_of_one_key() -> None:
    kinds = [Member(lit("k1"), group=0), Member(lit("k2"), group=0), Member(lit("m"))]
    expr = bag(kinds, COMMA, [clause(1, 2)])
    assert run(expr, "k1", "k2,m", "k1,k2", "k1,k1", "m") == [True, True, False, False, False]
    with pytest.raises(EmptyLanguage):
        Automaton(Rules.of(bag(kinds, COMMA, [clause(1), clause(2)])))


def test_contradictions_are_empty() -> None:
    for expr in (
        bag([Member(lit("a"), 2, 1)], COMMA),
        bag([Member(EMPTY, 1)], COMMA),
        bag([Member(lit("a"))], COMMA, low=2),
        bag([Member(lit("a"), 1)], COMMA, [clause(-1)]),
        bag(members("ab"), EMPTY, [clause(1), clause(2)]),
        bag([Member(lit("a"), 3, None)], COMMA, high=2),
    ):
        with pytest.raises(EmptyLanguage):
            Automaton(Rules.of(expr))


def test_members_that_begin_alike() -> None:
    kinds = [Member(lit("1")), Member(lit("12")), Member(lit("123"))]
    assert run(bag(kinds, COMMA), "1,12,123", "123,12,1", "12,1,12", "1,1") == [
        True, True, False, False,
    ]  # fmt: skip
    assert run(bag(kinds, EPS), "112", "121", "123", "11212", "1121231") == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_an_open_object_with_a_required_key() -> None:
    letters = plus(byte_set([(0x61, 0x7A)]))
    other = intersect(letters, complement(alt(lit("id"), lit("name"))))
    kinds = [Member(lit("id=1"), 1), Member(lit("name=1")), Member(seq(other, lit("=0")), 0, None)]
    expr = seq(lit("{"), bag(kinds, COMMA), lit("}"))
    assert run(expr, "{id=1}", "{ids=0,id=1,i=0}", "{id=0}", "{name=1}", "{x=0,x=0,id=1,name=1}") == [
        True, True, False, False, True,
    ]  # fmt: skip


def test_thirty_members_in_any_order_stay_lazy() -> None:
    names = [f"key{n:02}" for n in range(30)]
    expr = bag([Member(lit(name + ":0"), 1) for name in names], COMMA)
    automaton = Automaton(Rules.of(expr))
    order = names[::-1]
    assert accepts(automaton, ",".join(f"{name}:0" for name in order).encode())
    assert not accepts(automaton, ",".join(f"{name}:0" for name in order[1:]).encode())
    assert automaton.num_states < 4000


def test_bags_within_bags_and_recursion() -> None:
    inner = seq(lit("("), bag([Member(lit("a"), 1), Member(ref("s"))], COMMA), lit(")"))
    automaton = Automaton(Rules("s", {"s": inner}))
    assert accepts(automaton, b"((a),a)")
    assert accepts(automaton, b"(a,((a,(a)),a))")
    assert not accepts(automaton, b"((a))")
    assert not accepts(automaton, b"(a,(a),(a))")


def test_large_bounds_are_counters() -> None:
    expr = bag([Member(lit("a"), 1000, 65_536)], COMMA, low=1000, high=65_536)
    automaton = Automaton(Rules.of(expr))
    assert not accepts(automaton, b",".join([b"a"] * 999))
    assert accepts(automaton, b",".join([b"a"] * 1000))
    assert accepts(automaton, b",".join([b"a"] * 5000))


def test_a_bag_within_an_intersection() -> None:
    free = bag(members("abc"), COMMA)
    expr = intersect(free, seq(anything(), lit("c")))
    assert run(expr, "a,c", "c", "c,a", "b,a,c") == [True, True, False, True]
