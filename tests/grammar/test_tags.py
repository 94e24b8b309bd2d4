"""Free text with constrained regions, in Python and in its JSON form."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from deepinfer.core.errors import (
    EmptyLanguage,
    GrammarSyntaxError,
    GrammarTooLarge,
    UnsupportedKeyword,
)
from deepinfer.grammar import (
    Tag,
    any_text,
    choices,
    compile_regex,
    compile_structural_tag,
    reasoning,
    tagged_text,
    tool_calls,
)


def texts(alphabet: str, size: int) -> list[str]:
    return ["".join(t) for n in range(size + 1) for t in itertools.product(alphabet, repeat=n)]


@pytest.mark.parametrize(
    "excludes",
    [["abcd", "abce", "bcd"], ["aab"], ["aa", "aba"], ["bb", "abba"], ["a"], []],
)
def test_excluded_strings_inside_one_another(excludes: list[str]) -> None:
    grammar = any_text(excludes=excludes)
    alphabet = "abcde" if "abcd" in excludes else "ab"
    for text in texts(alphabet, 4 if alphabet == "abcde" else 7):
        assert grammar.matches(text) == (not any(e in text for e in excludes)), text


def test_any_text_is_well_formed() -> None:
    grammar = any_text(excludes=["é"])
    assert grammar.matches("e\u0301道\n\x00")
    assert not grammar.matches("aéb")
    assert not grammar.matches(b"a\xff")
    assert not grammar.matches(b"\xc3")
    with pytest.raises(GrammarSyntaxError, match="not empty"):
        any_text(excludes=[""])
    with pytest.raises(GrammarSyntaxError, match="lone surrogate"):
        any_text(excludes=["\ud800"])


def test_reasoning() -> None:
    grammar = reasoning(choices(["yes", "no"]), end="</t>")
    for text in ("</t>yes", "a <t> b </ t>\n</t>no", "</</t>yes"):
        assert grammar.matches(text), text
    for text in ("yes", "a</t>", "a</t>b</t>yes", "</t>yes\n"):
        assert not grammar.matches(text), text
    opened = reasoning(choices(["x"]), begin="<t>", end="</t>")
    assert opened.matches("<t>a</t>x")
    assert not opened.matches("a</t>x")
    overlapping = reasoning(choices(["b", "ab"]), end="aab")
    assert overlapping.matches("aaabb")
    assert not overlapping.matches("aabaabb")


def accepts(
    text: str,
    tags: Sequence[tuple[str, str]],
    triggers: Sequence[str],
    *,
    first: bool = False,
    stop: bool = False,
) -> bool:
    """Tags as their beginning and all that follows it, read from left to right."""
    if first:
        rests = [text[len(b + c) :] for b, c in tags if text.startswith(b + c)]
        if stop:
            return "" in rests
        return any(accepts(rest, tags, triggers) for rest in rests)
    found = [(text.find(t) + len(t), t) for t in triggers if t in text]
    if not found:
        return True
    end = min(place for place, _ in found)
    for place, trigger in found:
        if place != end:
            continue
        for begin, rest in tags:
            whole = begin[len(trigger) :] + rest
            if begin.startswith(trigger) and text.startswith(whole, end):
                behind = text[end + len(whole) :]
                if behind == "" if stop else accepts(behind, tags, triggers):
                    return True
    return False


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(
    ("tags", "triggers"),
    [
        ([("ab", "b")], ["ab"]),
        ([("ab", "b"), ("aba", "")], ["ab"]),
        ([("aab", "a")], ["aa"]),
        ([("aba", "b"), ("ba", "a")], ["aba", "ba"]),
        ([("bb", ""), ("aa", "b")], ["aa", "b"]),
        ([("ab", "ab")], ["ab", "bb"]),
    ],
)
def test_triggers_open_tags(
    tags: list[tuple[str, str]], triggers: list[str], first: bool, stop: bool
) -> None:
    grammar = tagged_text(
        [Tag(begin, choices([rest])) for begin, rest in tags],
        triggers,
        at_least_one=first,
        stop_after_first=stop,
    )
    for text in texts("ab", 8):
        expected = accepts(text, tags, triggers, first=first, stop=stop)
        assert grammar.matches(text) == expected, text


def test_calls_between_sentences() -> None:
    call = Tag("<f=get>", compile_regex(r"\{[a-z]*\}"), "</f>")
    other = Tag("<f=put>", compile_regex("[0-9]+"), "</f>")
    grammar = tagged_text([call, other], ["<f="], excludes=["secret"])
    for text in ("", "a <f", "a<f=get>{x}</f> b <f=put>12</f>", "<b>"):
        assert grammar.matches(text), text
    for text in (
        "a<f=",
        "<f=get>x</f>",
        "<f=del>1</f>",
        "<f=get>{x}",
        "a secret",
        "<f=put>1</f>secret",
    ):
        assert not grammar.matches(text), text
    assert pickle.loads(pickle.dumps(grammar)) == grammar
    with pytest.raises(GrammarSyntaxError, match="begins with no trigger; triggers are"):
        tagged_text([call], ["<g"])
    with pytest.raises(EmptyLanguage, match="there are no tags"):
        tagged_text([], ["<g"], at_least_one=True)
    with pytest.raises(GrammarSyntaxError, match="the beginning of a tag is ''"):
        tagged_text([Tag("", call.content)], ["<g"])
    assert tagged_text([], ["<g"]).matches("a<")
    assert not tagged_text([], ["<g"]).matches("a<g")


REGEX = {"type": "regex", "pattern": "[0-9]+"}
TAG = {"type": "tag", "begin": "<n>", "content": REGEX, "end": "</n>"}


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        ({"type": "const_string", "value": "é"}, ["é"], ["", "e"]),
        ({"type": "const_string", "value": ""}, [""], ["e"]),
        ({"type": "json_schema", "json_schema": {"type": "boolean"}}, ["true"], ["1"]),
        ({"type": "json_schema", "json_schema": None}, ["[1]"], ["x"]),
        (REGEX, ["12"], ["", "a"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["(x)"], ["(x"]),
        ({"type": "any_text"}, ["", "a<b"], []),
        ({"type": "any_text", "excludes": ["ab"]}, ["aab"[:2], "ba"], ["xabx"]),
        ({"type": "sequence", "elements": [TAG, REGEX]}, ["<n>1</n>2"], ["<n>1</n>"]),
        ({"type": "sequence", "elements": []}, [""], ["a"]),
        (
            {"type": "or", "elements": [TAG, {"type": "const_string", "value": "x"}]},
            ["x", "<n>1</n>"],
            ["1"],
        ),
        ({"type": "optional", "content": TAG}, ["", "<n>1</n>"], ["<n>1</n><n>1</n>"]),
        ({"type": "star", "content": TAG}, ["", "<n>1</n><n>2</n>"], ["1"]),
        ({"type": "plus", "content": TAG}, ["<n>1</n>"], [""]),
        (
            {"type": "repeat", "content": TAG, "min": 1, "max": 2},
            ["<n>1</n>", "<n>1</n><n>1</n>"],
            ["", "<n>1</n>" * 3],
        ),
        ({"type": "repeat", "content": TAG, "min": 2, "max": -1}, ["<n>1</n>" * 3], ["<n>1</n>"]),
        (
            {"type": "tag", "begin": "[", "content": REGEX, "end": ["]", ")"]},
            ["[1]", "[1)"],
            ["[1"],
        ),
        ({"type": "tag", "begin": "[", "content": REGEX, "end": ""}, ["[1"], ["[1]"]),
        (
            {
                "type": "tag",
                "begin": "[",
                "content": {"type": "sequence", "elements": [REGEX, {"type": "any_text"}]},
                "end": "]]",
            },
            ["[1]]", "[1 ] a]]"],
            ["[1", "[1]", "[1]]a]]", "[]]"],
        ),
        # Text in a tag ends with the tag's first end.
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                    REGEX,
                ],
            },
            ["<t></t>1", "<t>a</b></t>2"],
            ["<t>a</t></t>1", "<t>1"],
        ),
        (
            {
                "type": "tag",
                "begin": "<c>",
                "end": "</c>",
                "content": {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG]},
            },
            ["<c>a<n>1</n>b</c>", "<c></c>"],
            ["<c>a</c>b</c>", "<c><n>x</n></c>", "<c><n></c>"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<n"],
                "tags": [TAG],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<n>1</n>"],
            ["", "a<n>1</n>", "<n>1</n>a"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<n"],
                "tags": [TAG],
                "at_least_one": True,
                "excludes": ["zz"],
            },
            ["<n>1</n>", "<n>1</n>z<n>1</n>"],
            ["", "a<n>1</n>", "<n>1</n>zz"],
        ),
        (
            {"type": "tags_with_separator", "tags": [TAG], "separator": ","},
            ["", "<n>1</n>", "<n>1</n>,<n>2</n>"],
            ["<n>1</n>,", "<n>1</n><n>2</n>"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [TAG],
                "separator": "",
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<n>1</n>"],
            ["", "<n>1</n><n>2</n>"],
        ),
        (
            {
                "type": "tag",
                "begin": "{",
                "end": "}",
                "content": {"type": "tags_with_separator", "tags": [TAG], "separator": ";"},
            },
            ["{}", "{<n>1</n>;<n>2</n>}"],
            ["{", "{;}"],
        ),
    ],
)
def test_json_form(form: dict[str, Any], yes: list[str], no: list[str]) -> None:
    spec = {"type": "structural_tag", "format": form}
    for given in (spec, json.dumps(spec)):
        grammar = compile_structural_tag(given)
        assert [text for text in yes if not grammar.matches(text)] == []
        assert [text for text in no if grammar.matches(text)] == []


def test_older_json_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = compile_structural_tag(
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<f=x>", "schema": schema, "end": "</f>"},
                {"begin": "<f=y>", "schema": None, "end": "</f>"},
            ],
            "triggers": ["<f="],
        }
    )
    for text in ("hello", 'a<f=x>{"a": 1}</f>b<f=y>[]</f>'):
        assert grammar.matches(text), text
    for text in ("a<f=z>", '<f=x>{"b": 1}</f>', "<f=x>[]</f>"):
        assert not grammar.matches(text), text


def deep(levels: int) -> dict[str, Any]:
    form: dict[str, Any] = REGEX
    for _ in range(levels):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("{", GrammarSyntaxError, "no JSON"),
        ("[]", GrammarSyntaxError, "JSON object"),
        ({}, GrammarSyntaxError, "needs a format"),
        ({"format": 3}, GrammarSyntaxError, "at /format: a format is a JSON object"),
        ({"format": {"type": "magic"}}, UnsupportedKeyword, "format type 'magic' is not known"),
        ({"format": {"type": "regex"}}, GrammarSyntaxError, "at /format: pattern is None"),
        (
            {"format": {"type": "regex", "pattern": "("}},
            GrammarSyntaxError,
            "at /format/pattern: at character 0",
        ),
        (
            {"format": {"type": "regex", "pattern": r"(a)\1"}},
            UnsupportedKeyword,
            "at /format/pattern",
        ),
        (
            {"format": {"type": "grammar", "grammar": "root ::= x"}},
            GrammarSyntaxError,
            "at /format/grammar: line 1",
        ),
        (
            {"format": {"type": "tag", "begin": "", "content": REGEX, "end": ""}},
            GrammarSyntaxError,
            "begin",
        ),
        (
            {"format": {"type": "tag", "begin": "a", "end": "b"}},
            GrammarSyntaxError,
            "at /format/content",
        ),
        (
            {"format": {"type": "repeat", "content": REGEX, "min": 3, "max": 2}},
            GrammarSyntaxError,
            "wrong order",
        ),
        (
            {"format": {"type": "repeat", "content": REGEX, "min": True}},
            GrammarSyntaxError,
            "must be a int",
        ),
        (
            {"format": {"type": "triggered_tags", "tags": [3], "triggers": ["a"]}},
            GrammarSyntaxError,
            "a tag is",
        ),
        ({"format": {"type": "or", "elements": []}}, EmptyLanguage, "no text can match"),
        ({"format": deep(80)}, GrammarTooLarge, "nests more than 64"),
    ],
)
def test_faults_of_the_json_form(spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compile_structural_tag(spec)


D = "｜DSML｜"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 9, "description": "where"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
                "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "both": {"type": ["string", "null"], "pattern": "^x"},
                "tree": {"$ref": "#/$defs/tree"},
                "code": {"$ref": "#/$defs/code"},
            },
            "required": ["city"],
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                    "additionalProperties": False,
                },
                "code": {"allOf": [{"type": "string"}, {"const": "k"}]},
            },
        },
    },
}


def block(*parameters: tuple[str, str, bool], name: str = "get_weather") -> str:
    lines = "\n".join(
        f'<{D} parameter name="{key}" string="{"true" if is_text else "false"}">{value}</{D} parameter>'
        for key, value, is_text in parameters
    )
    return f'<{D} invoke name="{name}">\n{lines}\n</{D} invoke>\n'


def answer(*blocks: str, text: str = "Sure.\n\n") -> str:
    return f"{text}<{D} calls>\n{''.join(blocks)}</{D} calls>"


CITY = ("city", "Oslo", True)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("No tool is needed <b>", True),
        (answer(block(CITY)), True),
        (answer(block(CITY), block(name="noop")), True),
        (answer(block(("days", "3", False), CITY)), True),
        (answer(block(("city", 'a "b"\n<c>!', True))), False),
        (answer(block(("city", 'a"\n<c>', True))), True),
        (answer(block(("days", "3", False))), False),
        (answer(block(CITY, CITY)), False),
        (answer(block(CITY, ("days", "10", False))), False),
        (answer(block(CITY, ("days", "3", True))), False),
        (answer(block(CITY, ("unit", "F", True))), True),
        (answer(block(CITY, ("unit", "K", True))), False),
        (answer(block(CITY, ("unit", '"F"', False))), False),
        (answer(block(CITY, ("either", "null", False))), True),
        (answer(block(CITY, ("either", "x", True))), False),
        (answer(block(CITY, ("both", "xy", True))), True),
        (answer(block(CITY, ("both", "yx", True))), False),
        (answer(block(CITY, ("both", "null", False))), True),
        (answer(block(CITY, ("tree", '{"c": [{}, {"c": []}]}', False))), True),
        (answer(block(CITY, ("tree", '{"d": 1}', False))), False),
        (answer(block(CITY, ("code", "k", True))), True),
        (answer(block(CITY, ("code", "l", True))), False),
        (answer(block(("city", "", True))), False),
        (answer(block(("city", "5", False))), False),
        (answer(block(CITY, ("nothing", "x", True))), False),
        (answer(block(name="other")), False),
        (answer(), False),
        (answer(block(CITY)) + "\n", False),
        (answer(block(CITY))[:-1], False),
        (f"<{D} calls>", False),
    ],
)
def test_calls_of_tools(text: str, fits: bool) -> None:
    grammar = tool_calls([WEATHER, {"name": "noop"}])
    assert grammar.report.is_exact
    assert grammar.matches(text) == fits


def test_calls_that_are_required_or_single() -> None:
    needed = tool_calls([WEATHER], required=True, parallel=False)
    assert needed.matches(answer(block(CITY), text="\n\n"))
    assert not needed.matches(answer(block(CITY)))
    assert not needed.matches("Sure.")
    assert not needed.matches(answer(block(CITY), block(CITY), text="\n\n"))


def test_tools_that_cannot_be_held() -> None:
    def tool(schema: Any, **more: Any) -> dict[str, Any]:
        return {"name": "f", "parameters": {"properties": {"a": schema}, **more}}

    grammar = tool_calls([tool({"type": "string", "format": "date"})])
    assert [entry.path for entry in grammar.report] == ["/0/parameters/properties/a/format"]
    with pytest.raises(EmptyLanguage, match="there are no tools"):
        tool_calls([])
    with pytest.raises(GrammarSyntaxError, match="at /0: a tool is an object with a name"):
        tool_calls([{"parameters": {}}])
    with pytest.raises(GrammarSyntaxError, match="no schema of an object"):
        tool_calls([{"name": "f", "parameters": {"properties": []}}])
    with pytest.raises(GrammarSyntaxError, match="requires 'b', which is not among its properties"):
        tool_calls([tool({}, required=["b"])])
    with pytest.raises(UnsupportedKeyword) as caught:
        tool_calls([tool({"$ref": "http://x.example/y", "type": "object"})])
    assert str(caught.value.path).startswith("/0/parameters/properties/a")
