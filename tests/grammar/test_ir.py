from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from tests.grammar.expressions import full
from tests.grammar.oracle import Oracle

from deepinfer.core.errors import ConfigError, GrammarSyntaxError
from deepinfer.grammar import ir
from deepinfer.grammar.ir import (
    EMPTY,
    EPS,
    Alt,
    And,
    Bag,
    Bytes,
    Clause,
    Literal,
    Member,
    Not,
    Repeat,
    Rules,
    Seq,
    alt,
    anything,
    bag,
    byte_set,
    complement,
    intersect,
    literal,
    optional,
    plus,
    ref,
    repeat,
    seq,
    star,
)

A, B = literal(b"a"), literal(b"b")


def language(expr: ir.Expr) -> frozenset[bytes]:
    return Oracle(Rules.of(expr), b"ab,", 4).accepted


class TestConstructors:
    def test_sequences_are_flat_and_literals_join(self) -> None:
        assert seq(A, seq(B, literal(b"cd")), EPS) == Literal(b"abcd")
        assert seq() == EPS
        assert seq(A, EMPTY) == EMPTY
        wild = byte_set([(0, 255)])
        assert seq(A, wild, B, B) == Seq((A, wild, Literal(b"bb")))

    def test_unions_are_flat_without_doubles_and_sets_merge(self) -> None:
        assert alt(A, alt(B, EMPTY), A) == byte_set(b"ab")
        assert alt() == EMPTY
        assert alt(literal(b"ab"), literal(b"ab")) == literal(b"ab")
        assert alt(A, anything()) == anything()
        assert isinstance(alt(literal(b"ab"), A), Alt)

    def test_intersections(self) -> None:
        assert intersect(byte_set(b"ab"), byte_set(b"bc")) == B
        assert intersect(A, B) == EMPTY
        assert intersect(A, literal(b"ab")) == EMPTY
        assert intersect() == anything()
        assert intersect(star(A), anything()) == star(A)
        assert isinstance(intersect(star(A), star(B)), And)

    def test_complement_twice_is_nothing(self) -> None:
        assert complement(complement(star(A))) == star(A)
        assert complement(EMPTY) == anything()
        assert isinstance(complement(A), Not)

    def test_repeats(self) -> None:
        assert repeat(A, 1, 1) == A
        assert repeat(A, 0, 0) == EPS
        assert repeat(EPS, 3, 5) == EPS
        assert repeat(EMPTY, 0, 5) == EPS
        assert repeat(EMPTY, 1, 5) == EMPTY
        assert star(star(A)) == star(A)
        assert repeat(optional(A), 30, 30) == Repeat(A, 0, 30)
        assert plus(star(A)) == star(A)

    def test_byte_sets(self) -> None:
        assert byte_set([65, (0x80, 0xFF)]) == Bytes((((1 << 128) - 1) << 128) | 1 << 65)
        assert byte_set([]) == EMPTY

    @given(full())
    @settings(max_examples=150, deadline=None)
    def test_normal_forms_keep_the_language(self, expr: ir.Expr) -> None:
        own = language(expr)
        assert language(repeat(expr, 0, 2)) == language(Repeat(expr, 0, 2))
        assert language(repeat(repeat(expr, 1, 2), 2, 2)) == language(
            Repeat(Repeat(expr, 1, 2), 2, 2)
        )
        assert language(alt(expr, A, expr)) == own | {b"a"}
        assert language(intersect(expr, star(A))) == own & language(star(A))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: byte_set([256]),
            lambda: byte_set([(5, 3)]),
            lambda: repeat(A, -1, 2),
            lambda: repeat(A, 3, 2),
            lambda: bag([Member(A, -1)]),
            lambda: bag([Member(A)], low=-1),
            lambda: bag([Member(A)], clauses=[Clause(frozenset([1]))]),
        ],
    )
    def test_impossible_bounds_are_refused(self, make: object) -> None:
        with pytest.raises(ConfigError, match=r"range|bounds|clause"):
            make()  # type: ignore[operator]


