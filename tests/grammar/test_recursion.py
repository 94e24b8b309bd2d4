from __future__ import annotations

import pytest
from tests.grammar.test_automaton import accepts, check_against_oracle

from deepinfer.grammar.automaton import DEAD, Automaton
from deepinfer.grammar.ir import (
    EPS,
    Expr,
    Rules,
    alt,
    byte_set,
    literal,
    optional,
    ref,
    repeat,
    seq,
)


def lit(text: str) -> Expr:
    return literal(text.encode())


NEST = Rules("s", {"s": alt(seq(lit("("), ref("s"), lit(")")), lit("x"))})
RIGHT = Rules("s", {"s": alt(seq(lit("a"), ref("s")), lit("b"))})
LIST = Rules(
    "l",
    {
        "l": alt(seq(ref("i"), lit(","), ref("l")), ref("i")),
        "i": alt(lit("x"), seq(lit("("), ref("l"), lit(")"))),
    },
)
SUMS = Rules(
    "e",
    {
        "e": alt(
            seq(ref("e"), lit("+"), ref("e")),
            seq(ref("e"), lit("*"), ref("e")),
            seq(lit("("), ref("e"), lit(")")),
            seq(lit("-"), ref("e")),
            lit("n"),
        )
    },
)
HIDDEN = Rules(
    "s", {"s": alt(seq(ref("o"), ref("s"), lit("a")), lit("b")), "o": optional(lit("c"))}
)
MUTUAL = Rules(
    "a",
    {
        "a": alt(seq(ref("b"), lit("x")), lit("y")),
        "b": alt(seq(optional(ref("a")), lit("z")), ref("a"), lit("w")),
    },
)


class TestStack:
    def test_depth_counts_frames(self) -> None:
        automaton = Automaton(NEST)
        depths = [automaton.depth(automaton.run(automaton.start, b"(" * n)) for n in range(5)]
        assert depths == [1, 2, 3, 4, 5]
        assert automaton.depth(automaton.run(automaton.start, b"(x)")) == 0

    def test_three_thousand_levels(self) -> None:
        automaton = Automaton(NEST)
        assert accepts(automaton, b"(" * 3000 + b"x" + b")" * 3000)
        assert not accepts(automaton, b"(" * 3000 + b"x" + b")" * 2999)
        assert automaton.run(automaton.start, b"(x))") == DEAD

    @pytest.mark.parametrize("rules", [RIGHT, LIST], ids=["rule", "list"])
    def test_tail_calls_leave_no_frame(self, rules: Rules) -> None:
        automaton = Automaton(rules)
        data = b"a" * 100_000 + b"b" if rules is RIGHT else b"x," * 50_000 + b"x"
        assert accepts(automaton, data)
        assert automaton.num_states < 10

    def test_left_recursion_needs_no_frame(self) -> None:
        automaton = Automaton(Rules("s", {"s": alt(seq(ref("s"), lit("a")), lit("b"))}))
        assert accepts(automaton, b"b" + b"a" * 100_000)
        assert automaton.num_states < 10

    def test_ambiguity_merges(self) -> None:
        automaton = Automaton(SUMS)
        assert accepts(automaton, b"((n+n)*-n)+" * 2000 + b"n")
        assert automaton.num_states < 50
        for rules in (
            Rules("s", {"s": alt(seq(ref("s"), ref("s")), lit("a"))}),
            Rules(
                "s",
                {"s": alt(seq(ref("s"), ref("s"), ref("s")), seq(ref("s"), ref("s")), lit("a"))},
            ),
        ):
            ambiguous = Automaton(rules)
            assert accepts(ambiguous, b"a" * 5000)
            assert ambiguous.num_states < 10

    def test_stacks_with_one_top_are_one_stack(self) -> None:
        rules = Rules(
            "s",
            {
                "s": alt(
                    seq(lit("("), ref("s"), lit(")")), seq(lit("("), ref("s"), lit("]")), lit("x")
                )
            },
        )
        automaton = Automaton(rules)
        assert accepts(automaton, b"(" * 500 + b"x" + b")]" * 250)
        assert not accepts(automaton, b"(" * 500 + b"x" + b")]" * 249 + b")")


class TestLeftRecursion:
    @pytest.mark.parametrize(
        ("rules", "alphabet", "longest"),
        [
            (SUMS, b"n+(-)", 5),
            (HIDDEN, b"abc", 6),
            (MUTUAL, b"xyzw", 6),
            (Rules("s", {"s": alt(ref("s"), seq(ref("s"), lit("a")), EPS)}), b"ab", 5),
            (Rules("s", {"s": alt(seq(repeat(ref("s"), 0, 2), lit("a")), lit("b"))}), b"ab", 6),
            (
                Rules("s", {"s": seq(optional(ref("s")), byte_set(b"ab"), optional(ref("s")))}),
                b"ab",
                5,
            ),
            (Rules("s", {"s": alt(seq(ref("s"), ref("s")), lit("ab"), EPS)}), b"ab", 6),
            (
                Rules(
                    "a",
                    {
                        "a": alt(seq(ref("b"), lit("x")), EPS),
                        "b": alt(seq(ref("c"), lit("y")), ref("a")),
                        "c": alt(seq(ref("a"), ref("b"), lit("z")), lit("w")),
                    },
                ),
                b"xyzw",
                5,
            ),
        ],
        ids=["sums", "hidden", "mutual", "unit", "repeated", "both ends", "square", "three rules"],
    )
    def test_keeps_the_language(self, rules: Rules, alphabet: bytes, longest: int) -> None:
        check_against_oracle(rules, alphabet, longest)
