"""Grammars in the dialect of the Lark parser, against Lark's own Earley parser."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.core.errors import (
    GrammarSyntaxError,
    GrammarTooLarge,
    MissingDependency,
    UnsupportedKeyword,
)
from deepinfer.grammar import compile_ebnf
from deepinfer.grammar.ebnf import Syntax

lark = pytest.importorskip("lark")

Matches = Callable[..., bool]

# A grammar, texts that it accepts, and the characters to mutate them with.
GRAMMARS: dict[str, tuple[str, list[str], str]] = {
    "sums": (
        '?start: sum\n?sum: product | sum "+" product -> add\n?product: atom | product "*" atom\n'
        '?atom: NUMBER -> number | "(" sum ")"\n%import common.NUMBER\n%import common.WS_INLINE\n%ignore WS_INLINE',
        ["1+2", " ( 1.5 * 2e3 ) ", "1"],
        "1.+*() e",
    ),
    "keywords": (
        'start: "if"i NAME ("else" NAME)?\nNAME: /[a-z]+/\n%ignore /\\s+/',
        ["if a else b", "IFaelseb", "If x"],
        "ifelsa IE\n",
    ),
    "repeats": (
        'start: "a"~2 "b"~1..3 ["c" "d"] ("e" | "f")* "g"+ "h"?',
        ["aabg", "aabbbcdefggh"],
        "abcdefgh",
    ),
    "templates": (
        'start: _sep{pair, ","} _sep{NUM, ";"}\n_sep{x, s}: x (s x)*\npair: NUM ":" wrap{NUM}\n'
        'wrap{y}: "<" y ">" | y\nNUM: "0".."9"+',
        ["1:2,3:<4>5;6", "1:23"],
        "123:<>,;",
    ),
    "recursion": (
        'start: a\na: b "x" | "y" | start "w"\nb: a "z" | \n',
        ["yzx", "x", "y", "ywzxw"],
        "xyzw",
    ),
    "right": ('start: "a" start | "b"', ["aaab", "b"], "ab"),
    "strings": (
        "start: ESCAPED_STRING+\n%import common.ESCAPED_STRING\n%import common.WS\n%ignore WS",
        [r'"a" "b\"c"', r'"\\"', '""'],
        '"\\ab ',
    ),
    "flags": ("start: /a.c/s /[b-d]/i /x y/x", ["a\ncBxy", "abcdxy"], "abcBDxy \n"),
    "escapes": (r'start: "\x41\n\"" "\\d" "\d" /\/\d/', ['A\n"\\d\\d/1'], 'A\n"\\d/1'),
    "comments": (
        '// first\nstart: A  // here\n  | B # there\nA: "a" | "b"\n\nB.2: A "c"',
        ["a", "b", "ac", "bc"],
        "abc",
    ),
    "ignored": (
        'start: "a" b\nb: "b"*\n%ignore " "\n%ignore C\nC: "#" /[^\\n]*/ "\\n"',
        ["a", " #x\na b # y\nb ", "#\nab"],
        "ab #\n",
    ),
    "imported": (
        "%import common (CNAME, SIGNED_INT)\n%import common.WS -> SPACE\nstart: CNAME SPACE SIGNED_INT",
        ["ab_1 -12", "x\n+0"],
        "ab_1 -+0",
    ),
    "extended": (
        '%import common.DIGIT\n%extend DIGIT: "x"\nstart: DIGIT+ w\nw: "a"\n%override w: "b"',
        ["1xb", "xb"],
        "01xab",
    ),
    "lazy": (
        'start: TAG "x"* C*\nTAG: /<.*?>b*/\n%import common.C_COMMENT -> C',
        ["<a>bx", "<>/*a*//**x*/", "<b>xx/* */"],
        "<>abx/* ",
    ),
    "empty": ('start: | start "a" start', ["", "a", "aa"], "ab"),
}


def oracle(text: str) -> Callable[[str], bool]:
    parser = lark.Lark(text, parser="earley", lexer="dynamic_complete")

    def accepts(data: str) -> bool:
        try:
            parser.parse(data)
        except lark.exceptions.UnexpectedInput:
            return False
        return True

    return accepts


@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_lark_agrees(slow_match: Matches, name: str) -> None:
    text, samples, alphabet = GRAMMARS[name]
    grammar = compile_ebnf(text)
    accepts = oracle(text)
    assert [sample for sample in samples if not grammar.matches(sample)] == []
    assert [sample for sample in samples if not accepts(sample)] == []
    rng = random.Random(name)
    seen = {True: 0, False: 0}
    for _ in range(120):
        data = list(rng.choice(samples))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randrange(2)] = rng.choice(["", *alphabet])
        mutated = "".join(data)
        expected = accepts(mutated)
        seen[expected] += 1
        assert grammar.matches(mutated) == expected, mutated
        assert grammar.matches_prefix(mutated) or not expected
    assert min(seen.values()) > 3, seen


def test_conditions_inside_terminals() -> None:
    grammar = compile_ebnf(
        r"start: /(?!if\b)[a-z]+/ | A B" + "\n" + r"A: /a/ /(?<!b)c/" + "\nB: /d/"
    )
    assert grammar.matches("iff")
    assert not grammar.matches("if")
    assert grammar.matches("acd")
    entries = list(compile_ebnf("start: A B\nA: /a(?!b)/\nB: /./").report)
    assert [(entry.path, entry.status) for entry in entries] == [("2:1", "approximated")]


def test_priorities_are_noted() -> None:
    grammar = compile_ebnf('start: a\n\na.2: "x"\nB.-1: "y"')
    assert [str(entry) for entry in grammar.report] == [
        "3:1: priority ignored (every parse counts)",
        "4:1: priority ignored (every parse counts)",
    ]
    assert not grammar.report.is_exact


def test_start_is_a_rule_or_a_terminal() -> None:
    text = 'start: "x"\nother: A\nA: "a"+\n%ignore " "'
    assert compile_ebnf(text).matches(" x ")
    assert compile_ebnf(text, start="other").matches("aa ")
    assert compile_ebnf(text, start="A").matches(" aaa")
    with pytest.raises(
        GrammarSyntaxError, match="start rule 'nothing' is not defined; defined are start, other"
    ):
        compile_ebnf(text, start="nothing")


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ('start: ("a"', 1, 8, "is not closed"),
        ('start: "a")', 1, 11, "closes nothing"),
        ('start: "a', 1, 8, "no closing quote"),
        ("start: /a", 1, 8, "no closing slash"),
        ("start: b", 1, 8, "'b' is used and not defined"),
        ('start: "a"\n  | B', 2, 5, "'B' is used and not defined"),
        ('start: "a"\nstart: "b"', 2, 1, "defined twice"),
        ('start: * "a"', 1, 8, "nothing to repeat"),
        ('start: "a"~3..2', 1, 11, "wrong order"),
        ('start: "ab".."c"', 1, 8, "one character"),
        ("start: A\nA: B\nB: A", 3, 1, "uses itself"),
        ('start: A\nA: b\nb: "b"', 2, 4, "cannot use the rule"),
        ("start: /a(/", 1, 10, "no closing parenthesis"),
        ('start: x{"a"}\nx{a, b}: a b', 1, 8, "takes 2 arguments and gets 1"),
        ("%import nowhere.A\nstart: A", 1, 17, "no library 'nowhere'"),
        ("%import common.NOTHING\nstart: NOTHING", 2, 8, "used and not defined"),
        ("%import .file.A\nstart: A", 1, 1, "not read"),
        ("%import common\nstart: A", 1, 1, "%import module.NAME"),
        ("%what A", 1, 1, "directives are"),
        ('%override a: "b"\nstart: a', 1, 11, "nothing can be changed"),
        ("start 'a'", 1, 7, "double quotes"),
        ('start "a"', 1, 7, "expected :"),
        ("start: <think>", 1, 8, "special tokens"),
    ],
)
def test_faults_have_a_place(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(GrammarSyntaxError, match=message) as caught:
        compile_ebnf(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("start: A\n%declare A", "%declare"),
        (r"start: /(a)\1/", "back-reference"),
    ],
)
def test_what_cannot_be_enforced(text: str, keyword: str) -> None:
    with pytest.raises(UnsupportedKeyword) as caught:
        compile_ebnf(text)
    assert caught.value.keyword == keyword


@pytest.mark.parametrize(
    "text",
    [
        "start: " + "(" * 60_000 + '"a"' + ")" * 60_000,
        "start: " + "[" * 60_000,
        'start: x{"a"}\nx{y}: x{z{y}}\nz{y}: y y',
        "start: /" + "(" * 60_000 + "a" + ")" * 60_000 + "/",
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"',
        "start: A0\n"
        + "\n".join(f'A{i}: "b" | A{i + 1} "c"' for i in range(3_000))
        + '\nA3000: "a"',
    ],
    ids=lambda text: text[:22],
)
def test_hostile_texts_end_soon(text: str) -> None:
    begin = time.process_time()
    with contextlib.suppress(GrammarTooLarge, GrammarSyntaxError):
        compile_ebnf(text)
    assert time.process_time() - begin < 2


def test_libraries_need_lark(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import resources

    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(resources, "files", absent)
    with pytest.raises(MissingDependency, match="pip install lark"):
        compile_ebnf("%import common.INT\nstart: INT")


@pytest.mark.parametrize("syntax", ["auto", "lark"])
def test_grammars_that_people_use(shared_data: Path, syntax: Syntax) -> None:
    folder = shared_data / "grammars"
    sums = compile_ebnf((folder / "arithmetic.lark").read_text("utf-8"), syntax=syntax)
    for text in ("1", "-(1 + 2.5)*3", " 1e5 /2"):
        assert sums.matches(text), text
    for text in ("", "1+", "(1", "1\n+2", "--"):
        assert not sums.matches(text), text
    json = compile_ebnf((folder / "json.lark").read_text("utf-8"), syntax=syntax)
    for text in ('{"a": [1, -2.5e3, null]}', "[]", ' "x\\"y" ', "true"):
        assert json.matches(text), text
    for text in ("", "{a: 1}", "[1,]", '"x', "tru"):
        assert not json.matches(text), text


def test_a_library_of_terminals(shared_data: Path) -> None:
    """A text without a start rule: each terminal can be the start."""
    text = (shared_data / "grammars" / "common.lark").read_text("utf-8")
    samples = {
        "DIGIT": ("7", "77"),
        "HEXDIGIT": ("f", "g"),
        "SIGNED_INT": ("-12", "1.2"),
        "DECIMAL": (".5", "5"),
        "FLOAT": ("1e5", "1"),
        "SIGNED_NUMBER": ("+1.5", "1.5.5"),
        "UNESCAPED_STRING": ('"a\\"', '"a"b"'),
        "ESCAPED_STRING": (r'"a\"b"', '"a'),
        "WORD": ("abC", "a1"),
        "CNAME": ("_a1", "1a"),
        "WS_INLINE": (" \t", "\n"),
        "WS": (" \n", "a"),
        "NEWLINE": ("\r\n\n", "\r"),
        "SH_COMMENT": ("# x", "x"),
        "CPP_COMMENT": ("// x", "/ x"),
        "C_COMMENT": ("/* \n * x */", "/* x"),
        "SQL_COMMENT": ("-- x", "- x"),
    }
    for name, (yes, no) in samples.items():
        grammar = compile_ebnf(text, start=name)
        assert grammar.matches(yes), name
        assert not grammar.matches(no), name
    for name in re.findall(r"^([A-Z_]+) *:", text, re.MULTILINE):
        assert compile_ebnf(text, start=name).automaton
