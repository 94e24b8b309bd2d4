"""Grammars by kind and text, compiled once."""

from __future__ import annotations

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
