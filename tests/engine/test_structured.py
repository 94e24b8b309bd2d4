"""Structured output with the embedded model: what comes out parses and fits."""

from __future__ import annotations

import json
import re

import pytest

from deepinfer import Engine, SamplingParams
from deepinfer.core.errors import EmptyLanguage, GrammarSyntaxError, InvalidRequest
from deepinfer.grammar import GrammarLibrary, TokenVocab
from deepinfer.models import resolve_checkpoint

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 200},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "format": "date"}]},
]


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("nano") as made:
        yield made


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_fit_their_schema(engine, schema, temperature):
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=3, json_schema=schema)
    for out in engine.generate(["The record: ", "x = "], params):
        assert out.finish_reason.value == "stop", out.text
        jsonschema.validate(json.loads(out.text), schema)


def test_outputs_fit_their_pattern_and_neighbours_are_free(engine):
    pattern = r"[A-Z][a-z]{2,6} [0-9]{3}\."
    bound = SamplingParams(max_tokens=40, temperature=1.0, seed=5, regex=pattern)
    free = SamplingParams(max_tokens=8, temperature=0)
    alone = engine.generate(["def f(x):"], free)[0].token_ids
    outs = engine.generate(["A line: ", "def f(x):"], [bound, free])
    assert re.fullmatch(pattern, outs[0].text)
    assert outs[1].token_ids == alone


def test_grammar_texts(engine):
    text = 'root ::= "(" root ")" | "x"\n'
    out = engine.generate(["f"], SamplingParams(max_tokens=60, temperature=1.0, seed=1, ebnf=text))[
        0
    ]
    if out.finish_reason.value == "stop":
        assert re.fullmatch(r"\(*x\)*", out.text)
        assert out.text.count("(") == out.text.count(")")


def test_bad_grammars_are_refused_and_the_engine_goes_on(engine):
    with pytest.raises(GrammarSyntaxError):
        engine.generate(["a"], SamplingParams(regex="(a"))
    with pytest.raises(EmptyLanguage):
        engine.generate(["a"], SamplingParams(json_schema={"enum": []}))
    assert engine.generate(["a"], SamplingParams(max_tokens=2))[0].token_ids


def test_grammars_are_shared_between_requests(engine):
    params = SamplingParams(max_tokens=6, temperature=0, regex="[a-z]+ [a-z]+")
    first = engine.generate(["one", "one"], params)
    assert first[0].token_ids == first[1].token_ids
    assert engine.generate(["one"], params)[0].token_ids == first[0].token_ids


def test_the_engines_tokenizer_gives_the_vocabulary_of_its_checkpoint(engine):
    vocab = TokenVocab.from_tokenizer(engine.tokenizer)
    read = TokenVocab.from_tokenizer(resolve_checkpoint("nano"))
    assert vocab.fingerprint == read.fingerprint
    assert vocab.eos_ids == read.eos_ids == (1,)
    assert set(range(12)) <= vocab.special_ids
    assert vocab.encode('{"a": 1}') == read.encode('{"a": 1}')


