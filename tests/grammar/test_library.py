"""Grammars by kind and text, compiled once."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.core.params import SamplingParams
from deepinfer.grammar import GrammarLibrary, TokenVocab, compile_kind

EOS = 256


@pytest.fixture
def vocab() -> TokenVocab:
    return TokenVocab([bytes([b]) for b in range(256)] + [None], eos_ids=[EOS])


@pytest.mark.parametrize(
    ("kind", "spec", "yes", "no"),
    [
        ("json", '{"type": "integer"}', "12", "x"),
        ("json_object", "", '{"a": 1}', "[]"),
        ("regex", "a+", "aa", "b"),
        ("grammar", 'root ::= "x" root | "y"', "xy", "x"),
        ("choice", '["yes", "no"]', "no", "n"),
        ("structural_tag", '{"format": {"type": "const_string", "value": "z"}}', "z", "y"),
    ],
)
def test_kinds(kind: str, spec: str, yes: str, no: str) -> None:
    grammar = compile_kind(kind, spec)
    assert grammar.matches(yes)
    assert not grammar.matches(no)
    with pytest.raises(ConfigError, match="use one of json, json_object"):
        compile_kind("xml", spec)


def test_library_keeps_the_latest(vocab: TokenVocab) -> None:
    library = GrammarLibrary(vocab, max_grammars=2)
    first = library.get("regex", "a")
    assert library.get("regex", "a") is first
    library.get("regex", "b")
    library.get("regex", "a")
    library.get("regex", "c")
    assert len(library) == 2
    assert library.get("regex", "a") is first
    library.clear()
    assert library.get("regex", "a") is not first
    with pytest.raises(ConfigError, match="keep one at least"):
        GrammarLibrary(vocab, max_grammars=0)


def test_parameters_of_a_request(vocab: TokenVocab) -> None:
    library = GrammarLibrary(vocab)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    for params, text in (
        (SamplingParams(regex="a+"), b"aa"),
        (SamplingParams(ebnf='root ::= "b"'), b"b"),
        (SamplingParams(json_schema=schema), b'{"a": 1}'),
        (SamplingParams(json_schema='{"type": "null"}'), b"null"),
        (SamplingParams(json_schema=True), b"[]"),
    ):
        compiled = library(params)
        assert library(params) is compiled
        state = compiled.start()
        assert state.accept(list(text))
        assert compiled.matcher().validate([*text, EOS]) == len(text) + 1
    with pytest.raises(ConfigError, match="no regex, json_schema or ebnf"):
        library(SamplingParams())


def test_stop_ids_of_a_request_are_allowed_at_the_end_and_nowhere_else():
    vocab = TokenVocab([b"a", b"b", b"\n", b"<eos>", b"ab"], eos_ids=[3])
    library = GrammarLibrary(vocab)
    state = library(SamplingParams(regex="a[ab\n]*b", stop_token_ids=(2, 4))).start()
    row = np.zeros(vocab.num_words, dtype=np.int32)

    def allowed():
        state.fill_mask(row)
        return {token for token in range(5) if row[0] >> token & 1}

    assert allowed() == {0}  # "ab" is a stop here, and no text any more
    assert state.accept([0])
    assert allowed() == {0, 1}
    assert state.accept([1])
    assert allowed() == {0, 1, 2, 3, 4}
    assert not state.accept([2, 0])
    assert state.accept([2])
    assert allowed() == {2, 3, 4}


def test_requests_without_options_share_the_grammar_itself():
    vocab = TokenVocab([b"a", b"b", b"<eos>"], eos_ids=[2])
    library = GrammarLibrary(vocab)
    assert library(SamplingParams(regex="a+")) is library(
        SamplingParams(regex="a+", stop_token_ids=(2,))
    )


@pytest.mark.parametrize(
    ("prompt", "bound"),
    [
        ([], True),
        ([0, 1], True),
        ([3], False),
        ([3, 0, 1], False),
        ([3, 0, 4], True),
        ([3, 4, 3, 1], False),
    ],
)
def test_a_prompt_that_leaves_reasoning_open_is_free_up_to_its_end(prompt, bound):
    vocab = TokenVocab(
        [b"a", b"b", b"<eos>", b"<think>", b"</think>"], eos_ids=[2], special_ids=[3, 4]
    )
    library = GrammarLibrary(vocab, reasoning=(3, 4))
    state = library.for_request(SamplingParams(regex="b"), prompt).start()
    if not bound:
        assert state.accept([0, 0, 1])
        assert not state.accept([2])
        assert state.accept([4])
    assert not state.accept([0])
    assert state.accept([1])
    assert state.is_done


@pytest.mark.parametrize("reasoning", [(1,), (1, 2, 0), (0, 9)])
def test_a_boundary_is_two_ids_of_the_vocabulary(reasoning):
    with pytest.raises(ConfigError):
        GrammarLibrary(TokenVocab([b"a", b"b", b"c"]), reasoning=reasoning)