class TestNodes:
    def test_are_immutable(self) -> None:
        for node in (A, seq(A, star(B)), Member(A), Clause()):
            with pytest.raises(AttributeError, match="immutable"):
                node.parts = ()  # type: ignore[union-attr]

    @given(full())
    @settings(max_examples=100, deadline=None)
    def test_survive_pickle_and_copy(self, expr: ir.Expr) -> None:
        again = pickle.loads(pickle.dumps(expr))
        assert again == expr
        assert hash(again) == hash(expr)
        assert copy.deepcopy(expr) == expr
        assert Rules.of(again).digest == Rules.of(expr).digest

    def test_members_and_clauses_compare_by_content(self) -> None:
        one = bag([Member(A, 0, 2, 1)], B, [Clause(frozenset([0]), frozenset())], 1, 4, True)
        two = bag([Member(A, 0, 2, 1)], B, [Clause(frozenset([0]), frozenset())], 1, 4, True)
        assert one == two
        assert one != bag(
            [Member(A, 0, 2, 2)], B, [Clause(frozenset([0]), frozenset())], 1, 4, True
        )
        assert isinstance(one, Bag)
        assert pickle.loads(pickle.dumps(one.members[0])) == one.members[0]

    def test_deep_nesting_needs_no_recursion(self) -> None:
        def deep() -> ir.Expr:
            expr: ir.Expr = literal(b"x")
            for _ in range(20_000):
                expr = seq(A, star(expr), B)
            return expr

        one, two = deep(), deep()
        assert one == two
        assert len(repr(one)) < 400
        assert Rules.of(one).digest == Rules.of(two).digest
        assert pickle.loads(pickle.dumps(one)) == one

    def test_text(self) -> None:
        expr = seq(literal(b'say "'), repeat(byte_set([(0x61, 0x7A)]), 1, 3), optional(ref("rule")))
        assert ir.to_text(expr) == '("say \\"" [a-z]{1,3} rule?)'
        assert ir.to_text(complement(alt(literal(b"ab"), EPS))) == '!("ab" | "")'
        assert ir.bytes_to_text(ir.ALL_BYTES) == "."
        assert ir.bytes_to_text(ir.ALL_BYTES & ~(1 << 10)) == "[^\\x0A]"
        assert ir.to_text(star(literal(b"ab" * 100)), limit=10).endswith("...")


class TestRules:
    def test_undefined_names_are_found(self) -> None:
        Rules("r", {"r": seq(A, ref("s")), "s": B}).check()
        with pytest.raises(GrammarSyntaxError, match="'t' is not defined"):
            Rules("r", {"r": seq(A, ref("t"))}).check()
        with pytest.raises(GrammarSyntaxError, match="start rule 'x'"):
            Rules("x", {"r": A}).check()

    def test_content_decides_equality_hash_and_digest(self) -> None:
        one = Rules("r", {"r": alt(A, ref("s")), "s": B})
        two = Rules("r", {"r": alt(A, ref("s")), "s": B})
        assert one == two
        assert hash(one) == hash(two)
        assert one.digest == two.digest
        assert one.digest != Rules("s", dict(one.rules)).digest
        assert one.digest != Rules("r", {"r": alt(A, ref("s")), "s": A}).digest
        assert pickle.loads(pickle.dumps(one)) == one

    def test_digest_is_the_same_in_another_process(self) -> None:
        code = (
            "from deepinfer.grammar.ir import *\n"
            "b = bag([Member(literal(b'a')), Member(ref('x'))], literal(b','),"
            " [Clause(frozenset([0, 1]), frozenset([1]))])\n"
            "print(Rules('x', {'x': alt(b, star(literal(b'yz')))}).digest)"
        )
        seen = {
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(seen) == 1
        assert len(seen.pop().strip()) == 32

    def test_of_takes_a_free_name(self) -> None:
        rules = Rules.of(seq(A, ref("root")), {"root": B})
        assert rules.start != "root"
        assert rules.rules["root"] == B
        assert str(rules).startswith(rules.start)

    def test_are_immutable(self) -> None:
        rules = Rules.of(A)
        with pytest.raises(AttributeError, match="immutable"):
            rules.start = "x"  # type: ignore[misc]
        with pytest.raises(TypeError):
            rules.rules["x"] = B  # type: ignore[index]
