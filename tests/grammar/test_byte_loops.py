"""Tokens by the bytes that they hold, against regular expressions."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mask_checks import bits

from deepinfer.grammar.byte_loops import LEADS, ByteNodes, TriePaths
from deepinfer.grammar.vocab import TokenVocab

TOKENS = [
    *[bytes([byte]) for byte in range(256)],
    *"the, of to_be x-1 3.14 é çà naïve 東京 東 😀 a😀b".encode().split(b" "),
    b" a",
    b" a b",
    b"  ",
    b" \xc3",
    b"\xc3\xa9\xc3",
    b"ab\xff",
    b'"name"',
    b' "',
    b"a\nb",
    b"<eos>",
]
EOS = len(TOKENS) - 1


@pytest.fixture(scope="module")
def vocab() -> TokenVocab:
    return TokenVocab(TOKENS, eos_ids=[EOS], vocab_size=len(TOKENS) + 5)


def members_of(ascii_bytes: bytes, leads: bool) -> int:
    members = sum(1 << byte for byte in set(ascii_bytes))
    return members | sum(1 << byte for byte in LEADS) if leads else members


def fits(token: bytes, ascii_bytes: bytes, leads: bool) -> bool:
    """Whole characters over the set, the last perhaps cut short, the slow way."""
    for end in range(len(token), len(token) + 4):
        for tail in ((), (0x80,), (0x80, 0x80), (0xBF, 0xBF), (0x80, 0x80, 0x80), (0xA0, 0x80)):
            if len(token) + len(tail) != end:
                continue
            try:
                text = (token + bytes(tail)).decode()
            except UnicodeDecodeError:
                continue
            if not tail or not text[-1].isascii():
                return all(
                    ord(c) in ascii_bytes if c.isascii() else leads and (not tail or True)
                    for c in text
                )
    return False


SETS = [
    (b"abcdefghijklmnopqrstuvwxyz", False),
    (b" abcdefghijklmnopqrstuvwxyz", False),
    (b"0123456789.", False),
    (bytes(c for c in range(0x20, 0x7F) if c not in b'"\\'), True),
    (b"", True),
    (bytes(range(128)), True),
]


@pytest.mark.parametrize(("members", "leads"), SETS)
def test_tokens_over_a_set(vocab, members, leads):
    found = bits(vocab.byte_loops.over(members_of(members, leads)))
    expected = {i for i, t in enumerate(TOKENS) if i != EOS and fits(t, members, leads)}
    # What is cut short could become a surrogate, which no completion here stands for.
    assert found - expected <= {i for i in found if TOKENS[i][-1:] in (b"\xed", b"\xf4", b"\xf0")}
    assert expected <= found


@pytest.mark.parametrize(("members", "leads"), SETS)
def test_tokens_that_begin_with_a_blank(vocab, members, leads):
    found = bits(vocab.byte_loops.over_behind_blank(members_of(members, leads)))
    expected = {
        i
        for i, t in enumerate(TOKENS)
        if t[:1] == b" " and len(t) > 1 and fits(t[1:], members, leads)
    }
    assert found == expected


def test_short_tokens(vocab):
    short = bits(vocab.byte_loops.short(2))
    assert TOKENS.index("東京".encode()) in short
    assert TOKENS.index("çà".encode()) in short
    assert TOKENS.index(b"the,") not in short


@pytest.mark.parametrize("members", [b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b" ", b"\x00"])
def test_longest_runs(vocab, members):
    mask = sum(1 << byte for byte in members)
    runs = re.findall(b"[" + re.escape(members) + b"]+", b"\xff".join(TOKENS[:EOS]))
    assert vocab.byte_loops.longest_run(mask) == max(map(len, runs))


def test_where_tokens_leave_a_set(vocab):
    trie = vocab.trie
    nodes = ByteNodes(trie, TriePaths.of(trie))
    letters = members_of(b"abcdefghijklmnopqrstuvwxyz", False)

    def way(node: int) -> bytes:
        out = []
        while node:
            out.append(trie.labels[node])
            node = int(trie.parent[node])
        return bytes(reversed(out))

    found = {way(node) for node in nodes.leaving(letters, list(b"_,\xc3")).tolist()}
    prefixes = {t[:n] for t in TOKENS if t != b"<eos>" for n in range(1, len(t) + 1)}
    assert found == {p for p in prefixes if re.fullmatch(rb"[a-z]*[_,\xc3]", p)}
    few = nodes.leaving(letters, list(b"_,"), 1, 2)
    assert {way(node) for node in few.tolist()} == {
        p for p in prefixes if re.fullmatch(rb"[a-z]{1,2}[_,]", p)
    }


def test_paths_over_random_sets(vocab):
    rng = random.Random(4)
    paths, nodes = vocab.byte_loops.paths, np.arange(len(vocab.trie), dtype=np.int32)
    for _ in range(20):
        members = members_of(bytes(rng.sample(range(128), 60)), rng.random() < 0.5)
        together = paths.over(nodes, members)
        assert together.tolist() == [paths.is_over(node, members) for node in nodes.tolist()]


def test_tokens_by_their_length(vocab):
    loops = vocab.byte_loops
    assert bits(loops.up_to(2)) == {i for i, t in enumerate(TOKENS) if i != EOS and len(t) <= 2}
    assert [vocab.strings[r] for r in loops.longer(3).tolist()] == [
        text for text in vocab.strings if len(text) > 3
    ]


def test_a_shorter_run_that_is_long_enough(vocab):
    loops = type(vocab.byte_loops)(vocab)
    digits, more = (sum(1 << byte for byte in text) for text in (b"0123456789", b"0123456789."))
    assert loops.longest_run(digits) == 2
    assert loops.longest_run(more, enough=2) == 2
    assert loops.longest_run(more) == 4


def test_where_two_bytes_follow_each_other(vocab):
    trie = vocab.trie
    nodes = ByteNodes(trie, TriePaths.of(trie))
    at, below = nodes.pair(0xC3, 0xA9)
    assert all(trie.labels[n] == 0xA9 and trie.labels[int(trie.parent[n])] == 0xC3 for n in at)
    found = {vocab.strings[trie.ranks[n]] for n in np.flatnonzero(below) if trie.ranks[n] >= 0}
    assert found == {text for text in vocab.strings if b"\xc3\xa9" in text}
    assert bits(vocab.byte_loops.holding(0xC3, 0xA9, below)) == {
        i for i, t in enumerate(TOKENS) if i != EOS and b"\xc3\xa9" in t
    }


def test_the_deepest_string_below_a_node(vocab):
    trie = vocab.trie
    for prefix in (b"", b"t", b"na", b"\xe6", b" "):
        longest = max(len(text) for text in vocab.strings if text.startswith(prefix))
        assert trie.deepest[trie.find(prefix)] == longest
