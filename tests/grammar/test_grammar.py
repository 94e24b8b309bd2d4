"""Class Grammar, and grammars put together."""

from __future__ import annotations

import pickle
import random
import threading
import time

import pytest

from deepinfer.core.errors import ConfigError, EmptyLanguage, GrammarSyntaxError
from deepinfer.grammar import (
    Grammar,
    Report,
    ReportEntry,
    any_json,
    choices,
    compile_ebnf,
    compile_regex,
    concatenate,
    either,
    ir,
)


def test_equal_by_content_whatever_the_text() -> None:
    one, two = compile_regex("a+"), compile_regex("(?:a)+?")
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, compile_regex("b")}) == 2
    assert one != compile_ebnf('root ::= "b"')
    assert one != "a+"


def test_pickles_without_its_automaton() -> None:
    grammar = compile_ebnf('start: a\na.2: "(" a ")" | "x"')
    assert grammar.matches("((x))")
    copy = pickle.loads(pickle.dumps(grammar))
    assert copy == grammar
    assert copy.report == grammar.report
    assert copy.source == grammar.source == "ebnf"
    assert copy.matches("(x)")
    assert len(pickle.dumps(grammar)) < 2_000


def test_matching() -> None:
    grammar = compile_regex("é{2}|x")
    assert grammar.matches("éé")
    assert grammar.matches("éé".encode())
    assert not grammar.matches("é")
    assert not grammar.matches(b"x\xff")
    assert not grammar.matches("\ud800")
    assert grammar.matches_prefix("éé".encode()[:3])
    assert not grammar.matches_prefix("xé")
    assert not grammar.matches_prefix("\ud800")
    with pytest.raises(ConfigError, match="data is a list; give bytes or str"):
        grammar.matches(["x"])  # type: ignore[arg-type]


def test_what_matches_nothing_is_found_when_it_is_needed() -> None:
    grammar = compile_ebnf('root ::= "a" root')
    with pytest.raises(EmptyLanguage):
        grammar.matches("a")


def test_one_automaton_for_many_threads() -> None:
    grammar = compile_regex("[ab]{1,40}")
    found = []
    threads = [threading.Thread(target=lambda: found.append(grammar.automaton)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(automaton) for automaton in found}) == 1


def test_repr() -> None:
    assert repr(compile_regex("a")) == "Grammar(regex, 1 rules)"


def test_putting_together() -> None:
    tree = compile_ebnf('root ::= "(" root ")" | "x"')
    other = compile_ebnf('root ::= "[" root "]" | "y"')
    both = tree + other
    assert both.matches("(x)[y]")
    assert not both.matches("(y)[x]")
    assert not both.matches("(x)")
    one = tree | other | compile_regex("z+")
    for text in ("((x))", "[y]", "zz"):
        assert one.matches(text)
    assert not one.matches("([x])")
    assert concatenate(tree, tree, tree).matches("x(x)x")
    assert concatenate().matches("")
    assert pickle.loads(pickle.dumps(both)) == both
    with pytest.raises(EmptyLanguage):
        either()
    with pytest.raises(TypeError):
        tree + "x"  # type: ignore[operator]
    with pytest.raises(TypeError):
        tree | "x"  # type: ignore[operator]


def test_reports_come_along() -> None:
    first = Grammar(
        ir.Rules.of(ir.literal(b"a")), report=Report((ReportEntry("/a", "x", "ignored"),))
    )
    second = Grammar(
        ir.Rules.of(ir.literal(b"b")),
        report=Report(
            (ReportEntry("", "y", "enforced", "why"), ReportEntry("/b", "z", "approximated"))
        ),
    )
    report = (first + second).report
    assert [str(entry) for entry in report] == [
        "/a: x ignored",
        "/: y enforced (why)",
        "/b: z approximated",
    ]
    assert str(report).count("\n") == 2
    assert len(report) == 3
    assert not report.is_exact
    assert [entry.keyword for entry in report.by_status("ignored")] == ["x"]
    assert Report().is_exact


def test_choices() -> None:
    grammar = choices(["yes", "no", "yesterday", "nope", "né", "no", b"\xff\x00"])
    for text in ("yes", "no", "yesterday", "nope", "né", b"\xff\x00"):
        assert grammar.matches(text), text
    for text in ("", "y", "yest", "nopes", "n", b"\xff"):
        assert not grammar.matches(text), text
    assert choices(["", "a"]).matches("")
    assert choices("abc").matches("abc")
    assert not choices("abc").matches("a")
    with pytest.raises(EmptyLanguage, match="no choices"):
        choices([])
    with pytest.raises(GrammarSyntaxError, match="choice 1 holds a lone surrogate"):
        choices(["a", "\udc00"])


def test_choices_against_a_set() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("ab", k=rng.randrange(6))) for _ in range(30)]
    grammar = choices(words)
    for size in range(6):
        for number in range(2**size):
            text = "".join("ab"[number >> bit & 1] for bit in range(size))
            assert grammar.matches(text) == (text in words)


def test_many_choices() -> None:
    begin = time.process_time()
    grammar = choices(f"item {number}" for number in range(20_000))
    assert grammar.matches("item 19999")
    assert not grammar.matches("item 20000")
    assert choices(["a" * 200_000, "a" * 200_001]).matches("a" * 200_000)
    assert time.process_time() - begin < 2


def test_any_json() -> None:
    grammar = any_json()
    for text in (
        '{"a": [1, -2.5e3, null, true, "\\u0041\\n"]}',
        "[]",
        "0",
        '""',
        "[" * 100 + "]" * 100,
    ):
        assert grammar.matches(text), text
    for text in ("", "{a: 1}", "01", "[1,]", '"\n"', "nul", '"\\x"'):
        assert not grammar.matches(text), text
    assert grammar.source == "any_json"
