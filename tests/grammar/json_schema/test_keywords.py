"""Every keyword: values that must be accepted, values that must be refused."""

from __future__ import annotations

import pytest

OBJ = {"type": "object"}

CASES = [
    # name, schema, valid, invalid
    ("true", True, [1, "a", None, [], {}], []),
    ("false", False, [], [1, None]),
    ("type", {"type": "string"}, ["", "x"], [1, None, [], {}, True]),
    ("type-integer", {"type": "integer"}, [1, -3, 1.0, 1e16, 0], [1.5, "1", True]),
    ("type-number", {"type": "number"}, [1, 1.5, -2e-7], ["1", False]),
    ("type-boolean", {"type": "boolean"}, [True, False], [0, 1, "true"]),
    ("type-list", {"type": ["integer", "null"], "minimum": 2}, [None, 3], [1, "x"]),
    (
        "enum",
        {"enum": [1, "x", None, {"a": [1]}]},
        [1, 1.0, "x", None, {"a": [1]}],
        [True, "y", {}],
    ),
    ("enum-empty", {"enum": []}, [], [1, None]),
    (
        "const",
        {"const": {"a": [1, {"b": None}], "é": "ñ"}},
        [{"é": "ñ", "a": [1, {"b": None}]}],
        [{}],
    ),
    ("const-false", {"const": False}, [False], [0, None]),
    ("minimum", {"minimum": 3}, [3, 3.5, "x"], [2, 2.999, -4]),
    ("maximum", {"maximum": 3}, [3, -100, 2.5], [3.001, 4]),
    ("exclusiveMinimum", {"exclusiveMinimum": 0}, [0.001, 1], [0, -0.0, -1]),
    ("exclusiveMaximum", {"exclusiveMaximum": 5}, [4.999, -6], [5, 5.0, 6]),
    ("range", {"type": "integer", "minimum": 10, "maximum": 20}, [10, 20, 15.0], [9, 21, 100]),
    ("multipleOf", {"multipleOf": 3}, [0, 9, -3, 300], [7, 1.5, 10]),
    ("multipleOf-decimal", {"multipleOf": 0.25}, [0.75, 2, -1.25], [0.3, 0.1]),
    ("multipleOf-tenths", {"multipleOf": 0.3}, [0.3, 0.9, 3], [0.4, 1]),
    ("minLength", {"minLength": 2}, ["ab", "é€", 1], ["", "a", "\n"]),
    ("maxLength", {"maxLength": 2}, ["", "🚀🚀", "\n\t"], ["abc", "\n\t\n"]),
    ("pattern", {"pattern": "b"}, ["abc", "b", 3], ["ac", ""]),
    (
        "pattern-length",
        {"pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
        ["ab"],
        ["a", "abcd", "1a"],
    ),
    ("format", {"format": "date"}, ["2024-02-29", 3], ["2026-02-30", "2023-02-29"]),
    (
        "properties",
        {"properties": {"a": {"type": "integer"}}},
        [{}, {"a": 1}, {"b": "x"}, 3],
        [{"a": "x"}],
    ),
    ("properties-false", {"properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    ("required", {"required": ["a", "b"]}, [{"b": 1, "a": 2, "c": 3}], [{"a": 1}, {}]),
    (
        "additionalProperties",
        {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        [{"a": 1}, {"b": "x", "a": 2}],
        [{"b": 1}],
    ),
    (
        "closed",
        {"properties": {"a": {}}, "additionalProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    (
        "patternProperties",
        {"patternProperties": {"b": {"type": "integer"}}, "additionalProperties": False},
        [{"abc": 1}],
        [{"abc": "x"}, {"a": 1}],
    ),
    (
        "patternProperties-beside-properties",
        {
            "properties": {"ab": {"minimum": 2}},
            "patternProperties": {"b": {"type": "integer"}, "^a": {"maximum": 9}},
        },
        [{"ab": 3, "b": 1, "az": "x"}],
        [{"ab": 1}, {"ab": 2.5}, {"ab": 10}, {"b": "x"}, {"az": 10}],
    ),
    (
        "propertyNames",
        {"propertyNames": {"pattern": "^a", "maxLength": 2}},
        [{"ab": 1}, {}],
        [{"b": 1}, {"abc": 1}],
    ),
    ("minProperties", {"minProperties": 2}, [{"a": 1, "b": 2}], [{}, {"a": 1}]),
    ("maxProperties", {"maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    (
        "dependentRequired",
        {"dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    (
        "dependentSchemas",
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}}},
        [{"b": "x"}, {"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": "x"}],
    ),
    ("items", {"items": {"type": "integer"}}, [[], [1, 2], "x"], [["a"], [1, None]]),
    (
        "prefixItems",
        {"prefixItems": [{"type": "integer"}, {"type": "string"}]},
        [[], [1], [1, "a", None]],
        [["a"], [1, 2]],
    ),
    (
        "prefixItems-closed",
        {"prefixItems": [{}, {"const": 1}], "items": False},
        [[2], [2, 1]],
        [[2, 2], [2, 1, 3]],
    ),
    ("minItems", {"minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ("maxItems", {"maxItems": 1}, [[], [1]], [[1, 2]]),
    ("contains", {"contains": {"const": 3}}, [[1, 3], [3]], [[], [1]]),
    ("minContains", {"contains": {"type": "integer"}, "minContains": 2}, [[1, "a", 2]], [[1, "a"]]),
    (
        "maxContains",
        {"contains": {"const": 1}, "maxContains": 2},
        [[1, 1], [2, 1]],
        [[1, 1, 1], [2]],
    ),
    (
        "contains-zero",
        {"contains": {"const": 1}, "minContains": 0, "maxContains": 1},
        [[], [1], [2]],
        [[1, 1]],
    ),
    (
        "contains-behind-prefix",
        {
            "prefixItems": [{"type": "string"}],
            "items": {"type": "integer"},
            "contains": {"type": "number", "minimum": 5},
        },
        [["a", 5], ["a", 1, 7]],
        [["a"], ["a", 1], [5]],
    ),
    (
        "uniqueItems",
        {"items": {"enum": [1, 2, "x"]}, "uniqueItems": True},
        [[], [2, 1], ["x", 1, 2]],
        [[1, 1], [1, 2, 1]],
    ),
    (
        "uniqueItems-numbers",
        {"items": {"enum": [1, True]}, "uniqueItems": True},
        [[1, True]],
        [[1, 1.0]],
    ),
    ("uniqueItems-off", {"uniqueItems": False}, [[1, 1]], []),
    ("allOf", {"allOf": [{"minimum": 2}, {"maximum": 4}, {"multipleOf": 2}]}, [2, 4], [3, 5, 0]),
    (
        "allOf-objects",
        {
            "allOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"minimum": 5}}},
            ]
        },
        [{"a": 6}],
        [{"a": 4}, {}, {"a": 5.5}],
    ),
    ("anyOf", {"anyOf": [{"type": "string"}, {"minimum": 10}]}, ["x", 10, None], [9]),
    (
        "anyOf-siblings",
        {"required": ["k"], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"k": 1, "b": 2}],
        [{"k": 1}],
    ),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5], [3, 0.5]),
    (
        "oneOf-objects",
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 2}],
    ),
    ("not", {"not": {"type": "string"}}, [1, None], ["x"]),
    (
        "not-required",
        {"type": "object", "not": {"required": ["a", "b"]}},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    (
        "not-properties",
        {"type": "object", "not": {"properties": {"a": {"type": "integer"}}}},
        [{"a": "x"}],
        [{}, {"a": 1}],
    ),
    ("not-enum", {"type": "string", "not": {"enum": ["a", "b"]}}, ["c", "ab", ""], ["a", "b"]),
    ("not-pattern", {"type": "string", "not": {"pattern": "^a"}}, ["ba", ""], ["a", "ab"]),
    ("not-const-array", {"not": {"const": [1, 2]}}, [[1], [2, 1], [1, 2, 3]], [[1, 2]]),
    (
        "not-items",
        {"type": "array", "not": {"items": {"type": "integer"}}},
        [["a"], [1, None]],
        [[], [1]],
    ),
    (
        "not-uniqueItems",
        {"type": "array", "items": {"enum": [1, 2, 3]}, "not": {"uniqueItems": True}},
        [[1, 1], [1, 2, 1]],
        [[], [1, 2]],
    ),
    (
        "if",
        {
            "if": {"properties": {"t": {"const": "a"}}, "required": ["t"]},
            "then": {"required": ["v"]},
            "else": {"required": ["w"]},
        },
        [{"t": "a", "v": 1}, {"t": "b", "w": 1}, {"w": 2}],
        [{"t": "a"}, {"t": "b", "v": 1}],
    ),
    (
        "if-number",
        {"if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"multipleOf": 2}},
        [20, 4],
        [15, 3],
    ),
    (
        "ref",
        {"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 3},
        [4],
        [2, "x"],
    ),
    (
        "ref-recursive",
        {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "c": {"items": {"$ref": "#"}, "type": "array"},
            },
            "required": ["v"],
        },
        [{"v": 1, "c": [{"v": 2, "c": []}]}],
        [{"v": 1, "c": [{"c": []}]}],
    ),
    (
        "anchor",
        {"$defs": {"x": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"},
        [1],
        ["x"],
    ),
    (
        "dynamicRef",
        {
            "$dynamicAnchor": "node",
            "properties": {"next": {"$dynamicRef": "#node"}},
            "unevaluatedProperties": False,
        },
        [{"next": {"next": {}}}],
        [{"next": {"x": 1}}],
    ),
    (
        "unevaluatedProperties",
        {
            "allOf": [{"properties": {"a": {}}}],
            "anyOf": [{"required": ["b"], "properties": {"b": {}}}, {}],
            "unevaluatedProperties": False,
        },
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    (
        "unevaluatedItems",
        {"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": {"type": "integer"}},
        [["x"], ["x", 1]],
        [["x", "y"]],
    ),
    (
        "oneOf-touching-bounds",
        {"type": "number", "oneOf": [{"minimum": 3}, {"maximum": 3}]},
        [2, 4, 3.5],
        [3, 3.0],
    ),
    (
        "uniqueItems-of-arrays",
        {
            "items": {"enum": [[1, 2], [2, 1], [1]], "not": {"items": {"const": 1}}},
            "uniqueItems": True,
        },
        [[[1, 2], [2, 1]], [[2, 1]]],
        [[[1]], [[1, 2], [1, 2]]],
    ),
    (
        "uniqueItems-of-objects",
        {"items": {"enum": [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}, {}]}, "uniqueItems": True},
        [[{"a": 1, "b": 2}, {}]],
        [[{"a": 1, "b": 2}, {"b": 2, "a": 1}]],
    ),
    ("untyped", {"minimum": 5, "maxLength": 1}, ["a", 5, []], ["ab", 4]),
    (
        "required-undeclared",
        {"required": ["x"], "additionalProperties": False},
        [[]],
        [{}, {"x": 1}],
    ),
]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_keyword(accepts, schema, valid, invalid):
    assert [value for value in valid if not accepts(schema, value)] == []
    assert [value for value in invalid if accepts(schema, value)] == []


def test_older_drafts(accepts):
    four = {"$schema": "http://json-schema.org/draft-04/schema#"}
    assert accepts({**four, "minimum": 3, "exclusiveMinimum": True}, 4)
    assert not accepts({**four, "minimum": 3, "exclusiveMinimum": True}, 3)
    assert accepts({**four, "type": "integer"}, 1)
    assert not accepts({**four, "type": "integer"}, 1.0)  # draft 4 speaks of the spelling
    assert accepts({**four, "const": 1}, 2)  # not a keyword yet
    either = {**four, "anyOf": [{"type": "integer", "minimum": 5}, {"enum": [0.5, 2]}]}
    assert [value for value in (7, 0.5, 2, 2.0) if accepts(either, value)] == [7, 0.5, 2, 2.0]
    assert [value for value in (7.0, 3, 1e16) if accepts(either, value)] == []
    assert accepts({**four, "not": {"type": "integer"}}, 1.0)
    assert not accepts({**four, "not": {"type": "integer"}}, 1)
    seven = {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert accepts(
        {
            **seven,
            "$ref": "#/definitions/a",
            "minimum": 9,
            "definitions": {"a": {"type": "integer"}},
        },
        1,
    )
    assert not accepts({**seven, "items": [{"type": "integer"}], "additionalItems": False}, [1, 2])
    assert not accepts({**seven, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, {"c": 1})
    assert accepts(
        {"items": [{"type": "integer"}], "dependencies": {"a": ["b"]}}, [1, 2], draft="7"
    )


def test_members_come_in_any_order_unless_asked(accepts_text):
    schema = {
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert accepts_text(schema, '{"b": 1, "a": 2}')
    assert accepts_text(schema, '{"a": 1, "b": 2}', order="declared")
    assert not accepts_text(schema, '{"b": 1, "a": 2}', order="declared")


def test_undeclared_keys_come_last_in_any_order(accepts_text):
    schema = {
        "properties": {"z": {}},
        "patternProperties": {"^i": {"type": "integer"}, "^s": {"type": "string"}},
    }
    for text in ('{"z": 0, "i": 1, "s": "", "i2": 2, "x": []}', '{"x": 1, "s": "", "i": 3}'):
        assert accepts_text(schema, text, order="declared")
    assert not accepts_text(schema, '{"i": 1, "z": 0}', order="declared")


def test_undeclared_keys_can_be_left_out(accepts):
    schema = {"properties": {"a": {"properties": {"x": {}}}, "m": {"type": "object"}}}
    assert accepts(schema, {"b": 1})
    assert not accepts(schema, {"b": 1}, additional="closed")
    assert not accepts(schema, {"a": {"b": 1}}, additional="closed")
    assert accepts(schema, {"a": {"x": 1}, "m": {"anything": 1}}, additional="closed")


def test_declared_keys_occur_once(accepts_text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not accepts_text(schema, '{"a": 1, "a": 2}')
    # A key that nothing names is not remembered.
    assert accepts_text(schema, '{"b": 1, "b": 2}')
