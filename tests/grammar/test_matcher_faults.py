"""Faults that grammar engines had in production, each with the input that shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic_vocab as sv
import toy_automata
from mask_checks import bits, mask

from deepinfer.grammar import ir
from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.bitmask import allocate_bitmask
from deepinfer.grammar.compiled import CompiledGrammar
from deepinfer.grammar.matcher import GrammarMatcher
from deepinfer.grammar.regex import compile_regex
from deepinfer.grammar.vocab import TokenVocab

VOCAB = sv.synthetic_vocab()
EOS = sv.EOS


def token(text: str | bytes, vocab: TokenVocab = VOCAB) -> int:
    """The first plain id with these bytes."""
    data = text.encode() if isinstance(text, str) else text
    return next(
        i
        for i in range(vocab.num_tokens)
        if vocab.token_bytes(i) == data and i not in vocab.special_ids
    )


def matcher(grammar, vocab: TokenVocab = VOCAB, text: bytes = b"", **options) -> GrammarMatcher:
    compiled = CompiledGrammar(grammar, vocab)
    out = GrammarMatcher(compiled, **options)
    for byte in text:
        assert out.accept_bytes(bytes([byte]))
    return out


def rules(**named: ir.Expr) -> Automaton:
    return Automaton(ir.Rules("root", named))


BRACKETS = ir.alt(ir.seq(ir.literal(b"("), ir.ref("root"), ir.literal(b")")), ir.literal(b"x"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_closers_of_a_start_rule_that_is_itself_recursive(wrapped):
    grammar = (
        rules(
            root=ir.ref("s"),
            s=ir.alt(ir.seq(ir.literal(b"("), ir.ref("s"), ir.literal(b")")), ir.literal(b"x")),
        )
        if wrapped
        else rules(root=BRACKETS)
    )
    at = matcher(grammar, text=b"(((x")
    allowed = mask(at)
    for text, fits in [(")", True), ("))", True), (")))", True), ("()", False)]:
        assert (token(text) in allowed) == fits
        assert at.allowed(token(text)) == fits


def test_every_spelling_of_forced_bytes_is_allowed_unless_the_canonical_one_is_asked_for():
    vocab = TokenVocab(
        [b"", b"<eos>", b"a", b"aa", b"aaaa"],
        eos_ids=[1],
        encode=lambda text: (
            [4] * (len(text) // 4) + [3] * (len(text) % 4 // 2) + [2] * (len(text) % 2)
        ),
    )
    grammar = compile_regex("(a?){30}a{30}")
    plain = matcher(grammar, vocab)
    assert {2, 3, 4} <= mask(plain)
    assert all(plain.allowed(i) for i in (2, 3, 4))
    canonical = matcher(grammar, vocab, canonical_forced=True)
    # Behind 30 letters or more the output may end, so only the first ones are forced, and `aaaa` could go on.
    assert canonical.forced_bytes() == b"a" * 30
    assert mask(canonical) == {4}
    assert not canonical.allowed(2)
    assert canonical.accept_token(2)  # other spellings are still taken


def test_a_merged_separator_is_taken_from_the_vocabulary_not_from_a_round_trip():
    vocab = TokenVocab([b"<eos>", b'"', b":", b" ", b'":', b'": ', b"a", b'a":', b"1"], eos_ids=[0])
    at = matcher(compile_regex('"a": 1'), vocab, text=b'"a')
    allowed = mask(at)
    assert allowed == {1, 4, 5}
    for index in sorted(allowed):
        assert at.fork().accept_token(index)


def test_negated_and_ideograph_classes_over_bytes():
    ideographs = matcher(compile_regex("[一-龥]+"))
    allowed = mask(ideographs)
    assert {token("道"), token("一"), token("龥"), token(b"\xe9"), token(b"\xe9\x81")} <= allowed
    assert token("é") not in allowed
    assert token("a") not in allowed
    others = matcher(compile_regex("[^а-я]+"))
    allowed = mask(others)
    assert {token("道"), token("é"), token("a"), token(b"\xe9")} <= allowed
    assert token("ж") not in allowed
    for overlong in (b"\xc0\x80", b"\xc0", b"\xff", b"\xed\xa0\x80"):
        assert token(overlong) not in allowed
    assert token(b"\x93") not in allowed  # a character cannot begin with a continuation byte


def test_characters_split_over_tokens():
    at = matcher(compile_regex("[😀-🙏]+"))
    assert mask(at) >= {token("😀"), token("🙏"), token(b"\xf0\x9f"), token(b"\xf0")}
    assert at.accept_token(token(b"\xf0\x9f"))
    assert not at.is_accepting()
    allowed = mask(at)
    assert token(b"\x98\x80") in allowed
    assert token("😀") not in allowed
    assert EOS not in allowed
    assert at.accept_token(token(b"\x98\x80"))
    assert at.is_accepting()
    assert EOS in mask(at)


def test_rollback_over_the_end():
    grammar = toy_automata.json_values()
    fresh, at = matcher(grammar), matcher(grammar)
    assert at.accept_token(token("{}"))
    assert at.accept_token(EOS)
    assert at.is_terminated()
    assert not at.accept_token(token("a"))
    assert at.is_terminated()  # a refused token leaves nothing behind
    at.rollback(2)
    assert not at.is_terminated()
    assert at.state == fresh.state
    assert mask(at) == mask(fresh)
    assert at.accept_token(token("{"))
    at.rollback(1)
    assert at.accept_token(token("{}"))
    assert at.accept_tokens([EOS, EOS, token("a")]) == 2
    at.rollback(1)
    assert at.is_terminated()
    at.rollback(1)
    assert not at.is_terminated()
    assert at.is_accepting()


def test_a_token_that_fails_half_way_changes_nothing():
    at = matcher(toy_automata.finite([b"abc", b"the name"]), text=b"ab")
    before = (at.state, at.num_tokens, mask(at))
    assert not at.accept_token(token("bcd"))
    assert at.accept_tokens([token("c"), token("c")]) == 1
    at.rollback(1)
    assert (at.state, at.num_tokens, mask(at)) == before
    assert not at.accept_bytes(b"cd")
    assert (at.state, at.num_tokens, mask(at)) == before


def test_tokens_behind_the_end_inside_one_draft():
    at = matcher(toy_automata.json_values())
    rows = np.zeros((5, VOCAB.num_words), dtype=np.int32)
    draft = [token("{}"), EOS, token("a"), token("{")]
    assert at.fill_draft(rows, 0, draft) == 2
    assert bits(rows[1]) == {EOS}
    assert bits(rows[2]) == {EOS}  # behind the end
    assert bits(rows[3]) == bits(rows[4]) == {EOS}  # never sampled from, yet never empty
    assert at.num_tokens == 0
    assert mask(at) == mask(matcher(toy_automata.json_values()))


def test_rollback_needs_no_option_and_a_limit_is_kept():
    at = matcher(compile_regex("[a-z]{0,500}"))
    assert at.accept_tokens([token("a"), token("ab")] * 200) == 333  # 500 letters
    at.rollback(333)
    assert at.state == at.compiled.start_state
    assert at.accept_tokens([token("ab")] * 300) == 250
    bounded = matcher(compile_regex("[a-z]*"), max_rollback=8)
    assert bounded.accept_tokens([token("a")] * 500) == 500
    assert len(bounded._states) <= 2 * 8 + 65
    with pytest.raises(ValueError, match="cannot take 9 tokens back"):
        bounded.rollback(9)
    bounded.rollback(8)
    with pytest.raises(ValueError, match="tokens back"):
        matcher(compile_regex("a")).rollback(1)


def test_siblings_of_a_draft_tree_have_their_own_rows():
    at = matcher(toy_automata.json_values())
    #        {        [
    #     {" , {}   [[ , 1
    parents = [-1, -1, 0, 0, 1, 1, 3]
    tokens = [token("{"), token("["), token('"'), token("}"), token("[["), token("1"), EOS]
    rows = np.zeros((len(tokens) + 1, VOCAB.num_words), dtype=np.int32)
    fits = at.fill_tree(rows, parents, tokens)
    assert fits == [True] * 7
    for node in range(len(tokens)):
        path, where = [], node
        while where >= 0:
            path.append(tokens[where])
            where = parents[where]
        alone = matcher(toy_automata.json_values())
        assert alone.accept_tokens(reversed(path)) == len(path)
        assert bits(rows[node + 1]) == mask(alone)
    assert bits(rows[0]) == mask(at)
    assert bits(rows[1]) != bits(rows[2])
    fits = at.fill_tree(rows, [-1, 0, 1], [token("{"), token("{"), token("}")])
    assert fits == [True, False, False]
    assert bits(rows[2]) == bits(rows[1])


def test_drafts_behind_the_end_of_reasoning_are_constrained():
    at = matcher(toy_automata.json_values(), after_token=sv.THINK_END)
    free = mask(at)
    assert token("a") in free
    assert sv.THINK_END in free
    assert EOS not in free
    rows = np.zeros((4, VOCAB.num_words), dtype=np.int32)
    assert at.fill_draft(rows, 0, [sv.THINK_END, token("//"), token("{")]) == 1
    start = mask(matcher(toy_automata.json_values()))
    assert bits(rows[1]) == start
    assert token("//") not in start
    assert at.fill_draft(rows, 0, [token("a"), sv.THINK_END, token("{")]) == 3
    assert bits(rows[0]) == bits(rows[1]) == free
    assert bits(rows[2]) == start
    assert at.accept_tokens([token("a"), sv.THINK_END, token("{")]) == 3
    at.rollback(2)
    assert mask(at) == free


@pytest.mark.parametrize("stops", [{1, 2}, {2}])
def test_several_ends(stops):
    at = matcher(toy_automata.json_values(), stop_ids=stops, text=b'"abc')
    assert not mask(at) & {1, 2}
    at.accept_bytes(b'"')
    assert mask(at) & {1, 2} == stops
    for stop in stops:
        fork = at.fork()
        assert fork.accept_token(stop)  # alone ...
        assert fork.is_terminated()
        assert at.fork().accept_tokens([stop, stop]) == 2  # ... and in a list
    for other in {1, 2} - stops:
        assert not at.fork().accept_token(other)


def test_an_end_that_is_plain_text_is_no_text_unless_named():
    stop = token("a")
    at = matcher(compile_regex("[ab]{2}"), stop_ids=[stop])
    twins = {i for i in range(VOCAB.num_tokens) if VOCAB.token_bytes(i) == b"a"} - {stop}
    assert stop not in mask(at)
    assert twins <= mask(at)
    assert not at.accept_token(stop)
    at.accept_bytes(b"ab")
    assert mask(at) == {stop}
    named = GrammarMatcher(
        CompiledGrammar(compile_regex("[ab]{2}"), VOCAB, text_ids=[stop]), stop_ids=[stop]
    )
    assert named.accept_tokens([stop, stop]) == 2
    assert not named.is_terminated()
    assert named.accept_token(stop)
    assert named.is_terminated()


def test_the_end_that_a_choice_allows_is_accepted():
    at = matcher(toy_automata.finite([b"yes", b"no"]))
    assert at.accept_token(token("yes"))
    assert mask(at) == {EOS}
    assert at.is_complete()
    assert not at.is_terminated()
    assert at.accept_token(EOS)
    assert at.is_terminated()
    assert at.is_accepting()


def test_behind_the_end_only_the_end_is_allowed():
    at = matcher(compile_regex("a*"))
    at.accept_tokens([token("a"), EOS])
    assert mask(at) == {EOS}
    assert at.allowed(EOS)
    assert not at.allowed(token("a"))
    assert not at.accept_bytes(b"a")
    none = matcher(compile_regex("a"), stop_ids=[])
    none.accept_token(token("a"))
    assert mask(none) == set()


def test_rows_with_strides_and_wide_rows():
    whole = allocate_bitmask(6, VOCAB.vocab_size + 200)
    at = matcher(compile_regex("[a-z]+"))
    view = whole[::2]
    at.fill_bitmask(view, 1)
    assert bits(whole[2]) == mask(at)  # the words past the vocabulary are cleared
    assert (whole[[0, 1, 3, 4, 5]] == -1).all()


def test_control_tokens_are_no_text_unless_named():
    grammar = compile_regex("(<think>|<eos>)a*")
    at = matcher(grammar)
    spelled = token("<think>")
    assert spelled != 3
    assert spelled in mask(at)
    assert not mask(at) & {0, 1, 2, 3, 4}
    assert not at.accept_token(3)
    named = GrammarMatcher(CompiledGrammar(grammar, VOCAB, text_ids=[3]))
    assert {3, spelled} <= mask(named)
    assert named.fork().accept_token(3)
    with pytest.raises(ValueError, match="has no bytes"):
        CompiledGrammar(grammar, VOCAB, text_ids=[VOCAB.num_tokens - 1])


def test_ids_with_equal_bytes_share_the_bit():
    for text, grammar in [(b"a", "[a-z]+"), (b"abc", "abc"), (b'"', '"x'), (b"\xe9", "道")]:
        twins = {i for i in range(VOCAB.num_tokens) if VOCAB.token_bytes(i) == text}
        assert len(twins) >= 2
        at = matcher(compile_regex(grammar))
        assert twins <= mask(at)
        assert all(at.fork().accept_token(i) for i in twins)


def test_excluded_texts_that_begin_alike_or_inside_each_other():
    def without(*words: bytes) -> Automaton:
        held = ir.alt(*(ir.seq(ir.anything(), ir.literal(w), ir.anything()) for w in words))
        letters = ir.star(ir.byte_set([(0x61, 0x65)]))
        return rules(root=ir.seq(ir.intersect(letters, ir.complement(held)), ir.literal(b"!")))

    at = matcher(without(b"abcd", b"bcd", b"abce"), text=b"a")
    assert at.allowed(token("bb"))
    assert not at.allowed(token("bcd"))
    at.accept_bytes(b"bc")
    assert not at.allowed(token("e"))
    assert not at.allowed(token("d"))
    assert at.allowed(token("c"))
    other = matcher(without(b"abce", b"bcd"))
    assert not other.allowed(token("abcd"))  # `bcd` inside the branch of `abce`
    assert other.allowed(token("abc"))
    assert {token("abcd"), token("abce"), token("bcd")}.isdisjoint(mask(other))
