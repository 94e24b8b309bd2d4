"""First bytes of expressions, against their transitions; text that states take, against walks; forms of states."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.first_bytes import first_bytes
from deepinfer.grammar.frame_text import TextStates
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.regex import compile_regex

SCHEMAS = [
    {"type": "string", "pattern": "a+b|c"},
    {"type": "string", "pattern": "^[a-z]{2,4}(-x)?$", "maxLength": 5},
    {"properties": {"a": {"enum": [1, "x"]}, "b": True}, "required": ["b"]},
    {"patternProperties": {"^n_.$": {"type": "null"}}, "properties": {"n": {}}},
    {"type": "array", "items": {"anyOf": [{"type": "number"}, {"format": "date"}]}},
]


def some_states(automaton: Automaton, seed: int, count: int) -> list[int]:
    """States along random walks."""
    rng, found = random.Random(seed), [automaton.start]
    state = automaton.start
    for _ in range(count):
        automaton.expand(state)
        alive = [byte for byte in range(256) if automaton.step(state, byte)]
        state = automaton.step(state, rng.choice(alive)) if alive else automaton.start
        found.append(state)
    return found


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_no_live_byte_is_missing(number):
    automaton = compile_json_schema(SCHEMAS[number]).automaton
    for state in some_states(automaton, number, 60):
        first = first_bytes(automaton.node_of(state), 30)
        live = sum(1 << byte for byte in range(256) if automaton.step(state, byte))
        assert not live & ~first


def test_first_bytes_are_few_where_they_are_seen():
    automaton = compile_regex("(a|bc)?[0-9]{2,}").automaton
    found = first_bytes(automaton.node_of(automaton.start), 30)
    assert found == sum(1 << byte for byte in b"ab0123456789")


def test_what_follows_an_unknown_rest_may_be_anything():
    store = NodeStore()
    digits = store.rep(store.byte_set(0x3FF << 48), 0, -1)
    assert first_bytes(store.cons(digits, store.unknown), 30) == (1 << 256) - 1
    assert first_bytes(store.cons(digits, store.literal(b"x")), 30) == 0x3FF << 48 | 1 << ord("x")


def takes_text(automaton: Automaton, state: int) -> bool:
    """Whether some texts are live, tried one by one."""
    texts = ("", "x", "name", "n_", "n_~", "ab", "c-x", "/ é日", "~" * 9, "0" * 9)
    return all(automaton.run(state, text.encode()) for text in texts)


@pytest.mark.parametrize(
    ("schema", "before", "expected"),
    [
        ({"type": "string"}, b'"', True),
        ({"type": "string", "pattern": "ab+c"}, b'"a', True),
        ({"type": "string", "minLength": 3}, b'"', True),
        ({"type": "string", "maxLength": 200}, b'"', False),
        ({"type": "string", "pattern": "^[a-z]+$"}, b'"', False),
        ({"properties": {"n": {}}, "patternProperties": {"^n_.$": {}}}, b'{"', True),
        ({"not": {"pattern": "^lucene"}, "type": "string"}, b'"', False),
    ],
)
def test_states_that_take_any_text(schema, before, expected):
    automaton = compile_json_schema(schema).automaton
    store = automaton.store

    def loops(state: int) -> bool:
        return all(automaton.step(state, byte) == state for byte in b"az09 ~/-_")

    with automaton.at_work:
        state = automaton.run(automaton.start, before)
        node = store.push(automaton.node_of(state), store.unknown)
        found = TextStates(automaton, loops).holds(automaton.state_of(node))
        assert not found or takes_text(automaton, state)
    if before == b'"':  # members of a bag are walked one by one
        assert found is expected


def test_text_that_may_run_into_an_unknown_rest_is_not_all_seen():
    automaton = compile_json_schema({"type": "string"}).automaton
    store = automaton.store
    tests = TextStates(automaton, lambda state: True)
    with automaton.at_work:
        text = automaton.node_of(automaton.run(automaton.start, b'"')).a

        def holds(*frames: bytes) -> bool:
            node = store.unknown
            for frame in reversed(frames):
                node = store.cons(store.literal(frame), node)
            return tests.holds(automaton.state_of(store.cons(text, node)))

        assert all((holds(b'"'), holds(b"ab", b'"'), holds(b'a"')))
        assert not any((holds(), holds(b"ab"), holds(b"a", b"b")))


def test_a_state_has_one_form_behind_any_character():
    schema = {
        "anyOf": [
            {"type": "string", "pattern": "^/[^x]+$"},
            {"type": "string", "pattern": "^[^/]+(/[^/]+)?$"},
        ]
    }
    automaton = compile_json_schema(schema).automaton
    state = automaton.run(automaton.start, b'"')
    ends = {automaton.run(state, text.encode()) for text in ("a", "é", "日", "😀")}
    assert len(ends) == 1


def test_a_pattern_and_a_length_count_once():
    store = NodeStore()
    letters = store.byte_set(sum(1 << byte for byte in b"abc"))
    wider = store.alt([store.byte_set(sum(1 << byte for byte in b"abcdef")), store.literal(b"\\n")])
    both = store.conj([store.rep(letters, 1, -1), store.rep(wider, 0, 4)])
    assert both is store.rep(letters, 1, 4)
    assert store.conj([store.rep(letters, 5, -1), store.rep(wider, 0, 4)]) is store.empty
    other = store.alt([store.byte_set(sum(1 << byte for byte in b"abcd")), store.literal(b"ab")])
    kept = store.conj([store.rep(letters, 1, -1), store.rep(other, 0, 4)])
    assert len(kept.parts) == 2  # "ab" is one copy of the other and two of the letters
