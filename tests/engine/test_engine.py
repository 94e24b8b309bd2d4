"""`generate`: what comes out for what goes in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason
from deepinfer.core.errors import ConfigError, InvalidRequest, RequestTooLong
from deepinfer.testing import ToyConfig, ToyModel, ToyTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello world, how are you?", "abc", [5, 6, 7, 8], "x", [0] * 20, "the end"]


def ids_of(prompt: str | list[int]) -> list[int]:
    return ToyTokenizer().encode(prompt) if isinstance(prompt, str) else prompt


def test_greedy_tokens_are_the_models(make_engine) -> None:
    model = ToyModel()
    outputs = make_engine(model).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.token_ids) == model.greedy(ids_of(prompt), 12)
        assert output.text == ToyTokenizer().decode(output.token_ids)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.usage.prompt == len(ids_of(prompt))
        assert output.usage.generated == 12
        assert output.usage.total == output.usage.prompt + 12
    assert len({output.rid for output in outputs}) == len(PROMPTS)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("budget", [16, 17, 64])
def test_chunks_and_budget_change_nothing(make_engine, chunk: int, budget: int) -> None:
    config = {"prefill_chunk_tokens": chunk, "max_num_batched_tokens": budget, "max_num_seqs": 16}
    together = make_engine(config=config).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in together] == [
        tuple(ToyModel().greedy(ids_of(prompt), 12)) for prompt in PROMPTS
    ]


def test_sixteen_requests_at_once_equal_one_at_a_time(make_engine) -> None:
    prompts = [[(i * 13 + j) % 60 + 4 for j in range(1 + 3 * i)] for i in range(16)]
    params = [
        SamplingParams(max_tokens=3 + i, temperature=(i % 3) / 2, seed=i, top_k=8 * (i % 2))
        for i in range(16)
    ]
    together = make_engine(config={"max_num_seqs": 16}).generate(prompts, params)
    engine = make_engine(config={"max_num_seqs": 1})
    alone = [engine.generate([p], one)[0] for p, one in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


class TestSeeds:
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)

    def test_same_seed_same_tokens(self, make_engine) -> None:
        engine = make_engine()
        seeded = self.params.replace(seed=5)
        first = engine.generate("abc", seeded)[0]
        engine.generate(["noise", "more noise"], self.params)
        outputs = engine.generate(["abc", "abcd", "abc"], [seeded, self.params, seeded])
        assert outputs[0].token_ids == outputs[2].token_ids == first.token_ids

    def test_requests_without_a_seed_differ(self, make_engine) -> None:
        outputs = make_engine().generate(["abc"] * 4, self.params)
        assert len({output.token_ids for output in outputs}) == 4

    def test_engine_seed_makes_them_repeatable(self, make_engine) -> None:
        runs = [
            [
                o.token_ids
                for o in make_engine(config={"seed": 3}).generate(["abc"] * 3, self.params)
            ]
            for _ in range(2)
        ]
        assert runs[0] == runs[1]
        assert len(set(runs[0])) == 3

    def test_samples_of_one_prompt(self, make_engine) -> None:
        engine = make_engine()
        outputs = engine.generate(["abc", "de"], self.params.replace(n=4, seed=9))
        assert [output.index for output in outputs] == [0, 1, 2, 3] * 2
        assert len({output.rid for output in outputs}) == 2
        assert len({output.token_ids for output in outputs[:4]}) == 4
        single = engine.generate("abc", self.params.replace(seed=9))[0]
        assert outputs[0].token_ids == single.token_ids


class TestEnds:
    def test_eos_ends_and_can_be_ignored(self, make_engine) -> None:
        model = ToyModel()
        tokens = model.greedy([5, 6], 200)
        at = tokens.index(model.config.eos_token_id)
        engine = make_engine(model)
        output = engine.generate([5, 6], SamplingParams(max_tokens=200, temperature=0))[0]
        assert output.finish_reason is FinishReason.STOP
        assert list(output.token_ids) == tokens[: at + 1]
        assert output.stop_reason == model.config.eos_token_id
        ignored = engine.generate(
            [5, 6], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        )[0]
        assert list(ignored.token_ids) == tokens

    def test_stop_token(self, make_engine) -> None:
        tokens = ToyModel().greedy([5, 6], 12)
        at = next(i for i, t in enumerate(tokens) if i > 2 and t > 3 and tokens.index(t) == i)
        output = make_engine().generate([5, 6], GREEDY.replace(stop_token_ids=(tokens[at],)))[0]
        assert list(output.token_ids) == tokens[: at + 1]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, tokens[at])
        assert output.text == ToyTokenizer().decode(tokens[:at])

    def test_stop_string_across_tokens(self, make_engine) -> None:
        text = make_engine().generate("stop here", GREEDY.replace(max_tokens=40))[0].text
        stop = text[10:13]
        at = text.index(stop)
        output = make_engine().generate("stop here", GREEDY.replace(max_tokens=40, stop=stop))[0]
        assert output.text == text[:at]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
        assert ToyTokenizer().decode(output.token_ids) == text[: at + 3]

    def test_the_last_delta_says_what_ended_it(self, make_engine) -> None:
        tokens = ToyModel().greedy([5, 6], 12)
        at = next(i for i, t in enumerate(tokens) if i > 2 and t > 3 and tokens.index(t) == i)
        text = ToyTokenizer().decode(tokens)
        engine = make_engine()
        for end in (
            {"stop_token_ids": (tokens[at],)},
            {"stop": text[3:5]},
            {"stop": text[3:5], "logprobs": 0},
            {},
        ):
            engine.add_request([5, 6], GREEDY.replace(max_tokens=12, **end))
            deltas = []
            while engine.has_unfinished:
                deltas += engine.step()
            *before, last = deltas
            assert not any(delta.stop_reason for delta in before)
            wanted = end.get("stop") or end.get("stop_token_ids", (None,))[0]
            assert last.finished
            assert last.stop_reason == wanted

    def test_context_is_the_limit(self, make_engine) -> None:
        engine = make_engine(config={"max_model_len": 10})
        output = engine.generate([5] * 7, GREEDY)[0]
        assert output.finish_reason is FinishReason.LENGTH
        assert len(output.token_ids) == 3
        assert engine.max_model_len == 10

    def test_one_token(self, make_engine) -> None:
        output = make_engine().generate([5], SamplingParams(max_tokens=1, temperature=0))[0]
        assert len(output.token_ids) == 1


class TestLogprobs:
    def test_output_logprobs(self, make_engine) -> None:
        model = ToyModel()
        output = make_engine(model).generate([5, 6, 7], GREEDY.replace(logprobs=3))[0]
        ids = [5, 6, 7, *output.token_ids]
        exact = torch.log_softmax(model.logits(ids).double(), -1)
        assert output.logprobs is not None
        assert len(output.logprobs) == 12
        for index, entry in enumerate(output.logprobs):
            row = exact[2 + index]
            assert entry.token_id == output.token_ids[index]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-6)
            assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
            assert entry.rank == 1

    @pytest.mark.parametrize("chunk", [1, 3, 50])
    def test_prompt_logprobs_in_any_chunks(self, make_engine, chunk: int) -> None:
        model = ToyModel()
        prompt = [5, 9, 4, 30, 22, 17, 8]
        output = make_engine(model, config={"prefill_chunk_tokens": chunk}).generate(
            prompt, GREEDY.replace(prompt_logprobs=2, max_tokens=2)
        )[0]
        exact = torch.log_softmax(model.logits(prompt).double(), -1)
        entries = output.prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert [e.token_id for e in entries[1:] if e] == prompt[1:]
        for index, entry in enumerate(entries[1:], start=1):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(exact[index - 1, prompt[index]]), abs=1e-6)
            assert len(entry.top) == 2
        assert output.logprobs is None

    def test_only_who_asks_gets_them(self, make_engine) -> None:
        params = [GREEDY, GREEDY.replace(logprobs=0), GREEDY.replace(max_tokens=4)]
        outputs = make_engine().generate([[5], [6], [7]], params)
        assert [o.logprobs is not None for o in outputs] == [False, True, False]
        assert len(outputs[1].logprobs or ()) == 12

    def test_running_a_prompt_again_does_not_repeat_its_entries(self, make_engine) -> None:
        engine = make_engine(config={"prefill_chunk_tokens": 3})
        params = GREEDY.replace(prompt_logprobs=0)
        prompt = [5, 9, 4, 30, 22, 17, 8, 11]
        wanted = engine.generate(prompt, params)[0]
        rid = engine.add_request(prompt, params, keep_output=True)
        for count in range(30):
            if count in (1, 4, 9):
                engine._parts.scheduler.preempt(rid)
            engine.step()
        output = engine.take_output(rid)[0]
        assert output.prompt_logprobs == wanted.prompt_logprobs
        assert output.token_ids == wanted.token_ids

    def test_prompt_of_one_token(self, make_engine) -> None:
        output = make_engine().generate([5], GREEDY.replace(prompt_logprobs=0))[0]
        assert output.prompt_logprobs == (None,)


def test_penalties_and_bias_reach_the_sampler(make_engine) -> None:
    engine = make_engine()
    forced = engine.generate([5, 6], GREEDY.replace(logit_bias={9: 100.0}))[0]
    assert set(forced.token_ids) == {9}
    ids = [5, 6]
    for _ in range(12):
        logits = ToyModel().logits(ids)[-1]
        for token in ids[2:]:
            logits[token] -= 2.0
        ids.append(int(logits.argmax()))
    spread = engine.generate([5, 6], GREEDY.replace(frequency_penalty=2.0))[0]
    assert list(spread.token_ids) == ids[2:] != ToyModel().greedy([5, 6], 12)


class TestPrompts:
    def test_one_prompt_in_every_form(self, make_engine) -> None:
        engine = make_engine()
        ids = ToyTokenizer().encode("abc")
        wanted = engine.generate("abc", GREEDY)[0].token_ids
        array, tensor = np.array(ids), torch.tensor(ids)
        for prompt in (ids, tuple(ids), array, tensor, [ids], ["abc"], [array], iter(["abc"])):
            outputs = engine.generate(prompt, GREEDY)
            assert [output.token_ids for output in outputs] == [wanted]

    def test_no_prompts_no_outputs(self, make_engine) -> None:
        assert make_engine().generate([], GREEDY) == []

    def test_params_in_every_form(self, make_engine) -> None:
        engine = make_engine()
        assert len(engine.generate("abc")[0].token_ids) <= 16
        outputs = engine.generate(["a", "b"], [{"max_tokens": 2}, SamplingParams(max_tokens=3)])
        assert [output.usage.generated <= n for output, n in zip(outputs, (2, 3), strict=True)]
        with pytest.raises(InvalidRequest, match="2 prompts and 1 sampling"):
            engine.generate(["a", "b"], [GREEDY])
        with pytest.raises(InvalidRequest, match="did you mean 'max_tokens'"):
            engine.generate("a", {"max_token": 3})
        for params in (3, [[GREEDY]]):
            with pytest.raises(InvalidRequest, match="params is "):
                engine.generate("a", params)

    @pytest.mark.parametrize(
        ("prompt", "params", "error", "match"),
        [
            ("", {}, InvalidRequest, "empty text"),
            ([[]], {}, InvalidRequest, "empty list"),
            ([5, 64], {}, InvalidRequest, "prompt token 1 is 64"),
            ([5, -1], {}, InvalidRequest, "from 0 to 63"),
            ([[5, "a"]], {}, InvalidRequest, "prompt token 1"),
            ([[5.0]], {}, InvalidRequest, "prompt token 0"),
            (b"abc", {}, InvalidRequest, "give text"),
            ({"role": "user"}, {}, InvalidRequest, "give text"),
            (7, {}, InvalidRequest, "give text"),
            ({"a", "b"}, {}, InvalidRequest, "give text"),
            (memoryview(b"0"), {}, InvalidRequest, "give text"),
            ([bytearray(b"0")], {}, InvalidRequest, "list of token ids"),
            ([memoryview(b"0")], {}, InvalidRequest, "list of token ids"),
            ([None], {}, InvalidRequest, "list of messages"),
            ([{"role": "user", "content": "hi"}], {}, InvalidRequest, "encode_chat"),
            ("ä", {}, InvalidRequest, "no id for"),
            ([4] * 512, {}, RequestTooLong, "may have 511"),
            ("a", {"stop_token_ids": (64,)}, InvalidRequest, "stop_token_ids holds"),
            ("a", {"logit_bias": {99: 1.0}}, InvalidRequest, "logit_bias holds"),
            ("a", {"regex": "a+"}, InvalidRequest, "knows no vocabulary"),
            ("a", {"json_schema": True}, InvalidRequest, "json_schema is set"),
            ("a", {"ebnf": 'root ::= "a"'}, InvalidRequest, "ebnf is set"),
        ],
    )
    def test_bad_requests_are_refused_before_anything_runs(
        self, make_engine, prompt, params, error, match
    ) -> None:
        model = ToyModel()
        engine = make_engine(model)
        with pytest.raises(error, match=match):
            engine.generate(prompt, SamplingParams(**params))
        good = "abc"
        if isinstance(prompt, str | list) and prompt and not isinstance(prompt[0], int | dict):
            one = prompt if isinstance(prompt, str) else prompt[0]
            with pytest.raises(error, match=match):
                engine.generate([good, one], SamplingParams(**params))
        assert model.num_forwards == 0
        assert not engine.has_unfinished
        engine.check()
        assert engine.generate(good, GREEDY)[0].usage.generated == 12

    @pytest.mark.parametrize("several", [["a", "b"], [[5], [6]], [[{"role": "user"}]]])
    def test_calls_for_one_prompt_say_so(self, make_engine, several) -> None:
        engine = make_engine()
        for call in (engine.add_request, engine.stream):
            with pytest.raises(InvalidRequest, match="looks like several prompts"):
                call(several, GREEDY)
        assert not engine.has_unfinished

    def test_zero_tokens_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="max_tokens is 0"):
            SamplingParams(max_tokens=0)

    def test_bad_requests_can_be_returned(self, make_engine) -> None:
        outputs = make_engine().generate(["abc", "", "def", [99]], GREEDY, on_error="return")
        assert [output.finish_reason for output in outputs] == [
            FinishReason.LENGTH,
            FinishReason.ERROR,
            FinishReason.LENGTH,
            FinishReason.ERROR,
        ]
        assert isinstance(outputs[1].error, InvalidRequest)
        assert len({output.rid for output in outputs}) == 4
        with pytest.raises(ConfigError, match="on_error"):
            make_engine().generate("abc", GREEDY, on_error="ignore")

    def test_ids_only_without_a_tokenizer(self, make_engine) -> None:
        engine = make_engine(tokenizer=None)
        output = engine.generate([5, 6], GREEDY)[0]
        assert output.text == ""
        assert len(output.token_ids) == 12
        for prompt, params in (("text", GREEDY), ([5], GREEDY.replace(stop="a"))):
            with pytest.raises(InvalidRequest, match="cannot be used without a tokenizer"):
                engine.generate(prompt, params)


class TestProgress:
    def test_nothing_is_drawn_where_nobody_looks(self, make_engine, capsys) -> None:
        make_engine().generate(["a", "b"], GREEDY)
        assert capsys.readouterr() == ("", "")

    def test_bar_when_asked(self, make_engine, capsys) -> None:
        make_engine().generate(["a", "b"], GREEDY, progress=True)
        assert "2/2" in capsys.readouterr().err

    def test_function_is_called(self, make_engine) -> None:
        calls: list[tuple[int, int]] = []
        make_engine().generate(
            ["a", "b"],
            GREEDY.replace(n=2),
            progress=lambda done, total: calls.append((done, total)),
        )
        assert calls[-1] == (4, 4)
        assert calls == sorted(calls)


def test_two_engines_in_one_process(make_engine) -> None:
    one, two = make_engine(), make_engine(ToyModel(ToyConfig(vocab_size=40)), tokenizer=None)
    first, second = one.stream([5, 6], GREEDY), two.stream([5, 6], GREEDY)
    tokens = ([], [])
    for a, b in zip(first, second, strict=True):
        tokens[0].extend(a.token_ids)
        tokens[1].extend(b.token_ids)
    assert tokens[0] == ToyModel().greedy([5, 6], 12)
    assert tokens[1] == ToyModel(ToyConfig(vocab_size=40)).greedy([5, 6], 12)


def test_times_are_in_order(make_engine) -> None:
    output = make_engine().generate("abc", GREEDY)[0]
    assert output.first_token_s is not None
    assert output.finish_s is not None
    assert output.arrival_s <= output.first_token_s <= output.finish_s
    assert output.time_to_first_token_s is not None
    assert math.isfinite(output.time_to_first_token_s)


def test_engine_is_reexported() -> None:
    import deepinfer.engine

    assert deepinfer.engine.Engine is Engine


def test_draws_are_those_of_the_sampler_at_absolute_positions(make_engine) -> None:
    from deepinfer.core import Request
    from deepinfer.core.protocols import SampleRows
    from deepinfer.sampling import Sampler

    params = SamplingParams(max_tokens=10, temperature=0.9, top_k=20, seed=11, ignore_eos=True)
    model, sampler, ids = ToyModel(), Sampler(), [5, 6, 7]
    request = Request(rid="r", prompt_token_ids=tuple(ids), params=params)
    for _ in range(10):
        rows = SampleRows(requests=(request,), positions=(len(ids),), seeds=(11,))
        ids.append(int(sampler(model.logits(ids)[-1:], rows).token_ids))
    assert list(make_engine().generate([5, 6, 7], params)[0].token_ids) == ids[3:]
