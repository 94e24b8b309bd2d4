from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammar.expressions import full, recursive_rules
from tests.grammar.oracle import all_strings
from tests.grammar.test_automaton import reachable

from deepinfer.core.errors import EmptyLanguage
from deepinfer.grammar.automaton import DEAD, Automaton
from deepinfer.grammar.ir import (
    Expr,
    Member,
    Rules,
    alt,
    bag,
    byte_set,
    literal,
    ref,
    repeat,
    seq,
)


def lit(text: str) -> Expr:
    return literal(text.encode())


def check_cuts(rules: Rules, longest: int, depths: tuple[int, ...] = (1, 2, 3, 5)) -> int:
    """Compare each state with its cuts on all short strings; gives the number of states really cut."""
    try:
        automaton = Automaton(rules, counter_limit=longest)
    except EmptyLanguage:
        return 0
    words = all_strings(b"ab,", longest)
    cuts = 0
    for state in reachable(automaton, 30)[0]:
        for depth in depths:
            cut = automaton.truncate(state, depth)
            if cut == state:
                continue
            cuts += 1
            for word in words:
                real, short, known = state, cut, not automaton.uncertain(cut)
                for byte in word:
                    if not known:
                        break
                    real, short = automaton.step(real, byte), automaton.step(short, byte)
                    known = not automaton.uncertain(short)
                if known:
                    assert (real == DEAD) == (short == DEAD)
                    assert automaton.accepting(real) == automaton.accepting(short)
    return cuts


@given(full())
@settings(max_examples=60, deadline=None)
def test_cuts_agree_until_they_are_uncertain(expr: Expr) -> None:
    check_cuts(Rules.of(expr), 3)


@given(recursive_rules())
@settings(max_examples=40, deadline=None)
def test_cuts_agree_with_recursion(rules: Rules) -> None:
    check_cuts(rules, 3)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([None, 0, 1, 9]),
    st.booleans(),
    st.integers(0, 7),
)
@settings(max_examples=60, deadline=None)
def test_saturated_counters_agree(
    low: int, more: int, total: int | None, ordered: bool, need: int
) -> None:
    counted = repeat(byte_set(b"ab"), low, low + more + 1)
    kinds = [Member(lit("a"), 0, low + more + 1), Member(lit("b"), need, None), Member(lit("ab"))]
    high = None if total is None else need + total
    several = bag(kinds, lit(","), low=min(low, high or low), high=high, ordered=ordered)
    check_cuts(Rules.of(alt(seq(counted, lit(",")), several)), 3)


def test_equal_tops_have_equal_cuts() -> None:
    rules = Rules("s", {"s": alt(seq(lit("("), ref("s"), lit(")")), lit("x"))})
    automaton = Automaton(rules)
    deep, deeper = (automaton.run(automaton.start, b"(" * n) for n in (30, 70))
    assert deep != deeper
    assert automaton.truncate(deep, 4) == automaton.truncate(deeper, 4)
    assert automaton.truncate(deep, 31) == deep
    cut = automaton.truncate(deep, 2)
    assert not automaton.uncertain(automaton.run(cut, b"x"))
    assert automaton.uncertain(automaton.run(cut, b"x)"))


def test_long_counters_have_equal_cuts() -> None:
    automaton = Automaton(
        Rules.of(seq(lit('"'), repeat(byte_set([(97, 122)]), 2, 6_000), lit('"')))
    )
    state = automaton.run(automaton.start, b'"abc')
    assert automaton.truncate(state, 9) == automaton.truncate(automaton.run(state, b"x" * 1000), 9)
    late = automaton.run(state, b"x" * (6_000 - 3 - 50))
    assert automaton.truncate(late, 9) == late


def test_a_saturated_counter_stays_above_every_walk() -> None:
    automaton = Automaton(Rules.of(repeat(lit("a"), 8, 20)), counter_limit=3)
    cut = automaton.truncate(automaton.start, 5)
    assert cut != automaton.start
    after = automaton.run(cut, b"aaa")
    assert after != DEAD
    assert not automaton.accepting(after)


def test_long_bags_have_equal_cuts() -> None:
    automaton = Automaton(Rules.of(bag([Member(lit("a"), 0, 65_536)], lit(","), high=60_000)))
    state = automaton.run(automaton.start, b"a,a")
    assert automaton.truncate(state, 9) == automaton.truncate(automaton.run(state, b",a" * 500), 9)
