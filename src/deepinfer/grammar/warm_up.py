"""The walks that nearly every schema needs, done before the first request."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

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


_STRINGS: dict[str, dict[str, Any]] = {
    "date": {"format": "date-time"},
    "day": {"format": "date"},
    "time": {"format": "time"},
    "mail": {"format": "email"},
    "link": {"format": "uri"},
    "host": {"format": "hostname"},
    "code": {"format": "uuid"},
    "ip": {"format": "ipv4"},
    "any": {"pattern": "^.*$"},
    "some": {"pattern": "^.+$"},
    "one": {"minLength": 1},
    "word": {"pattern": "^\\w+$"},
    "name": {"pattern": "^[a-zA-Z0-9_-]+$"},
    "file": {"pattern": "^[a-zA-Z0-9_.-]+$"},
    "part": {"pattern": "^[^/]+$"},
    "full": {"pattern": "^\\S+$"},
    "small": {"pattern": "^[a-z]+$"},
    "digits": {"pattern": "^[0-9]+$"},
    "hex": {"pattern": "^[0-9a-f]+$"},
    "short": {"maxLength": 50},
}
"""Formats, and patterns of which many schemas hold one."""

_EXAMPLES = {
    "date": "2022-01-31T12:00:59.5Z",
    "day": "2022-01-31",
    "time": "12:00:59+01:00",
    "mail": "a.b@example.org",
    "link": "https://example.org:80/a/b?c=d#e",
    "host": "a.example.org",
    "code": "01234567-89ab-4def-8123-456789abcdef",
    "ip": "10.0.0.1",
}
"""Texts of the formats; one letter or digit for the patterns."""


def warm_up(vocab: TokenVocab) -> None:
    """Computes the masks along a few JSON texts, for what the grammars over a vocabulary share.

    Args:
        vocab: The vocabulary.
    """
    for members in _COUNTED:
        vocab.byte_loops.longest_run(sum(1 << byte for byte in members))
    FrameStore.of(vocab).find_pairs()
    _follow(vocab, _SCHEMA, _TEXTS)
    properties = {key: {"type": "string", **rule} for key, rule in _STRINGS.items()}
    texts = [
        f'{{"{key}": "{_EXAMPLES.get(key, "7" if key in ("digits", "hex") else "aa")}"'.encode()
        for key in _STRINGS
    ]
    _follow(vocab, {"type": "object", "properties": properties}, texts)


def _follow(vocab: TokenVocab, schema: dict[str, Any], texts: Iterable[bytes]) -> None:
    """Computes the masks behind each byte of some texts."""
    compiled = compile_json_schema(schema).bind(vocab)
    for text in texts:
        state = compiled.start_state
        for place in range(len(text) + 1):
            compiled.row(state)
            state = compiled.advance_bytes(state, text[place : place + 1])
            if not state:
                break
