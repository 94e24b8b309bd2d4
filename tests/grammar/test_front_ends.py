"""What the front ends make, with tokens: masks agree with single steps, and random outputs satisfy other engines."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic_vocab as sv
from mask_checks import check_invariant, mask
from test_ebnf_gbnf import GRAMMARS as GBNF
from test_ebnf_lark import GRAMMARS as LARK
from test_ebnf_lark import oracle

from deepinfer.grammar import (
    Grammar,
    GrammarMatcher,
    Tag,
    any_text,
    choices,
    compile_ebnf,
    compile_regex,
    reasoning,
    tagged_text,
    tool_calls,
)

MADE: dict[str, Callable[[], Grammar]] = {
    **{f"gbnf {n}": lambda text=text: compile_ebnf(text) for n, (text, _, _) in enumerate(GBNF)},
    **{f"lark {name}": lambda text=text: compile_ebnf(text) for name, (text, _, _) in LARK.items()},
    "choices": lambda: choices(["yes", "ye", "no", "né", "道"]),
    "text without": lambda: any_text(excludes=["abcd", "bcd", "abce"]),
    "reasoning": lambda: reasoning(choices(["yes", "no"])),
    "tags": lambda: tagged_text(
        [Tag("((", compile_regex("[ab]+"), "))"), Tag("(a", choices(["b"]), ")")], ["((", "(a"]
    ),
    "tools": lambda: tool_calls(
        [{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}]
    ),
    "look-ahead": lambda: compile_regex(r"(?=.*a)(?!ab)[abc]{2,6}"),
    "words": lambda: compile_regex(r"(\b(?!the\b)[a-z]+\b ?)+", flavor="python"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_bit_is_set_where_the_token_is_accepted(name: str) -> None:
    assert check_invariant(MADE[name](), sv.synthetic_vocab(), max_states=16) >= 2


def outputs(grammar: Grammar, count: int, seed: str) -> list[str]:
    """Outputs of random tokens out of the masks, each up to its end."""
    vocab = sv.synthetic_vocab()
    compiled = grammar.bind(vocab)
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        matcher = GrammarMatcher(compiled, stop_ids=[sv.EOS])
        tokens: list[int] = []
        while not matcher.is_terminated() and len(tokens) < 200:
            allowed = sorted(mask(matcher))
            assert allowed, tokens
            ends = sv.EOS in allowed and (len(tokens) > 12 or rng.random() < 0.3)
            token = sv.EOS if ends else rng.choice(allowed)
            assert matcher.accept_token(token)
            tokens.append(token)
        if matcher.is_terminated():
            text = b"".join(vocab.token_bytes(token) for token in tokens[:-1]).decode()
            assert grammar.matches(text)
            found.append(text)
    return found


@pytest.mark.parametrize("name", sorted(set(LARK) - {"strings"}))
def test_random_outputs_are_parsed_by_lark(name: str) -> None:
    text = LARK[name][0]
    accepts = oracle(text)
    written = outputs(compile_ebnf(text), 12, name)
    assert written
    assert [output for output in written if len(output) < 60 and not accepts(output)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?=.*[a-z])(?=.*\d)\w{3,9}",
        r"(\b(?!the\b)[a-z]+\b ?)+",
        r"^(?:(?!ab).){2,}$",
        r"[^а-я]{1,4}",
        r"(?i:né|道)+",
        r"-?(?:0|[1-9]\d*)(?:\.\d+)?",
        r"(?<!a)b*(?<=b)c?",
        r"\"(?:[^\"\\]|\\.)*\"",
    ],
)
def test_random_outputs_are_matched_by_re(pattern: str) -> None:
    written = outputs(compile_regex(pattern, flavor="python"), 15, pattern)
    assert written
    assert [text for text in written if not re.fullmatch(pattern, text)] == []
