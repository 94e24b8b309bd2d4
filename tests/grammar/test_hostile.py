"""Grammars that are built to exhaust memory or time finish, or are refused."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

import pytest
from tests.grammar.test_automaton import accepts

from deepinfer.core.errors import GrammarTooLarge
from deepinfer.grammar.automaton import DEAD, Automaton
from deepinfer.grammar.budget import GrammarLimits
from deepinfer.grammar.ir import (
    Expr,
    Rules,
    alt,
    byte_set,
    intersect,
    literal,
    optional,
    ref,
    repeat,
    seq,
    star,
)

A, B, X = literal(b"a"), literal(b"b"), literal(b"x")


def nested(step: Callable[[Expr], Expr]) -> Rules:
    expr: Expr = X
    for _ in range(20_000):
        expr = step(expr)
    return Rules.of(expr)


def parentheses() -> Rules:
    rules: Expr = X
    half = literal(b"(" * 60_000)
    return Rules.of(seq(half, rules, literal(b")" * 60_000)))


@pytest.mark.parametrize(
    ("rules", "data"),
    [
        (parentheses, None),
        (lambda: nested(lambda e: seq(optional(literal(b"(")), e)), b"(((x"),
        (lambda: nested(lambda e: alt(seq(A, e), B)), b"a" * 500 + b"b"),
        (lambda: nested(lambda e: star(seq(alt(e, A), B))), b"bab"),
        (lambda: Rules.of(star(star(A))), b"a" * 1000),
        (
            lambda: Rules.of(seq(*[optional(A)] * 30, *[A] * 30)),
            b"a" * 45,
        ),
        (lambda: Rules.of(seq(repeat(A, 0, 65_536), B)), b"a" * 10_000 + b"b"),
        (lambda: Rules.of(repeat(repeat(A, 2, 1000), 2, 1000)), b"a" * 1000),
        (
            lambda: Rules.of(seq(star(byte_set(b"ab")), A, repeat(byte_set(b"ab"), 20, 20))),
            bytes(random.Random(1).choices(b"ab", k=2000)) + b"a" * 21,
        ),
        (
            lambda: Rules(
                "r0",
                {
                    f"r{n}": seq(A, alt(ref(f"r{(n + 1) % 5000}"), B))
                    for n in range(5000)
                },
            ),
            b"a" * 6000 + b"b",
        ),
        (
            lambda: Rules(
                "r0", {f"r{n}": alt(seq(ref(f"r{n + 1}"), A), ref(f"r{n + 1}")) if n < 33_000 else B for n in range(33_001)}
            ),
            b"b",
        ),
        (lambda: Rules.of(alt(*[literal(b"%06d" % n) for n in range(50_000)])), b"049999"),
    ],
    ids=[
        "parentheses", "optional nest", "union nest", "star nest", "star of star", "optional thirty",
        "long counter", "nested counters", "exponential", "rule cycle", "rule chain", "many choices",
    ],
)  # fmt: skip
def test_finishes_or_is_refused(rules: Callable[[], Rules], data: bytes | None) -> None:
    grammar = rules()
    begin = time.thread_time()
    try:
        automaton = Automaton(grammar)
        assert automaton.size_bytes < 512e6
        if data is None:
            assert automaton.run(automaton.start, b"(" * 3000) != DEAD
        else:
            assert accepts(automaton, data)
        assert automaton.size_bytes < 512e6
    except GrammarTooLarge:
        pass
    # The bound of one piece of work is 2 s; the room above is for a busy machine.
    assert time.thread_time() - begin < 8


def test_memory_of_a_long_counter() -> None:
    tracemalloc.start()
    try:
        automaton = Automaton(Rules.of(seq(repeat(A, 0, 65_536), B)))
        assert accepts(automaton, b"a" * 5000 + b"b")
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 3 * automaton.size_bytes
        assert automaton.size_bytes < 3 * peak
    finally:
        tracemalloc.stop()


def test_states_are_bounded() -> None:
    rules = Rules.of(seq(star(byte_set(b"ab")), A, repeat(byte_set(b"ab"), 30, 30)))
    automaton = Automaton(rules, limits=GrammarLimits(max_states=5000))
    data = bytes(random.Random(0).choices(b"ab", k=20_000))
    with pytest.raises(GrammarTooLarge, match="more than 5000 states") as caught:
        accepts(automaton, data)
    assert caught.value.resource == "states"
    assert caught.value.limit == 5000
    # What was built stays usable.
    assert accepts(automaton, data[:20]) in (True, False)


def test_memory_is_bounded() -> None:
    rules = Rules.of(repeat(A, 0, 65_536))
    with pytest.raises(GrammarTooLarge, match="max_bytes"):
        accepts(Automaton(rules, limits=GrammarLimits(max_bytes=1_000_000)), b"a" * 60_000)


def test_time_is_bounded() -> None:
    words = [literal(b"%06d" % n) for n in range(20_000)]
    rules = Rules.of(alt(*[seq(word, star(word)) for word in words]))
    with pytest.raises(GrammarTooLarge, match="ms") as caught:
        Automaton(rules, limits=GrammarLimits(build_ms=5))
    assert caught.value.resource == "ms"


def test_a_search_for_dead_ends_is_bounded() -> None:
    # The only common string has 2 * 3 * 5 * 7 * 11 * 13 letters.
    lengths = [seq(repeat(A, n, n), star(repeat(A, n, n))) for n in (2, 3, 5, 7, 11, 13)]
    rules = Rules.of(intersect(*lengths))
    bounded = Automaton(rules, limits=GrammarLimits(search_states=100))
    assert bounded.live(bounded.start)
    exact = Automaton(rules, limits=GrammarLimits(search_states=50_000))
    assert accepts(exact, b"a" * 30_030)
