"""In every state of many small grammars: a bit is set exactly where the token is accepted."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic_vocab as sv
import toy_automata
from mask_checks import brute_mask, check_invariant, mask
from small_grammars import GRAMMARS

from deepinfer.grammar import bitmask, mask_build, mask_splits, mask_states, mask_walk
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.matcher import GrammarMatcher


@pytest.fixture(scope="module")
def vocab():
    return sv.synthetic_vocab()


def test_there_are_many_grammars():
    assert len(GRAMMARS) >= 40


@pytest.fixture(params=["as set", "all routes early"])
def thresholds(request, monkeypatch):
    """The second makes a small vocabulary go through every way of computing a row."""
    if request.param != "as set":
        for module, names in {
            mask_walk: {"NARROW": 1, "DENSE_LEVEL": 3, "DENSE_SHARE": 2, "MAX_NEW_SPLITS": 99},
            mask_splits: {"MIN_STRINGS": 2},
            mask_build: {"MANY_TOKENS": 3, "FEW_IDS": 2},
            mask_states: {"FEW_LIVE": 2},
            bitmask: {"COMPACT_WORDS": 3},
        }.items():
            for name, value in names.items():
                monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_equals_accept_in_every_state(name, thresholds):
    # States of palindromes, which are guessed at each byte, are large.
    most = 8 if name == "palindromes" else 100
    assert check_invariant(GRAMMARS[name](), sv.synthetic_vocab(), max_states=most) >= 2


@pytest.mark.parametrize("name", GRAMMARS)
def test_mask_holds_the_tokens_whose_bytes_are_live(name, vocab):
    compiled = CompiledGrammar(GRAMMARS[name](), vocab)
    automaton = compiled.automaton
    matcher = GrammarMatcher(compiled, stop_ids=[])
    for _ in range(6):
        allowed = mask(matcher)
        assert allowed == brute_mask(automaton, vocab, matcher.state)
        if not allowed:
            break
        matcher.accept_token(sorted(allowed)[len(allowed) * 2 // 3])


@pytest.mark.parametrize("seed", range(3))
def test_other_paths_through_the_same_grammar(seed, vocab):
    check_invariant(toy_automata.json_values(), vocab, max_states=40, seed=seed)


def test_every_state_of_a_finite_grammar_is_reached(vocab):
    words = [b"abc", b"abcd", b"the name"]
    seen = check_invariant(toy_automata.finite(words), vocab, max_states=1000)
    prefixes = {w[:n] for w in words for n in range(len(w) + 1)}
    # Each prefix by tokens, and the end behind each whole word.
    assert seen == len(prefixes) + len(words)


def test_the_check_sees_a_wrong_row(vocab, monkeypatch):
    monkeypatch.setattr(mask_build.MaskBuilder, "_survives", lambda self, state, text: False)
    check_invariant(GRAMMARS["regex: literal"](), vocab)
    with pytest.raises(AssertionError):
        check_invariant(GRAMMARS["regex: control token names"](), vocab, max_states=3, text_ids=[3])


@pytest.mark.parametrize("text", [b"[[[[1", b'[[[[["a"', b'[{"a":[[[[]', b'{"a":{"a":{"a":1'])
def test_closers_reach_as_deep_as_tokens_do(text, thresholds):
    vocab = sv.synthetic_vocab()
    compiled = CompiledGrammar(toy_automata.json_values(), vocab)
    matcher = GrammarMatcher(compiled, stop_ids=[])
    assert matcher.accept_bytes(text)
    assert mask(matcher) == brute_mask(compiled.automaton, vocab, matcher.state)
    deeper = GrammarMatcher(compiled, stop_ids=[])
    assert deeper.accept_bytes(b"[" * 40 + text)
    assert mask(deeper) == brute_mask(compiled.automaton, vocab, deeper.state)


def test_states_without_a_known_rest_are_told():
    automaton = toy_automata.json_values()
    state = automaton.truncate(automaton.run(automaton.start, b"[[[1"), 1)
    behind = automaton.run(state, b"]")
    rows = mask_states.StateRows(automaton)
    rows.require_certain(np.array([0, state], dtype=np.int32))
    assert automaton.uncertain(behind)
    for ask in (
        lambda: rows.require_certain(np.array([state, behind], dtype=np.int32)),
        lambda: rows.moves(behind),
    ):
        with pytest.raises(mask_states.NeedsDepth):
            ask()
