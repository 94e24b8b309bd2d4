"""Random schemas: verdicts agree with the `jsonschema` library, and what the grammar generates is valid."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from tests.grammar.json_schema.slow import Recogniser

from deepinfer.core.errors import EmptyLanguage, GrammarError, GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.json_schema import compile_json_schema

KEYS = ["a", "b", "c", "ab"]
LEAVES = [
    True,
    False,
    {},
    {"type": "integer"},
    {"type": "string"},
    {"const": 1},
    {"enum": ["a", 1, None]},
    {"minimum": 2},
]
TYPES = [
    "integer",
    "number",
    "string",
    "object",
    "array",
    "null",
    "boolean",
    ["string", "null"],
    ["integer", "object"],
]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice([None, True, False])
    if kind < 0.45:
        return rng.choice([0, 1, 2, 3, 5, -1, 1.0, 0.5, 2.5, 10, -0.5, 7])
    if kind < 0.7 or depth > 1:
        return rng.choice(["", "a", "b", "ab", "abc", "x", 'é"'])
    if kind < 0.85:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    if depth > 2 or rng.random() < 0.08:
        return rng.choice(LEAVES)

    def child() -> Any:
        return random_schema(rng, depth + 1)

    makers = {
        "type": lambda: {"type": rng.choice(TYPES)},
        "enum": lambda: {"enum": [random_value(rng) for _ in range(rng.randint(1, 4))]},
        "const": lambda: {"const": random_value(rng)},
        "bound": lambda: {rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): rng.choice([0, 1, 2, 2.5, -1])},
        "multiple": lambda: {"multipleOf": rng.choice([1, 2, 3, 0.5, 0.25, 2.5])},
        "length": lambda: {rng.choice(["minLength", "maxLength"]): rng.randint(0, 3)},
        "pattern": lambda: {"pattern": rng.choice(["a", "^a", "b$", "^[a-c]+$", "^$", "a|x", "^.{2}$"])},
        "properties": lambda: {"properties": {key: child() for key in rng.sample(KEYS, rng.randint(1, 3))}},
        "patterns": lambda: {"patternProperties": {key: child() for key in rng.sample(["a", "^b", "b$", "^[ab]$"], 2)}},
        "additional": lambda: {"additionalProperties": child()},
        "names": lambda: {"propertyNames": rng.choice([{"pattern": "a"}, {"maxLength": 1}, {"enum": ["a", "b"]}, {"not": {"pattern": "b"}}])},
        "required": lambda: {"required": rng.sample(KEYS, rng.randint(1, 2))},
        "members": lambda: {rng.choice(["minProperties", "maxProperties"]): rng.randint(0, 3)},
        "dependent": lambda: {"dependentRequired": {rng.choice(KEYS): rng.sample(KEYS, rng.randint(0, 2))}},
        "schemas": lambda: {"dependentSchemas": {rng.choice(KEYS): child()}},
        "items": lambda: {"items": child()},
        "prefix": lambda: {"prefixItems": [child() for _ in range(rng.randint(1, 2))]},
        "contains": lambda: {"contains": child(), "minContains": rng.randint(0, 2), "maxContains": rng.randint(1, 3)},
        "count": lambda: {rng.choice(["minItems", "maxItems"]): rng.randint(0, 3)},
        "several": lambda: {rng.choice(["allOf", "anyOf", "oneOf"]): [child() for _ in range(rng.randint(1, 3))]},
        "not": lambda: {"not": child()},
        "if": lambda: {"if": child(), "then": child(), "else": child()},
        "ref": lambda: {"$ref": rng.choice(["#/$defs/x", "#/$defs/y"])} if depth else {},
        "unevaluated": lambda: {rng.choice(["unevaluatedProperties", "unevaluatedItems"]): child()},
    }  # fmt: skip
    schema: dict[str, Any] = {}
    for name in rng.sample(list(makers), rng.randint(1, 3)):
        schema.update(makers[name]())
    return schema


def random_root(rng: random.Random) -> dict[str, Any]:
    schema = random_schema(rng)
    if not isinstance(schema, dict):
        schema = {"not": schema}
    schema["$defs"] = {
        "x": {"type": ["string", "integer"]},
        "y": {
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/y"}},
            "maxProperties": 2,
        },
    }
    return schema


@pytest.mark.parametrize("seed", range(120))
def test_verdicts(seed):
    rng = random.Random(seed)
    schema = random_root(rng)
    validator = jsonschema.Draft202012Validator(schema)
    grammar = None
    try:
        grammar = compile_json_schema(schema)
    except EmptyLanguage:
        pass
    except (UnsupportedKeyword, GrammarTooLarge):
        return
    for _ in range(20):
        value = random_value(rng)
        got = grammar is not None and grammar.matches(json.dumps(value))
        assert got == validator.is_valid(value), (schema, value)


def walk(automaton: Automaton, rng: random.Random) -> bytes | None:
    """A random output; None when it grew too long."""
    usual = b'",}]:[{0123456789abcx '
    state, out = automaton.start, bytearray()
    while len(out) < 300:
        if automaton.accepting(state) and (rng.random() < 0.3 or len(out) > 80):
            return bytes(out)
        following = [byte for byte in range(256) if automaton.step(state, byte)]
        if not following:
            assert automaton.accepting(state), f"a dead end behind {bytes(out)!r}"
            return bytes(out)
        wanted = b'"}],:' if len(out) > 80 else usual if rng.random() < 0.97 else bytes(range(256))
        byte = rng.choice([byte for byte in following if byte in wanted] or following)
        state = automaton.step(state, byte)
        out.append(byte)
    return None


@pytest.mark.parametrize("seed", range(60))
def test_outputs_are_valid(seed):
    rng = random.Random(10_000 + seed)
    schema = random_root(rng)
    try:
        automaton = compile_json_schema(schema).automaton
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(5):
        out = walk(automaton, rng)
        # The library computes with binary floats, so long numbers say nothing.
        if out is None or re.search(rb"[0-9.]{12}|[eE]", out):
            continue
        if not repeats_a_key(out):
            assert validator.is_valid(json.loads(out)), (schema, out)


def repeats_a_key(text: bytes) -> bool:
    """Whether some object names a key twice; keys that nothing declares are not remembered."""
    found = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    return any(found)


@pytest.mark.parametrize("seed", range(25))
def test_rules_mean_the_same_to_a_slow_matcher(seed):
    """The rules are right by themselves, not only under the automaton that runs them."""
    rng = random.Random(20_000 + seed)
    schema = random_root(rng)
    try:
        rules = compile_json_schema(schema).rules
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in (random_value(rng) for _ in range(6)):
        text = json.dumps(value, separators=(",", ":"))
        if len(text) <= 40:
            assert Recogniser(rules, text.encode()).accepts() == validator.is_valid(value), (
                schema,
                value,
            )
