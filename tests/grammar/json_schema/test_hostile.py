"""Schemas that are meant to hurt: done or refused soon."""

from __future__ import annotations

import json
import time

import pytest

from deepinfer.core.errors import GrammarError, GrammarTooLarge
from deepinfer.grammar.json_schema import compile_json_schema

LIMIT_S = 4.0  # CPU time
REFUSED_S = 2.0  # the compilation's own bound is 1.5


def conditions_within_conditions(depth: int) -> object:
    inner: object = {
        "properties": {"a": {"type": "integer"}, "b": {"pattern": "^x"}},
        "required": ["a"],
    }
    for i in range(depth):
        if i % 2:
            inner = {"not": inner}
        else:
            inner = {
                "if": inner,
                "then": {"not": {"required": [f"z{i}"]}},
                "else": {"required": ["q"]},
            }
    return inner


def nested(depth: int, leaf: object, wrap) -> object:
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


REFUSED = {
    "products": {
        "allOf": [
            {"anyOf": [{"properties": {f"k{i}": {"type": "integer"}}, "required": [f"m{i}"]}, {"properties": {f"k{i}": {"maxLength": 3}}}]}
            for i in range(30)
        ]
    },
    "exclusive-overlaps": {"oneOf": [{"properties": {"k": {"minimum": i}, "j": {"maximum": i}}} for i in range(40)]},
    "conditions": {
        "allOf": [
            {"if": {"properties": {"a": {"minimum": i}}, "required": ["a"]}, "then": {"properties": {"b": {"minLength": i}}}}
            for i in range(40)
        ]
    },
    "key-patterns": {"patternProperties": {f"[a-z]{{{i}}}x": {"minimum": i} for i in range(20)}},
    "positions": {"contains": {"const": 1}, "minContains": 10**6},
    "remainders": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}, {"multipleOf": 983}]},
    "cases": {"anyOf": [{"properties": {f"a{i}": True}} for i in range(20)], "unevaluatedProperties": False},
    "members": {"properties": {f"p{i}": {} for i in range(20_000)}},
    "conditions-within-conditions": conditions_within_conditions(40),
    "levels": nested(3000, {"type": "string"}, lambda s: {"allOf": [s]}),
    "value-levels": {"const": nested(800, 1, lambda s: [s])},
    "diamonds": {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} if i < 200 else {"type": "null"} for i in range(201)},
        "$ref": "#/$defs/d0",
    },
}  # fmt: skip

COMPILED = {
    "choices": ({"enum": [f"value {i}" for i in range(10_000)]}, "value 9999", "value 10000"),
    "numbers": ({"enum": list(range(0, 30_000, 3))}, 29_997, 4),
    "not-numbers": ({"type": "integer", "not": {"enum": list(range(0, 3000, 3))}}, 4, 2997),
    "long-choices": ({"enum": ["y" * 500 + str(i) for i in range(2000)]}, "y" * 500 + "7", "y" * 500),
    "needs-of-needs": (
        {"dependentRequired": {f"k{i}": [f"k{i + 1}"] for i in range(40)}},
        {f"k{i}": 0 for i in range(41)},
        {"k0": 1},
    ),
    "many-items": ({"type": "array", "minItems": 2, "maxItems": 10**9}, [1, 2], [1]),
    "long-strings": ({"type": "string", "maxLength": 10**9}, "x", 1),
    "different-items": ({"items": {"enum": list(range(60))}, "uniqueItems": True, "type": "array"}, list(range(60)), [1, 2, 1]),
    "separate-key-patterns": (
        {
            "type": "object",
            "patternProperties": {f"^p{i:02}_": {"minimum": i} for i in range(40)},
            "additionalProperties": False,
        },
        {"p07_x": 7, "p39_": 40},
        {"p07_x": 6},
    ),
    "discriminated": (
        {"oneOf": [{"properties": {"t": {"const": i}, "v": {"minimum": i}}, "required": ["t"], "type": "object"} for i in range(100)]},
        {"t": 40, "v": 50},
        {"t": 40, "v": 30},
    ),
    "references": (
        {
            "$defs": {
                f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {f"x{i}": {"$ref": f"#/$defs/d{i + 1}"}}}]}
                if i < 25
                else {"type": "object"}
                for i in range(26)
            },
            "$ref": "#/$defs/d0",
        },
        {"x3": {"x4": {}}},
        {"x3": {"x4": 1}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_time(name):
    start = time.thread_time()
    with pytest.raises(GrammarTooLarge):
        compile_json_schema(REFUSED[name])
    assert time.thread_time() - start < REFUSED_S


@pytest.mark.parametrize("name", COMPILED)
def test_done_in_time(name):
    schema, valid, invalid = COMPILED[name]
    start = time.thread_time()
    grammar = compile_json_schema(schema)
    assert time.thread_time() - start < LIMIT_S
    start = time.thread_time()
    assert grammar.matches(json.dumps(valid))
    assert not grammar.matches(json.dumps(invalid))
    assert time.thread_time() - start < LIMIT_S


def test_text_nested_past_the_parser():
    for depth in (2000, 200_000):
        with pytest.raises(GrammarError):
            compile_json_schema('{"not":' * depth + "{}" + "}" * depth)


def test_five_megabytes():
    schema = {
        "properties": {
            f"p{i}": {
                "properties": {f"q{j}": {"minimum": i * j, "title": "x" * 40} for j in range(30)}
            }
            for i in range(2000)
        }
    }
    text = json.dumps(schema)
    assert len(text) > 4_000_000
    start = time.thread_time()
    with pytest.raises(GrammarTooLarge):
        compile_json_schema(text)
    assert time.thread_time() - start < LIMIT_S


def test_the_time_bound_is_an_option():
    schema = {
        "properties": {
            f"p{i}": {"properties": {f"q{j}": {"minimum": i * j} for j in range(20)}}
            for i in range(30)
        }
    }
    with pytest.raises(GrammarTooLarge, match="budget_ms"):
        compile_json_schema(schema, budget_ms=5)
    compile_json_schema(schema, budget_ms=None)
