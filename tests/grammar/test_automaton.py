from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammar.expressions import full, plain, recursive_rules
from tests.grammar.oracle import Oracle, all_strings

from deepinfer.core.errors import EmptyLanguage, GrammarSyntaxError
from deepinfer.grammar.automaton import DEAD, Automaton
from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Alt,
    Bytes,
    Expr,
    Literal,
    Repeat,
    Rules,
    Seq,
    alt,
    any_byte,
    anything,
    byte_set,
    complement,
    intersect,
    literal,
    optional,
    ref,
    repeat,
    seq,
    star,
)


def lit(text: str) -> Expr:
    return literal(text.encode())


def accepts(automaton: Automaton, data: bytes) -> bool:
    state = automaton.run(automaton.start, data)
    return state != DEAD and automaton.accepting(state)


def reachable(automaton: Automaton, most: int) -> tuple[list[int], bool]:
    """States from the start, and whether these are all."""
    seen = {automaton.start: None}
    queue = [automaton.start]
    for state in queue:
        automaton.expand(state)
        for target in set(automaton.table[state].tolist()) - {DEAD}:
            if target not in seen:
                if len(seen) >= most:
                    return list(seen), False
                seen[target] = None
                queue.append(target)
    return list(seen), True


def assert_no_dead_ends(automaton: Automaton) -> None:
    states, complete = reachable(automaton, 300)
    if not complete:
        return
    back: dict[int, set[int]] = {}
    for state in states:
        for target in set(automaton.table[state].tolist()):
            back.setdefault(target, set()).add(state)
    live = {state for state in states if automaton.accepting(state)}
    queue = list(live)
    while queue:
        for state in back.get(queue.pop(), ()):
            if state not in live:
                live.add(state)
                queue.append(state)
    assert live == set(states), [automaton.describe(s) for s in set(states) - live]


def check_against_oracle(rules: Rules, alphabet: bytes, longest: int) -> None:
    wanted = Oracle(rules, alphabet, longest).accepted
    try:
        automaton = Automaton(rules)
    except EmptyLanguage:
        assert not wanted
        return
    got = frozenset(w for w in all_strings(alphabet, longest) if accepts(automaton, w))
    assert got == wanted
    assert_no_dead_ends(automaton)


class TestLanguage:
    @given(full())
    @settings(max_examples=300, deadline=None)
    def test_equals_enumeration(self, expr: Expr) -> None:
        check_against_oracle(Rules.of(expr), b"ab,", 4)

    @given(recursive_rules())
    @settings(max_examples=100, deadline=None)
    def test_equals_enumeration_with_recursion(self, rules: Rules) -> None:
        check_against_oracle(rules, b"ab", 4)

    @given(plain(), st.lists(st.text("ab,", max_size=12), max_size=20))
    @settings(max_examples=200, deadline=None)
    def test_equals_re(self, expr: Expr, texts: list[str]) -> None:
        pattern = re.compile(_python(expr))
        automaton = Automaton(Rules.of(expr))
        for text in texts:
            assert accepts(automaton, text.encode()) == bool(pattern.fullmatch(text))

    def test_complement_is_over_all_bytes(self) -> None:
        automaton = Automaton(Rules.of(complement(lit("ab"))))
        assert accepts(automaton, b"")
        assert accepts(automaton, bytes(range(256)))
        assert not accepts(automaton, b"ab")
        assert accepts(automaton, b"ab\xff")

    def test_excluded_strings_inside_one_another(self) -> None:
        banned = alt(lit("bcd"), lit("abce"), lit("abcd"))
        automaton = Automaton(Rules.of(complement(seq(anything(), banned, anything()))))
        assert accepts(automaton, b"abcx")
        assert not accepts(automaton, b"xabcd")
        assert not accepts(automaton, b"bcbcd")
        assert accepts(automaton, b"abababc")

    def test_literals_of_many_kinds_share_a_choice(self) -> None:
        words = ["", "a", "ab", "abc", "b", "ba", "x" * 100, "x" * 100 + "y", "ab" * 40]
        automaton = Automaton(Rules.of(seq(alt(*map(lit, words)), lit("!"))))
        for word in words:
            assert accepts(automaton, word.encode() + b"!")
            assert not accepts(automaton, word.encode())
        assert not accepts(automaton, b"xxx!")


def _python(expr: Expr) -> str:
    if isinstance(expr, Literal):
        return re.escape(expr.text.decode())
    if isinstance(expr, Bytes):
        return "[" + "".join(c for c in "ab," if expr.mask >> ord(c) & 1) + "]"
    if isinstance(expr, Seq):
        return "".join(map(_python, expr.parts))
    if isinstance(expr, Alt):
        return "(?:" + "|".join(map(_python, expr.parts)) + ")"
    if isinstance(expr, Repeat):
        return f"(?:{_python(expr.expr)}){{{expr.low},{'' if expr.high is None else expr.high}}}"
    assert expr == EPS
    return ""


@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [
        ([(2, 2), (4, 4)], {2, 4}),
        ([(2, 3), (4, 5)], {2, 3, 4, 5}),
        ([(0, 1), (3, None)], {0, 1, *range(3, 12)}),
        ([(2, 9), (3, 4), (11, 11)], {*range(2, 10), 11}),
    ],
)
def test_unions_of_counters(ranges: list[tuple[int, int | None]], wanted: set[int]) -> None:
    automaton = Automaton(Rules.of(alt(*[repeat(lit("a"), low, high) for low, high in ranges])))
    assert {count for count in range(12) if accepts(automaton, b"a" * count)} == wanted


