"""What a caller may get wrong: each is refused with a typed error, or works as meant; nothing is half done."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, GrammarSyntaxError, ShapeError
from deepinfer.core.params import SamplingParams
from deepinfer.grammar import (
    GrammarLibrary,
    GrammarMatcher,
    Tag,
    TokenVocab,
    Whitespace,
    allocate_bitmask,
    choices,
    compile_ebnf,
    compile_json_schema,
    compile_kind,
    compile_regex,
    concatenate,
    either,
    fill_batch,
    reasoning,
    tagged_text,
)

VOCAB = TokenVocab([bytes([i]) for i in range(256)] + [b"ab", None, b"</s>"], eos_ids=[258])
COMPILED = compile_regex("a(b|c)*").bind(VOCAB)
WORDS = VOCAB.num_words


def test_ids_far_outside_of_the_vocabulary_are_never_another_state_s():
    matcher = COMPILED.matcher()
    assert matcher.accept_token(97)
    assert not COMPILED.matcher().accept_token(98)
    for start in range(1, 8):  # a state and an id share one number
        for wide in range(1, 8):
            assert COMPILED.advance(start, (wide << 24) + 98) == 0
    assert not matcher.accept_token(2**70)
    assert not matcher.accept_token(-(2**70))


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.uint64])
def test_ids_of_numpy(kind):
    matcher = COMPILED.matcher()
    assert matcher.accept_token(kind(97))
    assert matcher.validate(np.array([98, 99, 97], dtype=kind)) == 2
    assert not matcher.allowed(kind(97))


def test_ids_of_torch():
    torch = pytest.importorskip("torch")
    matcher = COMPILED.matcher()
    assert matcher.accept_tokens(torch.tensor([97, 98, 258])) == 3
    assert matcher.is_terminated()


@pytest.mark.parametrize("wrong", [97.0, "a", b"a", None, 258.0])
def test_what_is_no_id(wrong):
    matcher = COMPILED.matcher()
    assert matcher.accept_token(97)
    row = allocate_bitmask(4, VOCAB.vocab_size)
    for call in (
        lambda: matcher.accept_token(wrong),
        lambda: matcher.accept_tokens([wrong]),
        lambda: matcher.allowed(wrong),
        lambda: matcher.validate([wrong]),
        lambda: matcher.fill_draft(row, 0, [wrong]),
        lambda: matcher.fill_tree(row, [-1], [wrong]),
        lambda: COMPILED.matcher(stop_ids=[wrong]),
        lambda: TokenVocab([b"a"] * 300, eos_ids=[wrong]),
        lambda: compile_regex("a").bind(VOCAB, text_ids=[wrong]),
    ):
        with pytest.raises(ConfigError):
            call()
    assert matcher.num_tokens == 1


@pytest.mark.parametrize("wrong", [7, "ab", [b"a", "b"], [5], {b"a": 0}, b"ab", None])
def test_what_are_no_tokens(wrong):
    with pytest.raises(ConfigError, match="bytes"):
        TokenVocab(wrong)


@pytest.mark.parametrize("size", ["3", 3.0, -1, 2**24 + 1])
def test_widths_of_vocabularies(size):
    with pytest.raises(ConfigError, match="vocab_size"):
        TokenVocab([b"a"], vocab_size=size)


@pytest.mark.parametrize("options", [{"max_rollback": 1.5}, {"max_rollback": -1}, {"stop_ids": 5}])
def test_options_of_a_matcher(options):
    with pytest.raises(ConfigError):
        COMPILED.matcher(**options)


def test_parts_in_the_place_of_others():
    with pytest.raises(ConfigError, match="from_tokenizer"):
        compile_regex("a").bind("nano")
    with pytest.raises(ConfigError, match="bind"):
        GrammarMatcher(compile_regex("a"))


@pytest.mark.parametrize("data", ["a", 5, [97], None])
def test_bytes_are_bytes(data):
    with pytest.raises(ConfigError, match="bytes"):
        COMPILED.matcher().accept_bytes(data)


def test_a_rollback_is_a_number():
    matcher = COMPILED.matcher()
    matcher.accept_token(97)
    for wrong in ("1", 1.0, None, -1, 2):
        with pytest.raises(ConfigError):
            matcher.rollback(wrong)
    matcher.rollback(np.int64(1))
    assert matcher.num_tokens == 0


def test_rows_that_are_no_rows_write_nothing():
    matcher = COMPILED.matcher()
    mask = allocate_bitmask(3, VOCAB.vocab_size)
    matcher.fill_bitmask(mask, 0)  # the array is known from here on
    before = mask.copy()
    for wrong in (3, -4, None, 1.0, "0"):
        with pytest.raises(ShapeError):
            matcher.fill_bitmask(mask, wrong)
    for wrong in (-1, None, 1.5):
        with pytest.raises(ShapeError):
            matcher.fill_draft(mask, wrong, [97])
        with pytest.raises(ShapeError):
            matcher.fill_tree(mask, [-1], [97], wrong)
    for parents in ([None], ["a"], [-1.0], [-2], [0]):
        with pytest.raises(ConfigError):
            matcher.fill_tree(mask, parents, [97])
    assert (mask[1:] == before[1:]).all()


def test_one_row_holds_one_row():
    matcher = COMPILED.matcher()
    single = np.zeros(WORDS, dtype=np.int32)
    matcher.fill_bitmask(single)
    with pytest.raises(ShapeError):
        matcher.fill_draft(single, 0, [97, 98])
    with pytest.raises(ShapeError):
        fill_batch([matcher, matcher], single)
    other = matcher.fork()
    other.accept_token(97)
    with pytest.raises(ShapeError):
        fill_batch([matcher, other], single)


@pytest.mark.parametrize("wrong", [[[0] * WORDS], None, np.zeros((1, WORDS), dtype=np.int64)])
def test_bitmasks_that_are_none(wrong):
    with pytest.raises(ShapeError):
        fill_batch([COMPILED.matcher()], wrong)
    with pytest.raises(ShapeError):
        COMPILED.matcher().fill_bitmask(wrong)


def test_a_bitmask_that_cannot_be_written():
    mask = allocate_bitmask(1, VOCAB.vocab_size)
    mask.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        COMPILED.matcher().fill_bitmask(mask)


def test_rows_of_a_batch_exist():
    matchers = [COMPILED.matcher(), COMPILED.matcher()]
    mask = allocate_bitmask(2, VOCAB.vocab_size)
    with pytest.raises(ShapeError):
        fill_batch(matchers, mask, [0, 7])


def test_a_copy_is_a_fork():
    matcher = COMPILED.matcher()
    matcher.accept_token(97)
    for other in (copy.copy(matcher), copy.deepcopy(matcher)):
        assert other.accept_token(98)
        assert other.num_tokens == 2
        assert matcher.num_tokens == 1
        other.rollback(2)
        assert matcher.accept_token(98)
        matcher.rollback(1)


def test_a_matcher_is_not_pickled_into_another_automaton():
    with pytest.raises(TypeError, match="CompiledGrammar"):
        pickle.dumps(COMPILED.matcher())


def test_vocabularies_of_tokenizers_are_pickled(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    text = json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        }
    )  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    for tokenizer in (path, tokenizers.Tokenizer.from_str(text)):
        compiled = compile_regex("ab+").bind(TokenVocab.from_tokenizer(tokenizer))
        again = pickle.loads(pickle.dumps(compiled))
        assert again.vocab.encode("ab") == compiled.vocab.encode("ab") == [2]
        assert again.matcher().accept_tokens([2, 1]) == 2


def test_one_text_is_no_list_of_characters():
    assert choices("ab").matches("ab")
    assert not choices("ab").matches("a")


@pytest.mark.parametrize("wrong", [["a", 5], [None], 5, None])
def test_choices_are_texts(wrong):
    with pytest.raises(ConfigError, match="choice"):
        choices(wrong)


@pytest.mark.parametrize("spec", ["[", '"ab"', '{"a": 1}', "5"])
def test_choices_of_a_server_are_a_json_list(spec):
    with pytest.raises(GrammarSyntaxError, match="JSON"):
        compile_kind("choice", spec)


def test_libraries_check_what_they_are_given():
    for wrong in ("nano", None):
        with pytest.raises(ConfigError, match="from_tokenizer"):
            GrammarLibrary(wrong)
    for size in (0, "a", 1.5):
        with pytest.raises(ConfigError, match="max_grammars"):
            GrammarLibrary(VOCAB, max_grammars=size)
    with pytest.raises(ConfigError, match="whitespace"):
        GrammarLibrary(VOCAB, schema_options={"white_space": 1})
    with pytest.raises(ConfigError, match="spec"):
        GrammarLibrary(VOCAB).get("json", {"type": "string"})


def test_schemas_of_a_library_have_its_options():
    schema = '{"type": "array", "items": {"const": 1}}'
    style = {"whitespace": Whitespace.compact()}
    plain, compact = (GrammarLibrary(VOCAB, schema_options=o) for o in (None, style))
    for library, takes in ((plain, True), (compact, False)):
        grammar = library.get("json", schema).grammar
        assert grammar.matches("[1,1]")
        assert grammar.matches("[1, 1]") is takes


@pytest.mark.parametrize("wrong", [None, 5, b"a", ["a"]])
def test_front_ends_take_text(wrong):
    for compile_one in (compile_regex, compile_ebnf):
        with pytest.raises(ConfigError, match="give a str"):
            compile_one(wrong)


@pytest.mark.parametrize(
    "schema", [{1: 2}, {"properties": {1: {}}}, {"const": {1: 2}}, {"enum": [[{None: 1}]]}]
)
def test_names_in_schemas_are_texts(schema):
    with pytest.raises(GrammarSyntaxError, match="names are texts"):
        compile_json_schema(schema)


def test_white_space_is_a_policy():
    for wrong in (5, "compact", None):
        with pytest.raises(ConfigError, match="Whitespace"):
            compile_json_schema({}, whitespace=wrong)


def test_what_no_json_holds_is_refused_when_a_request_comes():
    params = SamplingParams(json_schema={"const": {"a": {1}}})
    with pytest.raises(GrammarSyntaxError, match="no JSON value"):
        GrammarLibrary(VOCAB)(params)


@pytest.mark.parametrize("wrong", ["x", None, 5])
def test_grammars_within_grammars(wrong):
    for call in (
        lambda: concatenate(choices(["a"]), wrong),
        lambda: either(choices(["a"]), wrong),
        lambda: reasoning(wrong),
        lambda: tagged_text([Tag("<a>", wrong, "</a>")], ["<a"]),
    ):
        with pytest.raises(ConfigError, match="no Grammar"):
            call()
