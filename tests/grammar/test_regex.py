r"""Regular expressions against Python's own engine, and rules that it does not share."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer.core.errors import (
    ConfigError,
    EmptyLanguage,
    GrammarSyntaxError,
    GrammarTooLarge,
    UnsupportedKeyword,
)
from deepinfer.grammar import compile_regex, ir
from deepinfer.grammar.regex import regex_to_expr

Matches = Callable[..., bool]

ATOMS = [
    "a",
    "b",
    "c",
    r"\w",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    "é",
    "[а-я]",
    r"\s",
    "-",
    "1",
    r"[^\W\d]",
]
ASSERTIONS = [
    "^",
    "$",
    r"\b",
    r"\B",
    "(?<=a)",
    "(?<!b)",
    r"(?<!\w)",
    r"\A",
    r"\Z",
    "(?<=ab)",
    "(?<!b[bc])",
]
QUANTIFIERS = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "*?", "{0}"]


def patterns(*, assertions: bool) -> st.SearchStrategy[str]:
    leaves = st.sampled_from(ATOMS + (ASSERTIONS if assertions else []))

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        ways = [
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from(QUANTIFIERS)).map(lambda two: f"(?:{two[0]}){two[1]}"),
        ]
        if assertions:
            ways.append(inner.map(lambda x: f"(?={x})"))
            ways.append(inner.map(lambda x: f"(?!{x})"))
        return st.one_of(ways)

    return st.recursive(leaves, grow, max_leaves=7)


TEXTS = st.lists(st.text("aabbc1 \né-А", max_size=5), min_size=4, max_size=8)


def check(match: Matches, pattern: str, texts: list[str], *, search: bool) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:
        assume(False)
    expr = regex_to_expr(pattern, "python", search=search)
    for text in texts:
        if text == "" and r"\B" in pattern:
            continue  # Python says no before 3.14, and yes from then on
        expected = bool(compiled.search(text) if search else compiled.fullmatch(text))
        assert match(expr, text) == expected, (pattern, text)


@given(patterns(assertions=False), TEXTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_patterns(slow_match: Matches, pattern: str, texts: list[str], search: bool) -> None:
    check(slow_match, pattern, texts, search=search)


@given(patterns(assertions=True), TEXTS, st.booleans())
@settings(max_examples=250, deadline=None)
def test_random_patterns_with_assertions(
    slow_match: Matches, pattern: str, texts: list[str], search: bool
) -> None:
    with contextlib.suppress(UnsupportedKeyword):  # looks nested in repeats
        check(slow_match, pattern, texts, search=search)


@given(patterns(assertions=False), TEXTS)
@settings(max_examples=60, deadline=None)
def test_another_engine_agrees(slow_match: Matches, pattern: str, texts: list[str]) -> None:
    interegular = pytest.importorskip("interegular")
    assume(not set(pattern) & {"\\", "."})  # classes are ASCII there
    machine = interegular.parse_pattern(pattern).to_fsm()
    expr = regex_to_expr(pattern, "python")
    for text in texts:
        assert slow_match(expr, text) == machine.accepts(text), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        # Anchors inside alternatives, groups and repeats.
        ("^a|b$", ["a", "ax", "xb", "b"], ["xa", "bx", ""]),
        ("(^a)", ["a", "ab"], ["ba"]),
        ("(^|,)x(,|$)", ["x", "a,x", "x,b", "a,x,b"], ["ax", "xb"]),
        ("^([a-z]+(,|$))+$", ["ab", "ab,c"], ["ab,,c", ""]),
        ("a^b", [], ["ab", "a^b"]),
        ("^$", [""], ["a", "\n"]),
        ("^a$", ["a"], ["a\n"]),
        # Look-ahead and look-behind, at the start, in the middle, in repeats.
        ("^(?!foo).*$", ["", "fo", "bar foo"], ["foo", "foobar"]),
        (r"^(?=.*\d)(?=.*[a-z]).{4,}$", ["ab1c", "1aaa"], ["abcd", "1a", "1234"]),
        (
            r"^((?!-)[a-z0-9-]{1,9}(?<!-)\.)+[a-z]{2,6}$",
            ["a-b.com", "x.y.org"],
            ["-a.com", "a-.com", "a"],
        ),
        ("^(?:(?!foo).)*$", ["", "fofo"], ["foo", "xfoox"]),
        ("<!--((?!-->).)*-->", ["<!-- a -->", "x<!---->y"], ["<!--", "<!-- ->"]),
        (r"(?<!\d)\d{3}(?!\d)", ["123", "a123b"], ["1234", "12"]),
        (r"(?<=\$)\d+", ["$5", "a $5"], ["5", "$"]),
        ("^(?:(?=ab)a|a|b)*$", ["aa", "ab", "ba", "aab"], ["ac", "c"]),
        ("(?<=ab|c)d", ["abd", "cd"], ["d", "bd"]),
        ("a(?=b)", ["ab"], ["a", "ac"]),
        ("(?=a(?!b))a.", ["ac"], ["ab", "a"]),
        # Word boundaries.
        (r"\bfoo\b", ["foo", "a foo!", "-foo-"], ["foot", "afoo", "foo_"]),
        (r"\Bo", ["oo", "foo"], ["o", " o"]),
        (r"^(\b\w+\b ?)+$", ["ab cd", "ab "], ["ab  cd", ""]),
        # ECMA-262 escapes.
        (r"^\cJ$", ["\n"], ["J"]),
        (r"^[\u{1F600}-\u{1F64F}]$", ["\U0001f600", "\U0001f64f"], ["\U0001f650"]),
        (r"^\ud83d\ude00$", ["\U0001f600"], [""]),
        (r"^\u0041\x42$", ["AB"], ["ab"]),
        (r"^\p{Lu}\P{Lu}$", ["Éé", "Ж1"], ["éÉ"]),
        (r"^\p{Script=Greek}+$", ["αβγ"], ["abc"]),
        (r"^\d\w$", ["1a", "1_"], ["1é", "٣a"]),
        (r"^\s$", [" ", "\ufeff", "\u2028", "\u3000"], ["\x85", "a"]),
        (r"^[^\S]$", [" "], ["a"]),
        (r"^[\b]\0\/\-$", ["\x08\x00/-"], ["b0/-"]),
        (r"^[\w-.]$", ["a", "-", "."], ["/", "+"]),
        (r"^[^]$", ["a", "\n"], ["", "ab"]),
        (r"^[]$", [], ["", "]"]),
        ("^.$", ["a", "道", "\x85"], ["\n", "\r", "\u2028"]),
        ("^{a}]$", ["{a}]"], []),
        ("^a{2,}b{3}?$", ["aabbb"], ["abbb", "aabb"]),
        ("(?i)^straße$", ["STRAßE", "straẞe"], ["strasse"]),
        ("(?i:a)b", ["Ab"], ["aB"]),
        ("(?<year>[0-9]{4})", ["1999"], ["199"]),
        ("^(?:a|)b$", ["ab", "b"], ["a"]),
        # Characters of several bytes, alone and against a negated class.
        ("^[^а-я]+$", ["道", "abc", "Ж\u0450", "\U0001f600"], ["ж", "aя"]),
        ("^[一-龥]$", ["道", "一", "龥"], ["a", "\u4dff", "\u9fa6"]),
        ("^[😀-🙏]+$", ["😀🙏"], ["a", "\U0001f5ff"]),
        (r"^\S$", ["[", "é"], [" "]),
    ],
)
def test_json_schema_flavour(
    slow_match: Matches, pattern: str, yes: list[str], no: list[str]
) -> None:
    expr = regex_to_expr(pattern, search=True)
    assert [text for text in yes if not slow_match(expr, text)] == []
    assert [text for text in no if slow_match(expr, text)] == []


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"(?i)k[^s]", ["Kx", "\u212aX", "ks", "k\u017f"]),
        (r"(?m)^a$", ["a", "a\n", "b\na\nc", "ba"]),
        (r"a$", ["a", "a\n", "a\n\n"]),
        (r"a$\n", ["a\n", "a"]),
        (r"\Aa\Z", ["a", "a\n"]),
        (r"(?s).", ["\n"]),
        (r"(?x) a b # comment" + "\n" + r" \  [ ] c", ["ab  c", "abc"]),
        (r"(?a)\d\w", ["1a", "٣a", "1é"]),
        (r"\d\w\s", ["٣é\u2003", "1a\x1c"]),
        (r"(?P<n>a)(?#what)+b", ["aab", "b"]),
        (r"a{,2}b{,}", ["", "aabbb", "aaab"]),
        (r"\x41\u0042\U00000043\103\0", ["ABCC\0"]),
        (r"\N{GREEK SMALL LETTER ALPHA}\a", ["α\a"]),
        (r"[]a]+[^]b]", ["]ax", "]]b"]),
        (r"(?-i:a)(?i:b)", ["ab", "aB", "Ab"]),
        (r"(?:^|a)(?=b)*b", ["b", "ab"]),
        (r"[\d\-x]", ["-", "7", "x", "y"]),
        (r"{a}{", ["{a}{"]),
    ],
)
def test_python_flavour(slow_match: Matches, pattern: str, texts: list[str]) -> None:
    for search in (False, True):
        expr = regex_to_expr(pattern, "python", search=search)
        for text in [*texts, "", "ab"]:
            way = re.search if search else re.fullmatch
            assert slow_match(expr, text) == bool(way(pattern, text)), (search, text)


@pytest.mark.parametrize(
    ("pattern", "flavor", "position"),
    [
        ("a(b", "json-schema", 1),
        ("a)b", "json-schema", 1),
        ("a[b", "json-schema", 1),
        ("*a", "json-schema", 0),
        ("a**", "json-schema", 2),
        ("a|*", "json-schema", 2),
        ("^*", "json-schema", 1),
        ("(?=a)*", "json-schema", 5),
        ("ab{3,2}", "json-schema", 2),
        ("ab{,2}", "json-schema", 2),
        ("[z-a]", "json-schema", 1),
        (r"a\Z", "json-schema", 1),
        (r"\a", "json-schema", 0),
        (r"\p{Foo}", "json-schema", 0),
        (r"\pL", "json-schema", 0),
        (r"\u{110000}", "json-schema", 0),
        (r"\u{}", "json-schema", 0),
        (r"\u12", "json-schema", 0),
        (r"\c1", "json-schema", 0),
        (r"\01", "json-schema", 0),
        ("a\\", "json-schema", 1),
        ("[a\\", "json-schema", 2),
        ("(?<1>a)", "json-schema", 0),
        ("(?<n", "json-schema", 3),
        ("(?~a)", "json-schema", 0),
        ("a(?i)", "json-schema", 1),
        ("(?i-", "json-schema", 0),
        (r"\q", "python", 0),
        (r"\N{NO SUCH}", "python", 0),
        (r"\400", "python", 0),
        (r"[\w-a]", "python", 1),
        ("(?L)a", "python", 2),
        (r"\U00110000", "python", 0),
        ("a\n\n(", "python", 3),
    ],
)
def test_faults_have_a_position(pattern: str, flavor: str, position: int) -> None:
    with pytest.raises(GrammarSyntaxError) as caught:
        compile_regex(pattern, flavor=flavor)  # type: ignore[arg-type]
    assert caught.value.position == position
    assert caught.value.line == pattern.count("\n", 0, position) + 1
    assert str(caught.value).startswith(f"at character {position} of the regular expression: ")


@pytest.mark.parametrize(
    ("pattern", "flavor", "keyword"),
    [
        (r"(a)\1", "json-schema", "back-reference"),
        (r"(?<n>a)\k<n>", "json-schema", "back-reference"),
        (r"(?P<n>a)(?P=n)", "python", "back-reference"),
        ("(a)?(?(1)b|c)", "python", "conditional"),
        ("(?>a)", "python", "atomic group"),
        ("a++", "python", "possessive quantifier"),
        ("(?:(?<=(?=b)a)b)*", "json-schema", "look-around"),
    ],
)
def test_what_is_not_regular_is_refused(pattern: str, flavor: str, keyword: str) -> None:
    with pytest.raises(UnsupportedKeyword) as caught:
        compile_regex(pattern, flavor=flavor)  # type: ignore[arg-type]
    assert caught.value.keyword == keyword


def test_unknown_flavour() -> None:
    with pytest.raises(ConfigError, match="use 'json-schema' or 'python'"):
        compile_regex("a", flavor="perl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 60_000 + "a" + ")" * 60_000,
        "(" * 60_000,
        "((" * 30_000 + "a)?" + ")b" * 30_000,
        "(a?){30}a{30}",
        "a{65536}",
        "((((a{999}){999}){999}){999}){999}",
        "(?:(?!end).){0,500}end",
        "a{99999999999}",
        "a" * 1_000_001,
        "[" + "a-z" * 30_000 + "]",
        "(a|b)*a(a|b){12}(?=c)",
        "(?!" * 300 + "a" + ")" * 300,
        "(?:" + "(?=a" * 9 + ")" * 9 + ")*",
    ],
    ids=lambda pattern: pattern[:20],
)
def test_hostile_patterns_end_soon(pattern: str) -> None:
    begin = time.process_time()
    with contextlib.suppress(GrammarTooLarge, GrammarSyntaxError, UnsupportedKeyword):
        regex_to_expr(pattern, search=True)
    assert time.process_time() - begin < 2


def test_an_empty_language_is_refused() -> None:
    with pytest.raises(EmptyLanguage, match="matches no text"):
        compile_regex("a^b")


def test_spellings_of_the_caller(slow_match: Matches) -> None:
    """Each character may be written in two ways; conditions are about characters, not about bytes."""

    def encode(points: tuple[tuple[int, int], ...]) -> ir.Expr:
        plain = [
            c for first, last in points for c in range(first, min(last, 0x7F) + 1) if c != 0x25
        ]
        escaped = [
            ir.literal(b"%%%02X" % c)
            for first, last in points
            for c in range(first, min(last, 0x7F) + 1)
        ]
        return ir.alt(ir.byte_set(plain), *escaped)

    expr = regex_to_expr("^(?!a)[ab]+$", encode_class=encode, search=True)
    assert slow_match(expr, "ba%61")
    assert not slow_match(expr, "%61b")
    behind = regex_to_expr("(?:b|1(?<!1))+", encode_class=encode)
    assert slow_match(behind, "b%62")  # ends in a byte "2", or in "b"
    assert not slow_match(behind, "b1")


def test_searching_is_not_matching() -> None:
    assert regex_to_expr("a*", search=True) == ir.star(regex_to_expr(r"[\s\S]"))
