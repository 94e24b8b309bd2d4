"""Faults that other engines of this kind were reported to have, as tests."""

from __future__ import annotations

import pytest

from deepinfer.core.errors import EmptyLanguage, UnsupportedKeyword
from deepinfer.grammar.json_schema import Whitespace, compile_json_schema


def test_bounds_on_numbers_are_not_ignored(accepts):
    assert not accepts({"type": "number", "minimum": 0}, -1)


def test_divisors_of_decimals_are_sound(accepts_text):
    assert not accepts_text({"type": "number", "multipleOf": 0.25}, "0.3")
    assert accepts_text({"type": "number", "multipleOf": 0.25}, "0.75")


def test_leading_zeros_are_no_numbers(accepts_text):
    assert not accepts_text({"type": "integer", "minimum": 3}, "01")
    assert not accepts_text({"type": "integer", "minimum": 3}, "03")


def test_negative_fractions_and_zeros(accepts_text):
    for text in ("-0.5", "-0", "-0.0"):
        assert accepts_text({"type": "number", "minimum": -4, "maximum": 4}, text)


def test_a_declared_key_is_no_additional_one(accepts, accepts_text):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": True,
    }
    assert not accepts(schema, {"a": "wrong"})
    assert accepts(schema, {"b": "x"})
    assert not accepts_text(schema, '{"\\u0061": "x"}')


def test_keys_out_of_order_need_no_escapes(accepts):
    schema = {
        "type": "object",
        "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
        "required": ["first", "second"],
        "additionalProperties": {"type": "string"},
    }
    assert accepts(schema, {"second": 1, "zzz": "x", "first": 2})
    grammar = compile_json_schema(schema, order="declared")
    assert not grammar.matches_prefix('{"\\u0073')
    assert not grammar.matches_prefix('{"second"')


def test_key_patterns_beside_properties(accepts):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "patternProperties": {"^s_": {"type": "string"}, "^i_": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert accepts(schema, {"x": 1, "s_a": "v", "i_a": 2})
    assert not accepts(schema, {"s_a": 1})
    assert not accepts(schema, {"t": 1})
    names = {"properties": {"ab": {"type": "integer"}}, "propertyNames": {"pattern": "^a"}}
    assert accepts(names, {"ab": 1, "ac": "x"})
    assert not accepts(names, {"b": 1})


def test_patterns_match_anywhere_and_are_escaped(accepts, accepts_text):
    assert accepts({"type": "string", "pattern": "b"}, "abc")
    quoted = {"type": "string", "pattern": '^a"b$'}
    assert accepts_text(quoted, '"a\\"b"')
    assert not accepts_text(quoted, '"a"b"')


@pytest.mark.parametrize("length", [0, 1, 1999, 2000, 65536])
def test_long_length_bounds(length):
    grammar = compile_json_schema({"type": "string", "maxLength": length})
    assert grammar.matches('"' + "x" * length + '"')
    assert not grammar.matches('"' + "x" * (length + 1) + '"')


def test_empty_properties(accepts):
    assert accepts({"type": "object", "properties": {}}, {"a": 1})
    assert accepts({"type": "object", "properties": {}, "additionalProperties": False}, {})
    assert not accepts(
        {"type": "object", "properties": {}, "additionalProperties": False}, {"a": 1}
    )


def test_nothing_is_refused_at_once():
    for schema in (
        {"enum": []},
        False,
        {"not": {}},
        {"required": ["x"], "additionalProperties": False, "type": "object"},
    ):
        with pytest.raises(EmptyLanguage):
            compile_json_schema(schema)


def test_keys_with_quotes_slashes_and_control_characters(accepts, accepts_text):
    schema = {
        "type": "object",
        "properties": {'q"': {}, "s/": {}, "c\x01": {}},
        "additionalProperties": False,
    }
    assert accepts(schema, {'q"': 1, "s/": 2, "c\x01": 3})
    assert accepts_text({"enum": ["a/b"]}, '"a/b"')
    assert not accepts_text({"type": "string"}, '"a\x01"')


def test_escapes_that_json_lacks(accepts_text):
    for text in ('"\\\'"', '"\\x41"', '"\\a"', '"\\u00g0"'):
        assert not accepts_text({"type": "string"}, text)
    assert accepts_text({"type": "string"}, '"\\\\"')


def test_white_space_never_runs_on():
    grammar = compile_json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    assert not grammar.matches_prefix("{" + "\n" * 2)
    assert not grammar.matches_prefix('{"a":' + " " * 33)
    assert not grammar.matches_prefix('{"a": 1' + "\t" * 33)
    compact = compile_json_schema(
        {"type": "object", "properties": {"a": {}}}, whitespace=Whitespace.compact()
    )
    assert compact.matches('{"a":"x"}')


def test_definitions_do_not_give_empty_output(accepts):
    schema = {
        "$defs": {
            "p": {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
        },
        "$ref": "#/$defs/p",
    }
    assert accepts(schema, {"n": "x"})
    assert not accepts(schema, {})


def test_references_in_a_circle_are_refused():
    with pytest.raises(UnsupportedKeyword):
        compile_json_schema(
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        )


def test_dates_by_shape_are_not_enough(accepts):
    assert not accepts({"type": "string", "format": "date"}, "2026-02-30")
    assert not accepts({"type": "string", "format": "date-time"}, "2026-02-30T00:00:00Z")


def test_a_nested_constant_in_any_white_space(accepts_text):
    schema = {"const": {"a": [1, {"b": None}]}}
    for text in (
        '{"a":[1,{"b":null}]}',
        '{ "a" : [ 1 , { "b" : null } ] }',
        '{\n  "a": [\n    1.0,\n    {"b": null}]}',
    ):
        assert accepts_text(schema, text)


def test_siblings_are_not_ignored(accepts):
    base = {"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 3}
    assert not accepts(base, 2)
    both = {
        "properties": {"k": {"type": "string"}},
        "required": ["k"],
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    assert not accepts(both, {"k": "v"})


def test_overlapping_branches_of_one_of(accepts):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}
    assert not accepts(schema, 3)
    assert accepts(schema, 2.5)


def test_conditions_between_members(accepts):
    schema = {
        "type": "object",
        "properties": {"t": {"enum": ["a", "b"]}, "v": {}},
        "required": ["t", "v"],
        "if": {"properties": {"t": {"const": "a"}}},
        "then": {"properties": {"v": {"type": "integer"}}},
    }
    assert accepts(schema, {"v": 1, "t": "a"})
    assert not accepts(schema, {"v": "x", "t": "a"})
    assert accepts(schema, {"v": "x", "t": "b"})
