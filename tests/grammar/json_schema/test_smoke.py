"""A few schemas end to end."""

from __future__ import annotations

import json

import pytest

from deepinfer.grammar.json_schema import compile_json_schema

CASES = [
    ({"type": "integer", "minimum": 3}, [3, 4, 100], [2, -1, 3.5, "3"]),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 1}, {"b": ["x"], "a": 2}],
        [{}, {"b": []}, {"a": 1, "c": 2}, []],
    ),
    ({"enum": [1, "x", None, {"a": [1]}]}, [1, "x", None, {"a": [1]}], [2, "y", {"a": []}]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
def test_accepts_what_the_schema_accepts(schema, valid, invalid):
    grammar = compile_json_schema(schema)
    assert [grammar.matches(json.dumps(value)) for value in valid] == [True] * len(valid)
    assert [grammar.matches(json.dumps(value)) for value in invalid] == [False] * len(invalid)
