from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core.errors import ConfigError
from deepinfer.engine.detokenizer import IncrementalDetokenizer

sys.path.insert(0, str(Path(__file__).parent))
from tiny_tokenizer import SPECIALS, tiny_tokenizer

BYTES = {i: bytes([i]) for i in range(256)}


def stream_of(*parts: bytes) -> list[str]:
    stream = IncrementalDetokenizer(dict(enumerate(parts)).__getitem__)
    return [*map(stream.push, range(len(parts))), stream.finish()]


@given(
    st.lists(st.integers(0, tiny_tokenizer().vocab_size - 1), max_size=60),
    st.booleans(),
    st.lists(st.integers(1, 5), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_pieces_joined_equal_decode(ids, skip_special, cuts):
    tokenizer = tiny_tokenizer()
    stream = tokenizer.stream(skip_special=skip_special)
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)
    groups = tokenizer.stream(skip_special=skip_special)
    at, grouped = 0, []
    for size in [*cuts, len(ids)]:
        grouped.append(groups.push_all(ids[at : at + size]))
        at += size
    grouped.append(groups.finish())
    assert "".join(grouped) == "".join(pieces)


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_bytes_one_at_a_time(data):
    stream = IncrementalDetokenizer(BYTES.__getitem__)
    pieces = [stream.push(byte) for byte in data]
    shown = "".join(pieces)
    assert shown + stream.finish() == data.decode("utf-8", errors="replace")
    # whatever was shown stays true when more comes
    assert data.decode("utf-8", errors="replace").startswith(shown)


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_a_broken_character(text):
    stream = IncrementalDetokenizer(BYTES.__getitem__)
    shown = ""
    for byte in text.encode():
        shown += stream.push(byte)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_equals_the_library_on_random_ids():
    from tiny_tokenizer import tokenizer_json
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer_json())
    tokenizer = tiny_tokenizer()
    source = random.Random(1)
    for _ in range(300):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(source.randrange(12))]
        assert tokenizer.decode(ids, skip_special=False) == backend.decode(
            ids, skip_special_tokens=False
        )


def test_a_character_comes_out_when_it_is_whole():
    assert stream_of(b"caf", b"\xc3", b"\xa9!") == ["caf", "", "é!", ""]
    assert stream_of(b"\xf0\x9f", b"\x99", b"\x82") == ["", "", "🙂", ""]


def test_invalid_bytes_come_out_when_they_are_proven_invalid():
    assert stream_of(b"a\xc3", b"b") == ["a", "\ufffdb", ""]
    assert stream_of(b"\xff", b"x") == ["\ufffd", "x", ""]
    assert stream_of(b"\xe4\xbd", b"\xe4\xbd\xa0") == ["", "\ufffd你", ""]


def test_an_unfinished_character_comes_out_at_the_end_once():
    stream = IncrementalDetokenizer(BYTES.__getitem__)
    assert stream.push(0xE4) == ""
    assert stream.pending
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert not stream.pending


def test_leading_spaces_are_kept():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(" the capital", add_bos=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == " the capital"
    middle = tokenizer.stream()
    first, *rest = tokenizer.encode("The capital", add_bos=False)
    middle.push(first)
    assert tokenizer.decode([first]) + "".join(map(middle.push, rest)) == "The capital"


def test_control_tokens_are_hidden_or_shown():
    tokenizer = tiny_tokenizer()
    user = SPECIALS.index("<｜User｜>")
    hidden, shown = tokenizer.stream(), tokenizer.stream(skip_special=False)
    assert hidden.push(user) == ""
    assert shown.push(user) == "<｜User｜>"


def test_a_bad_id_takes_nothing():
    stream = tiny_tokenizer().stream()
    good = tiny_tokenizer().encode("Paris", add_bos=False)
    with pytest.raises(ConfigError):
        stream.push_all([*good, 10**6])
    assert stream.push_all(good) == "Paris"
