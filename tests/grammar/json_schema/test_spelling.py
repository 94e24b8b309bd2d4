"""Spellings of strings and keys, and white space."""

from __future__ import annotations

import json

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.grammar.grammar import Grammar
from deepinfer.grammar.ir import Rules
from deepinfer.grammar.json_schema import Whitespace, compile_json_schema
from deepinfer.grammar.json_schema.spelling import Spelling, spell_text

CHARACTERS = [
    "a",
    "/",
    '"',
    "\\",
    "\n",
    "\t",
    "\x00",
    "\x1f",
    "\x7f",
    "é",
    "€",
    "🚀",
    "\U0010ffff",
    "\ud800",
]


def spellings(character: str) -> set[str]:
    """Every way to write one character in JSON."""
    units = character.encode("utf-16-be", "surrogatepass")
    hexes = [units[i : i + 2].hex() for i in range(0, len(units), 2)]
    found = {"".join("\\u" + h for h in hexes), "".join("\\u" + h.upper() for h in hexes)}
    short = {
        '"': '\\"',
        "\\": "\\\\",
        "/": "\\/",
        "\n": "\\n",
        "\t": "\\t",
        "\r": "\\r",
        "\b": "\\b",
        "\f": "\\f",
    }
    if character in short:
        found.add(short[character])
    if character >= " " and character not in '"\\' and not 0xD800 <= ord(character[0]) <= 0xDFFF:
        found.add(character)
    return found


@pytest.mark.parametrize("character", CHARACTERS, ids=map(ascii, CHARACTERS))
def test_every_spelling_of_a_character(character):
    anyway = Grammar(Rules.of(spell_text(character, Spelling.ANY)))
    usual = Grammar(Rules.of(spell_text(character, Spelling.CANONICAL)))
    for text in spellings(character):
        assert json.loads(f'"{text}"') == character
        assert anyway.matches(text)
    written = {json.dumps(character)[1:-1], json.dumps(character, ensure_ascii=False)[1:-1]}
    for text in written - {"\ud800"}:
        assert usual.matches(text)
    others = [c for c in CHARACTERS if c != character]
    assert not any(anyway.matches(text) for other in others for text in spellings(other))


def test_strings_are_what_json_allows(accepts_text):
    schema = {"type": "string"}
    for text in ['""', '"\\u00e9\\ud83d\\ude80\\/"', '"é\\n"', '"\x7f"']:
        assert accepts_text(schema, text)
    for text in [
        '"a\nb"',
        '"\\q"',
        '"\\u12"',
        '"a',
        "'a'",
        '"\\ud800"',
        '"\\ude80\\ud83d"',
        b'"\xff"',
        b'"\xc0\x80"',
        '"\\\'"',
    ]:
        assert not accepts_text(schema, text)


def test_lengths_count_code_points(accepts_text):
    schema = {"type": "string", "maxLength": 1, "minLength": 1}
    for text in ['"\\ud83d\\ude80"', '"\\u00e9"', '"🚀"', '"\\""', '"\\/"']:
        assert accepts_text(schema, text)
    for text in ['""', '"ab"', '"\\n\\n"', '"\\u0061b"']:
        assert not accepts_text(schema, text)


def test_keys_in_other_spellings_are_not_undeclared_keys(accepts_text):
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert not accepts_text(schema, '{"\\u0061": "x"}')
    assert not accepts_text(schema, '{"\\u0061": "x"}', escapes="any")
    assert accepts_text(schema, '{"\\u0061": 1}', escapes="any")
    assert not accepts_text(schema, '{"a": 1, "\\u0061": 1}', escapes="any")
    assert accepts_text(schema, '{"b": "x", "a": 1}')


def test_keys_that_need_escapes(accepts):
    schema = {
        "properties": {'a"b\\c': {"type": "integer"}, "é\n": {}},
        "required": ['a"b\\c'],
        "additionalProperties": False,
    }
    assert accepts(schema, {'a"b\\c': 1, "é\n": 2})
    assert not accepts(schema, {'a"b\\c': "x"})


def test_white_space_is_bounded(accepts_text):
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    value = {"a": [1, {"b": [[], {}]}], "c": "x"}
    for options in ({"indent": 2}, {"indent": 4}, {"separators": (",", ":")}, {}):
        assert accepts_text(schema, json.dumps(value, **options))
    assert accepts_text(schema, "{" + " " * 32 + "}")
    assert not accepts_text(schema, "{" + " " * 33 + "}")
    assert not accepts_text(schema, "{\n\n}")
    assert not accepts_text(schema, " {}")
    roomy = Whitespace(max_blanks=None, max_newlines=3, around=True)
    assert accepts_text(schema, "\n{\n\n\n" + " " * 500 + "}  ", whitespace=roomy)


def test_compact_output(accepts_text):
    schema = {"type": "array"}
    compact = Whitespace.compact()
    assert accepts_text(schema, '[1,{"a":[]}]', whitespace=compact)
    assert not accepts_text(schema, "[1, 2]", whitespace=compact)
    spaced = Whitespace(item_separator=", ", key_separator=": ")
    assert accepts_text(schema, '[1, {"a": 2}]', whitespace=spaced)
    assert not accepts_text(schema, "[1,2]", whitespace=spaced)


@pytest.mark.parametrize(
    "options",
    [
        {"max_blanks": -1},
        {"max_newlines": 1 << 30},
        {"item_separator": ","},
        {"item_separator": ";", "key_separator": ":"},
    ],
)
def test_white_space_is_checked(options):
    with pytest.raises(ConfigError):
        Whitespace(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"order": "x"},
        {"additional": True},
        {"formats": "no"},
        {"escapes": 1},
        {"on_unsupported": "x"},
        {"draft": "5"},
        {"budget_ms": 0},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError):
        compile_json_schema({}, **options)
