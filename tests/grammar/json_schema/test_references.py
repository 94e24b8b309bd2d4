"""References, anchors, identifiers, drafts."""

from __future__ import annotations

import json

import pytest

from deepinfer.core.errors import (
    EmptyLanguage,
    GrammarSyntaxError,
    GrammarTooLarge,
    UnsupportedKeyword,
)
from deepinfer.grammar.json_schema import compile_json_schema


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "x"}),
        ({"$defs": {"a/b": {"type": "integer"}, "c~%": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/c~0%25"}, 1, "x"),
        ({"$id": "http://x.y/root", "$defs": {"a": {"$id": "sub", "type": "integer"}}, "$ref": "sub"}, 1, "x"),
        ({"$id": "http://x.y/z/", "$defs": {"a": {"$id": "q/", "$defs": {"b": {"type": "null"}}, "$ref": "#/$defs/b"}}, "$ref": "q/"}, None, 1),
        ({"$id": "urn:uuid:deadbeef-1234-00ff-ff00-4321feebdaed", "$defs": {"b": {"type": "string"}}, "items": {"$ref": "urn:uuid:deadbeef-1234-00ff-ff00-4321feebdaed#/$defs/b"}}, ["x"], [1]),
        ({"$defs": {"a": {"$anchor": "x", "type": "integer"}}, "items": {"$ref": "#x"}}, [1], ["x"]),
        ({"definitions": {"a": {"$id": "#x", "type": "integer"}}, "$schema": "http://json-schema.org/draft-07/schema", "items": {"$ref": "#x"}}, [1], ["x"]),
    ],
)  # fmt: skip
def test_local_references(accepts, schema, valid, invalid):
    assert accepts(schema, valid)
    assert not accepts(schema, invalid)
    assert accepts(json.dumps(schema), valid)


def test_other_documents_are_given_never_fetched(accepts, no_network):
    schema = {"items": {"$ref": "http://x.y/int.json#/$defs/i"}}
    with pytest.raises(UnsupportedKeyword, match="resources=") as caught:
        compile_json_schema(schema)
    assert caught.value.path == "/items/$ref"
    resources = {
        "http://x.y/int.json": {"$defs": {"i": {"$ref": "other.json"}}},
        "http://x.y/other.json": {"type": "integer"},
    }
    assert accepts(schema, [1], resources=resources)
    assert not accepts(schema, ["x"], resources=resources)


def test_meta_schemas_are_known(accepts):
    schema = {"$ref": "http://json-schema.org/draft-07/schema#/definitions/nonNegativeInteger"}
    assert accepts(schema, 1)
    assert not accepts(schema, -1)
    whole = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    with pytest.raises(UnsupportedKeyword, match="uniqueItems"):
        compile_json_schema(whole, formats="annotate")
    assert accepts(
        whole, {"type": "object", "properties": {"a": {"minimum": 1}}}, on_unsupported="warn"
    )
    assert not accepts(whole, {"properties": {"a": {"minimum": "x"}}}, on_unsupported="warn")


def test_dynamic_references_see_where_they_were_entered(accepts):
    tree = {
        "$id": "http://x.y/tree",
        "$dynamicAnchor": "node",
        "type": "object",
        "properties": {
            "data": {},
            "children": {"type": "array", "items": {"$dynamicRef": "#node"}},
        },
    }
    strict = {
        "$id": "http://x.y/strict",
        "$dynamicAnchor": "node",
        "$ref": "tree",
        "unevaluatedProperties": False,
    }
    resources = {"http://x.y/tree": tree}
    misspelt = {"children": [{"daat": 1}]}
    assert accepts(tree, misspelt)
    assert accepts(strict, {"children": [{"data": 1}]}, resources=resources)
    assert not accepts(strict, misspelt, resources=resources)
    both = {"properties": {"a": {"$ref": "http://x.y/tree"}, "b": {"$ref": "http://x.y/strict"}}}
    resources["http://x.y/strict"] = strict
    assert accepts(both, {"a": misspelt}, resources=resources)
    assert not accepts(both, {"b": misspelt}, resources=resources)


def test_vocabularies_switch_keywords_off(accepts):
    meta = {
        "$id": "http://x.y/meta",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$vocabulary": {
            "https://json-schema.org/draft/2020-12/vocab/core": True,
            "https://json-schema.org/draft/2020-12/vocab/applicator": True,
        },
    }
    schema = {"$schema": "http://x.y/meta", "properties": {"a": False}, "minProperties": 3}
    assert accepts(schema, {"b": 1}, resources={"http://x.y/meta": meta})
    assert not accepts(schema, {"a": 1}, resources={"http://x.y/meta": meta})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {
            "$defs": {"a": {"anyOf": [{"type": "integer"}, {"not": {"$ref": "#/$defs/a"}}]}},
            "$ref": "#/$defs/a",
        },
    ],
)
def test_references_that_only_lead_to_each_other_are_refused(schema):
    with pytest.raises(UnsupportedKeyword, match="refers to itself"):
        compile_json_schema(schema)


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "#/items/3"])
def test_references_that_lead_nowhere(reference):
    with pytest.raises(GrammarSyntaxError):
        compile_json_schema({"$ref": reference, "items": [{}]})


def test_recursion_is_deep():
    tree = {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"c": {"$ref": "#/$defs/n"}},
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    }
    grammar = compile_json_schema(tree)
    assert grammar.matches('{"c":' * 500 + "{}" + "}" * 500)
    assert not grammar.matches('{"c":' * 500 + "{}" + "}" * 499)
    arrays = compile_json_schema({"type": "array", "items": {"$ref": "#"}})
    assert arrays.matches("[" * 2000 + "]" * 2000)


def test_recursion_without_an_end_is_empty():
    with pytest.raises(EmptyLanguage):
        compile_json_schema(
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
        )
    optional = {
        "properties": {
            "a": {"type": "array", "minItems": 1, "items": {"$ref": "#/properties/a"}},
            "b": {},
        }
    }
    grammar = compile_json_schema(optional)
    assert grammar.matches('{"b": 1}')
    assert not grammar.matches_prefix('{"a"')  # no dead end


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ('{"type": ', "JSON"),
        ('{"minimum": NaN}', "JSON"),
        ({"type": "strnig"}, "type"),
        ({"minimum": "3"}, "minimum"),
        ({"minItems": -1}, "minItems"),
        ({"properties": []}, "properties"),
        ({"allOf": []}, "allOf"),
        ({"items": 3}, "schema"),
        ({"required": "a"}, "required"),
        ({"multipleOf": 0}, "multipleOf"),
        (3, "schema"),
    ],
)
def test_malformed_schemas_are_named(schema, word):
    with pytest.raises(GrammarSyntaxError, match=word):
        compile_json_schema(schema)


def test_patterns_that_cannot_be_compiled_are_named(accepts):
    for pattern in ("(", r"(a)\1"):
        with pytest.raises(UnsupportedKeyword) as caught:
            compile_json_schema({"properties": {"x": {"pattern": pattern}}})
        assert caught.value.path == "/properties/x/pattern"
        assert accepts({"pattern": pattern}, "x", on_unsupported="warn")


def test_too_much_nesting_is_refused():
    deep: object = {"type": "string"}
    for _ in range(3000):
        deep = {"allOf": [deep]}
    with pytest.raises(GrammarTooLarge):
        compile_json_schema(deep)  # type: ignore[arg-type]