def test_one_batch_of_every_kind_at_any_depth(engine):
    form = SCHEMAS[0]
    rows = [
        SamplingParams(max_tokens=80, seed=1, json_schema=form),
        SamplingParams(max_tokens=12, seed=2),
        SamplingParams(max_tokens=40, seed=3, ebnf='root ::= "(" [a-z]{1,4} ("," [a-z]){0,2} ")"'),
        SamplingParams(max_tokens=1, seed=4, json_schema=form),
        SamplingParams(max_tokens=80, seed=5, json_schema=form, n=2),
        SamplingParams(max_tokens=30, seed=6, regex="[a-z]{3}", ignore_eos=True),
        SamplingParams(max_tokens=40, seed=7, regex="x{3}END[a-z]+", stop="END"),
        SamplingParams(max_tokens=60, seed=8, json_schema={"const": "a\x00é<think>"}),
    ]
    prompts = ["The record: "] * len(rows)
    with Engine.from_pretrained("nano", async_depth=1) as ahead:
        outs = ahead.generate(prompts, rows)
    now = engine.generate(prompts, rows)
    assert [(o.token_ids, o.text, o.finish_reason) for o in outs] == [
        (o.token_ids, o.text, o.finish_reason) for o in now
    ]
    for place in (0, 4, 5):
        jsonschema.validate(json.loads(outs[place].text), form)
    assert re.fullmatch(r"\([a-z]{1,4}(,[a-z]){0,2}\)", outs[2].text)
    assert (len(outs[3].token_ids), outs[3].finish_reason.value) == (1, "length")
    assert re.fullmatch("[a-z]{3}", outs[6].text)
    assert outs[7].text == "xxx"
    assert json.loads(outs[8].text) == "a\x00é<think>"
    control = engine.tokenizer.control_ids
    for out, row in zip(outs, [*rows[:5], rows[4], *rows[5:]], strict=True):
        if row.has_grammar:
            assert control.isdisjoint(out.token_ids[:-1])


def test_an_abort_in_the_middle_leaves_nothing_behind(engine):
    params = SamplingParams(max_tokens=60, seed=1, json_schema=SCHEMAS[0])
    before = engine.generate(["The record: "], params)[0].token_ids
    rid = engine.add_request("The record: ", params)
    for _ in range(4):
        engine.step()
    engine.abort(rid)
    while engine.has_unfinished:
        engine.step()
    assert engine.generate(["The record: "], params)[0].token_ids == before


def test_without_a_vocabulary_the_message_says_what_to_give(engine):
    with (
        Engine(model=engine.model) as bare,
        pytest.raises(InvalidRequest, match="GrammarLibrary"),
    ):
        bare.generate([[5]], SamplingParams(regex="a"))


def test_a_stop_id_ends_the_output_where_the_grammar_may_end_and_nowhere_else(engine):
    # As a stop token a line end may not stand inside the list, though white space may.
    newline = engine.tokenizer.encode("\n", add_bos=False)
    assert len(newline) == 1
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    params = SamplingParams(
        max_tokens=60,
        temperature=1.0,
        json_schema=schema,
        stop_token_ids=newline,
        logit_bias={newline[0]: 50.0},
    )
    for seed in range(4):
        out = engine.generate(["x = "], params.replace(seed=seed))[0]
        assert out.finish_reason.value == "stop"
        assert newline[0] not in out.token_ids[:-1]
        jsonschema.validate(json.loads(out.text), schema)


def test_reasoning_is_free_and_the_answer_is_bound(engine):
    tokenizer = engine.tokenizer
    begin, end = (tokenizer.control_tokens[name] for name in ("<think>", "</think>"))
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, regex="(yes|no)")
    opened = [*tokenizer.encode("Is it so? "), begin]
    # A bias ends the reasoning; without it a small model thinks for ever.
    out = engine.generate([opened], params.replace(logit_bias={end: 14.0}))[0]
    assert end in out.token_ids
    at = out.token_ids.index(end)
    assert at > 0
    assert tokenizer.decode(out.token_ids[at + 1 :]) in ("yes", "no")
    assert out.finish_reason.value == "stop"
    # Reasoning that is over, or none, binds from the first token.
    for prompt in ([*opened, end], tokenizer.encode("Is it so? ")):
        assert engine.generate([prompt], params)[0].text in ("yes", "no")


def test_a_library_without_a_boundary_binds_reasoning_too(engine):
    tokenizer = engine.tokenizer
    opened = [*tokenizer.encode("Is it so? "), tokenizer.control_tokens["<think>"]]
    library = GrammarLibrary(TokenVocab.from_tokenizer(tokenizer))
    other = engine.replace(grammar=library)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=2, regex="(yes|no)")
    assert other.generate([opened], params)[0].text in ("yes", "no")
