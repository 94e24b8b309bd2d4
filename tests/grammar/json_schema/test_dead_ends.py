"""No output is led to where nothing can follow and nothing is complete."""

from __future__ import annotations

import random

import pytest

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.json_schema import compile_json_schema

RULED_OUT = [
    # A key that a pattern rules out by now, beside one that is declared and no longer possible.
    ({"propertyNames": {"not": {"pattern": "b"}}, "properties": {"a": {}}}, b'{"b'),
    ({"propertyNames": {"not": {"pattern": "b"}}, "required": ["a"]}, b'{"b'),
    (
        {
            "propertyNames": {"not": {"pattern": "b"}},
            "dependentRequired": {"c": ["ab", "a"]},
        },
        b'{"x":1,"yb',
    ),
]

WALKED = [
    *[schema for schema, _ in RULED_OUT],
    {
        "patternProperties": {"b$": {"type": "string"}, "a": {"type": "string"}},
        "propertyNames": {"maxLength": 3},
        "additionalProperties": False,
        "minProperties": 2,
    },
    {
        "properties": {"a": {"not": {"enum": [1, "b"]}}, "b": False},
        "propertyNames": {"pattern": "^.{2}$"},
        "dependentRequired": {"ab": ["éa"]},
        "maxProperties": 3,
    },
]


@pytest.mark.parametrize(("schema", "text"), RULED_OUT)
@pytest.mark.parametrize("order", ["any", "declared"])
def test_keys_that_are_ruled_out_are_dead_at_once(schema, text, order):
    automaton = compile_json_schema(schema, order=order).automaton
    assert automaton.run(automaton.start, text[:-1])
    assert not automaton.run(automaton.start, text)


def dead_end(automaton: Automaton, rng: random.Random, steps: int) -> bytes | None:
    """Takes random bytes; the way to a state that is live, not complete, and without a next one."""
    members: dict[int, list[int]] = {}
    for byte, index in enumerate(automaton.byte_class.tolist()):
        members.setdefault(index, []).append(byte)
    state, way = automaton.start, b""
    for _ in range(steps):
        automaton.expand(state)
        live = [(c, after) for c, after in enumerate(automaton.table[state].tolist()) if after]
        if not live:
            return None if automaton.accepting(state) else way
        inside = [pair for pair in live if members[pair[0]][0] not in b" \t\r\n"]
        index, state = rng.choice(inside or live)
        way += bytes((rng.choice(members[index]),))
    return None


@pytest.mark.parametrize("number", range(len(WALKED)))
@pytest.mark.parametrize("order", ["any", "declared"])
def test_random_outputs_end_in_no_dead_end(number, order):
    automaton = compile_json_schema(WALKED[number], order=order).automaton
    rng = random.Random(number)
    for _ in range(40):
        assert dead_end(automaton, rng, 60) is None
