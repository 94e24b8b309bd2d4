"""EBNF as GBNF and the W3C write it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.core.errors import ConfigError, GrammarSyntaxError, GrammarTooLarge
from deepinfer.grammar import compile_ebnf
from deepinfer.grammar.ebnf import Syntax

Matches = Callable[..., bool]

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" | \'b\' "c"?', ["a", "b", "bc"], ["", "ac", "c"]),
    ("root ::= [a-c] [^a-c] .", ["adx", "a道é"], ["aax", "ad"]),
    (r'root ::= "\x41\u0042\U00000043\n\t\"\\"', ['ABC\n\t"\\'], ["ABC"]),
    (r"root ::= [\x41-\x43\]\-^\\]+", ["ABC", "]-^\\"], ["D", ""]),
    ('root ::= "a"{2} "b"{1,} "c"{,2} "d"{1,2}', ["aabd", "aabbccdd"], ["abd", "aabcccd", "aab"]),
    ('root ::= ([0-9]+ ("." [0-9]*)?)', ["1", "1.", "1.5"], [".5", ""]),
    (
        '# first\nroot ::= # here\n  (\n "a" | # one\n "b" ) # two\n tail\ntail ::= "!"',
        ["a!", "b!"],
        ["a"],
    ),
    ('root::="a"b\nb::="b"|', ["a", "ab"], ["b"]),
    ('root ::= | "x"', ["", "x"], ["xx"]),
    ('root ::= ""', [""], ["a"]),
    # Recursion of all kinds, ambiguity, empty parts.
    ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab", ""]),
    ('root ::= "a" root | "b"', ["b", "aab"], ["a", "ba"]),
    ('root ::= opt root "a" | "c"\nopt ::= "b" |', ["c", "ca", "bcaa"], ["b", "bc", "ac"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "x)"]),
    ('root ::= ("a"*)*', ["", "aaa"], ["b"]),
    ('root ::= (("a" | )+ "b"?)*', ["", "abab", "b"], ["c"]),
    ('root ::= e\ne ::= e "+" e | e "*" e | [0-9]', ["1", "1+2*3+4"], ["1+", "+1"]),
    ('root ::= a\na ::= b "1" | "x"\nb ::= a "2" | "y"', ["x", "y1", "x21", "y121"], ["xy", "x2"]),
    # The W3C's characters, differences and comments.
    ("root ::= #x41 [#x30-#x39] #x20? /* a digit */", ["A0", "A9 "], ["B0"]),
    ("root ::= (letter - [aeiou])+ \nletter ::= [a-z]", ["bcd"], ["ba", ""]),
    ('root ::= word - ("if" | "else")\nword ::= [a-z]+', ["iff", "i", "elses"], ["if", "else"]),
    ('root ::= "a" - "b" | "c"', ["a", "c"], ["b"]),
    # Characters of several bytes.
    ("root ::= [一-龥]+ | [😀-🙏]+ | [^а-я]", ["道", "😀🙏", "é"], ["ж", "道😀"]),
    ('root ::= "é" [à-ü]', ["éé"], ["e", "éa"]),
    ("cn-char_1 ::= [、-〾]\nroot ::= cn-char_1*", ["", "、〾"], ["a"]),
]


@pytest.mark.parametrize(("text", "yes", "no"), GRAMMARS)
def test_languages(slow_match: Matches, text: str, yes: list[str], no: list[str]) -> None:
    grammar = compile_ebnf(text)
    assert [x for x in yes if not grammar.matches(x)] == []
    assert [x for x in no if grammar.matches(x)] == []
    assert [x for x in [*yes, *no] if slow_match(grammar.rules, x) != (x in yes)] == []


@pytest.mark.parametrize(
    ("text", "syntax", "yes", "no"),
    [
        ('root ::= "a" #x41 is a comment\n "b"', "gbnf", "ab", "aAb"),
        ("root ::= [#x41]", "gbnf", "#", "A"),
        ("root ::= [#x41]", "auto", "A", "#"),
        (r"root ::= '\' 'n'", "w3c", "\\n", "\n"),
        (r"root ::= '\n'", "gbnf", "\n", "\\n"),
    ],
)
def test_dialects(text: str, syntax: Syntax, yes: str, no: str) -> None:
    grammar = compile_ebnf(text, syntax=syntax)
    assert grammar.matches(yes)
    assert not grammar.matches(no)


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ('root ::= ("a"', 1, 10, "no closing parenthesis"),
        ('root ::= "a")', 1, 13, "closes nothing"),
        ('root ::= "a', 1, 10, "no closing quote"),
        ("root ::= 'a\n'", 1, 10, "no closing quote"),
        ("root ::= [a", 1, 10, "no closing bracket"),
        ("root ::= b", 1, 10, "rule 'b' is used and not defined"),
        ('root ::= "a"\n\n  | c', 3, 5, "rule 'c' is used and not defined"),
        ('root ::= "a"\nroot ::= "b"', 2, 1, "defined twice"),
        ('root ::= * "a"', 1, 10, "nothing to repeat"),
        ('root ::= "a" | {2}', 1, 16, "nothing to repeat"),
        ('root ::= "a"{3,2}', 1, 13, "wrong order"),
        ('root ::= "a"{}', 1, 13, "a repeat is written"),
        ('root ::= "a"{x}', 1, 13, "a repeat is written"),
        ('root ::= "a"{1234567890}', 1, 13, "9 digits"),
        (r'root ::= "\q"', 1, 11, "unknown escape"),
        (r'root ::= "\x4"', 1, 11, "2 hexadecimal digits"),
        (r'root ::= "\ud800"', 1, 11, "surrogate"),
        ("root ::= [z-a]", 1, 11, "backwards"),
        ("root ::= #x110000", 1, 10, "past the last character"),
        ('root ::= "a" -', 1, 14, "needs an expression behind"),
        ("root ::= - [a]", 1, 10, "needs an expression before"),
        ('"a"', 1, 1, "begins with a rule"),
        ("a b ::= c", 1, 1, "begins with a rule"),
        ('::= "a"', 1, 1, "no rule name"),
        ("root ::= <think>", 1, 10, "angle brackets"),
        ("root ::= /* x", 1, 10, "not closed"),
        ("root ::= a = b", 1, 12, "means nothing here"),
        ('root ::= "\ud800"', 1, 10, "lone surrogate"),
    ],
)
def test_faults_have_a_place(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(GrammarSyntaxError, match=message) as caught:
        compile_ebnf(text, syntax="auto" if text.startswith("root") else "gbnf")
    assert (caught.value.line, caught.value.column) == (line, column)


def test_the_start_rule() -> None:
    text = 'a ::= "x" b\nb ::= "y"\nc ::= "z"'
    assert compile_ebnf(text, start="a").matches("xy")
    assert compile_ebnf(text, start="b").matches("y")
    assert set(compile_ebnf(text, start="a").rules) == {"a", "b"}
    with pytest.raises(
        GrammarSyntaxError, match="start rule 'root' is not defined; defined are a, b, c"
    ):
        compile_ebnf(text)


def test_unknown_syntax() -> None:
    with pytest.raises(ConfigError, match="use 'auto', 'w3c', 'gbnf' or 'lark'"):
        compile_ebnf('root ::= "a"', syntax="bnf")  # type: ignore[arg-type]


def test_more_rules_than_sixteen_bits_count() -> None:
    count = 33_000
    lines = [
        "root ::= r0",
        *(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(count)),
        f'r{count} ::= "c"',
    ]
    grammar = compile_ebnf("\n".join(lines))
    assert len(grammar.rules) == count + 2
    assert grammar.matches("a" * 1_000 + "b")
    assert not grammar.matches("a" * 1_000)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000,
        "root ::= " + "(" * 60_000,
        'root ::= "' + "a" * 1_000_000 + '"',
        'root ::= "a"{65536} "b"{,999999999}',
        "root ::= " + "[" * 100_000,
        "root ::= " + '"a" | ' * 50_000,
        "x" * 8_000_001,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_texts_end_soon(text: str) -> None:
    begin = time.process_time()
    with contextlib.suppress(GrammarTooLarge, GrammarSyntaxError):
        compile_ebnf(text)
    assert time.process_time() - begin < 2


FILES: dict[str, tuple[list[str], list[str]]] = {
    "arithmetic.gbnf": (["a=1\n", "a +1*(b) =2\nx=y\n"], ["a=1", "a=\n", "=1\n", ""]),
    "chinese.ebnf": (["你好", "你好、 世界!"], ["hello", "", " 你"]),
    "emoji.ebnf": (["😀", "😀🙏"], ["a", "", "🚀"]),
    "english.gbnf": (["Hello, world", "a [b] \\ `c`"], ["", " a", "é"]),
    "json.gbnf": (
        ['{"a":[1,2.5,"x\\n",null]}', "{}"],
        ["[]", '{"a":}', '{"a": 1,}', '{"a":"\x01"}'],
    ),
    "json_minimal.ebnf": (['{"a":[1,-2],"b":{}}', "{}"], ['{"é":1}', "1", '{"a":1,}']),
    "list.gbnf": (["- a\n", "- a\n- é b\n"], ["a\n", "- \n", "- a", "- a\x85\n"]),
    "pddl_depot.ebnf": (
        [
            "(drive truck0 depot1 distributor0)",
            "(lift hoist0 crate1 pallet2 depot0) (drop hoist2 crate5 pallet5 depot1)",
        ],
        ["(drive truck0 depot1)", "(fly truck0 depot1 depot0)", "(drive truck2 depot1 depot0)"],
    ),
    "product_catalog_json.ebnf": (
        [
            '{"productId":1,"productName":"x","price":1.5}',
            '{ "productId" : 12 , "productName" : "" , "price" : 0 }',
        ],
        [
            '{"productName":"x","productId":1,"price":1}',
            '{"productId":01,"productName":"x","price":1}',
        ],
    ),
    "smiles_isocyanates.ebnf": (["O=C=NCC", "CCN=C=O", "O=C=Nc1ccccc1"], ["CC", "O=C=N", ""]),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_grammars_that_people_use(shared_data: Path, name: str) -> None:
    grammar = compile_ebnf((shared_data / "grammars" / name).read_text(encoding="utf-8"))
    yes, no = FILES[name]
    assert [text for text in yes if not grammar.matches(text)] == []
    assert [text for text in no if grammar.matches(text)] == []
