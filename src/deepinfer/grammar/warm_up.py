"""The walks that nearly every schema needs, done before the first request."""

from __future__ import annotations

import string

from deepinfer.grammar.frame_store import FrameStore
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.vocab import TokenVocab

__all__ = ["warm_up"]

_SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": ["string", "null"]},
        "l": {"type": "array", "items": {"type": "string"}},
        "m": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["s"],
}
_DIGITS, _SMALL, _LARGE = (
    b"0123456789",
    string.ascii_lowercase.encode(),
    string.ascii_uppercase.encode(),
)
_COUNTED = (
    b"\t ",
    _DIGITS,
    _DIGITS + b"abcdef",
    _DIGITS + b"ABCDEF",
    _DIGITS + b"ABCDEFabcdef",
    _SMALL,
    _LARGE,
    _SMALL + _LARGE,
    _DIGITS + _SMALL + _LARGE,
)
"""Sets of bytes that patterns count."""

_TEXTS = (
    b'{"i": 12, "n": -0.5e3, "b": true, "o": null, "l": ["a", "b"], "m": [1], "s": "x y\\n\xc3\xa9"}',
    b'{"k": [{}, "v", 1, 2.5, false], "p": {"q": ""}, "s":"',
)


def warm_up(vocab: TokenVocab) -> None:
    """Computes the masks along a few JSON texts, for what the grammars over a vocabulary share.

    Args:
        vocab: The vocabulary.
    """
    for members in _COUNTED:
        vocab.byte_loops.longest_run(sum(1 << byte for byte in members))
    FrameStore.of(vocab).find_pairs()
    compiled = compile_json_schema(_SCHEMA).bind(vocab)
    for text in _TEXTS:
        state = compiled.start_state
        for place in range(len(text)):
            compiled.row(state)
            state = compiled.advance_bytes(state, text[place : place + 1])
            if not state:
                break
