"""What the report says."""

from __future__ import annotations

import pytest

from deepinfer.core.errors import UnsupportedKeyword
from deepinfer.grammar.json_schema import compile_json_schema


def test_every_keyword_is_listed():
    schema = {
        "title": "x",
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "date", "mine": 1},
            "b": {"$ref": "#/$defs/i"},
        },
        "$defs": {"i": {"minimum": 3, "format": "odd"}, "unused": {"minimum": 4}},
        "nullable": True,
    }
    report = compile_json_schema(schema).report
    found = {entry.path: entry.status for entry in report}
    assert found == {
        "/type": "enforced",
        "/properties": "enforced",
        "/nullable": "ignored",
        "/properties/a/type": "enforced",
        "/properties/a/format": "enforced",
        "/properties/a/mine": "ignored",
        "/properties/b/$ref": "enforced",
        "/$defs/i/minimum": "enforced",
        "/$defs/i/format": "ignored",
    }


def test_what_is_left_aside_is_listed():
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 5}}}
    with pytest.raises(UnsupportedKeyword, match="infinitely many") as caught:
        compile_json_schema(schema)
    assert caught.value.path == "/properties/a/uniqueItems"
    grammar = compile_json_schema(schema, on_unsupported="warn")
    assert [e.path for e in grammar.report.by_status("ignored")] == ["/properties/a/uniqueItems"]
    assert grammar.matches('{"a": [1, 1]}')
    assert not grammar.matches('{"a": [1, 1, 1, 1, 1, 1]}')


def test_siblings_of_ref_in_old_drafts_are_listed():
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/a",
        "minimum": 3,
        "definitions": {"a": {}},
    }
    report = compile_json_schema(schema).report
    assert {(e.path, e.status) for e in report} == {("/$ref", "enforced"), ("/minimum", "ignored")}


def test_grammars_are_values():
    first = compile_json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    second = compile_json_schema('{"properties": {"a": {"type": "integer"}}, "type": "object"}')
    assert first == second
    assert hash(first) == hash(second)