class TestDeadEnds:
    def test_intersections_that_die_later_are_never_entered(self) -> None:
        expr = intersect(alt(lit("ax"), lit("by")), alt(lit("az"), lit("by")))
        automaton = Automaton(Rules.of(expr))
        assert automaton.step(automaton.start, ord("a")) == DEAD
        assert accepts(automaton, b"by")

    def test_an_empty_intersection_is_refused(self) -> None:
        with pytest.raises(EmptyLanguage, match="accepts no string"):
            Automaton(Rules.of(intersect(star(lit("ab")), star(lit("ba")), any_byte())))

    def test_a_dead_branch_behind_recursion_is_cut(self) -> None:
        nothing = intersect(star(lit("ab")), seq(lit("a"), star(lit("ab"))))
        rules = Rules(
            "s",
            {
                "s": alt(lit("x"), seq(lit("("), ref("t"))),
                "t": alt(seq(lit("a"), ref("t")), nothing),
            },
        )
        automaton = Automaton(rules)
        assert automaton.step(automaton.start, ord("(")) == DEAD
        assert accepts(automaton, b"x")

    def test_recursion_without_an_end_is_empty(self) -> None:
        with pytest.raises(EmptyLanguage):
            Automaton(Rules("s", {"s": seq(lit("a"), ref("s"))}))
        with pytest.raises(EmptyLanguage):
            Automaton(Rules.of(EMPTY))

    def test_counts_that_cannot_meet(self) -> None:
        expr = intersect(
            repeat(byte_set(b"ab"), 3, 60), seq(star(any_byte()), repeat(lit("a"), 50, 50))
        )
        automaton = Automaton(Rules.of(expr))
        assert accepts(automaton, b"b" * 10 + b"a" * 50)
        # Eleven letters b leave room for 49 letters a only.
        assert automaton.run(automaton.start, b"b" * 11) == DEAD


class TestTable:
    def test_layout(self) -> None:
        automaton = Automaton(Rules.of(seq(byte_set([(0x61, 0x7A)]), lit("!"))))
        assert automaton.byte_class.dtype == np.uint8
        assert automaton.byte_class.shape == (256,)
        assert automaton.num_classes == 3
        assert automaton.table.dtype == np.int32
        assert automaton.table.flags.c_contiguous
        assert automaton.table.shape[1] == 3
        assert (automaton.table[DEAD] == DEAD).all()

    def test_rows_are_filled_on_demand(self) -> None:
        automaton = Automaton(Rules.of(seq(lit("a"), lit("b"), lit("c"))))
        assert (automaton.table[automaton.start] == -1).all()
        automaton.expand(automaton.start)
        row = automaton.table[automaton.start]
        assert (row >= 0).all()
        (target,) = set(row.tolist()) - {DEAD}
        assert (automaton.table[target] == -1).all()
        assert automaton.step(automaton.start, ord("a")) == target

    def test_expand_many_fills_all_and_survives_growth(self) -> None:
        automaton = Automaton(Rules.of(alt(*[lit(f"{n:03}") for n in range(300)])))
        frontier = np.array([automaton.start, DEAD, automaton.start], np.int32)
        for _ in range(3):
            automaton.expand_many(frontier)
            rows = automaton.table[frontier]
            assert (rows >= 0).all()
            frontier = np.unique(rows)
        assert accepts(automaton, b"299")
        assert not accepts(automaton, b"300")
        assert automaton.table.shape[0] >= automaton.num_states
        assert automaton.size_bytes > automaton.table.nbytes

    @given(st.one_of(full().map(Rules.of), recursive_rules()), st.text("ab,", max_size=6))
    @settings(max_examples=100, deadline=None)
    def test_single_steps_agree_with_rows(self, rules: Rules, text: str) -> None:
        try:
            automaton = Automaton(rules)
        except EmptyLanguage:
            return
        state = automaton.start
        for byte in text.encode():
            column = automaton.byte_class[byte]
            stepped = automaton.step(state, byte)
            assert automaton.table[state, column] == stepped
            automaton.expand(state)
            assert automaton.table[state, column] == stepped
            state = stepped

    def test_equal_rests_are_one_state(self) -> None:
        string = seq(lit('"'), star(byte_set([(0x61, 0x7A)])), lit('"'))
        rules = Rules.of(alt(seq(lit("x"), string), seq(lit("y"), string)))
        automaton = Automaton(rules)
        assert automaton.run(automaton.start, b'x"ab') == automaton.run(automaton.start, b'y"')

    def test_threads_agree(self) -> None:
        rules = Rules.of(
            repeat(seq(star(byte_set(b"ab")), lit("a"), byte_set(b"ab"), lit(",")), 1, 9)
        )
        automaton = Automaton(rules)
        texts = [bytes(97 + (n >> k & 1) for k in range(10)) + b"," for n in range(400)]
        results: list[list[bool]] = []

        def work() -> None:
            results.append([accepts(automaton, text) for text in texts])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone = Automaton(rules)
        assert results == [[accepts(alone, text) for text in texts]] * 4

    def test_describe_is_text(self) -> None:
        automaton = Automaton(Rules.of(seq(lit("ab"), optional(lit("c")))))
        assert "ab" in automaton.describe(automaton.start)


class TestErrors:
    def test_undefined_rule(self) -> None:
        with pytest.raises(GrammarSyntaxError, match="'missing' is not defined"):
            Automaton(Rules("s", {"s": seq(lit("a"), ref("missing"))}))

    def test_intersection_of_recursive_rules(self) -> None:
        rules = Rules(
            "s", {"s": alt(lit("a"), seq(lit("("), intersect(ref("s"), lit("a")), lit(")")))}
        )
        with pytest.raises(GrammarSyntaxError, match="recursive rule"):
            Automaton(rules)
