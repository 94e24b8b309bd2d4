"""Hostile grammars and long outputs: every step stays short, and nothing recurses on Python's stack."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic_vocab as sv
from mask_checks import bits

from deepinfer.grammar import any_json, compile_ebnf, compile_regex

VOCAB = sv.synthetic_vocab()
BYTE = {b: next(i for i in range(5, 261) if VOCAB.token_bytes(i) == bytes([b])) for b in range(256)}


def run(grammar, text: bytes, every: int) -> None:
    """Feeds single bytes; fills now and then, and the next byte must be allowed there."""
    matcher = grammar.bind(VOCAB).matcher()
    row = np.zeros(VOCAB.num_words, dtype=np.int32)
    for place, byte in enumerate(text):
        if place % every == 0:
            matcher.fill_bitmask(row)
            assert BYTE[byte] in bits(row)
        assert matcher.accept_token(BYTE[byte])
    assert matcher.is_accepting()
    matcher.rollback(len(text) // 2)
    assert matcher.accept_tokens([BYTE[b] for b in text[-(len(text) // 2) :]]) == len(text) // 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: compile_ebnf('root ::= "(" root ")" | "x"'), b"(" * 20_000 + b"x" + b")" * 20_000),
        (lambda: compile_ebnf('root ::= "a" root | "b"'), b"a" * 20_000 + b"b"),
        (lambda: compile_ebnf('root ::= root "a" | "b"'), b"b" + b"a" * 20_000),
        (lambda: compile_ebnf('root ::= root root | "a" | "(" root ")"'), b"a(a)" * 300),
        (lambda: any_json(), b"[" * 3000 + b"1" + b"]" * 3000),
        (lambda: compile_regex("(a?){30}a{30}"), b"a" * 60),
        (lambda: compile_regex("[ab]*a[ab]{12}c"), b"ab" * 30 + b"a" + b"b" * 12 + b"c"),
        (lambda: compile_regex("[a-z]{0,65536}"), b"a" * 20_000),
    ],
)
def test_long_outputs(make, text):
    started = time.process_time()
    run(make(), text, max(1, len(text) // 100))
    assert time.process_time() - started < 5.0
