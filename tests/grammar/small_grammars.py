"""Small grammars of every kind, by name, for the checks that hold for all grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import toy_automata

from deepinfer.grammar import ir
from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.regex import compile_regex

WORD = ir.byte_set([(0x61, 0x7A)])
DIGIT = ir.byte_set([(0x30, 0x39)])
TEXT = ir.byte_set([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E)])


def _rules(**rules: ir.Expr) -> Automaton:
    return Automaton(ir.Rules("root", rules))


def _lit(text: str) -> ir.Expr:
    return ir.literal(text.encode())


def _bag(*, ordered: bool, low: int = 0, clauses: tuple[ir.Clause, ...] = ()) -> Automaton:
    members = [
        ir.Member(ir.seq(_lit(f'"{key}":'), value))
        for key, value in [("a", DIGIT), ("ab", ir.plus(WORD)), ("name", _lit("true"))]
    ]
    inner = ir.bag(members, _lit(","), clauses=clauses, low=low, ordered=ordered)
    return _rules(root=ir.seq(_lit("{"), inner, _lit("}")))


R = ir.ref
REGEXES = {
    "literal": "abc",
    "alternatives": "yes|no|ye",
    "nested prefixes": "a|ab|abc|abcd",
    "star": "(ab)*",
    "plus of letters": "[a-z]+",
    "digits": "[0-9]+",
    "counted": "a{3,5}b?",
    "long count": "[a-z]{0,200}!",
    "at least": "(aa){2,}",
    "optional run": "(a?){12}a{12}",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?",
    "any character": ".*",
    "any character but a letter": "[^a]*",
    "ends with answer": ".*answer: [A-D]",
    "quoted": r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
    "words and spaces": r"[a-z]+( [a-z]+)*",
    "class of ideographs": "[一-龥]+",
    "negated Cyrillic": "[^а-я]+",
    "emoji": "[😀-🙏]{1,3}",
    "accents": "(é|è|道){2}",
    "white space": r"[ \t\n\r]*x",
    "exponential": "[ab]*a[ab]{5}c",
    "date": "[0-9]{4}-(0[1-9]|1[0-2])",
    "empty allowed": "(a|)b?",
    "word characters": r"\w+",
    "control token names": "(<think>|<eos>)a*",
}

GRAMMARS: dict[str, Callable[[], Any]] = {
    **{f"regex: {name}": lambda text=text: compile_regex(text) for name, text in REGEXES.items()},
    "brackets": lambda: _rules(root=ir.alt(ir.seq(_lit("("), R("root"), _lit(")")), _lit("x"))),
    "brackets, wrapped": lambda: _rules(
        root=R("s"), s=ir.alt(ir.seq(_lit("("), R("s"), _lit(")")), _lit("x"))
    ),
    "balanced": lambda: _rules(
        root=ir.alt(ir.EPS, ir.seq(_lit("("), R("root"), _lit(")"), R("root")))
    ),
    "right recursion": lambda: _rules(root=ir.alt(ir.seq(_lit("a"), R("root")), _lit("b"))),
    "left recursion": lambda: _rules(root=ir.alt(ir.seq(R("root"), _lit("a")), _lit("b"))),
    "ambiguous": lambda: _rules(
        root=ir.alt(
            ir.seq(R("root"), R("root")), _lit("a"), ir.seq(_lit("("), R("root"), _lit(")"))
        )
    ),
    "arithmetic": lambda: _rules(
        root=ir.alt(ir.seq(R("root"), ir.byte_set([0x2B, 0x2D]), R("term")), R("term")),
        term=ir.alt(ir.seq(R("term"), _lit("*"), R("factor")), R("factor")),
        factor=ir.alt(ir.plus(DIGIT), ir.seq(_lit("("), R("root"), _lit(")"))),
    ),
    "two brackets": lambda: _rules(
        root=ir.alt(
            ir.seq(_lit("["), ir.star(R("root")), _lit("]")),
            ir.seq(_lit("("), ir.star(R("root")), _lit(")")),
            ir.seq(_lit('"'), ir.star(TEXT), _lit('"')),
        )
    ),
    "a to the n, b to the n": lambda: _rules(
        root=ir.alt(ir.EPS, ir.seq(_lit("a"), R("root"), _lit("b")))
    ),
    "palindromes": lambda: _rules(
        root=ir.alt(
            ir.EPS, ir.seq(_lit("a"), R("root"), _lit("a")), ir.seq(_lit("b"), R("root"), _lit("b"))
        )
    ),
    "intersection": lambda: _rules(
        root=ir.intersect(
            ir.seq(ir.anything(), _lit("ab"), ir.anything()),
            ir.repeat(ir.byte_set([0x61, 0x62, 0x63]), 2, 9),
        )
    ),
    "complement": lambda: _rules(
        root=ir.seq(
            _lit('"'),
            ir.intersect(ir.complement(ir.alt(_lit("a"), _lit("name"))), ir.star(TEXT)),
            _lit('":'),
        )
    ),
    "bag, any order": lambda: _bag(ordered=False),
    "bag, declared order": lambda: _bag(ordered=True, low=1),
    "bag, conditions": lambda: _bag(
        ordered=False,
        clauses=(ir.Clause(frozenset([1, 2])), ir.Clause(frozenset([2]), frozenset([0]))),
    ),
    "table: words": lambda: toy_automata.finite([b"abc", b"abce", b"bcd", b"the name", b"tr"]),
    "table: JSON": toy_automata.json_values,
    "table: string but two": lambda: toy_automata.string_but([b"name", b"value"]),
    "table: everything": lambda: toy_automata.LazyAutomaton(
        0, lambda at, byte: None if byte == 0x71 else (at * 3 + byte) % 5, lambda at: at != 3
    ),
}
